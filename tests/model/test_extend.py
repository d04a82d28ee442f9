"""The plugin topology and norm of docs/extend.md, as written, work with every verb."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from residua.config import plugins
from residua.config.choices import TopologyChoice
from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import PLUGINS, ConfigError
from residua.config.variants import overrides
from residua.errors import UserError
from residua.generate.whole_step import build_layers
from residua.model import taps
from residua.model.builders import build as build_checked
from residua.model.decoder import Decoder, build
from residua.model.inference import InferenceDecoder
from residua.storage.load import load
from residua.train.step import recompute_sublayers
from tests.golden.compare import randomise
from tests.model.page_plugins import PAGES, forget, page_plugins
from tests.model.small import in_parts, small, tokens_and_targets
from tests.trained import WORDS, residua, train_run

OWN = {
    "topology": {"kind": "channel_gain", "start": 0.2},
    "anchors": {"kind": "key_residual"},
    "norm": {"kind": "l1norm"},
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """RESIDUA_PLUGINS names the page's files; afterwards they are unregistered."""
    folder = tmp_path_factory.mktemp("plugins")
    forget()  # registered by a test of ranks
    files = [folder / name for name in page_plugins()]
    for file, code in zip(files, page_plugins().values(), strict=True):
        file.write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLUGINS, ",".join(map(str, files)))
        yield folder
    forget()
    for file in files:
        sys.modules.pop(file.stem, None)
        plugins._loaded.discard(str(file))


@pytest.fixture(scope="module")
def run(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("own"), **OWN)


def test_plugin_kind_is_configured_like_any_other(own: Path) -> None:
    config = small(**OWN)
    assert ModelConfig.from_dict(config.model_dump()) == config and 'kind = "channel_gain"' in config.to_toml()
    assert config.override(["topology.start=0.5"]).topology.model_dump() == {"kind": "channel_gain", "start": 0.5}
    with pytest.raises(ConfigError, match=r"topology.strat = 1 is not a known key: did you mean 'start'\?"):
        config.override(["topology.strat=1"])
    with pytest.raises(ConfigError, match=r"'channel_gai' does not exist, .*: did you mean 'channel_gain'\?"):
        config.override(["topology.kind=channel_gai"])


def test_a_plugin_kind_named_as_a_variant_gets_a_hint(own: Path) -> None:
    for part in ("anchors", "norm"):  # the page's topology is a known variant too
        table = OWN[part]
        entry = f'{table["kind"]} = ["model.{part}.kind={table["kind"]}"]'
        with pytest.raises(ConfigError, match=re.escape(f"is a kind of {part}, not a variant: put {entry} under")):
            overrides([table["kind"]], small())
    assert "residua compare prenorm base --base" in PAGES  # the baseline comes first


def test_every_plugin_parameter_gets_a_gradient(own: Path) -> None:
    model, tokens = build(small(**OWN)), torch.randint(0, 16, (2, 9))
    model.loss(tokens, tokens).backward()
    mixes = [sublayer.body.mix for sublayer in model.sublayers[::2]]
    parameters = [*model.topology.parameters(), *model.norm.parameters(), *(p for m in mixes for p in m.parameters())]
    assert parameters and all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


@pytest.fixture
def reader(own: Path) -> Decoder:
    """A model whose topology reads token ids, with random parameters."""
    return randomise(build_checked(small(topology={"kind": "token_gain", "rows": 7})))


def test_topology_that_reads_ids_matches_its_equation(reader: Decoder) -> None:
    tokens, _ = tokens_and_targets()
    with taps.record() as seen:
        reader(tokens)
    h = seen["sublayer.0.input"]
    for k in range(6):
        gain = reader.topology.gains[k][tokens % 7]
        h = h + gain[..., None] * seen[f"sublayer.{k}.output"]
        torch.testing.assert_close(seen.get(f"sublayer.{k + 1}.input", seen["final.input"]), h)


def test_token_ids_reach_decoding_and_rewritten_models(reader: Decoder) -> None:
    tokens, _ = tokens_and_targets()
    whole = reader(tokens)
    torch.testing.assert_close(in_parts(reader, tokens, [3, 1, 1, 1]), whole)
    torch.testing.assert_close(InferenceDecoder(reader)(tokens), whole)
    cache = reader.new_cache(*tokens.shape)
    cache.static = True
    assert build_layers(reader, cache) is None


