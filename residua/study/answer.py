"""The answer of a study in one line, and how its numbers were made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from residua.report import Cell, Tone
from residua.study.entries import count
from residua.study.results import Interval, StudyResult, VariantResult
from residua.study.runs import RunRecord
from residua.study.verdict import at_size, says_nothing, speed_is_shown, understated, was_busy

NAMED = 4
"""The answer names at most so many variants that failed."""
MANY = 5
"""From so many comparisons on, the verdict says that intervals are not corrected for their number."""


def answer(result: StudyResult) -> tuple[Tone, str]:
    """Does a variant pay per second, at the last size? "Yes" and "No" only where the intervals say so."""
    rows = [row for row in result.rows(result.sizes[-1]) if row.name != result.baseline]
    timed = [row for row in rows if row.wall_clock_gain is not None and speed_is_shown(row, result)]
    if not timed:
        return _by_loss(rows, result)
    best = _best(timed)
    per_second, gain = f"{_seconds(best):.2f}× per second{at_size(best.size, result)}", best.wall_clock_gain
    which = "the best" if _seconds(best) == max(map(_seconds, timed)) else "the best that is shown"
    named = f"{which}, {best.name}," if len(timed) > 1 else best.name
    if _clearly_above_one(gain):
        return "good", f"Yes: {named} is {per_second}"
    if len(timed) == len(rows) and all(_clearly_below_one(row.wall_clock_gain) for row in timed):
        if understated(best, result):
            return "unsure", f"Not shown: {named} is {per_second} by steps, which understate it: use --ladder"
        if any(understated(row, result) for row in timed):
            return "unsure", f"Not shown: {named} is {per_second}, but others gain per step: use --ladder"
        return "bad", f"No: {named} is {per_second}"
    return "unsure", f"Not shown: {named} is {per_second}, {_why(gain)}"


def best_row(result: StudyResult) -> VariantResult | None:
    """The row of the answer: the largest gain per second, else the lowest loss; those that are shown before others.

    None if nothing is compared.
    """
    rows = [row for row in result.rows(result.sizes[-1]) if row.difference is not None]
    timed = [row for row in rows if row.wall_clock_gain is not None and speed_is_shown(row, result)]
    return _best(timed) if timed else next(iter(_lower(rows) or by_loss(rows)), None)


def _best(timed: Sequence[VariantResult]) -> VariantResult:
    """The largest gain per second of those that are shown; if none is, of all."""
    shown = [row for row in timed if _clearly_above_one(row.wall_clock_gain)]
    return max(shown or timed, key=_seconds)


def by_gain(rows: Iterable[VariantResult], baseline: str) -> list[VariantResult]:
    """Rows by gain per second, else per token, largest first; the baseline is at 1, those without a gain come last."""

    def place(row: VariantResult) -> float:
        gain = row.wall_clock_gain or row.equivalent_tokens or row.step_gain
        return -1.0 if row.name == baseline else float("inf") if gain is None else -gain.value

    return sorted(rows, key=place)


def by_loss(rows: Iterable[VariantResult]) -> list[VariantResult]:
    """The rows that can be compared with the baseline, lowest loss first."""
    return sorted((row for row in rows if row.difference is not None), key=_change)


def comparisons_sentence(result: StudyResult) -> str:
    """A warning where many variants are compared at once; empty for a few."""
    rows = result.rows(result.sizes[-1])
    shown = sum(row.difference is not None and row.difference.low is not None for row in rows)
    if shown < MANY:
        return ""
    return f"The {result.confidence * 100:g} % intervals are not corrected for {shown} comparisons."


def _by_loss(rows: Sequence[VariantResult], result: StudyResult) -> tuple[Tone, str]:
    """The answer where no gain per second is known well enough: about loss, if that is shown."""
    compared = by_loss(rows)
    if not compared:
        return "unsure", _no_answer(rows, result)
    lower = _lower(compared)
    best = (lower or compared)[0]
    change = best.difference
    assert change is not None  # by_loss has only rows with a difference
    against = f"{change.value:+.4f} against {result.baseline}{', one seed' if change.count == 1 else ''}"
    if not lower and change.low is not None:
        ends = f"interval {change.low:+.4f} to {change.high:+.4f}"
        said = f"no lower loss is shown ({best.name} {change.value:+.4f}, {ends})"
    elif len(compared) == 1:
        said = f"the loss of {best.name} is {against}"
    else:
        said = f"{best.name} has {'the lowest' if best is compared[0] else 'a lower'} loss, {against}"
    return "unsure", f"Not shown{at_size(best.size, result)}: {_why_no_speed(rows, result)}; {said}"


def _lower(rows: Iterable[VariantResult]) -> list[VariantResult]:
    """The rows whose loss is shown to be lower than the baseline's, lowest first."""
    return [row for row in by_loss(rows) if row.difference is not None and _below(row.difference.high, 0.0)]


