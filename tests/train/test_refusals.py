"""Runs that are refused or stopped: one sentence says why, and no file is lost."""

import errno
import json
import math
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from residua.data import open_corpus, prepare
from residua.machine import has_ended
from residua.storage import tensors as tensors_module
from residua.storage.run import Run, read_metrics
from residua.train.health import TrainingStopped, Watch
from residua.train.step import Step
from tests.train.conftest import Lab, after_each_step, files

pytestmark = pytest.mark.slow


def poison(monkeypatch: pytest.MonkeyPatch, after: int, value: float) -> None:
    """From step `after` on, the loss is multiplied by `value`."""
    forward, poisoned = Step._forward, []
    after_each_step(monkeypatch, lambda step, done: poisoned.append(done) if done >= after else None)

    def spoil(self: Step, *batch: Any) -> tuple[Tensor, Tensor, Any]:
        ce, z, routing = forward(self, *batch)
        return (ce * value if poisoned and torch.is_grad_enabled() else ce), z, routing

    monkeypatch.setattr(Step, "_forward", spoil)


STOPS = {
    "nan": (2, math.nan, ["train.validate_every=100"], r"by step 4 the loss is nan.*last good checkpoint is .*step-2"),
    "inf": (2, math.inf, ["train.validate_every=100"], r"by step 4 the loss is (nan|inf).*last good .* is .*step-2"),
    "nan between log lines": (3, math.nan, ["train.log_every=100"], "validation loss is nan"),
    "ran away": (
        2, 5.0, ["train.steps=20", "train.divergence_patience=3"],
        r"the run diverged: at step 8 .* for 3 log lines in a row",
    ),
    "ran away since the last log line": (
        4, 5.0, ["train.steps=20", "train.divergence_patience=1", "train.log_every=4", "train.save_every=3"],
        r"the run diverged: at step 8 .*last good checkpoint is .*step-3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("after", "value", "changes", "sentence"), STOPS.values(), ids=STOPS)
def test_broken_loss_stops_the_run_and_is_not_saved(lab: Lab, monkeypatch, after, value, changes, sentence) -> None:
    poison(monkeypatch, after, value)
    said = lab.refuse(sentence, *changes, error=TrainingStopped)
    assert lab.saved() == [3 if "step-3" in sentence else 2]
    assert said.startswith(lab.sessions()[-1]["stopped"])
    assert all(math.isfinite(record["loss"]) for record in read_metrics(lab / "run" / "metrics.jsonl"))


def test_one_bad_loss_is_tolerated() -> None:
    watch = Watch(margin=1.0, patience=2)
    assert [watch.check(step, loss, 1.0) for step, loss in enumerate([5.0, 6.5, 5.0, 6.5, 4.0])] == [None] * 5
    assert watch.check(6, 6.5, 1.0) is None and "diverged" in (watch.check(7, 6.5, 1.0) or "")


def test_folder_with_other_files_is_refused(lab: Lab) -> None:
    (lab / "run").mkdir()
    (lab / "run" / "thesis.tex").write_text("years of work")
    lab.refuse("has no run to resume", resume=True, out="nowhere")
    lab.refuse(r"run is not empty: choose another --out, or .* --resume")
    assert files(lab / "run") == {"thesis.tex": b"years of work"}


def test_quantized_folder_is_not_resumed(lab: Lab) -> None:
    (lab / "run").mkdir()
    (lab / "run" / "config.toml").write_text(lab.config.to_toml())
    (lab / "run" / "quantization.json").write_text("{}")
    before = files(lab.folder)
    lab.refuse("is a quantized model, which cannot be trained: resume the original run", resume=True)
    assert files(lab.folder) == before


def raising(error: Exception) -> Any:
    def fail(self: Step, *arguments: Any) -> None:
        raise error

    return fail


def test_running_out_of_gpu_memory_names_settings_to_lower(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "__call__", raising(torch.OutOfMemoryError()))
    sentence = r"out of memory after step 0; no checkpoint .* train\.micro_batch = 2"
    lab.refuse(sentence, error=TrainingStopped)


def test_error_that_ends_a_run_is_recorded_for_watch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "__call__", raising(KeyError("a plugin's own mistake")))
    lab.refuse(None, error=KeyError)
    assert lab.sessions()[-1]["failed"] == 'KeyError: "a plugin\'s own mistake"'
    assert not has_ended(lab.sessions()[-1]["process"])


def test_folder_in_use_is_refused(lab: Lab) -> None:
    run = Run.create(lab / "run", lab.config)
    lab.refuse("in use by another process")
    run.close()
    lab.train()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.layers=3", r"model\.layers was 2 .* is 3 now"),
        ("data.seed=1", r"data\.seed was 0"),
        ("data.sequence=8", r"data\.sequence was None .* is 8 now"),
        ("train.micro_batch=4", r"64 tokens, but would have 128 now: keep train\.accumulate × train\.micro_batch"),
        ("train.optimizer.kind=adamw", r"train\.optimizer\.kind was 'muon'"),
        ("train.steps=3", r"has done \d+ steps, more than train\.steps = 3"),
    ],
)
def test_resume_refuses_changes_to_fixed_settings(trained: Lab, change: str, named: str) -> None:
    before = files(trained / "run")
    trained.refuse(named, change, resume=True)
    assert files(trained / "run") == before


