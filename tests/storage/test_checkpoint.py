"""Which checkpoints are kept, loading a trained model from them, and the folder of a run."""

import errno
import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import residua
from residua.config.run import ParallelConfig, RunConfig
from residua.config.settings import ConfigError
from residua.distributed.mesh import one_rank
from residua.errors import UserError
from residua.files import WriteError
from residua.storage.checkpoint import best, checkpoints, prune
from residua.storage.load import load
from residua.storage.run import Run, failed_early
from residua.storage.shard_files import Saver, load_shards
from residua.train.trainer import train
from tests.train.conftest import small_run

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(small_run(data), folder, console=QUIET)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def fake(run: Path, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step, "validation_loss": loss}))


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    fake(tmp_path, {9: 3.0, 10: 1.0, 20: 2.0, 30: None, 100: 2.5})
    prune(tmp_path, keep=2)
    assert [c.step for c in checkpoints(tmp_path)] == [10, 30, 100]
    winner = best(checkpoints(tmp_path))
    assert winner is not None and winner.step == 10


def test_a_kill_during_cleanup_leaves_only_whole_checkpoints(tmp_path: Path, monkeypatch) -> None:
    fake(tmp_path, {1: 3.0, 2: 2.0, 3: 2.5})

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("residua.storage.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, keep=1)
    assert [c.state["step"] for c in checkpoints(tmp_path)] == [2, 3]
    prune(tmp_path, keep=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-3"]


def test_a_loaded_model_predicts_like_the_trained_one(run: Path, config: RunConfig) -> None:
    tokens = torch.randint(0, 257, (2, 16))
    last = load(run)
    again = residua.build(config.model)
    again.load_state_dict(load_file(run / "checkpoints" / "step-6" / "model.safetensors"))
    assert torch.equal(last(tokens), again(tokens))


def test_best_is_the_checkpoint_with_the_lowest_validation_loss(run: Path) -> None:
    state = run / "checkpoints" / "step-4" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"validation_loss": 0.0}))
    weights = load_file(run / "checkpoints" / "step-4" / "model.safetensors")
    assert torch.equal(load(run, "best").embed.weight, weights["embed.weight"])
    with pytest.raises(ValueError, match="there is no checkpoint 'step-3': choose 'last' or 'best'"):
        load(run, "step-3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t.pop("embed.weight"), r"lacks tensor 'embed\.weight'"),
        (lambda t: t.update({"embed.weight": t["embed.weight"][:-1].contiguous()}),
         r"holds 'embed\.weight' with shape \[319, 16\] where the model has \[320, 16\]"),
        (lambda t: t.update({"extra.weight": torch.zeros(3)}),
         r"holds tensor 'extra\.weight', which the model of config\.toml does not have"),
        (None, r"model\.safetensors cannot be read"),
    ],
    ids=["missing", "mis-shaped", "surplus", "no tensors"],
)  # fmt: skip
def test_checkpoint_of_another_model_is_refused_in_one_sentence(run: Path, edit: Any, sentence: str) -> None:
    path = run / "checkpoints" / "step-6" / "model.safetensors"
    if edit is None:
        path.write_bytes(b"not a tensor")
    else:
        edit(tensors := load_file(path))
        save_file(tensors, path)
    with pytest.raises(ValueError, match=sentence):
        load(run)


