"""`train --from` and `train.start`: a run that starts from the weights of another."""

import json
from pathlib import Path

import pytest
import torch

from residua.cli.compare_study import start_study
from residua.cli.train import _retrofit
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import open_corpus, prepare
from residua.model.equivalence import InitFidelity
from residua.quantize import quantize
from residua.storage.hugging_face import companions, import_folder
from residua.storage.load import load, weights_fingerprint
from residua.storage.run import read_metrics, saved_config
from residua.train.environment import START
from residua.train.start import check_model, start_lines, starting_model, what_is_kept
from residua.train.trainer import train
from residua.train.world import SharedWorld
from tests.convert.tiny import saved
from tests.train.conftest import small_run
from tests.trained import residua


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A trained pre-norm model."""
    out = tmp_path_factory.mktemp("old") / "run"
    train(of(data), out)
    return out


def of(data: Path) -> RunConfig:
    often = ["train.steps=4", "train.validate_every=2", "train.save_every=4", "train.schedule.warmup=1"]
    return small_run(data).override(["model.norm.eps=1e-5", "train.accumulate=1", *often])


def validations(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["model.topology=block_attnres", "model.norm=gatednorm", "train.seed=1"])
def test_a_run_starts_where_the_other_ended(old: Path, tmp_path: Path, monkeypatch, capsys, change: str) -> None:
    extra = ["model.topology.sublayers_per_block=2"] if "block" in change else []
    assert residua(monkeypatch, "train", "--from", old, change, *extra, "--out", tmp_path / "new") == 0
    losses = validations(tmp_path / "new")
    assert sorted(losses) == [0, 2, 4]
    assert losses[0] == pytest.approx(validations(old)[4], abs=2e-6)
    assert "the function of the model is kept" in capsys.readouterr().out
    config = saved_config(tmp_path / "new")
    assert config.train.start == str(old.resolve()) and config.model.norm.eps == 1e-5


@pytest.mark.slow
def test_start_from_a_quantized_model_does_not_claim_to_be_exact(old: Path, data: Path, tmp_path: Path) -> None:
    quantize(old, tmp_path / "q", scheme="fp8-row", calibration=1, probes=0)
    (line, *_) = start_lines(of(data).override([f"train.start={tmp_path / 'q'}"]))
    assert "kept exactly, except for quantization" in line


@pytest.mark.parametrize(("rate", "said"), [(0.01, True), (1e-5, False)])
def test_a_learning_rate_that_rises_again_is_reported(old: Path, data: Path, rate: float, said: bool) -> None:
    lines = list(start_lines(of(data).override([f"train.start={old}", f"train.optimizer.lr={rate}"])))
    assert len(lines) == 1 + said and ("rises to 0.01 again" in lines[-1]) == said


@pytest.mark.slow
def test_killed_run_restarts_from_the_same_weights(old: Path, tmp_path: Path, data: Path) -> None:
    """Its configuration remembers the start, so --resume needs no --from."""
    config = of(data).override([f"train.start='{old}'"])
    train(config, tmp_path / "new")
    for folder in (tmp_path / "new" / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
    before = validations(tmp_path / "new")
    train(saved_config(tmp_path / "new"), tmp_path / "new", resume=True)
    assert validations(tmp_path / "new") == before


@pytest.mark.slow
def test_shared_processes_reset_every_run_to_its_start(old: Path, data: Path) -> None:
    config = of(data).override([f"train.start='{old}'", "model.topology.kind=dense"])
    world = SharedWorld(torch.device("cpu"))
    first = world.build_step(config)
    with torch.no_grad():
        first.model.embed.weight.zero_()
    again = world.build_step(config.override(["train.seed=3"]))
    assert again is first and torch.equal(first.model.embed.weight, load(old).embed.weight)


def test_fidelity_is_known_without_the_weights(old: Path, data: Path) -> None:
    config = of(data).override([f"train.start='{old}'", "model.topology.kind=mhc", "model.norm.kind=gatednorm"])
    # the new kind of norm has another eps unless it is given the old one
    keys = ("norm.eps", "topology.kind", "model")
    assert what_is_kept(config.model, of(data).model) == dict.fromkeys(keys, InitFidelity.UP_TO_EPS)
    line, _ = start_lines(config)
    assert "kept up to the norms' eps (topology.kind: up to the norms' eps, norm.eps: up to the norms' eps)" in line
    assert not list(start_lines(of(data)))
    changes = ["model.topology.kind=boundary_attnres", "model.topology.sublayers_per_block=1"]
    line, _ = start_lines(of(data).override([f"train.start='{old}'", *changes]))
    assert line.endswith("the function of the model is not kept (topology.kind: not)")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            ["norm.kind=gatednorm"],
            "norm.activation=tanh",
            "the function of the model is not kept (norm.activation: not)",
        ),
        (["anchors.kind=exoformer", "attention.gate=elementwise"], "anchors.norm=none", "not kept (anchors.norm: not)"),
        (["norm.kind=gatednorm"], "norm.rank=17", "the function of the model is kept exactly"),
    ],
)
def test_start_line_names_the_settings_that_are_not_kept(tmp_path, data: Path, before: list[str], after, said) -> None:
    config = of(data).override([f"model.{key}" for key in before])
    (tmp_path / "config.toml").write_text(config.to_toml())
    line, *_ = start_lines(config.override([f"model.{after}", f"train.start='{tmp_path}'"]))
    assert line.endswith(said)


@pytest.mark.parametrize(("kind", "change"), [("multi_gate", "memory.kind=invert"), ("dense", "period=2")])
def test_changed_setting_does_not_change_the_readers_eps(tmp_path: Path, data: Path, kind: str, change: str) -> None:
    (tmp_path / "config.toml").write_text(of(data).override([f"model.topology.kind={kind}"]).to_toml())
    _, config = _retrofit(tmp_path, None, [f"model.topology.{change}"], None, tmp_path / "new", False)
    assert config.model.reader_eps == "norm"
    assert "model.reader_eps=sum" not in start_study({}, tmp_path)["set"]


def test_mistakes_are_refused_before_anything_is_written(old: Path, tmp_path: Path, data: Path) -> None:
    config = of(data).override([f"train.start='{old}'"])
    with pytest.raises(ConfigError, match=r"cannot start from .*: model.width = 32"):
        train(config.override(["model.width=32"]), tmp_path / "new")
    with pytest.raises(ConfigError, match=r"cannot start from .*nowhere"):
        starting_model(config.override(["train.start=nowhere"]))
    (tmp_path / "text.txt").write_text("some other text " * 400)
    text = tmp_path / "text.txt"
    prepare(open_corpus([text], validation=text), tmp_path / "d", "bpe:260", workers=1)
    with pytest.raises(ConfigError, match=r"prepared with a different tokenizer .*: prepare it with --tokenizer"):
        train(config.override([f"data.path='{tmp_path / 'd'}'"]), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"), [(["tiny"], "leave tiny out"), (["--resume"], "leave --from out"), ([], "--out")]
)
def test_from_requires_a_new_folder(old: Path, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    out = ["--out", tmp_path / "new"] if arguments else []
    assert residua(monkeypatch, "train", *arguments, "--from", old, *out) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_imported_run_can_be_a_start_but_not_resumed(tmp_path: Path, monkeypatch, capsys, data: Path) -> None:
    pytest.importorskip("transformers")
    saved(tmp_path / "hf", "Llama", vocab_size=320, rms_norm_eps=1e-5)
    (tmp_path / "hf" / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert residua(monkeypatch, "train", "--resume", "--out", tmp_path / "run") == 2
    assert "was imported, so it has no training to resume" in capsys.readouterr().err
    changes = ["model.topology=multi_gate", "model.norm=gatednorm", "train.steps=2", "train.schedule.warmup=1"]
    options = ["--data", data, "--out", tmp_path / "new"]
    assert residua(monkeypatch, "train", "--from", tmp_path / "run", *changes, "train.device=cpu", *options) == 0
    assert sorted(validations(tmp_path / "new")) == [0, 2]
    assert saved_config(tmp_path / "new").model.norm.eps == 1e-5
    kept = {name: path.read_text() for name, path in companions(tmp_path / "new").items()}
    assert kept == {name: path.read_text() for name, path in companions(tmp_path / "hf").items()}
    assert "chat_template.jinja" in kept
    assert residua(monkeypatch, "train", "--resume", "--out", tmp_path / "new", "train.steps=3") == 0


def test_a_new_router_without_a_gradient_is_refused(data: Path, tmp_path: Path) -> None:
    config = of(data).override(["model.ffn={kind='moe', hidden=8, experts=4, top_k=1}"])
    with pytest.raises(ConfigError, match=r"model\.ffn\.top_k = 1 gives .* use model\.ffn\.top_k = 2 or"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    check_model(config.override(["model.ffn.normalize=false"]))


@pytest.mark.slow
def test_imported_top_1_router_is_frozen_unless_balanced(tmp_path, monkeypatch, capsys, data) -> None:
    pytest.importorskip("transformers")
    saved(tmp_path / "hf", "Mixtral", vocab_size=320, num_local_experts=4, num_experts_per_tok=1)
    import_folder(tmp_path / "hf", tmp_path / "run")
    before = load(tmp_path / "run").state_dict()
    options = ["--from", tmp_path / "run", "--data", data, "train.steps=2", "train.schedule.warmup=1"]
    for weight, moved in ((0.0, False), (0.01, True)):
        balance, out = f"train.balance={{weight={weight}, router_z=0.0}}", tmp_path / f"new-{weight}"
        assert residua(monkeypatch, "train", *options, balance, "train.device=cpu", "--out", out) == 0
        assert "with model.ffn.top_k = 1, its routers get gradients only from train.balance" in capsys.readouterr().out
        after = load(out).state_dict()
        assert not torch.equal(after["embed.weight"], before["embed.weight"])
        routers = [name for name in before if name.endswith("router.weight")]
        assert routers and all(torch.equal(after[name], before[name]) != moved for name in routers)


@pytest.mark.slow
def test_an_export_must_be_imported_to_train_from_it(
    old: Path, tmp_path: Path, monkeypatch, capsys, data: Path
) -> None:
    folder, run, options = tmp_path / "export", tmp_path / "run", ["--data", data, "--out", tmp_path / "new"]
    assert residua(monkeypatch, "export", old, "--out", folder) == 0
    assert residua(monkeypatch, "train", "--from", folder, *options) == 2
    assert f"convert it with residua import {folder} --out RUN" in " ".join(capsys.readouterr().err.split())
    assert residua(monkeypatch, "import", folder, "--out", run) == 0
    changes = ["model.topology=multi_gate", "train.steps=2", "train.schedule.warmup=1", "train.device=cpu"]
    assert residua(monkeypatch, "train", "--from", run, *changes, "data.validation_tokens=128", *options) == 0
    assert validations(tmp_path / "new")[0] == pytest.approx(validations(old)[4], abs=2e-6)


@pytest.mark.slow
def test_resumed_run_records_its_initial_weights(data: Path, tmp_path: Path) -> None:
    train(of(data), tmp_path / "old")
    config = of(data).override([f"train.start='{tmp_path / 'old'}'"])
    began = weights_fingerprint(tmp_path / "old")
    train(config, tmp_path / "new")
    train(of(data).override(["train.steps=6"]), tmp_path / "old", resume=True)
    assert weights_fingerprint(tmp_path / "old") != began
    train(config.override(["train.steps=6"]), tmp_path / "new", resume=True)
    about = json.loads((tmp_path / "new/environment.json").read_text())
    assert about[START] == began and len(about["sessions"]) == 2
