"""Stops a run on a signal, or if its loss is not finite, has diverged, or does no better than token frequencies."""

from __future__ import annotations

import math
import signal
import threading
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any, Self

from residua.config.run import RunConfig, TrainConfig
from residua.data import Dataset, unigram_entropy
from residua.reading import counted
from residua.storage.checkpoint import TrainingStopped as TrainingStopped


class Interrupted(TrainingStopped):
    """SIGINT or SIGTERM arrived; the run was saved and can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


MIN_SKEW_NATS = 0.5
"""Minimum gap in nats between guessing and token frequencies; below it, losses are not compared with them."""
FAIR_STEPS = 10.0
"""Steps at the full learning rate by which a healthy loss starts to fall."""
MAX_STILL_STEPS, MAX_STILL_LINES = 500, 5
"""Steps after warm-up, and log lines, without a fall after which a run no better than token frequencies is ended."""
MIN_FALL_NATS = 0.01
"""Minimum decrease of the loss in nats that counts as a fall."""
MIN_LEARNED_SHARE = 0.05
"""A model has learned nothing if its loss covers less than this share of the gap from guessing to frequencies."""
SAMPLED_TOKENS = 1 << 20
"""Training tokens used to count frequencies."""
MAX_RISE_NATS = 0.5
"""If a loss no better than token frequencies is this many nats above its lowest value, the model was lost."""


@dataclass(frozen=True)
class Frequencies:
    """Losses to judge a run by, in nats per token: `guessing` any token, and knowing only `unigram` frequencies.

    On text with common and rare tokens, a healthy model is below `unigram` after a few hundred steps. A run with a huge
    learning rate stays at `guessing`: its norms keep activations finite, so the loss does not explode.
    """

    guessing: float
    unigram: float
    warmup: int

    @property
    def telling(self) -> bool:
        """Whether the losses on this text show if a run learns; on random tokens they do not."""
        return self.guessing - self.unigram >= MIN_SKEW_NATS


def token_frequencies(config: RunConfig, dataset: Dataset, tokens: int | None = None) -> Frequencies:
    """The losses of guessing and of token frequencies on the validation set, from a sample of the training text.

    `tokens`: use this many tokens of the validation text instead.
    """
    unigram = unigram_entropy(dataset, limit_tokens=tokens or config.data.validation_tokens, sample=SAMPLED_TOKENS)
    return Frequencies(math.log(config.model.vocab_size), unigram, config.train.schedule.warmup)


def had_fair_steps(recipe: TrainConfig) -> bool:
    """Whether the learning rates of a run's steps add up to at least `FAIR_STEPS` steps at the full rate."""
    rates = accumulate(recipe.schedule.factor(step, recipe.steps) for step in range(recipe.steps))
    return any(total >= FAIR_STEPS for total in rates)


@dataclass
class Watch:
    """Checks each logged loss. `strikes` counts how often in a row it was more than `margin` above `first_loss`.

    A healthy loss starts near ln(vocabulary) and falls. A loss that stays a margin above its start has diverged and
    does not recover. `stale` counts the log lines since the loss was `lowest`, at step `lowest_step`.
    """

    margin: float
    patience: int
    first_loss: float | None = None
    strikes: int = 0
    lowest: float | None = None
    lowest_step: int = 0
    stale: int = 0

    def stuck(self, step: int, loss: float, known: Frequencies) -> str | None:
        """A sentence if this loss, already checked, has stopped falling above that of token frequencies; else None."""
        still = step - max(self.lowest_step, known.warmup)
        if not known.telling or loss < known.unigram or still < MAX_STILL_STEPS or self.stale < MAX_STILL_LINES:
            return None
        return (
            f"the run learns nothing: at step {step} the loss is {loss:.3f} and has not fallen for "
            f"{counted(still, 'step')}, while token frequencies alone give {known.unigram:.3f}"
        )

    def unlearned(self, steps: int, loss: float, known: Frequencies) -> str | None:
        """Why the last `loss` of a run that had `FAIR_STEPS` is not that of a trained model; None if it is."""
        if not known.telling or loss < known.unigram:
            return None
        if loss > known.guessing - MIN_LEARNED_SHARE * (known.guessing - known.unigram):
            return (
                f"the run has learned nothing: after {counted(steps, 'step')} the loss is {loss:.3f}, guessing gives "
                f"{known.guessing:.3f} and token frequencies alone {known.unigram:.3f}"
            )
        if self.lowest is not None and self.lowest < known.unigram and loss > self.lowest + MAX_RISE_NATS:
            return (
                f"the run lost what it had learned: the loss was {self.lowest:.3f} at step {self.lowest_step} and is "
                f"{loss:.3f} at the end, where token frequencies alone give {known.unigram:.3f}"
            )
        return None

    def too_high(self, loss: float) -> bool:
        """Whether a loss is more than the margin above the first one checked."""
        return self.first_loss is not None and loss > self.first_loss + self.margin

    def check(self, step: int, loss: float, grad_norm: float) -> str | None:
        """The reason to stop, or None."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
            return f"by step {step} {what}"
        if self.first_loss is None:
            self.first_loss = loss
        self.strikes = self.strikes + 1 if self.too_high(loss) else 0
        self.stale += 1
        if self.lowest is None or loss < self.lowest - MIN_FALL_NATS:
            self.lowest, self.lowest_step, self.stale = loss, step, 0
        if self.strikes >= self.patience:
            return (
                f"the run diverged: at step {step} the loss is {loss:.3f}, more than {self.margin} above its first "
                f"value {self.first_loss:.3f} for {self.strikes} log lines in a row"
            )
        return None


class StopSignals:
    """In the `with` block, the first SIGINT or SIGTERM only sets `received`; a second one ends the program as usual."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