def test_documented_order_sets_a_topologys_executions(own: Path) -> None:
    (order,) = re.findall(r"```toml\n(\[model\.order\]\n.*?)```", PAGES, flags=re.S)
    config = small(layers=6, topology={"kind": "token_gain", "rows": 7}, **tomllib.loads(order)["model"])
    model = build(config)
    assert config.executed == (0, 1, 2, 3, 4, 1, 2, 3, 4, 5)
    assert model.topology.gains.shape == (20, 7) and len(model.sublayers) == 12
    model.loss(*tokens_and_targets()).backward()


@pytest.mark.slow
def test_token_ids_reach_recomputed_and_compiled_layers(reader: Decoder) -> None:
    tokens, targets = tokens_and_targets()
    gradients = []
    for prepare in (lambda model: None, recompute_sublayers):
        model = deepcopy(reader)
        prepare(model)
        model.loss(tokens, targets).backward()
        gradients.append(model.topology.gains.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    compiled = torch.compile(reader.hidden, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), reader.hidden(tokens))


def test_vectors_are_refused_if_the_topology_reads_ids(reader: Decoder) -> None:
    tokens, _ = tokens_and_targets()
    with pytest.raises(UserError, match=r"model.topology.kind = 'token_gain' reads token ids, .* pass tokens"):
        reader(reader.embed(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token_gain", "value_input"])
def test_export_of_models_with_ids_or_several_reads_loads(own: Path, tmp_path: Path, monkeypatch, kind: str) -> None:
    run = train_run(tmp_path, topology={"kind": kind})
    assert residua(monkeypatch, "export", run, "--out", tmp_path / "exported") == 0
    assert residua(monkeypatch, "bench", "plan", run / "config.toml", "train.accumulate=4", "--gpus", 2) == 0


def test_unknown_kind_is_refused_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLUGINS, raising=False)
    for table in ("topology", "anchors", "norm"):
        with pytest.raises(ConfigError, match=f"{table}.kind = 'nowhere' does not exist.*{PLUGINS}"):
            small(**{table: {"kind": "nowhere"}})


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    taken = tmp_path / "json.py"
    taken.write_text("")
    ends, dashed = tmp_path / "model.py", tmp_path / "layer-scale.py"
    ends.write_text("import sys\nsys.exit('ends here.')")
    clash = tmp_path / "clash.py"
    clash.write_text(
        "from typing import Literal\nfrom residua.config.choices import TopologyChoice\n"
        "from residua.model.topology import register_topology\n"
        "class Own(TopologyChoice):\n    kind: Literal['additive'] = 'additive'\nregister_topology(Own, None)"
    )
    reasons = {
        "no_such_module": "ModuleNotFoundError", broken: "ZeroDivisionError", taken: "already imported",
        ends: "ends here", dashed: "not a valid Python module name", tmp_path / "nowhere.py": "No such file",
        clash: "clash.Own has kind = 'additive', which residua.config.topologies.Additive already has",
    }  # fmt: skip
    for name, reason in reasons.items():
        monkeypatch.setenv(PLUGINS, str(name))
        with pytest.raises(ConfigError, match=f"^{PLUGINS} names '{re.escape(str(name))}', .*{reason}"):
            small(topology={"kind": "nowhere"})
        with pytest.raises(ConfigError, match=f"^{PLUGINS} names '{re.escape(str(name))}', .*{reason}"):
            RunConfig(model=small().model_dump() | {"topology": {"kind": "nowhere"}})
        own = name in (broken, ends)  # a bug of the plugin, shown with a traceback
        assert residua(monkeypatch, "presets") == (1 if own else 2)
        line, *trace = capsys.readouterr().err.splitlines()
        begin = f"the plugin {name}, line " if own else f"{PLUGINS} names {str(name)!r}, which cannot be imported ("
        assert line.startswith(f"residua: {begin}") and reason in line and bool(trace) == own
        assert not {"json", "no_such_module", "nowhere"} & plugins._packages


def test_an_existing_kind_cannot_be_redefined() -> None:
    class Additive(TopologyChoice):
        kind: Literal["additive"] = "additive"

    with pytest.raises(ValueError, match="already has"):
        TopologyChoice.join(Additive)


def test_choice_without_a_kind_is_refused_at_registration() -> None:
    class Word(TopologyChoice):
        kind: str = "word"

    class Nothing(TopologyChoice):
        start: float = 0.1

    for choice in (Word, Nothing):
        with pytest.raises(ValueError, match=f"{choice.__name__} has no kind: give it `kind: Literal"):
            TopologyChoice.join(choice)
    assert small(topology={"kind": "additive"}).topology.kind == "additive"


@pytest.mark.slow
def test_train_accepts_plugins_from_the_command_line(own: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    config = run / "config.toml"
    assert residua(monkeypatch, "train", config, "--out", tmp_path / "again", "train.steps=2") == 0
    assert type(load(tmp_path / "again").topology).__name__ == "ChannelGain"


@pytest.mark.slow
def test_diagnose_generate_and_eval_open_a_run_with_plugins(
    own: Path, run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "diagnosis"
    arguments = ("--tokens", 64, "--length", 16, "--ablation-tokens", 32, "--ablations", "all", "--out", out)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS * 20))
    assert residua(monkeypatch, "diagnose", run, "--text", text, *arguments) == 0
    (found,) = out.rglob("diagnosis.json")
    assert "channel_gain" in found.read_text(encoding="utf-8")
    assert residua(monkeypatch, "generate", run, "--prompt", "depth is", "--tokens", 4) == 0
    assert residua(monkeypatch, "eval", run, "--tokens", 64, "--out", tmp_path / "scores.json") == 0


@pytest.mark.slow
def test_quantize_smooths_plugin_norms(own: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "fp8"
    smooth = ("--smooth", 0.5, "--inside", "--calibration", 2, "--tokens", 64, "--probes", 0)
    assert residua(monkeypatch, "quantize", run, "--out", out, *smooth) == 0
    assert type(load(out).norm).__name__ == "L1Norm"


@pytest.mark.slow
def test_export_copies_plugin_files(own: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    """The exporter runs its output, without Residua, and compares the logits."""
    out = tmp_path / "exported"
    assert residua(monkeypatch, "export", run, "--out", out) == 0
    code = {file.name: file.read_text(encoding="utf-8") for file in out.glob("*.py")}
    assert "class ChannelGain(" in code["channel_gain.py"] and "class L1Norm(" in code["l1_norm.py"]
    assert "class KeyResidual(" in code["key_residual.py"]


def test_entry_points_of_installed_packages_are_also_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    point = SimpleNamespace(value="package.module", load=lambda: loaded.append("once"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "residua.plugins" else [])
    monkeypatch.setattr(plugins, "_entry_points", plugins._entry_points.__wrapped__)  # not those that were found before
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.delenv(PLUGINS, raising=False)
    plugins.load_plugins()
    plugins.load_plugins()
    assert loaded == ["once"]
    point.value, point.load = "package.broken", lambda: {}["missing"]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"names 'package.broken', which cannot be imported \(KeyError"):
            plugins.load_plugins()


@pytest.mark.slow
def test_bench_times_and_plans_plugins(own: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    config = run / "config.toml"
    few = ("--steps", 1, "--warmup", 0, "--out", tmp_path / "step.json")
    assert residua(monkeypatch, "bench", "step", config, *few) == 0
    assert residua(monkeypatch, "bench", "plan", config, "train.accumulate=4", "--gpus", 2) == 0
    assert json.loads((tmp_path / "step.json").read_text())


@pytest.mark.slow
def test_compare_trains_plugins_in_a_child_process(own: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    study = tmp_path / "study.toml"
    study.write_text('variants = ["base"]')
    how = ("--base", run / "config.toml", "--seeds", 1, "--match", "none", "--set", "train.steps=2")
    assert residua(monkeypatch, "compare", study, *how, "--out", tmp_path / "study") == 0
    (config,) = (file.read_text(encoding="utf-8") for file in (tmp_path / "study").rglob("config.toml"))
    assert "channel_gain" in config
