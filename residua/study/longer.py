"""A study's gains from longer runs of its baseline in another study: new text where its own longest run read it twice.

The other study has the same baseline with more steps. Its complete runs take the place of the largest budget of the
ladder; speeds stay the study's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError
from residua.study.conduct import show_saved
from residua.study.gains import product
from residua.study.inference import concluded
from residua.study.ladder import equivalent_tokens
from residua.study.measures import interval
from residua.study.results import RunResult, StudyResult, VariantResult
from residua.study.saved import SavedStudy
from residua.study.statistics import Estimate
from residua.study.trials import PLACE

Rungs = dict[float, dict[int, float]]  # the baseline's losses by tokens and seed
VALIDATED = {"vocab_size", "validation_tokens", "bytes_per_token"}
LENGTH = (*PLACE, "data.seed", "train.seed", "train.steps", "train.validate_every")


def with_longer(saved: SavedStudy, other: SavedStudy) -> tuple[StudyResult, Rungs]:
    """The study with gains per token and per second from that ladder, and the ladder."""
    _check_alike(saved, other)
    result, longer = show_saved(saved), show_saved(other)
    _check_same_tokens(result, longer)
    own = _losses(result.runs, result)
    new = _losses(longer.complete(longer.sizes[-1], longer.baseline), longer)  # without its ladder
    rungs = {tokens: losses for tokens, losses in own.items() if tokens < max(own)} | new
    rows = tuple(_regained(row, result, rungs) for row in result.variants)
    return concluded(result.model_copy(update={"variants": rows})), rungs


def _check_alike(saved: SavedStudy, other: SavedStudy) -> None:
    """Refuse budgets of another model or recipe, or whose loss is that of another text."""
    names = saved.config.name, other.config.name
    validated = [s.dataset and s.dataset.model_dump(include=VALIDATED) for s in (saved, other)]
    if validated[0] != validated[1]:
        raise ConfigError(f"the ladder of {names[0]} cannot have budgets of {names[1]}: the validation text differs.")
    ours, theirs = (
        settings(next(RunConfig(**m.config) for m in s.models if m.variant == s.config.baseline), without=LENGTH)
        for s in (saved, other)
    )
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    if differing:
        raise ConfigError(f"the ladder of {names[0]} cannot have budgets of {names[1]}: {differing[0]} differs.")


def _check_same_tokens(result: StudyResult, longer: StudyResult) -> None:
    """Refuse losses on another part of the text."""
    ours, theirs = result.validated_tokens, longer.validated_tokens
    if ours != theirs:
        raise ConfigError(
            f"the ladder of {result.name} cannot have budgets of {longer.name}: its losses are on {ours} validation "
            f"tokens, those of {longer.name} on {theirs}; use runs that were validated on the same text."
        )


def _losses(runs: Sequence[RunResult], result: StudyResult) -> Rungs:
    """Of the largest size."""
    found: Rungs = {}
    for run in runs:
        if (run.variant, run.size) == (result.baseline, result.sizes[-1]) and run.loss is not None and run.tokens:
            found.setdefault(float(run.tokens), {})[run.seed] = run.loss
    return found


def _regained(row: VariantResult, result: StudyResult, rungs: Rungs) -> VariantResult:
    """The row with the gains that these budgets of the baseline give."""
    if row.name == result.baseline or row.loss is None or row.size != result.sizes[-1]:
        return row
    runs = result.complete(row.size, row.name)
    losses = {run.seed: run.loss for run in runs if run.loss is not None}
    gain = equivalent_tokens(rungs, losses, max(run.tokens or 0 for run in runs), result.confidence)
    speed = None if row.throughput_ratio is None else Estimate(**row.throughput_ratio.model_dump())
    seconds = product(gain, speed)
    changed = {
        "equivalent_tokens": None if gain is None else interval(gain),
        "extrapolated": gain is not None and gain.extrapolated,
        "wall_clock_gain": None if seconds is None else interval(seconds),
    }
    return row.model_copy(update=changed)
