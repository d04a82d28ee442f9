"""Runs that are refused or stopped: one sentence says why, and no file is lost."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from residua.config.run import RunConfig
from residua.data import open_corpus, prepare
from residua.machine import has_ended
from residua.storage import tensors as tensors_module
from residua.storage.checkpoint import checkpoints
from residua.storage.run import Run, read_metrics
from residua.train.health import TrainingStopped, Watch
from residua.train.step import Step
from residua.train.trainer import train

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def stop_of(run: Path) -> str:
    """Why the last session of a run was ended, as environment.json has it."""
    return json.loads((run / "environment.json").read_text())["sessions"][-1]["stopped"]


def poison(monkeypatch: pytest.MonkeyPatch, after: int, value: float) -> None:
    """From step `after` on, the loss is multiplied by `value`."""
    forward, call, done = Step._forward, Step.__call__, 0

    def counted(self: Step, *arguments: Any) -> None:
        nonlocal done
        call(self, *arguments)
        done += 1

    def poisoned(self: Step, *batch: Any) -> tuple[Tensor, Tensor, Any]:
        ce, z, routing = forward(self, *batch)
        return (ce * value if done >= after and torch.is_grad_enabled() else ce), z, routing

    monkeypatch.setattr(Step, "__call__", counted)
    monkeypatch.setattr(Step, "_forward", poisoned)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_last_good_checkpoint(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    poison(monkeypatch, after=2, value=value)
    with pytest.raises(TrainingStopped, match=r"by step 4 the loss is (nan|inf).*last good checkpoint is .*step-2"):
        train(config.override(["train.validate_every=100"]), tmp_path / "run", console=QUIET)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2]
    assert all(record["loss"] == record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert stop_of(tmp_path / "run").startswith("by step 4 the loss is ")


def test_weights_that_are_no_numbers_are_never_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no log line comes between the broken weight and the save."""
    poison(monkeypatch, after=3, value=float("nan"))
    with pytest.raises(TrainingStopped, match="validation loss is nan"):
        train(config.override(["train.log_every=100"]), tmp_path / "run", console=QUIET)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2]


def test_a_run_that_ran_away_is_stopped_and_not_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, after=2, value=5.0)
    config = config.override(["train.steps=20", "train.divergence_patience=3"])
    with pytest.raises(TrainingStopped, match=r"the run diverged: at step 8 .* for 3 log lines in a row"):
        train(config, tmp_path / "run", console=QUIET)
    assert stop_of(tmp_path / "run").startswith("the run diverged")
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2]


def test_a_run_that_ran_away_since_the_last_log_line_is_not_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, after=4, value=5.0)
    often = ["train.log_every=4", "train.save_every=3"]
    config = config.override(["train.steps=20", "train.divergence_patience=1", *often])
    with pytest.raises(TrainingStopped, match=r"the run diverged: at step 8 .*last good checkpoint is .*step-3"):
        train(config, tmp_path / "run", console=QUIET)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [3]


def test_one_bad_log_line_is_forgiven() -> None:
    watch = Watch(margin=1.0, patience=2)
    assert [watch.check(step, loss, 1.0) for step, loss in enumerate([5.0, 6.5, 5.0, 6.5, 4.0])] == [None] * 5
    assert watch.check(6, 6.5, 1.0) is None and "diverged" in (watch.check(7, 6.5, 1.0) or "")


def test_a_folder_with_something_in_it_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"run is not empty: choose another --out, or .* --resume"):
        train(config, tmp_path / "run", console=QUIET)
    assert files(tmp_path / "run") == {"thesis.tex": b"years of work"}


def test_resuming_where_no_run_is_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(config, tmp_path / "run", resume=True, console=QUIET)


def test_a_quantized_folder_is_not_resumed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config.to_toml())
    (tmp_path / "quantization.json").write_text("{}")
    before = files(tmp_path)
    with pytest.raises(ValueError, match="is a quantized model, which cannot be trained: resume the run it was made"):
        train(config, tmp_path, resume=True, console=QUIET)
    assert files(tmp_path) == before


def test_running_out_of_gpu_memory_says_what_to_lower(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: Step, *arguments: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Step, "__call__", exhausted)
    with pytest.raises(TrainingStopped, match=r"out of memory after step 0; no checkpoint .* train\.micro_batch = 2"):
        train(config, tmp_path / "run", console=QUIET)