def test_a_negative_step_count_of_the_optimizer_is_refused(run: Path, config: RunConfig) -> None:
    path = run / "checkpoints" / "step-6" / "optimizer.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"adamw-rest/steps": torch.tensor(-6)}, path)
    sentence = r"optimizer\.safetensors: adamw-rest/steps is -6, expected 0 or more: move .*step-6 elsewhere"
    with pytest.raises(ValueError, match=sentence):
        train(config, run, resume=True, console=QUIET)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_names_one_to_resume_from(run: Path, config: RunConfig, name: str) -> None:
    last, earlier = run / "checkpoints" / "step-6", run / "checkpoints" / "step-4"
    cut(last / name)
    sentence = (
        rf"{last / name} cannot be read .*: move {last} elsewhere to continue with {earlier}, which is complete\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        train(config, run, resume=True, console=QUIET)
    if name == "model.safetensors":
        with pytest.raises(ValueError, match=sentence):
            load(run)
    last.rename(run / "elsewhere")
    load(run)
    assert train(config, run, resume=True, console=QUIET).steps == 6


def test_no_checkpoint_is_suggested_if_none_is_complete(run: Path) -> None:
    for checkpoint in checkpoints(run):
        cut(checkpoint.path / "model.safetensors")
    words = r"cannot be read .*: no other checkpoint is complete, so restore it from a copy or train again\.$"
    with pytest.raises(ValueError, match=words):
        load(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="holds no checkpoint: train it first"):
        load(run)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("[]", r"DCP_SHARDING_INFO holds a list of 0 entries, expected an object"),
        ("{", r"DCP_SHARDING_INFO is not valid JSON"),
        ('{"weight": {}}', r"DCP_SHARDING_INFO has no key weight\.saved_offsets"),
        ('{"weight": {"saved_offsets": [-1, 0]}}', r"weight\.saved_offsets\[0\] is -1, expected 0 or more"),
    ],
)
def test_an_invalid_row_list_of_a_shard_is_named(tmp_path: Path, rows: str, words: str) -> None:
    shards = tmp_path / "checkpoints" / "step-2" / "shards"
    shards.mkdir(parents=True)
    save_file({"weight": torch.zeros(2, 2)}, shards / "shard-1.safetensors", metadata={"DCP_SHARDING_INFO": rows})
    with pytest.raises(ValueError, match=rf"shard-1\.safetensors[,:].*{words}.*: no other checkpoint is complete"):
        load_shards(shards.parent, torch.nn.Linear(2, 2))
    (shards / "shard-1.safetensors").rename(tmp_path / "elsewhere")
    (shards / "shard-1.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"shard-1\.safetensors is a link to a file outside its folder"):
        load_shards(shards.parent, torch.nn.Linear(2, 2))


def test_sharded_checkpoint_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    """A disk may have room for a folder and not for the first file in it."""

    def full(path: Path, *arguments: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = torch.nn.Linear(2, 2)
    optimizer = SimpleNamespace(tensors=dict)
    with one_rank(torch.device("cpu"), ParallelConfig()), monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(WriteError, match="No space left on device"):
            Saver().save(tmp_path, 4, model, optimizer, {"step": 4}, keep=1)  # type: ignore[arg-type]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_leftover_files_of_a_killed_session_are_removed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / ".unfinished-7-abcdef-config.toml").write_text("half")
    (tmp_path / ".unfinished-fp8").mkdir()
    with closing(Run.create(tmp_path, config)) as run:
        run.begin({}, 0)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", ".unfinished-fp8", "config.toml", "environment.json"}


@pytest.mark.parametrize(
    "valuable", ["checkpoints/step-3/state.json", "checkpoints/step-3-not-finite-1/state.json", "result.json", "thesis"]
)
def test_folder_with_anything_of_value_is_not_restarted(config: RunConfig, tmp_path: Path, valuable: str) -> None:
    run = Run.create(tmp_path / "run", config)
    run.begin({}, 0)
    assert failed_early(tmp_path / "run")
    with pytest.raises(UserError, match="in use by another process"):
        Run.start_again(tmp_path / "run", config)
    run.close()
    Run.start_again(tmp_path / "run", config.override(["model.layers=3"])).close()
    path = tmp_path / "run" / valuable
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    assert not failed_early(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not empty"):
        Run.start_again(tmp_path / "run", config)


def test_restarted_run_drops_leftovers_of_the_failed_one(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with closing(Run.create(folder, config)) as run:
        run.begin({}, 0)
    (folder / "source").mkdir()
    (folder / "source" / "generation_config.json").write_text("{}")
    (folder / "wandb-id").write_text("old")
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert not failed_early(tmp_path), "there is no record of training"
    again = Run.start_again(folder, config)
    assert (folder / "source").exists()  # until the run begins, nothing is changed
    again.begin({}, 0)
    again.close()
    assert not (folder / "source").exists() and not (folder / "wandb-id").exists()


def test_branch_is_marked_as_waiting_until_trained(config: RunConfig, tmp_path: Path) -> None:
    trunk = Run.create(tmp_path / "long", config)
    trunk.begin({}, 0)
    (tmp_path / "long" / "metrics.jsonl").write_text("")
    trunk.branch(tmp_path / "short", config, 4, lambda folder: (folder / "checkpoints").mkdir())
    trunk.close()
    session = json.loads((tmp_path / "short" / "environment.json").read_text())["sessions"][-1]
    assert (session["branch_of"], session["until_step"]) == ("long", 4) and "process" not in session
