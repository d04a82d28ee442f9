"""A dataset of a few kilobytes, a run small enough to train in well under a second, and a lab to train it in."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from residua.config.run import RunConfig
from residua.report.plain import PlainConsole
from residua.storage.checkpoint import checkpoints
from residua.train.health import Interrupted
from residua.train.result import Result
from residua.train.step import Step
from residua.train.trainer import train
from tests.trained import SMALL, prepare_words


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset, one token per byte."""
    return prepare_words(tmp_path_factory.mktemp("text"), words=60, holdout=0.05)


@pytest.fixture(scope="session")
def config(data: Path) -> RunConfig:
    return small_run(data)


class Lab:
    """The small run in folders of a test: trained with changes, stopped by a signal, refused. `printed` is the last."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder, self.printed = config, folder, ""

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def train(self, *changes: str, out: str = "run", resume: bool = False, **settings: Any) -> Result:
        console = PlainConsole(file=io.StringIO(), width=400)
        try:
            return train(self.config.override(list(changes)), self / out, resume=resume, console=console, **settings)
        finally:
            self.printed = console.file.getvalue()  # type: ignore[attr-defined]

    def resume(self, *changes: str, out: str = "run", **settings: Any) -> Result:
        return self.train(*changes, out=out, resume=True, **settings)

    def stop(self, steps: int, *changes: str, out: str = "run", number: int = signal.SIGINT, **settings: Any) -> int:
        """Send the run a signal while it trains step `steps`; returns its exit code."""
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=f"--resume --out .*{out}") as end:
            stop_after(patch, steps, number)
            self.train(*changes, out=out, **settings)
        return end.value.exit_code

    def refuse(self, sentence: str | None, *changes: str, error: type[Exception] = ValueError, **settings: Any) -> str:
        """A run that ends with this error and this message."""
        with pytest.raises(error, match=sentence) as refused:
            self.train(*changes, **settings)
        return str(refused.value)

    def saved(self, out: str = "run") -> list[int]:
        return [checkpoint.step for checkpoint in checkpoints(self / out)]

    def sessions(self, out: str = "run") -> list[dict[str, Any]]:
        return json.loads((self / out / "environment.json").read_text())["sessions"]  # type: ignore[no-any-return]


@pytest.fixture
def lab(config: RunConfig, tmp_path: Path) -> Lab:
    return Lab(config, tmp_path)


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A run that is over, for tests that leave its files as they are."""
    lab = Lab(config, tmp_path_factory.mktemp("trained"))
    lab.train()
    return lab


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal while it trains step `steps`."""
    after_each_step(monkeypatch, lambda step, done: os.kill(os.getpid(), number) if done == steps else None)


def after_each_step(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Call `work(step, done)` after every step that is trained."""
    call, done = Step.__call__, 0

    def counted(self: Step, *arguments: Any) -> None:
        nonlocal done
        call(self, *arguments)
        done += 1
        work(self, done)

    monkeypatch.setattr(Step, "__call__", counted)


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but its lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def small_run(data: Path) -> RunConfig:
    """Six steps on two micro-batches each, a checkpoint every two."""
    return RunConfig(
        model=SMALL,
        data={"path": str(data), "validation_tokens": 128},
        train={
            "steps": 6, "micro_batch": 2, "accumulate": 2, "schedule": {"kind": "cosine", "warmup": 2},
            "device": "cpu", "log_every": 2, "validate_every": 3, "save_every": 2, "telemetry": "off",
        },
    )  # fmt: skip