def test_an_error_that_ends_a_run_is_kept_for_watchers(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Step, *arguments: Any) -> None:
        raise KeyError("a plugin's own mistake")

    monkeypatch.setattr(Step, "__call__", fail)
    with pytest.raises(KeyError):
        train(config, tmp_path / "run", console=QUIET)
    session = json.loads((tmp_path / "run/environment.json").read_text())["sessions"][-1]
    assert session["failed"] == 'KeyError: "a plugin\'s own mistake"'
    assert not has_ended(session["process"])


def test_a_folder_in_use_is_refused(config: RunConfig, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(ValueError, match="in use by another process"):
        train(config, tmp_path / "run", console=QUIET)
    run.close()
    train(config, tmp_path / "run", console=QUIET)


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run that is over, for tests that leave its files as they are."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(config, run, console=QUIET)
    return config, run


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.layers=3", r"model\.layers was 2 .* is 3 now"),
        ("data.seed=1", r"data\.seed was 0"),
        ("data.sequence=8", r"data\.sequence was None .* is 8 now"),
        ("train.micro_batch=4", r"64 tokens and would have 128 now: keep train\.accumulate × train\.micro_batch"),
        ("train.optimizer.kind=adamw", r"train\.optimizer\.kind was 'muon'"),
        ("train.steps=3", r"has done \d+ steps and train\.steps = 3 is fewer"),
    ],
)
def test_what_shapes_a_run_cannot_change_when_it_is_resumed(
    trained: tuple[RunConfig, Path], change: str, named: str
) -> None:
    config, run = trained
    before = files(run)
    with pytest.raises(ValueError, match=named):
        train(config.override([change]), run, resume=True, console=QUIET)
    assert files(run) == before


def test_a_run_on_prepared_text_can_be_resumed_where_its_tokenizer_has_another_place(
    config: RunConfig, tmp_path: Path
) -> None:
    assert config.data.path is not None
    train(config, tmp_path / "run", console=QUIET)
    moved = config.override(["data.tokenizer='elsewhere/tokenizer.json'"])
    train(moved, tmp_path / "run", resume=True, console=QUIET)


def test_a_vocabulary_smaller_than_the_datasets_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size = 100 is smaller .* set model\.vocab_size=257"):
        train(config.override(["model.vocab_size=100"]), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", [b"", b"garbage that is no header", None], ids=["empty", "garbage", "missing"])
def test_an_unreadable_shard_is_refused_before_training(
    config: RunConfig, data: Path, tmp_path: Path, damage: bytes | None
) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    shard = next(copy.glob("train-*"))
    shard.unlink()
    if damage is not None:
        shard.write_bytes(damage)
    with pytest.raises(ValueError, match=shard.name):
        train(config.override([f"data.path='{copy}'"]), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("entries", [260, 600], ids=["that the model has ids for", "with more ids than the model"])
def test_resuming_on_text_of_another_tokenizer_is_refused(config: RunConfig, tmp_path: Path, entries: int) -> None:
    train(config, tmp_path / "run", console=QUIET)
    before = files(tmp_path / "run")
    (tmp_path / "a.txt").write_text("".join(f"{'abcdefghij'[n % 10]}{n * n} some other words " for n in range(2000)))
    (tmp_path / "b.txt").write_text("for validation only " * 20)
    corpus = open_corpus([tmp_path / "a.txt"], validation=tmp_path / "b.txt")
    other = prepare(corpus, tmp_path / "other", f"bpe:{entries}", workers=1)
    assert other.vocab_size == entries
    with pytest.raises(ValueError, match="belongs to the tokenizer"):
        train(config.override([f"data.path='{other.path}'"]), tmp_path / "run", resume=True, console=QUIET)
    assert files(tmp_path / "run") == before


def prepared(folder: Path, text: str, validation: str) -> str:
    """The path of a dataset of one token per byte."""
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "b.txt").write_text(validation)
    corpus = open_corpus([folder / "a.txt"], validation=folder / "b.txt")
    return str(prepare(corpus, folder / "data", "bytes", workers=1).path)


TEXT, VALIDATION = "some words to learn " * 50, "words to validate with " * 20


@pytest.fixture
def begun(config: RunConfig, tmp_path: Path) -> RunConfig:
    """The configuration of a run on TEXT, which is in the folder `run`."""
    config = config.override([f"data.path='{prepared(tmp_path / 'own', TEXT, VALIDATION)}'"])
    train(config, tmp_path / "run", console=QUIET)
    return config.override(["train.steps=7"])


def forget_text(run: Path) -> None:
    """What a run of a Residua without fingerprints has recorded."""
    path = run / "environment.json"
    about = json.loads(path.read_text())
    del about["text"]
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("text", "validation"),
    [(TEXT, VALIDATION[::-1]), (TEXT[::-1], VALIDATION), (TEXT * 2, VALIDATION)],
    ids=["other validation", "other words", "other length"],
)
def test_resuming_on_another_text_is_refused(begun: RunConfig, tmp_path: Path, text: str, validation: str) -> None:
    run, before = tmp_path / "run", files(tmp_path / "run")
    other = prepared(tmp_path / "other", text, validation)
    with pytest.raises(ValueError) as refused:
        train(begun.override([f"data.path='{other}'"]), run, resume=True, console=QUIET)
    assert str(refused.value) == (
        f"{other} is not the text that {run} was trained on ({begun.data.path}): resume with that text, or begin a new "
        f"run from its weights with --from {run}."
    )
    assert files(run) == before


