"""Sinks for a run's records in addition to metrics.jsonl: display, TensorBoard if installed, optional Weights & Biases.

A run stops if metrics.jsonl cannot be written. If a tracker or the display fails, the run continues without it.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.files import AppendedFile, explain, write_atomically, writing
from residua.reading import read_text, reason
from residua.report.plain import PlainConsole


class Sink(Protocol):
    """Takes the records of a run: the metrics file, the display, a tracker."""

    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Optional:
    """An optional sink: if writing fails, `tell` reports it once, and the sink gets no more records.

    `errors` are the exceptions that count as a failure: libraries have their own in addition to the system's. A closed
    pipe is raised, because nobody reads the output any longer.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], Sink], tell: Callable[[str], None], errors: type[Exception] = OSError
    ) -> None:
        self._name, self._tell, self._errors = name, tell, errors
        self._sink: Sink | None = None
        self._try(lambda: setattr(self, "_sink", open_sink()))

    def write(self, record: dict[str, Any]) -> None:
        if (sink := self._sink) is not None:
            self._try(lambda: sink.write(record))

    def close(self) -> None:
        if (sink := self._sink) is not None:
            self._try(sink.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BrokenPipeError:
            raise
        except self._errors as error:
            self._sink = None
            what = "{} ({})".format(*explain(error)) if isinstance(error, OSError) else reason(error)
            with suppress(OSError):  # the message may go to the same disk
                self._tell(f"{self._name} is off from now on: {what}; the run and metrics.jsonl continue")


class TensorBoard:
    """Event files under `RUN/tensorboard`; hides steps after `start` that an interrupted session wrote.

    Writes the records itself, because the library's writer thread dies with a traceback on a full disk.
    """

    _numbers = count()

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._event: Any = Event
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        with writing(folder / "tensorboard"):
            (folder / "tensorboard").mkdir(exist_ok=True)
        self._file = AppendedFile(folder / "tensorboard" / name)
        self._add([
            Event(file_version="brain.Event:2"),
            Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)),
        ])  # fmt: skip

    def write(self, record: dict[str, Any]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars(record).items()]
        self._add([self._event(step=record["step"], summary={"value": values})])

    def _add(self, events: list[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            RecordWriter(records).write(event.SerializeToString())
        self._file.write(records.getvalue())

    def close(self) -> None:
        self._file.close()


class WandB:
    """A Weights & Biases run named after the folder; it continues when the run resumes."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        import wandb

        identity = folder / "wandb-id"
        if not identity.exists():
            write_atomically(identity, secrets.token_hex(8))
        self._run = wandb.init(
            project="residua",
            name=folder.name,
            id=read_text(identity, "remove it to start another run there"),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(),
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers as `kind/name`, and its figures by place as `kind.figure/03`; omits other tables."""
    curves = {
        f"{record['kind']}/{key}": value
        for key, value in record.items()
        if key not in ("kind", "step") and isinstance(value, int | float)
    }
    by_place = {
        f"{record['kind']}.{figure}/{place:02d}": value
        for figure, values in record.get("figures", {}).items()
        for place, value in enumerate(values)
        if value is not None
    }
    return curves | by_place


def open_trackers(config: RunConfig, folder: Path, start: int, tell: Callable[[str], None]) -> list[Sink]:
    """The trackers that this run writes to; `tell` prints a notice."""
    trackers: list[Sink] = []
    with suppress(ImportError):  # TensorBoard is optional; metrics.jsonl is the record
        trackers.append(Optional("TensorBoard", lambda: TensorBoard(folder, start), tell))
    if config.train.track == "wandb":
        trackers.append(Optional("Weights & Biases", lambda: WandB(folder, config), tell, Exception))
    return trackers


def check_trackers(config: RunConfig) -> None:
    """Refuse, before training, a tracker that is configured but not installed."""
    if config.train.track != "wandb":
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise ConfigError(
            "train.track = 'wandb' needs the wandb package: pip install wandb, or leave train.track out."
        ) from None


class Display:
    """Prints the records of a run as they arrive."""

    def __init__(self, config: RunConfig, start: int, console: Console | None = None) -> None:
        self.console = console or PlainConsole(file=sys.stdout)
        self._steps = config.train.steps
        self._tokens_per_step = config.tokens_per_step
        self._experts = ""
        self._live = self._start_line(start) if self.console.is_terminal else None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "validation":
            self.console.print(
                f"step {record['step']}  validation loss {record['loss']:.4f} nats/token, "
                f"{record['bits_per_byte']:.4f} bits/byte over {short(record['tokens'])} tokens"
            )
        elif record["kind"] == "experts":  # the lowest and the highest load; 1 is an equal share
            self._experts = f"experts {record['lightest']:.2f}–{record['heaviest']:.2f}"
        elif record["kind"] == "train":
            line = self._train_line(record)
            if self._live is None:
                self.console.print(line, soft_wrap=True)
            else:
                progress, task = self._live
                progress.update(task, completed=record["step"], description=line)

    def close(self) -> None:
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def _start_line(self, start: int) -> tuple[Progress, TaskID]:
        columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
        progress = Progress(*columns, console=self.console)
        task = progress.add_task("first steps (a GPU run compiles now)", total=self._steps, completed=start)
        progress.start()
        return progress, task

    def _train_line(self, record: dict[str, Any]) -> str:
        left = (self._steps - record["step"]) * self._tokens_per_step / record["tokens_per_second"]
        parts = [
            f"step {record['step']}/{self._steps}",
            f"loss {record['loss']:.4f} (smooth {record['smoothed']:.4f})",
            f"{short(record['tokens_per_second'])} tokens/s",
            f"MFU {record['mfu']:.3f}" if record["mfu"] is not None else "",
            self._experts,
            f"{record['memory_gib']:.1f} GiB",
            f"ETA {duration(left)}",
        ]
        return "  ".join(part for part in parts if part)


def short(number: float) -> str:
    """1234567 → 1.23M."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3723 → 1h02m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
