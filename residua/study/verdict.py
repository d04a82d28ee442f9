"""Does a variant pay, and how sure is that: the sentence, and the questions it asks of a row."""

from __future__ import annotations

from residua.reading import counted
from residua.study.entries import TOO_WIDE, too_wide
from residua.study.inference import around_one, comparisons, enough_runs, says_nothing, speed_is_shown, was_busy
from residua.study.results import Interval, StudyResult, VariantResult


def verdict(row: VariantResult, result: StudyResult) -> str:
    """One sentence on whether a variant pays, per step and per second, and how sure that is."""
    who = f"{row.name}{at_size(row.size, result)}"
    if row.loss is None:
        return f"{who}: no complete run."
    if row.difference is None:
        return f"{who}: nothing to compare it with."
    change = row.difference
    if change.low is None or change.high is None:
        sure = f"{_direction(change.value)}, but n = 1 allows no interval and no claim"
    elif change.low <= 0.0 <= change.high:
        level = f"{result.confidence * 100:g} %"
        ends = f"(Δ {change.value:+.4f}, {level} interval [{change.low:+.4f}, {change.high:+.4f}])"
        if other := _shown_otherwise(row):
            sure = f"no difference shown seed by seed {ends}, but {other}"
        else:
            sure = f"no difference shown {ends}"
    else:
        sure = f"{_direction(change.value)} (n = {change.count}{_if_lost(row, result)})"
    return f"{who}: {sure}; {_gains(row, result)}."


def _if_lost(row: VariantResult, result: StudyResult) -> str:
    """That a difference is not clear after correction; empty if it is."""
    after = row.difference_corrected
    if after is None or after.low is None or after.high is None or not after.low <= 0.0 <= after.high:
        return ""
    compared = sum(other.difference_corrected is not None for other in result.rows(row.size))
    return f"; not clear of 0 after correction for {counted(compared, 'comparison')}"


def _shown_otherwise(row: VariantResult) -> str:
    """What shows a gain or loss per token though seed by seed no difference of the last losses is shown; else empty."""
    gain = row.equivalent_tokens or row.step_gain
    if gain is None or around_one(gain):
        return ""
    if row.equivalent_tokens is None:
        return "one in the steps to the same loss is"
    return "the ladder, which pools the noise of all its runs, shows one"


def _gains(row: VariantResult, result: StudyResult) -> str:
    """The gains per token and per second, or why there are none."""
    if row.equivalent_tokens is None and row.step_gain is None:
        return f"no gain per step, {_why_no_gain(row, result)}"
    if row.throughput_ratio is None:
        return f"{_per_token(row)}, and no speeds to compare"
    per_token = _per_token(row)
    if result.side_by_side > 1 and row.timing is None:
        return f"{per_token}; its speed was not measured alone, so no gain per second is stated (--time-alone)"
    if was_busy(row, result):
        return f"{per_token}; its speed was timed on a busy machine, so no gain per second is stated"
    if not speed_is_shown(row, result):
        ends = ends_of(row.throughput_ratio)
        return f"{per_token}; its speed against {result.baseline} is not shown ({ends}), nor a gain per second"
    if row.wall_clock_gain is None:
        return f"{per_token}, and no speeds to compare"
    speed, seconds = row.throughput_ratio.value, row.wall_clock_gain
    said = f"{per_token} at {speed:.2f}× the speed of {result.baseline}, so {seconds.value:.2f}× per second"
    if seconds.low is None and seconds.high is None:
        return said if row.difference is None or row.difference.low is None else f"{said}, without an interval"
    if says_nothing(seconds) or around_one(seconds):
        return f"{said}, but no gain or loss per second is shown ({ends_of(seconds)})"
    if not enough_runs(row):
        return f"{said} ({ends_of(seconds)}), but {too_few(row)}"
    compared, after = comparisons(row.size, result), row.corrected
    if after is None or compared < 2:
        return f"{said} ({ends_of(seconds)})"
    corrected = f"corrected for {counted(compared, 'comparison')} {ends_of(after).removeprefix('interval ')}"
    if around_one(after):
        return f"{said} ({ends_of(seconds)}), but no gain or loss per second is shown ({corrected})"
    return f"{said} ({ends_of(seconds)}; {corrected})"


def too_few(row: VariantResult) -> str:
    """Why the interval of a gain per second shows none: it rests on two seeds."""
    seeds = 0 if row.wall_clock_gain is None else row.wall_clock_gain.count
    return f"{counted(seeds, 'seed')} without a ladder show no gain or loss (use --seeds 3 or --ladder)"


def _per_token(row: VariantResult) -> str:
    if row.equivalent_tokens is not None:
        said = _bracketed("extrapolated" if row.extrapolated else "", row.equivalent_tokens)
        return f"worth {row.equivalent_tokens.value:.2f}× the tokens{said}"
    assert row.step_gain is not None  # one of the two is known
    return f"{row.step_gain.value:.2f}× per step{_bracketed('', row.step_gain)}"


def _bracketed(word: str, ratio: Interval) -> str:
    """A word and the interval in brackets; nothing where neither is known."""
    known = ratio.low is not None or ratio.high is not None
    parts = [part for part in (word, ends_of(ratio) if known else "") if part]
    return f" ({', '.join(parts)})" if parts else ""


def _why_no_gain(row: VariantResult, result: StudyResult) -> str:
    ours, baseline = ({run.seed for run in result.complete(row.size, name)} for name in (row.name, result.baseline))
    if not ours & baseline:
        return "since no seed completed in both"
    return "which needs two validations or more of each run (train.validate_every) and losses that fall after the first"


def ends_of(ratio: Interval) -> str:
    """An interval in words, or that it is too wide, as in the table."""
    if too_wide(ratio):
        return TOO_WIDE
    low, high = ("" if end is None else f"{end:.2f}" if end < 100 else f"{end:.2g}" for end in (ratio.low, ratio.high))
    return "interval " + (f"{low} to {high}" if low and high else f"above {low}" if low else f"below {high}")


def at_size(size: str, result: StudyResult) -> str:
    """ " at SIZE" if the study has several sizes."""
    return f" at {size}" if len(result.sizes) > 1 else ""


def understated(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant that gains per step seems to lose per second, where there is no ladder to tell."""
    return not result.ladder and _at_least_one(row.step_gain) and _below_one(row.wall_clock_gain)


def _at_least_one(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.value >= 1.0


def _below_one(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.value < 1.0


def _direction(change: float) -> str:
    if abs(change) < 0.5e-4:
        return "the same loss to four digits"
    return f"{'lower' if change < 0 else 'higher'} loss by {abs(change):.4f}"