def test_run_on_prepared_text_resumes_with_a_moved_tokenizer(lab: Lab) -> None:
    assert lab.config.data.path is not None
    lab.train()
    lab.resume("data.tokenizer='elsewhere/tokenizer.json'")


def test_vocabulary_smaller_than_the_datasets_is_refused(lab: Lab) -> None:
    lab.refuse(r"model\.vocab_size = 100 is smaller .* set model\.vocab_size=257", "model.vocab_size=100")
    assert not (lab / "run").exists()


@pytest.mark.parametrize("damage", [b"", b"garbage that is no header", None], ids=["empty", "garbage", "missing"])
def test_unreadable_shard_is_refused_before_training(lab: Lab, data: Path, damage: bytes | None) -> None:
    copy = shutil.copytree(data, lab / "data")
    shard = next(copy.glob("train-*"))
    shard.unlink()
    if damage is not None:
        shard.write_bytes(damage)
    lab.refuse(shard.name, f"data.path='{copy}'")
    assert not (lab / "run").exists()


@pytest.mark.parametrize("entries", [260, 600], ids=["within the model's ids", "beyond the model's ids"])
def test_resume_refuses_text_of_another_tokenizer(lab: Lab, entries: int) -> None:
    lab.train()
    before = files(lab / "run")
    (lab / "a.txt").write_text("".join(f"{'abcdefghij'[n % 10]}{n * n} some other words " for n in range(2000)))
    (lab / "b.txt").write_text("for validation only " * 20)
    corpus = open_corpus([lab / "a.txt"], validation=lab / "b.txt")
    other = prepare(corpus, lab / "other", f"bpe:{entries}", workers=1)
    assert other.vocab_size == entries
    lab.refuse("belongs to the tokenizer", f"data.path='{other.path}'", resume=True)
    assert files(lab / "run") == before


def prepared(folder: Path, text: str, validation: str) -> str:
    """The path of a dataset of one token per byte."""
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "b.txt").write_text(validation)
    corpus = open_corpus([folder / "a.txt"], validation=folder / "b.txt")
    return str(prepare(corpus, folder / "data", "bytes", workers=1).path)


TEXT, VALIDATION = "some words to learn " * 50, "words to validate with " * 20


@pytest.fixture
def begun(lab: Lab) -> Lab:
    """A run on TEXT, which is one step from its new end."""
    lab.config = lab.config.override([f"data.path='{prepared(lab / 'own', TEXT, VALIDATION)}'"])
    lab.train()
    lab.config = lab.config.override(["train.steps=7"])
    return lab