def _why_no_speed(rows: Sequence[VariantResult], result: StudyResult) -> str:
    """Why no gain per second is stated."""
    known = [row for row in rows if row.throughput_ratio is not None]
    if not known:
        return "speeds are not known"
    if any(speed_is_shown(row, result) for row in known):
        return "gains per second are not known"
    if any(was_busy(row, result) for row in known):
        return "speeds were timed while the machine was busy"
    if all(row.timing is not None for row in known):
        return "speeds scatter too much"
    return f"speeds {'were not measured alone' if result.side_by_side > 1 else 'scatter too much'} (use --time-alone)"


def _no_answer(rows: Sequence[VariantResult], result: StudyResult) -> str:
    """Why nothing is compared: runs are missing, or have failed."""
    size = result.sizes[-1]
    own = [run for run in result.runs if run.size == size and run.budget == 1.0]
    if not own or any(run.status == "missing" for run in own):
        done = sum(run.status == "complete" for run in result.runs)
        return f"No answer yet: {done} of {len(result.runs)} runs are complete"
    names = [result.baseline, *(row.name for row in rows)]
    failed = [name for name in names if not result.complete(size, name)]
    if len(failed) == len(names):
        return "No answer: every run failed"
    if failed:
        who = ", ".join(failed) if len(failed) <= NAMED else f"{len(failed)} variants"
        return f"No answer: {who} failed"
    return f"No answer: no variant completed a seed that {result.baseline} completed"


def _why(gain: Interval | None) -> str:
    if gain is None or (gain.low is None and gain.high is None):
        return "but one seed allows no interval" if gain is None or gain.count < 2 else "without an interval"
    if says_nothing(gain) or gain.low is None or gain.high is None:
        return "but the interval is too wide to tell"
    if gain.high < 1.0:
        return "but others are not measured well enough"
    return f"interval {gain.low:.2f} to {gain.high:.2f}"


def _clearly_below_one(gain: Interval | None) -> bool:
    return gain is not None and _below(gain.high, 1.0)


def _clearly_above_one(gain: Interval | None) -> bool:
    return gain is not None and gain.low is not None and gain.low > 1.0


def _below(end: float | None, value: float) -> bool:
    return end is not None and end < value


def _seconds(row: VariantResult) -> float:
    return -1.0 if row.wall_clock_gain is None else row.wall_clock_gain.value


def _change(row: VariantResult) -> float:
    return float("inf") if row.difference is None else row.difference.value


def provenance(result: StudyResult, runs: Sequence[RunRecord], commands: Sequence[str]) -> dict[str, Cell]:
    """Text, tokens, seeds, date, hardware, versions, commit and command; what is not known is left out."""
    facts: dict[str, Cell] = {}
    if result.dataset:
        about = result.dataset
        facts |= {
            "text": Path(about.path).name,
            "training text": f"{count(about.train_tokens)} tokens",
            "vocabulary": f"{about.vocab_size:,}",
            "unigram entropy": f"{about.unigram_entropy:.4f} nats per token",
        }
    seen = _unique(count(run.tokens) for run in result.runs if run.tokens is not None and run.budget == 1.0)
    facts |= {"seen by a run": f"{' or '.join(seen)} tokens"} if seen else {}
    facts["seeds"] = str(len(result.seeds))
    environments = [run.environment for run in runs]
    started = sorted(s["started"][:10] for e in environments for s in e.get("sessions") or () if s.get("started"))
    known = {
        "trained": [started[0], *started[-1:]] if started else [],
        "hardware": [run.hardware for run in runs],
        "software": [_software(about) for about in environments],
        "commit": [_commit(about) for about in environments],
    }
    for name, values in known.items():
        if shown := _unique(values):
            facts[name] = (" to " if name == "trained" else "; ").join(shown)
    if commands:
        facts["command"] = "; ".join(commands)
    return facts


def _software(about: dict[str, Any]) -> str:
    titles = {"residua": "Residua", "torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "python": "Python"}
    return ", ".join(f"{title} {about[key]}" for key, title in titles.items() if about.get(key))


def _commit(about: dict[str, Any]) -> str:
    commit, _, changed = str(about.get("commit") or "").partition("+")
    return f"{commit[:12]}{' with changes' if changed else ''}" if commit else ""


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
