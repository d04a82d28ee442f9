"""The answer of a study in one line, and how its numbers were made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from residua.reading import counted
from residua.report import Cell, Tone
from residua.study.entries import count
from residua.study.inference import (
    around_one,
    comparisons,
    enough_runs,
    is_lower,
    loses,
    pays,
    says_nothing,
    speed_is_shown,
    was_busy,
)
from residua.study.results import StudyResult, VariantResult
from residua.study.runs import RunRecord
from residua.study.verdict import at_size, ends_of, too_few, understated

NAMED = 4
"""The answer names at most so many variants that failed."""


GAINS = ("wall_clock_gain", "equivalent_tokens", "step_gain")
"""Gains of a row, those that say most first."""


def answer(result: StudyResult) -> tuple[Tone, str]:
    """Does a variant pay per second, at the last size? "Yes" and "No" only where the corrected intervals say so."""
    rows = [row for row in result.rows(result.sizes[-1]) if row.name != result.baseline]
    timed = [row for row in rows if row.wall_clock_gain is not None]
    if not timed:
        return _by_loss(rows, result)
    best = _best(timed)
    per_second = f"{_seconds(best):.2f}× per second{at_size(best.size, result)}"
    which = f"the best of {len(timed)}" if _seconds(best) == max(map(_seconds, timed)) else "the best that is shown"
    named = f"{which}, {best.name}," if len(timed) > 1 else best.name
    if pays(best):
        pooled = "" if best.shrunk is None else f"about {best.shrunk.value:.2f}× per second{at_size(best.size, result)}"
        return "good", f"Yes: {named} is {pooled or per_second}"
    if len(timed) == len(rows) and all(loses(row) for row in timed):
        if understated(best, result):
            return "unsure", f"Not shown: {named} is {per_second} by steps, which understate it: use --ladder"
        if any(understated(row, result) for row in timed):
            return "unsure", f"Not shown: {named} is {per_second}, but others gain per step: use --ladder"
        return "bad", f"No: {named} is {per_second}"
    return "unsure", f"Not shown: {named} is {per_second}, {_why(best, result)}"


def best_row(result: StudyResult) -> VariantResult | None:
    """The row of the answer: the largest gain per second, else the lowest loss; those that are shown before others.

    None if nothing is compared.
    """
    rows = [row for row in result.rows(result.sizes[-1]) if row.difference is not None]
    timed = [row for row in rows if row.wall_clock_gain is not None]
    return _best(timed) if timed else next(iter(_lower(rows) or by_loss(rows)), None)


def _best(timed: Sequence[VariantResult]) -> VariantResult:
    """The largest gain per second of those that are shown; if none is, of all."""
    shown = [row for row in timed if pays(row)]
    return max(shown or timed, key=_seconds)


def by_gain(rows: Iterable[VariantResult], baseline: str) -> list[VariantResult]:
    """Rows by gain, largest first: per second if any is stated, else per token; the baseline is at 1, others last."""
    rows = list(rows)
    key = gain_key(rows)

    def place(row: VariantResult) -> float:
        gain = getattr(row, key)
        return -1.0 if row.name == baseline else float("inf") if gain is None else -gain.value

    return sorted(rows, key=place)


def gain_key(rows: Sequence[VariantResult]) -> str:
    """Which gain a table is sorted by: the first that any row has."""
    known = (key for key in GAINS if any(getattr(row, key) is not None for row in rows))
    return next(known, GAINS[-1])


def by_loss(rows: Iterable[VariantResult]) -> list[VariantResult]:
    """The rows that can be compared with the baseline, lowest loss first."""
    return sorted((row for row in rows if row.difference is not None), key=_change)


def comparisons_sentence(result: StudyResult) -> str:
    """How many gains are clear of 1 after correction for their number, and the best shrunk; empty for a single one."""
    size = result.sizes[-1]
    rows, compared = result.rows(size), comparisons(size, result)
    if compared < 2:
        return ""
    paying, losing = sum(map(pays, rows)), sum(map(loses, rows))
    said = f"After Holm's correction for {compared} comparisons, gains per second above 1: {paying}, below 1: {losing}."
    best = best_row(result)
    if best is None or best.shrunk is None:
        return said
    pooled = best.shrunk
    is_open = pooled.low is None or pooled.high is None
    around = f"({ends_of(pooled)})" if is_open else f"[{pooled.low:.2f}, {pooled.high:.2f}]"
    return (
        f"{said} The best was chosen after looking; pooled with the others, {best.name} is "
        f"{pooled.value:.2f}× {around}."
    )


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
        ends = f"interval {change.low:+.4f} to {change.high:+.4f}{_corrected_for(best, result)}"
        said = f"no lower loss is shown ({best.name} {change.value:+.4f}, {ends})"
    elif len(compared) == 1:
        said = f"the loss of {best.name} is {against}"
    else:
        said = f"{best.name} has {'the lowest' if best is compared[0] else 'a lower'} loss, {against}"
    return "unsure", f"Not shown{at_size(best.size, result)}: {_why_no_speed(rows, result)}; {said}"


def _corrected_for(row: VariantResult, result: StudyResult) -> str:
    """That an interval which is clear of 0 is not so after correction; empty otherwise."""
    change = row.difference
    if change is None or change.high is None or change.high >= 0.0:
        return ""
    compared = sum(other.difference_corrected is not None for other in result.rows(row.size))
    return f", not clear of 0 after correction for {counted(compared, 'comparison')}"


def _lower(rows: Iterable[VariantResult]) -> list[VariantResult]:
    """The rows whose loss is shown to be lower than the baseline's, lowest first."""
    return [row for row in by_loss(rows) if is_lower(row)]


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


def _why(row: VariantResult, result: StudyResult) -> str:
    gain, after = row.wall_clock_gain, row.corrected
    if gain is None or (gain.low is None and gain.high is None):
        return "but one seed allows no interval" if gain is None or gain.count < 2 else "without an interval"
    if says_nothing(gain) or gain.low is None or gain.high is None:
        return "but the interval is too wide to tell"
    if around_one(gain):
        return f"interval {gain.low:.2f} to {gain.high:.2f}"
    if not enough_runs(row):
        return f"but {too_few(row)}"
    if after is not None and after.low is not None and after.high is not None and around_one(after):
        compared = counted(comparisons(row.size, result), "comparison")
        return f"interval {after.low:.2f} to {after.high:.2f} after correction for {compared}"
    return "but others are not measured well enough"


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
