"""A run's folder: config.toml, environment.json, metrics.jsonl, tokenizer.json, checkpoints/, result.json.

One process at a time owns it. Metrics are lines of JSON, appended as they happen and cut back to the checkpoint when
a run is resumed, so that no step appears twice; where no checkpoint is left, they are kept as metrics-lost-N.jsonl.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig, differences
from residua.config.settings import ConfigError
from residua.storage.checkpoint import Checkpoint, checkpoints
from residua.storage.files import UNFINISHED, write_atomically

LOCK = ".lock"
# What a run that was refused or killed before it began leaves behind.
_OURS = (LOCK, UNFINISHED)
# What a resumed run may not change, since its weights, its data order or its optimizer state would no longer fit.
_FIXED = (
    "model.",
    "data.tokenizer",
    "data.sequence",
    "data.seed",
    "data.masking",
    "train.seed",
    "train.optimizer.kind",
)


class Run:
    """The folder of one run, owned by this process from `create` or `reopen` until `close`.

    Until `begin` nothing in it is written, so whatever is refused before leaves the folder as it was; those in `made`
    were not there.
    """

    def __init__(
        self, folder: Path, config: RunConfig, changes: dict[str, tuple[Any, Any]], made: Sequence[Path] = ()
    ) -> None:
        self.folder, self.config = folder, config
        self._changes, self._made = changes, made
        self._lock = self._take()

    def _take(self) -> int:
        return _own(self.folder)

    @classmethod
    def create(cls, folder: Path, config: RunConfig) -> Run:
        """Take a new folder; one that already holds something is refused."""
        if folder.exists() and (not folder.is_dir() or any(not p.name.startswith(_OURS) for p in folder.iterdir())):
            raise ConfigError(f"{folder} is not empty: choose another --out, or continue the run in it with --resume.")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, config, {}, made)

    @classmethod
    def reopen(cls, folder: Path, config: RunConfig) -> Run:
        """Take an old folder. What shapes weights or data order must be as it was; the rest may change."""
        old = saved_config(folder)
        changes = differences(old, config)
        if config.tokens_per_step != old.tokens_per_step:
            raise ConfigError(
                f"a step of {folder} has {old.tokens_per_step} tokens and would have {config.tokens_per_step} now: "
                "keep train.accumulate × train.micro_batch as it was, or start a new run in another --out."
            )
        for key, (before, after) in changes.items():
            if key.startswith(_FIXED):
                raise ConfigError(
                    f"{key} was {before!r} when {folder} was started and is {after!r} now: "
                    "resume with the old value, or start a new run in another --out."
                )
        return cls(folder, config, changes)

    def last_checkpoint(self) -> Checkpoint | None:
        found = checkpoints(self.folder)
        return found[-1] if found else None

    def begin(self, environment: dict[str, Any], step: int) -> None:
        """Write config.toml, and note in environment.json what this process is and what it changed from `step` on."""
        path = self.folder / "environment.json"
        sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
        changes = {key: list(pair) for key, pair in self._changes.items()}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        sessions.append({"started": started, "from_step": step, "changes": changes})
        # The configuration first: with it alone a run can be resumed, without it not.
        write_atomically(self.folder / "config.toml", self.config.to_toml())
        write_atomically(path, json.dumps({**environment, "sessions": sessions}, indent=1) + "\n")

    def keep_tokenizer(self, source: Path) -> None:
        """Copy the dataset's tokenizer beside the weights: a run stays usable when its data has gone."""
        target = self.folder / "tokenizer.json"
        if source.exists() and not target.exists():
            write_atomically(target, source.read_text(encoding="utf-8"))

    def set_metrics_aside(self) -> str | None:
        """For a run that is at step 0 again: keep what was measured of its lost steps, and say where."""
        path = self.folder / "metrics.jsonl"
        lost = read_metrics(path)
        if not lost:
            return None
        names = (self.folder / f"metrics-lost-{number}.jsonl" for number in count(1))
        kept = path.rename(next(name for name in names if not name.exists()))
        return (
            f"{self.folder} holds no checkpoint: starting again at step 1; the metrics up to step {lost[-1]['step']} "
            f"are kept in {kept.name}."
        )

    def metrics(self, until: int) -> Metrics:
        """The metrics file, cut back to lines of step `until` and earlier."""
        return MetricsFile(self.folder / "metrics.jsonl", until)

    def close(self) -> None:
        """Give the folder up; one in which nothing began is left as it was found."""
        if not (self.folder / "config.toml").exists():
            (self.folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # another process has put something there meanwhile
                for folder in self._made:
                    folder.rmdir()
        os.close(self._lock)


class FollowedRun(Run):
    """The folder of a run that another process of the same job owns: read, never written."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        super().__init__(folder, config, {})

    def _take(self) -> int:
        return -1

    def begin(self, environment: dict[str, Any], step: int) -> None:
        pass

    def keep_tokenizer(self, source: Path) -> None:
        pass

    def set_metrics_aside(self) -> str | None:
        return None

    def metrics(self, until: int) -> Metrics:
        return Metrics()

    def close(self) -> None:
        pass


class Metrics:
    """Where the records of a run go: nowhere."""

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsFile(Metrics):
    """metrics.jsonl, one JSON object a line."""

    def __init__(self, path: Path, until: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= until]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append a line; readers see it at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until every line is on the disk: a checkpoint must not be newer than the metrics before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def saved_config(folder: Path) -> RunConfig:
    """The configuration a run folder was started with."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds no run to resume: leave --resume out to start one there.")
    return RunConfig.from_toml(folder / "config.toml")


def _own(folder: Path) -> int:
    """Lock the folder for this process; the lock ends with the process, however it ends."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"{folder} is in use by another process: wait for it, or choose another --out.") from None
    return descriptor