@pytest.mark.parametrize(
    ("text", "validation"),
    [(TEXT, VALIDATION[::-1]), (TEXT[::-1], VALIDATION), (TEXT * 2, VALIDATION)],
    ids=["other validation", "other words", "other length"],
)
def test_resume_refuses_another_text(begun: Lab, text: str, validation: str) -> None:
    run, before = begun / "run", files(begun / "run")
    other = prepared(begun / "other", text, validation)
    assert begun.refuse(None, f"data.path='{other}'", resume=True) == (
        f"{other} is not the text that {run} was trained on ({begun.config.data.path}): resume with that text, or "
        f"start a new run from its weights with --from {run}."
    )
    assert files(run) == before


def test_run_without_a_fingerprint_checks_the_text_length(begun: Lab) -> None:
    path = begun / "run" / "environment.json"
    about = json.loads(path.read_text())
    del about["text"]
    path.write_text(json.dumps(about))
    longer, other = (prepared(begun / name, text, VALIDATION) for name, text in (("2", TEXT * 2), ("r", TEXT[::-1])))
    begun.refuse(r"is not the text that .*run was trained on", f"data.path='{longer}'", resume=True)
    begun.resume(f"data.path='{other}'")


def test_resume_accepts_a_copy_of_the_text(begun: Lab) -> None:
    copy = shutil.copytree(str(begun.config.data.path), begun / "copy")
    assert begun.resume(f"data.path='{copy}'").steps == 7


def test_resume_refuses_text_prepared_again_at_the_same_path(begun: Lab) -> None:
    shutil.rmtree(begun / "own")
    own = prepared(begun / "own", TEXT, VALIDATION[::-1])
    begun.refuse(rf"{own} is not the text that .*run was trained on: resume", resume=True)
    shutil.rmtree(begun / "run" / "checkpoints")
    begun.resume()  # without a checkpoint it may begin on another text


def test_restarted_run_has_the_tokenizer_of_its_text(begun: Lab) -> None:
    run = begun / "run"
    shutil.rmtree(run / "checkpoints")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).write_text("{}")  # of the text before
    begun.resume()
    own = Path(str(begun.config.data.path)) / "tokenizer.json"
    assert (run / "tokenizer.json").read_text() == own.read_text()
    assert not (run / "tokenizer_config.json").exists()


def test_resume_does_not_replace_text_by_the_embedded_corpus(begun: Lab, monkeypatch) -> None:
    monkeypatch.setattr("residua.train.world.find_data", lambda config: pytest.fail("text was opened"))
    data = begun.config.data.model_copy(update={"path": None})
    begun.config = begun.config.model_copy(update={"data": data})
    sentence = r"run was trained on .*data, but this command names no text: name only the run, as"
    begun.refuse(sentence, "model.layers=3", resume=True)


def test_disk_too_small_is_refused_before_training(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    lab.refuse(r"need .* [KMG]iB .* lower train\.keep = 2")
    lab.refuse(r"free: free some space or choose another --out\.$", "train.keep=1")
    assert files(lab / "run") == {}


def test_refused_run_leaves_nothing_behind(lab: Lab) -> None:
    (lab / "mine").mkdir()
    for out in ("runs/deep/run", "mine"):
        lab.refuse("sequence", "data.sequence=100000", out=out)
    assert [p.name for p in lab.folder.rglob("*")] == ["mine"]


def test_disk_that_fills_up_keeps_the_previous_checkpoint(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
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
        sentence = r"step-4: No space left.* good checkpoint is .*step-2: make room"
        lab.refuse(sentence, error=TrainingStopped)
    assert lab.saved() == [2]
    assert not list((lab / "run" / "checkpoints").glob(".unfinished-*"))
    assert lab.resume().steps == 6