def test_of_a_run_from_before_fingerprints_only_the_length_of_its_text_is_compared(
    begun: RunConfig, tmp_path: Path
) -> None:
    forget_text(tmp_path / "run")
    longer, other = (prepared(tmp_path / name, text, VALIDATION) for name, text in (("2", TEXT * 2), ("r", TEXT[::-1])))
    with pytest.raises(ValueError, match=r"is not the text that .*run was trained on"):
        train(begun.override([f"data.path='{longer}'"]), tmp_path / "run", resume=True, console=QUIET)
    train(begun.override([f"data.path='{other}'"]), tmp_path / "run", resume=True, console=QUIET)


def test_a_text_that_was_prepared_anew_at_its_place_is_another_text(begun: RunConfig, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "own")
    own = prepared(tmp_path / "own", TEXT, VALIDATION[::-1])
    with pytest.raises(ValueError, match=rf"{own} is not the text that .*run was trained on: resume"):
        train(begun, tmp_path / "run", resume=True, console=QUIET)


def test_a_copy_of_the_text_is_the_same_text(begun: RunConfig, tmp_path: Path) -> None:
    assert begun.data.path is not None
    copy = shutil.copytree(begun.data.path, tmp_path / "copy")
    result = train(begun.override([f"data.path='{copy}'"]), tmp_path / "run", resume=True, console=QUIET)
    assert result.steps == 7


def test_a_run_without_a_checkpoint_may_begin_again_on_another_text(begun: RunConfig, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    other = prepared(tmp_path / "other", TEXT, VALIDATION[::-1])
    train(begun.override([f"data.path='{other}'"]), tmp_path / "run", resume=True, console=QUIET)


def test_a_run_that_begins_again_has_the_tokenizer_of_its_text(begun: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).write_text("{}")  # of the text before
    train(begun, run, resume=True, console=QUIET)
    own = Path(str(begun.data.path)) / "tokenizer.json"
    assert (run / "tokenizer.json").read_text() == own.read_text()
    assert not (run / "tokenizer_config.json").exists()


def test_a_run_on_prepared_text_is_not_resumed_on_the_embedded_corpus_which_is_not_prepared_for_it(
    begun: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("residua.train.world.find_data", lambda config: pytest.fail("text was opened"))
    embedded = begun.model_copy(update={"data": begun.data.model_copy(update={"path": None})})
    with pytest.raises(ValueError, match=r"run was trained on .*data, and no text is named now: name only the run, as"):
        train(embedded.override(["model.layers=3"]), tmp_path / "run", resume=True, console=QUIET)


def test_a_disk_too_small_is_refused_before_training(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match=r"need .* [KMG]iB .* lower train\.keep = 2"):
        train(config, tmp_path / "run", console=QUIET)
    with pytest.raises(ValueError, match=r"free: make room or choose another --out\.$"):
        train(config.override(["train.keep=1"]), tmp_path / "run", console=QUIET)
    assert files(tmp_path / "run") == {}


def test_a_refused_run_leaves_nothing_behind(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "runs" / "deep" / "run", tmp_path / "mine"):
        with pytest.raises(ValueError, match="sequence"):
            train(config.override(["data.sequence=100000"]), out, console=QUIET)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = tensors_module.save_file, 0

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(tensors_module, "save_file", full)
        with pytest.raises(TrainingStopped, match=r"step-4: No space left.* good checkpoint is .*step-2: make room"):
            train(config, tmp_path / "run", console=QUIET)
    assert [c.step for c in checkpoints(tmp_path / "run")] == [2]
    assert not list((tmp_path / "run" / "checkpoints").glob(".unfinished-*"))
    assert train(config, tmp_path / "run", resume=True, console=QUIET).steps == 6
