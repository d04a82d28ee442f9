"""A disk that is full, read-only or broken at any moment of any verb: one sentence, and nothing is lost."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.files import UNFINISHED
from residua.storage.checkpoint import checkpoints
from residua.storage.tensors import holds_only_numbers
from tests.faults import Disk, failing
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow

SAMPLED = 3
"""Moments of each verb that `make test` tries; `make nightly` tries all of them."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A folder with a run, its data and texts, on the disk that will fail."""
    shutil.copytree(trained.parent, tmp_path / "place")
    place = tmp_path / "place"
    config = RunConfig.from_toml(place / "run/config.toml").override([f"data.path='{place / 'data'}'"])
    (place / "run/config.toml").write_text(config.to_toml())
    changes = ["train.steps=6", "train.save_every=2", "train.log_every=2", "train.validate_every=3"]
    (place / "new.toml").write_text(config.override(changes).to_toml())
    return place


VERBS: dict[str, Callable[[Path], list[object]]] = {
    "train": lambda at: ["train", at / "new.toml", "--out", at / "out/run"],
    "resume": lambda at: ["train", "--resume", "--out", at / "run", "train.steps=6", "train.save_every=2"],
    "eval": lambda at: ["eval", at / "run"],
    "export": lambda at: ["export", at / "run", "--out", at / "out/hf"],
    "diagnose": lambda at: ["diagnose", at / "run", "--out", at / "out/d", "--tokens", 64, "--ablations", "none"],
    "quantize": lambda at: ["quantize", at / "run", "--out", at / "out/q", "--probes", 0],
    "prepare": lambda at: ["data", "prepare", at / "texts", "--tokenizer", "bytes", "--out", at / "out/data"],
    "tokenizer": lambda at: ["data", "tokenizer", at / "texts", "--vocab-size", 260, "--out", at / "tokenizer.json"],
    "plan": lambda at: ["bench", "plan", "tiny", "--gpus", 1, "--out", at / "out/plan.json"],
}
ALLOWED_TO_CHANGE = {
    "resume": [f"run/{name}" for name in ("metrics.jsonl", "environment.json", "config.toml", "result.json", ".lock")]
}
FAULTS = {
    "full": {"code": errno.ENOSPC},
    "read-only": {"code": errno.EROFS},
    "broken": {"code": errno.EIO, "once": True},
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_verb(verb: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(place)
    return residua(monkeypatch, *VERBS[verb](place))


def moments(total: int, *, every: bool) -> list[int]:
    """Numbers of operations to fail at: all, or the first, the last and some between."""
    step = 1 if every else max(1, (total - 1) // (SAMPLED - 1))
    return sorted({*range(1, total + 1, step), total})


def check(verb: str, place: Path, before: dict[str, bytes], code: int, said: str) -> None:
    """What must hold after a verb that could not write."""
    spoken = [line for line in said.splitlines() if line.startswith("residua: ")]
    assert code != 0 and len(spoken) == 1, said
    assert "Traceback" not in said and "Errno" not in said and "os error" not in said, said
    assert re.search(rf"could not write {re.escape(str(place))}/\S+: ", spoken[0]), said
    assert spoken[0].endswith("."), said
    assert not list(place.rglob(f"*{UNFINISHED}*")) and not list(place.rglob(".tmp*"))
    after = files(place)
    for name, content in before.items():
        if name not in ALLOWED_TO_CHANGE.get(verb, ()):
            assert after.get(name) == content, name
    for found in [c for run in ("run", "out/run") for c in checkpoints(place / run)]:
        assert holds_only_numbers(found.path) and found.state["step"] == found.step
    if verb in ("train", "resume"):
        left = checkpoints(place / ("run" if verb == "resume" else "out/run"))
        intact = str(left[-1].path) if left else "no checkpoint had been written yet"
        assert any(words in spoken[0] for words in (intact, "nothing of it is left", "the folder is as it was")), said


@pytest.fixture
def copies(place: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Fresh copies of the place, each under its own name."""

    def copy() -> Path:
        shutil.rmtree(place.with_name("copy"), ignore_errors=True)
        made = Path(shutil.copytree(place, place.with_name("copy")))
        for name in ("run/config.toml", "new.toml"):
            (made / name).write_text((place / name).read_text().replace(str(place), str(made)))
        return made

    yield copy


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_failing_disk_costs_only_what_was_being_written(
    verb: str, fault: str, every: bool, copies: Callable[[], Path], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    # these take seconds and write nothing
    monkeypatch.setattr("residua.export.folder.check_export", lambda *_: 0.0)
    monkeypatch.setattr("residua.export.folder.bundle", lambda *_: {"modeling_residua.py": "# code\n"})
    place = copies()
    counted = Disk(place, **(FAULTS[fault] | {"fails_at": 0}))
    with failing(counted):
        assert run_verb(verb, place, monkeypatch) == 0
    assert counted.done
    for moment in moments(counted.done, every=every) if fault != "read-only" else [1]:
        place = copies()
        before = files(place)
        disk = Disk(place, moment, **FAULTS[fault])
        capfd.readouterr()
        with failing(disk):
            code = run_verb(verb, place, monkeypatch)
        out, err = capfd.readouterr()
        assert disk.failed, "the moment was not reached"
        if code == 0:
            assert all("tfevents" in what or "tensorboard" in what for what in disk.failed), disk.failed
            assert out.count("TensorBoard is off from here on") == 1 and not err.strip(), (out, err)
        else:
            check(verb, place, before, code, err)
