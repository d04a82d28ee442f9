"""When a run stops early: a loss that is not finite, a loss that diverged, or a signal."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from residua.storage.checkpoint import TrainingStopped as TrainingStopped


class Interrupted(TrainingStopped):
    """SIGINT or SIGTERM arrived; the run was saved and can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@dataclass
class Watch:
    """Checks each logged loss. `strikes` counts how often in a row it was more than `margin` above `first_loss`.

    A healthy loss starts near ln(vocabulary) and falls. One that stays a margin above its start has diverged: it does
    not recover.
    """

    margin: float
    patience: int
    first_loss: float | None = None
    strikes: int = 0

    def check(self, step: int, loss: float, grad_norm: float) -> str | None:
        """None, or the reason to stop."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
            return f"by step {step} {what}"
        if self.first_loss is None:
            self.first_loss = loss
        self.strikes = self.strikes + 1 if loss > self.first_loss + self.margin else 0
        if self.strikes >= self.patience:
            return (
                f"the run diverged: at step {step} the loss is {loss:.3f}, more than {self.margin} above its first "
                f"value {self.first_loss:.3f} for {self.strikes} log lines in a row"
            )
        return None


class StopSignals:
    """In the `with` block the first SIGINT or SIGTERM only sets `received`; the second ends the program as usual."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            restored: Callable[..., Any] | int = handler if handler is not None else signal.SIG_DFL
            signal.signal(number, restored)
        self._previous = {}
