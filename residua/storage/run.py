"""A run's folder: config.toml, environment.json, metrics.jsonl, tokenizer.json, checkpoints/, result.json, and
source/ if its model was imported (`residua.storage.hugging_face`).

One process at a time owns it. Metrics are JSON lines, appended during training. When a run resumes, lines after its
checkpoint are removed, so that no step appears twice. If there is no checkpoint, all lines move to
metrics-lost-N.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from residua.config.run import RunConfig, differences
from residua.config.settings import ConfigError
from residua.data.tokenizer import SETTINGS, SOURCE
from residua.errors import UserError
from residua.files import UNFINISHED, AppendedFile, atomic_folder, lock, refuse_blocked, write_atomically, writing
from residua.machine import this_process
from residua.reading import Count, ReadError, Shape, check, inside, read_json, read_json_lines, read_text, reason
from residua.storage.checkpoint import FOLDER, Checkpoint, TrainingStopped, checkpoints
from residua.storage.formats import ENVIRONMENT, find_reader
from residua.storage.formats import METRICS as METRICS
from residua.storage.hugging_face import keep_companions

LOCK = ".lock"
# A resumed run writes to these, so none may be a link that leads out of the folder.
_WRITTEN = (LOCK, "config.toml", ENVIRONMENT, METRICS, "tokenizer.json", SOURCE, "checkpoints", "profile",
            "tensorboard", "wandb-id")  # fmt: skip
_ANOTHER = "choose another --out, or continue the run in it with --resume"
_GO_ON = "move the file elsewhere to continue without it"
# Files that a run leaves if it is refused or killed before it begins.
_OURS = (LOCK, UNFINISHED)
# Files that it leaves before its first checkpoint, in addition to `_WRITTEN`.
_LATER = ("wandb", r"metrics-lost-\d+\.jsonl", r"collectives-rank-.*\.json")
_BEGUN = re.compile("|".join((*map(re.escape, (*_WRITTEN, SETTINGS)), *_LATER)))
# Keys that a resumed run may not change: the saved weights, data order or optimizer state would no longer match.
_FIXED = ("model.", "data.tokenizer", "data.sequence", "data.seed", "data.masking", "train.seed",
          "train.optimizer.kind")  # fmt: skip


class Run:
    """The folder of one run, owned by this process from `create` or `reopen` until `close`.

    Nothing is written before `begin`, so a refused run leaves the folder unchanged; `close` then removes the folders in
    `made`, which `create` made.
    """

    def __init__(
        self, folder: Path, config: RunConfig, changes: dict[str, tuple[Any, Any]], new_folders: Sequence[Path] = ()
    ) -> None:
        self.folder, self.config = folder, config
        self._changes, self._new_folders = changes, new_folders
        self._stale: tuple[Path, ...] = ()  # files that an earlier run in the folder copied from elsewhere
        self._begun = False
        self._lock = self._take()

    def _take(self) -> int:
        """Lock the folder for this process."""
        busy = f"{self.folder} is in use by another process: wait for it, or choose another --out."
        return lock(self.folder / LOCK, busy, "the folder is unchanged")

    @classmethod
    def create(cls, folder: Path, config: RunConfig, advice: str = _ANOTHER) -> Run:
        """Create the folder; refuses a folder that is not empty, and adds `advice` to the message."""
        refuse_blocked(folder)
        if folder.exists() and any(not p.name.startswith(_OURS) for p in folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: {advice}.")
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, config, {}, new_folders)
        except OSError:
            _remove_empty(new_folders)
            raise

    @classmethod
    def start_again(cls, folder: Path, config: RunConfig) -> Run:
        """Reuse the folder of a run that `failed_early`, for a run of any configuration; keeps the old metrics."""
        changes: dict[str, tuple[Any, Any]] = {}
        with suppress(UserError):  # for example a kind that its plugin has renamed since
            changes = differences(saved_config(folder), config)
        run = cls._take_over(folder, config, changes, must_have_failed=True)
        run._stale = (folder / SOURCE, folder / "wandb-id")
        return run

    @classmethod
    def reopen(cls, folder: Path, config: RunConfig) -> Run:
        """Open the folder of an earlier run. Refuses changes to settings that determine weights or data order."""
        old = saved_config(folder)
        changes = differences(old, config)
        _check_changes(folder, old, config, changes)
        return cls._take_over(folder, config, changes)

    @classmethod
    def _take_over(
        cls, folder: Path, config: RunConfig, changes: dict[str, tuple[Any, Any]], *, must_have_failed: bool = False
    ) -> Run:
        """Lock the folder of an earlier run if it is readable and writable; writes nothing else yet."""
        for name in _WRITTEN:
            inside(folder, name)
        run = cls(folder, config, changes)
        try:
            if must_have_failed and not failed_early(folder):  # another process may have trained it before we locked it
                raise ConfigError(f"{folder} is not empty: {_ANOTHER}.")
            run._sessions()
            read_metrics(folder / METRICS)
        except BaseException:
            run.close()
            raise
        return run

    def checkpoints(self) -> list[Checkpoint]:
        """The finished checkpoints, oldest first."""
        return checkpoints(self.folder)

    def set_checkpoint_aside(self, checkpoint: Checkpoint) -> str:
        """Rename a checkpoint that is not finite, so that the run can save that step again; returns the new name."""
        names = (checkpoint.path.with_name(f"{checkpoint.path.name}-not-finite-{number}") for number in count(1))
        with writing(checkpoint.path, "nothing was moved"):
            return checkpoint.path.rename(next(name for name in names if not name.exists())).name

    def begin(self, environment: dict[str, Any], step: int, startup: dict[str, float] | None = None) -> None:
        """Write config.toml, and add this session to environment.json: its environment, first step and changes.

        `startup` gives the seconds of each stage before the first step. Removes files that a killed session left
        half-written.
        """
        sessions = self._sessions()
        for path in self._stale:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for leftover in self.folder.glob(f"{UNFINISHED}*"):
            if leftover.is_file():  # a folder may hold a model that is being quantized into the run
                leftover.unlink(missing_ok=True)
        changes = {key: list(pair) for key, pair in self._changes.items()}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        session = {"started": started, "from_step": step, "changes": changes, "startup": startup or {}}
        sessions.append({**session, "process": this_process()})
        # Write config.toml first: a run cannot be resumed without it.
        write_atomically(self.folder / "config.toml", self.config.to_toml())
        write_atomically(self.folder / ENVIRONMENT, json.dumps({**environment, "sessions": sessions}, indent=1) + "\n")
        self._begun = True

    def record_stop(self, words: str) -> None:
        """Record in this session of environment.json why its losses or a signal ended it."""
        record_end(self.folder, "stopped", words)

    def record_failure(self, error: Exception) -> None:
        """Record in this session of environment.json which error ended it; does nothing before a session begins."""
        if self._begun:
            ours = isinstance(error, UserError | TrainingStopped)
            record_end(self.folder, "failed", str(error) if ours else f"{type(error).__name__}: {reason(error)}")

    def recorded(self, key: str) -> Any:
        """The value of this key in environment.json of an earlier session; None if there is none."""
        path = inside(self.folder, ENVIRONMENT)
        return read_json(path, dict[str, Any], _GO_ON).get(key) if path.exists() else None

    def _sessions(self) -> list[dict[str, Any]]:
        """The earlier sessions in environment.json."""
        path = inside(self.folder, ENVIRONMENT)
        return [*read_json(path, _Environment, _GO_ON).sessions] if path.exists() else []

    def keep_tokenizer(self, source: Path, fresh: bool = False) -> None:
        """Copy the dataset's tokenizer into the run, so that the run stays usable without the dataset.

        `fresh`: the run starts at step 1, possibly again and on another text, so an existing tokenizer is replaced.
        """
        for name in ("tokenizer.json", SETTINGS):
            original, target = source.with_name(name), inside(self.folder, name)
            if fresh and not original.exists():
                target.unlink(missing_ok=True)
            if original.exists() and (fresh or not target.exists()):
                write_atomically(target, read_text(original, "prepare the data again"))

    def keep_companions(self, start: Path) -> None:
        """Copy the companion files of the initial model, so that exports of this run have them too."""
        keep_companions(start, self.folder)

    def set_metrics_aside(self) -> str | None:
        """For a run that starts over at step 0: move its old metrics to another file; returns a notice."""
        path = self.folder / METRICS
        lost = read_metrics(path)
        if not lost:
            return None
        names = (self.folder / f"metrics-lost-{number}.jsonl" for number in count(1))
        with writing(path, "nothing was moved"):
            backup = path.rename(next(name for name in names if not name.exists()))
        return (
            f"{self.folder} holds no checkpoint: starting again at step 1; the metrics up to step {lost[-1]['step']} "
            f"are kept in {backup.name}."
        )

    def metrics(self, until: int) -> Metrics:
        """The metrics file, after removing lines beyond step `until`."""
        return Metrics(self.folder / METRICS, until)

    def branch(self, folder: Path, config: RunConfig, step: int, save: Callable[[Path], None]) -> None:
        """Make the folder of a shorter run that shares the first `step` steps with this one.

        It then resumes like an interrupted run. `save` writes the checkpoint into the folder that it receives. A folder
        that already exists is left unchanged.
        """
        if folder.exists():
            return
        about = read_json(self.folder / ENVIRONMENT, dict[str, Any], _GO_ON)
        about["sessions"][-1] |= {"branch_of": self.folder.name, "until_step": step}
        about["sessions"][-1].pop("process", None)  # no process trains the branch yet
        shared = [record for record in read_metrics(self.folder / METRICS) if record["step"] <= step]
        with atomic_folder(folder) as staging:
            save(staging)
            write_atomically(staging / METRICS, "".join(json.dumps(record) + "\n" for record in shared))
            write_atomically(staging / ENVIRONMENT, json.dumps(about, indent=1) + "\n")
            write_atomically(staging / "config.toml", config.to_toml())

    def close(self) -> None:
        """Release the folder; if nothing was written to it, remove what `create` made."""
        if not (self.folder / "config.toml").exists():
            with suppress(OSError):
                (self.folder / LOCK).unlink(missing_ok=True)
            _remove_empty(self._new_folders)
        os.close(self._lock)


def record_end(folder: Path, how: Literal["stopped", "failed"], words: str) -> None:
    """Record in the last session of environment.json how it ended; keeps a stop that is already recorded."""
    path = folder / ENVIRONMENT
    with suppress(ReadError, OSError, LookupError, TypeError, AttributeError):  # the error is reported in any case
        about = read_json(path, dict[str, Any], _GO_ON)
        if "stopped" not in (session := about["sessions"][-1]):
            session[how] = words
            write_atomically(path, json.dumps(about, indent=1) + "\n")


class FollowedRun(Run):
    """The folder of a run that another process of the same job owns; this process only reads it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        super().__init__(folder, config, {})

    def _take(self) -> int:
        return -1

    def metrics(self, until: int) -> Metrics:
        return Metrics(None)

    def _leave_to_owner(self, *_: Any, **__: Any) -> Any:
        """Do nothing: the process that owns the folder does it."""

    begin = record_stop = record_failure = set_checkpoint_aside = set_metrics_aside = _leave_to_owner
    keep_tokenizer = keep_companions = branch = close = _leave_to_owner


