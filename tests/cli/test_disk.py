"""A disk that is full, read-only or broken at any moment of any verb: one sentence, and nothing is lost."""

import errno
import io
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.files import UNFINISHED, AppendedFile, WriteError
from residua.storage.checkpoint import checkpoints
from residua.storage.tensors import holds_only_numbers
from residua.train.health import TrainingStopped
from residua.train.trainer import train
from tests.faults import Disk, failing
from tests.nightly import only_nightly
from tests.soak.faults import SmallDisk, open_disk
from tests.train.conftest import config as config
from tests.train.conftest import data as data
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
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


def run_verb(verb: str, place: Path, monkeypatch) -> int:
    monkeypatch.chdir(place)
    return residua(monkeypatch, *VERBS[verb](place))


def moments(total: int, *, every: bool) -> list[int]:
    """Numbers of operations to fail at: all, or one in the middle and the last."""
    return list(range(1, total + 1)) if every else sorted({(total + 1) // 2, total})


def check(verb: str, place: Path, before: dict[str, bytes], code: int, said: str) -> None:
    """Assertions after a verb that could not write."""
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
        assert any(
            words in spoken[0] for words in (intact, "the partial output was removed", "the folder is unchanged")
        ), said


@pytest.fixture
def copies(place: Path) -> Callable[[], Path]:
    """Fresh copies of the place, each under its own name."""

    def copy() -> Path:
        shutil.rmtree(place.with_name("copy"), ignore_errors=True)
        return copy_to(place.with_name("copy"), place)

    return copy


CASES = [(verb, fault, every) for verb in VERBS for fault in FAULTS for every in (False, True)]
"""`every`: fail at every moment of the verb, not only at two."""
QUICK = [(verb, "full", False) for verb in ("train", "eval", "export", "diagnose", "quantize", "prepare")]
QUICK += [("train", "broken", False), ("resume", "read-only", False)]


@pytest.mark.parametrize("case", only_nightly(CASES, QUICK), ids=str)
def test_a_failing_disk_loses_only_the_file_being_written(
    case: tuple[str, str, bool], copies: Callable[[], Path], monkeypatch,
    capfd
) -> None:  # fmt: skip
    verb, fault, every = case
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
        harmful = [what for what in disk.failed if not what.startswith("mkdir")]  # of a folder that exists
        if code != 0:
            check(verb, place, before, code, err)
        elif harmful:
            assert all("tfevents" in what or "tensorboard" in what for what in disk.failed), disk.failed
            assert out.count("TensorBoard is off from now on") == 1 and not err.strip(), (out, err)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with open_disk(tmp_path / "small") as disk:
        if not isinstance(disk, SmallDisk):
            pytest.skip("mounting a file system is not permitted here")
        yield disk


def copy_to(folder: Path, place: Path) -> Path:
    made = Path(shutil.copytree(place, folder))
    for name in ("run/config.toml", "new.toml"):
        (made / name).write_text((place / name).read_text().replace(str(place), str(made)))
    return made


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("verb", only_nightly(VERBS, ["train"]))
def test_a_full_disk_is_reported_in_one_sentence(verb, place: Path, small_disk: SmallDisk, monkeypatch, capfd):
    monkeypatch.setattr("residua.train.summary.check_disk", lambda *_: None)
    monkeypatch.setattr("residua.train.trainer.check_disk", lambda *_: None)
    made = copy_to(small_disk.path / "place", place)
    before = files(made)
    for room in (0, 1 << 13, 1 << 16):
        small_disk.fill(room, [])
        capfd.readouterr()
        code = run_verb(verb, made, monkeypatch)
        err = capfd.readouterr().err
        if code:
            check(verb, made, before, code, err)
        small_disk.empty()
        shutil.rmtree(made / "out", ignore_errors=True)
        shutil.rmtree(made / "run", ignore_errors=True)
        copied = Path(shutil.copytree(place / "run", made / "run"))
        (copied / "config.toml").write_bytes(before["run/config.toml"])
        (made / "tokenizer.json").unlink(missing_ok=True)
        assert code or room, "no room at all, and nothing failed"


@pytest.mark.parametrize("verb", only_nightly(VERBS, ["export"]))
def test_a_file_size_limit_is_reported_in_one_sentence(verb: str, place: Path, monkeypatch, capsys) -> None:
    """Also covers writes from below Python: safetensors is Rust."""
    monkeypatch.setattr("residua.export.folder.bundle", lambda *_: {})  # takes seconds
    before = files(place)
    with largest_file(64):
        code = run_verb(verb, place, monkeypatch)
    err = capsys.readouterr().err
    check(verb, place, before, code, err)
    assert "File too large" in err and "ulimit -f" in err


def test_run_continues_without_tensorboard_but_not_metrics(place: Path, monkeypatch, capfd) -> None:
    pytest.importorskip("tensorboard")
    write, broken = AppendedFile.write, "tfevents"

    def full(file: AppendedFile, piece: bytes) -> None:
        if broken in file.path.name and b"validation" in piece:
            raise WriteError(file.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        write(file, piece)

    monkeypatch.setattr(AppendedFile, "write", full)
    assert run_verb("train", place, monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out.count("TensorBoard is off from now on: could not write") == 1 and not err
    assert checkpoints(place / "out/run")[-1].step == 6
    shutil.rmtree(place / "out")
    broken = "metrics"
    assert run_verb("train", place, monkeypatch) == 1
    assert re.search(r"could not write \S+metrics\.jsonl: No space .* written yet: make room", capfd.readouterr().err)


def test_a_line_that_does_not_fit_is_rolled_back(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "lines")
    file.write(b"first\n")
    intact = r"could not write .*lines: File too large; its previous contents are intact: raise"
    with largest_file(8), pytest.raises(OSError, match=intact):
        file.write(b"second\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"first\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_unprintable_output_ends_with_an_error_code() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "residua.cli.main", "presets", "tiny"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode != 0 and "Traceback" not in done.stderr and done.stderr.count("residua: ") == 1
        assert subprocess.run(command, stdout=full, stderr=full).returncode != 0


def test_a_full_log_disk_stops_the_run_with_a_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    """Output goes to a file on another disk, which fills up at the third line of the run."""

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if "step 4/6" in text:
                self.full = True
            if getattr(self, "full", False):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    words = r"what is printed: No space left on device; the last good \S+ is \S+step-6"
    with pytest.raises(TrainingStopped, match=words):
        train(config, tmp_path / "run", console=Console(file=Log(), width=200))
    assert checkpoints(tmp_path / "run")[-1].step == 6 and (tmp_path / "run/result.json").exists()
