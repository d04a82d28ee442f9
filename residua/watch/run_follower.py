"""Follow one run's folder while another process writes to it. Nothing here writes, locks or waits.

A file may be half written, replaced, damaged or gone at any moment: readable parts are shown, and a message names the
rest. Does not import torch.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Literal

from residua.files import explain
from residua.machine import has_ended
from residua.reading import ReadError, brief, counted, inside, parse_json, read_json, read_toml
from residua.report.figures import evenly
from residua.report.plain import printable
from residua.storage.formats import CONFIG, ENVIRONMENT, METRICS, RESULT, WEIGHTS

State = Literal["waiting", "training", "quiet", "finished", "stopped", "crashed", "imported", "gone"]
POINTS = 600
"""The most points per curve sent to the page."""
PIECE = 2**24
"""The most bytes read at a time; the rest follows."""
PATIENCE = 120.0
"""A run counts as quiet after this many seconds without a line, or ten times its usual time between lines."""
FAR = 1e10
"""A longer remaining time, in seconds, is meaningless."""
RECENT = 20
"""How many recent log lines determine the speed and the time between lines."""
_CURVES = {
    "train": ("step", "tokens", "seconds", "loss", "smoothed", "lr", "grad_norm", "tokens_per_second", "mfu",
              "memory_gib"),
    "validation": ("step", "seconds", "loss", "bits_per_byte"),
    "experts": ("step", "heaviest", "lightest"),
    "telemetry": ("step", "seconds", "peak", "sink_ratio"),
}  # fmt: skip
Row = tuple[float | None, ...]


@dataclass(frozen=True)
class _Files:
    """The contents of a run's folder except its metrics; `exists` is None until the folder has been checked.

    result: the step count of its result. sessions: when each began, in words. stopped, crashed: how the last one ended.
    waits: it holds only a starting point that a longer run saved for it.
    """

    exists: bool | None = None
    result: float | None = None
    checkpoints: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    weights: bool = False
    stopped: str = ""
    crashed: str = ""
    waits: bool = False


@dataclass
class Follower:
    """A run's folder: its curves so far, and its state. Runs of a `study` have a log in the study's folder."""

    folder: Path
    study: Path | None = None
    version: int = 0
    rows: dict[str, list[Row]] = field(default_factory=lambda: {kind: [] for kind in _CURVES})
    sentences: list[str] = field(default_factory=list)
    damaged: int = 0
    problem: str = ""
    restarts: int = 0
    _identity: tuple[int, int] | None = None
    _offset: int = 0
    _written: float | None = None
    _steps: int | None = None
    _files: _Files = _Files()

    def refresh(self) -> bool:
        """Read new content; returns whether anything changed."""
        before = (self._offset, self._identity, self.problem, self._files)
        try:
            self.problem = ""
            self._read_new()
            self._steps = self._read_steps()
        except FileNotFoundError:
            if self._identity is not None and not self.folder.exists():
                self.problem = "its folder was removed; showing what was read before"
        except ReadError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = explain(error)[0]
        self._files = self._look()
        return before != (self._offset, self._identity, self.problem, self._files)

    def _read_new(self) -> None:
        path = inside(self.folder, METRICS)
        with _open(path) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ReadError(f"{path} is not a file")
            identity = (about.st_dev, about.st_ino)
            if identity != self._identity or about.st_size < self._offset:
                self._forget(identity)
            self._written = about.st_mtime
            file.seek(self._offset)
            piece = file.read(PIECE)
        whole = piece.rfind(b"\n") + 1
        if not whole and len(piece) == PIECE:
            raise ReadError(f"{path} has a line longer than {PIECE // 2**20} MiB")
        self._offset += whole
        for line in piece[:whole].splitlines():
            if line.strip():
                self._take(line)

    def _forget(self, identity: tuple[int, int]) -> None:
        """Reset, since the run went back to a checkpoint or restarted, and its file was replaced."""
        self.restarts += self._identity is not None
        self._identity, self._offset, self.damaged = identity, 0, 0
        self.rows, self.sentences = {kind: [] for kind in _CURVES}, []

    def _take(self, line: bytes) -> None:
        try:
            record = parse_json(line.decode("utf-8"), "", "")
            names = _CURVES.get(record["kind"], ())
            row = tuple(_number(record.get(name)) for name in names)
        except (ReadError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            self.damaged += 1
            return
        if names and row[0] is None:
            self.damaged += 1
        elif names:
            self.rows[record["kind"]].append(row)
            words = record.get("said")
            self.sentences += [brief(s, 300) for s in words if isinstance(s, str)] if isinstance(words, list) else []

    def _read_steps(self) -> int | None:
        """How many steps the run will have; None if unknown."""
        with suppress(ReadError):
            steps = read_toml(inside(self.folder, CONFIG), "").get("train", {}).get("steps")
            return steps if isinstance(steps, int) and 0 < steps < FAR else None
        return None

    def _look(self) -> _Files:
        saved, sessions, result = self._saved(), self._sessions(), self._result()
        last = sessions[-1] if sessions else {}
        stopped = last.get("stopped")
        finished = result is not None and self._done(result)
        return _Files(
            self.folder.exists(),
            result,
            tuple(saved),
            tuple(map(_begun, sessions)),
            weights=bool(saved) or (self.folder / WEIGHTS).exists(),
            stopped=brief(stopped, 300) if isinstance(stopped, str) else "",
            crashed="" if finished else brief(how_it_crashed(last, self._log_lines()), 300),
            waits="branch_of" in last,
        )

    def _log_lines(self) -> list[str]:
        """The end of its log; empty if its metrics are newer, because then it has been restarted since."""
        with suppress(OSError, ReadError):
            log = None if self.study is None else inside(self.study, f"{LOGS}/{self.folder.name}.log")
            if log is not None and log.stat().st_mtime >= (self._written or 0.0):
                return read_tail(log)
        return []

    def _result(self) -> float | None:
        """The step count of its result, infinite if the result does not say; None without a result."""
        with suppress(ReadError):
            steps = read_json(inside(self.folder, RESULT), dict[str, Any], "").get("steps")
            return steps if isinstance(steps, int) else math.inf
        return None

    def _saved(self) -> list[str]:
        """The names of its checkpoints, oldest first."""
        with suppress(OSError):
            names = [path.name for path in (self.folder / "checkpoints").iterdir()]
            saved = [name for name in names if re.fullmatch(r"step-\d+", name)]
            return sorted(saved, key=lambda name: int(name.removeprefix("step-")))
        return []

    def _sessions(self) -> list[dict[str, Any]]:
        """The records of its start and of every resumption."""
        with suppress(ReadError):
            sessions = read_json(inside(self.folder, ENVIRONMENT), dict[str, Any], "").get("sessions")
            return [s for s in sessions if isinstance(s, dict)] if isinstance(sessions, list) else []
        return []

    @property
    def last(self) -> dict[str, float | None]:
        """The last training line; empty before the first."""
        return dict(zip(_CURVES["train"], self.rows["train"][-1], strict=True)) if self.rows["train"] else {}

    @property
    def step(self) -> int:
        return int(self.last.get("step") or 0)

    @property
    def speed(self) -> float | None:
        """Tokens per second, the median of the last lines; the first line includes compilation."""
        speeds = [row[7] for row in self.rows["train"][1:][-RECENT:] or self.rows["train"] if row[7]]
        return _number(median(speeds)) if speeds else None

    def state(self, now: float) -> State:
        """The run's state according to its files. A model without curves was imported: "imported"."""
        files, begun = self._files, self._identity is not None
        if files.exists is False and (begun or not files.crashed):
            return "gone" if begun else "waiting"
        if self._finished:
            return "finished"
        if files.stopped or files.crashed:
            return "stopped" if files.stopped else "crashed"
        if files.waits or self._written is None:
            return "imported" if files.weights and not files.waits else "waiting"
        seconds = [row[2] for row in self.rows["train"][-RECENT:] if row[2] is not None]
        usual = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 0.0
        return "quiet" if now - self._written > max(PATIENCE, 10 * usual) else "training"

    @property
    def _finished(self) -> bool:
        """Whether it has a result for its last step; a run resumed for more steps has an outdated one."""
        return self._files.result is not None and self._done(self._files.result)

    def _done(self, result: float) -> bool:
        return min(result, self.step) >= (self._steps or 0)

    def remaining(self) -> float | None:
        """Seconds to its last step at the speed of the last lines; None if unknown."""
        tokens, speed = self.last.get("tokens"), self.speed
        if not self._steps or not tokens or not speed or not self.step:
            return None
        left = max(0, self._steps - self.step) * (tokens / self.step) / speed
        return left if left < FAR else None

    def summary(self, now: float) -> dict[str, Any]:
        """The row of the page's table."""
        state = self.state(now)
        validation = self.rows["validation"][-1] if self.rows["validation"] else None
        losses = [row[2] for row in self.rows["validation"] if row[2] is not None]
        return {
            "state": state,
            "age": None if self._written is None else max(0.0, now - self._written),
            "step": self.step,
            "steps": None if state == "imported" else self._steps,
            "loss": self.last.get("smoothed"),
            "validation": validation and validation[2],
            "best": min(losses, default=None),
            "bits": validation and validation[3],
            "speed": self.speed,
            "mfu": self.last.get("mfu"),
            "memory": self.last.get("memory_gib"),
            "seconds": self.last.get("seconds"),
            "left": self.remaining() if state in ("training", "quiet") else None,
            "why": self._files.crashed if state == "crashed" else "",
            "messages": self.messages(),
        }

    def messages(self) -> list[str]:
        """The latest events, newest first."""
        lines = [text for text in (self.problem, self._files.stopped or self._files.crashed) if text]
        lines += self.sentences[:-4:-1]
        if self.damaged:
            lines.append(f"{counted(self.damaged, 'line')} of {METRICS} cannot be read")
        if self.restarts:
            lines.append(f"went back to an earlier step {counted(self.restarts, 'time')}")
        if self._finished:
            lines.append("finished")
        for step, _, loss, bits in reversed(self.rows["validation"][-3:]):
            numbers = [f"{loss:.4f} nats/token"] if loss is not None else []
            numbers += [f"{bits:.4f} bits/byte"] if bits is not None else []
            lines.append(f"step {step:.0f}: validation loss {', '.join(numbers) or 'not finite'}")
        if self._files.checkpoints:
            lines.append(f"checkpoints: {', '.join(self._files.checkpoints[-4:])}")
        return [*lines, *reversed(self._files.sessions[-3:])]

    def curves(self) -> dict[str, dict[str, list[float | None]]]:
        """Its columns by kind, with at most POINTS points each."""
        return {
            kind: {name: [row[i] for row in evenly(self.rows[kind], POINTS)] for i, name in enumerate(names)}
            for kind, names in _CURVES.items()
        }