class Metrics:
    """metrics.jsonl, one JSON object per line. Without a path, as on ranks that do not own the run, writes nothing."""

    def __init__(self, path: Path | None, until: int = 0) -> None:
        self._file: AppendedFile | None = None
        if path is not None:
            records = [record for record in read_metrics(path) if record["step"] <= until]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
            self._file = AppendedFile(path)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line; readers see it at once."""
        if self._file is not None:
            self._file.write((json.dumps(record) + "\n").encode())

    def sync(self) -> None:
        """Wait until all lines are on disk. A checkpoint must not be newer than its metrics."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Environment(Shape):
    sessions: list[dict[str, Any]]


class _Record(Shape):
    kind: str
    step: Count


class _TrainRecord(_Record):
    loss: float
    seconds: float
    tokens_per_second: float
    memory_gib: float


class _ValidationRecord(_Record):
    loss: float
    bits_per_byte: float


class _TelemetryRecord(_Record):
    tokens: float
    figures: dict[str, list[float | None]]
    said: list[str] = Field(default_factory=list)


_RECORDS: dict[str, type[_Record]] = {
    "train": _TrainRecord,
    "validation": _ValidationRecord,
    "telemetry": _TelemetryRecord,
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; an incomplete last line (after a crash) is skipped."""
    inside(path.parent, path.name)
    if not path.exists():
        return []
    records = []
    hint = "correct or remove the line, or move the file elsewhere to continue without the old curves"
    for where, record in read_json_lines(path, hint):
        kind = check(record, _Record, where, hint).kind
        check(record, _RECORDS.get(kind, _Record), where, hint)
        records.append(record)
    return records


def failed_early(folder: Path) -> bool:
    """Whether a folder holds only the files of a run that has not completed its first checkpoint.

    False for a folder with any other file, with a checkpoint, or without a record of training.
    """
    if not all((folder / name).is_file() for name in ("config.toml", ENVIRONMENT)):
        return False
    saved = inside(folder, FOLDER)
    names = [path.name for path in folder.iterdir() if not path.name.startswith(_OURS)]
    return all(map(_BEGUN.fullmatch, names)) and all(path.name.startswith(UNFINISHED) for path in saved.glob("*"))


def saved_config(folder: Path) -> RunConfig:
    """The configuration a run folder was started with."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} has no run to resume: leave --resume out to start one there.")
    if find_reader(folder) is not None:
        raise ConfigError(f"{folder} is a quantized model, which cannot be trained: resume the original run.")
    if inside(folder, SOURCE).is_dir() and not (folder / ENVIRONMENT).exists():
        raise ConfigError(
            f"{folder} was imported, so it has no training to resume: start from its weights with --from "
            f"{folder} --out NEW."
        )
    return RunConfig.from_toml(inside(folder, "config.toml"))


def _check_changes(folder: Path, old: RunConfig, new: RunConfig, changes: dict[str, tuple[Any, Any]]) -> None:
    """Refuse to resume a run with changes to its text, weights, data order or optimizer state."""
    if old.data.path is not None and new.data.path is None:
        raise ConfigError(
            f"{folder} was trained on {old.data.path}, but this command names no text: name only the run, "
            f"as in residua train --resume --out {folder}, or name the text too, with --data."
        )
    for key, (before, after) in changes.items():
        if key == "data.tokenizer" and new.data.path is not None:
            continue  # prepared text has its own tokenizer, which is checked against the checkpoint
        if key.startswith(_FIXED):
            raise ConfigError(
                f"{key} was {before!r} when {folder} was started, but is {after!r} now: "
                "resume with the old value, or start a new run in another --out."
            )
    if new.tokens_per_step != old.tokens_per_step:
        raise ConfigError(
            f"a step of {folder} has {old.tokens_per_step} tokens, but would have {new.tokens_per_step} now: "
            "keep train.accumulate × train.micro_batch unchanged, or start a new run in another --out."
        )


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # another process may have written to it in the meantime
        for folder in folders:
            folder.rmdir()
