"""A search of each variant's learning rate (`tune`): its short runs, what they gave, and which rate was chosen.

Every rate of the optimizer is multiplied: Muon's, and that of the AdamW that trains the rest. The choice is made once
and kept in `tuning.json`, so that a study that goes on does not choose again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError, Frozen
from residua.files import write_atomically
from residua.reading import ReadError, inside, read_json
from residua.study.config import Tune

TUNING = "tuning.json"
PLACE = (
    "data.path", "data.tokenizer", "train.device", "train.log_every", "train.save_every", "train.keep", "train.track",
    "train.telemetry", "train.profile", "train.divergence_", "parallel.",
)  # fmt: skip
"""What does not change what a run computes: where its text is (its fingerprint counts), where it trains, what it logs
and when it gives up."""


class Trial(Frozen):
    """One rate: a multiple of the variant's own, the optimizer's `lr`, and the validation loss after the short run."""

    factor: float
    rate: float
    loss: float | None = None
    problem: str = ""


class TunedRate(Frozen):
    """What the search tried for a variant at one size, and the multiple that it chose.

    `made_for` tells which model, recipe and search it is for.
    """

    size: str
    variant: str
    seed: int
    steps: int
    trials: tuple[Trial, ...]
    chosen: float
    made_for: str

    @property
    def best(self) -> Trial:
        """The trial of the chosen rate."""
        return next(trial for trial in self.trials if trial.factor == self.chosen)

    @property
    def note(self) -> str:
        """What a person should know about the choice; empty if there is nothing."""
        if self.best.loss is None:
            return "no trial completed, so the rate nearest to its own is used"
        finished = [trial.factor for trial in self.trials if trial.loss is not None]
        if len(finished) < 2:
            return "the only trial that completed"
        if self.chosen == max(trial.factor for trial in self.trials):
            return "the largest that was tried: a larger one may be better"
        if self.chosen == min(trial.factor for trial in self.trials):
            return "the smallest that was tried: a smaller one may be better"
        return ""


def choose(size: str, variant: str, trials: Sequence[Trial], seed: int, steps: int, made_for: str) -> TunedRate:
    """The rate with the lowest loss; of equal ones, and if no trial completed, the one nearest to the variant's own."""

    def place(trial: Trial) -> tuple[float, float]:
        return math.inf if trial.loss is None else trial.loss, abs(math.log(trial.factor))

    return TunedRate(
        size=size, variant=variant, seed=seed, steps=steps, trials=tuple(trials),
        chosen=min(trials, key=place).factor, made_for=made_for,
    )  # fmt: skip


def rate_changes(config: RunConfig, factor: float) -> list[str]:
    """The overrides that multiply every learning rate of a run."""
    optimizer = config.train.optimizer
    rates = {"lr": optimizer.lr}
    if optimizer.kind == "muon":
        rates["rest.lr"] = optimizer.rest.lr
    return [f"train.optimizer.{key}={float(f'{rate * factor:.12g}')!r}" for key, rate in rates.items()]


def short_run(config: RunConfig, tune: Tune, factor: float) -> RunConfig:
    """The run of one trial: fewer steps, warm-up shortened alike, its own seed, and a rate of `factor` times."""
    recipe = config.train
    steps = max(2, round(tune.share * recipe.steps))
    warmup = min(max(1, round(tune.share * recipe.schedule.warmup)), steps - 1) if recipe.schedule.warmup else 0
    changes = [
        f"train.schedule.warmup={warmup}", f"train.steps={steps}", f"train.seed={tune.seed}", f"data.seed={tune.seed}",
    ]  # fmt: skip
    try:
        return config.override([*changes, *rate_changes(config, factor)])
    except ConfigError as error:
        raise ConfigError(f"tune.lr = {factor:g}: {error}") from None


def rate_title(factor: float) -> str:
    """The part of a trial's name that says its rate: `lr0.5x`."""
    return f"lr{factor:g}x"


def tuned_for(config: RunConfig, tune: Tune) -> str:
    """Equal for searches that would try the same runs, wherever they are trained."""
    kept = settings(config, without=(*PLACE, "data.seed", "train.seed"))
    return hashlib.sha256(json.dumps([kept, tune.model_dump()], sort_keys=True).encode()).hexdigest()[:16]


class _File(Frozen):
    """The content of tuning.json."""

    rates: tuple[TunedRate, ...] = ()


def read_rates(out: Path) -> tuple[TunedRate, ...]:
    """The rates that were chosen in a study's folder; none if the file is missing or damaged."""
    try:
        return read_json(inside(out, TUNING), _File, "").rates
    except ReadError:
        return ()


def keep_rates(out: Path, rates: Iterable[TunedRate]) -> None:
    """Add chosen rates to those in a study's folder."""
    found = {(rate.size, rate.variant): rate for rate in (*read_rates(out), *rates)}
    write_atomically(out / TUNING, _File(rates=tuple(found.values())).model_dump_json(indent=1) + "\n")