def _begun(session: dict[str, Any]) -> str:
    """When a session began, in words."""
    began = f"started {session.get('started', '')}".replace("T", " ").replace("+00:00", " UTC")
    step = session.get("from_step")
    return brief(f"{began}, from step {step}" if step else began, 120)


def _number(value: Any) -> float | None:
    """A finite number; None for anything else, including booleans."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return value if usable else None


LOGS = "logs"
"""The folder of a study that holds the output of its trainers."""
LOG_BYTES = 4096
"""How many bytes at the end of a log are read."""


def how_it_crashed(session: Mapping[str, Any], log: Sequence[str]) -> str:
    """The last line of a log, else the recorded error; empty if neither indicates a crash.

    A `session` of environment.json names its process, and the error that ended it if Python could still record it. A
    run of a study may fail before its session begins: then only its log has the reason.
    """
    last = log[-1] if log else ""
    if last.startswith("residua: ") and "stopped by a signal" not in last:
        return last
    failed, process = session.get("failed"), session.get("process")
    if isinstance(failed, str):
        return last or failed or "no reason was recorded"
    if isinstance(process, str):
        return f"its process has ended: {last or 'it left no reason'}" if has_ended(process) else ""
    return last if any(line.startswith("Traceback ") for line in log) else ""


def read_tail(log: Path) -> list[str]:
    """The last non-empty lines of a log."""
    with _open(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
        lines = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    return [printable(line)[:300] for line in lines if line.strip()]


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking if it is a pipe."""
    return os.fdopen(os.open(path, os.O_RDONLY | (0 if sys.platform == "win32" else os.O_NONBLOCK)), "rb")
