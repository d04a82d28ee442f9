"""A study in sentences: its answer, the verdict on each variant, and caveats about the numbers behind them.

The terminal, Markdown and the page share these sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from residua.data.dataset import TINY_VALIDATION
from residua.reading import counted
from residua.report import Tone
from residua.study.config import FOR_FLOPS, NOT_COUNTED
from residua.study.gains import MIN_SEEDS, comparisons, enough_runs, is_lower, loses, pays, says_nothing, speed_problem
from residua.study.plan import TIMINGS
from residua.study.results import LadderResult, StudyResult, VariantResult
from residua.study.statistics import Interval, count
from residua.study.timing import MAX_IDLE_SPREAD

GAINS = ("wall_clock_gain", "equivalent_tokens", "step_gain")
"""Gains of a row, the most informative first."""
MAX_FAILED_NAMES, MAX_RUN_NAMES = 4, 6
"""The most failed variants named in the answer, and the most runs named in a sentence."""
MAX_LADDER_MISFIT = 0.05
"""How far, in logarithms, a ladder's law may miss the tokens of a budget without a warning."""
RACE_LEVEL = 0.01
"""Below this p, a variant reaches a target in significantly fewer seconds."""
MAX_SHOWN_RATIO = 1000.0
"""high / low of an interval of ratios; a wider interval is not shown."""
TOO_WIDE = "interval too wide"
UNSTATED = {
    "shared": "not measured alone, so no gain per second is stated (--time-alone)",
    "busy": "timed on a busy machine, so no gain per second is stated",
}
"""Why no gain per second is stated, keyed by the problem with the speed."""
LACKED = {"tasks": "Accuracies on tasks", "quantize": "Losses in low precision"}


def too_wide(value: Interval) -> bool:
    """Whether the seeds disagree so much that the interval's ends differ by more than a factor of 1,000."""
    return value.low is not None and value.high is not None and value.high > MAX_SHOWN_RATIO * value.low


def ends_of(ratio: Interval) -> str:
    """An interval in words, or a note that it is too wide, as in the table."""
    if too_wide(ratio):
        return TOO_WIDE
    low, high = ("" if end is None else f"{end:.2f}" if end < 100 else f"{end:.2g}" for end in (ratio.low, ratio.high))
    return "interval " + (f"{low} to {high}" if low and high else f"above {low}" if low else f"below {high}")


def at_size(size: str, result: StudyResult) -> str:
    """ " at SIZE" if the study has several sizes."""
    return f" at {size}" if len(result.sizes) > 1 else ""


def sized_name(row: VariantResult, result: StudyResult) -> str:
    """The variant, with its size in brackets if the study has several."""
    return f"{row.name} ({row.size})" if len(result.sizes) > 1 else row.name


def verdict(row: VariantResult, result: StudyResult) -> str:
    """One sentence on whether a variant pays off per step and per second, and how certain that is."""
    who, change = f"{row.name}{at_size(row.size, result)}", row.difference
    if row.loss is None:
        return f"{who}: no complete run."
    if change is None:
        return f"{who}: nothing to compare it with."
    if change.ends is None:
        sure = f"{_direction(change.value)}, but with n = 1 there is no interval and no claim"
    elif change.holds(0.0):
        level, (low, high) = f"{result.confidence * 100:g} %", change.ends
        ends = f"(Δ {change.value:+.4f}, {level} interval [{low:+.4f}, {high:+.4f}])"
        other = _gain_per_token(row)
        sure = f"no difference shown across seeds {ends}, but {other}" if other else f"no difference shown {ends}"
    else:
        after = row.difference_corrected
        unclear = f"; {_not_clear(row, result)}" * (after is not None and after.holds(0.0))
        sure = f"{_direction(change.value)} (n = {change.count}{unclear})"
    return f"{who}: {sure}; {_gains(row, result)}."


def _direction(change: float) -> str:
    if abs(change) < 0.5e-4:
        return "the same loss to four digits"
    return f"{'lower' if change < 0 else 'higher'} loss by {abs(change):.4f}"


def _not_clear(row: VariantResult, result: StudyResult) -> str:
    compared = sum(other.difference_corrected is not None for other in result.rows(row.size))
    return f"not significant after correction for {counted(compared, 'comparison')}"


def _gain_per_token(row: VariantResult) -> str:
    """The measure that shows a gain or loss per token if the final losses, paired by seed, show none; else empty."""
    gain = row.equivalent_tokens or row.step_gain
    if gain is None or gain.holds(1.0):
        return ""
    if row.equivalent_tokens is None:
        return "the gain in steps to the same loss is"
    return "the ladder, which pools the noise of all its runs, shows a difference"


def _gains(row: VariantResult, result: StudyResult) -> str:
    per_token, ratio, seconds = _per_token(row, result), row.throughput_ratio, row.wall_clock_gain
    if row.equivalent_tokens is None and row.step_gain is None:
        return per_token
    problem = speed_problem(row, result)
    if problem in UNSTATED:
        return f"{per_token}; its speed was {UNSTATED[problem]}"
    if problem == "scattered" and ratio is not None:
        return (
            f"{per_token}; its speed against {result.baseline} is not shown ({ends_of(ratio)}), nor a gain per second"
        )
    if ratio is None or seconds is None:
        return f"{per_token}, without speeds to compare"
    sentence = f"{per_token} at {ratio.value:.2f}× the speed of {result.baseline}, so {seconds.value:.2f}× per second"
    if seconds.ends is None:
        return sentence if row.difference is None or row.difference.low is None else f"{sentence}, without an interval"
    if seconds.holds(1.0):
        return f"{sentence}, but no gain or loss per second is shown ({ends_of(seconds)})"
    if not enough_runs(row):
        return f"{sentence} ({ends_of(seconds)}), but {_too_few(row)}"
    compared, after = comparisons(row.size, result), row.corrected
    if after is None or compared < 2:
        return f"{sentence} ({ends_of(seconds)})"
    corrected = f"corrected for {counted(compared, 'comparison')} {ends_of(after).removeprefix('interval ')}"
    if after.holds(1.0):
        return f"{sentence} ({ends_of(seconds)}), but no gain or loss per second is shown ({corrected})"
    return f"{sentence} ({ends_of(seconds)}; {corrected})"


def _too_few(row: VariantResult) -> str:
    seeds = 0 if row.wall_clock_gain is None else row.wall_clock_gain.count
    return f"{counted(seeds, 'seed')} without a ladder cannot show a gain or loss (use --seeds 3 or --ladder)"


def _per_token(row: VariantResult, result: StudyResult) -> str:
    gain = row.equivalent_tokens or row.step_gain
    if gain is None:
        seeds = [{run.seed for run in result.complete(row.size, name)} for name in (row.name, result.baseline)]
        if not seeds[0] & seeds[1]:
            return "no gain per step, since no seed completed in both"
        return (
            "no gain per step, which needs at least two validations of each run (train.validate_every) and "
            "losses that fall after the first"
        )
    laddered = row.equivalent_tokens is not None
    words = ["extrapolated"] * (laddered and row.extrapolated) + ([] if gain.ends is None else [ends_of(gain)])
    around = f" ({', '.join(words)})" if words else ""
    return f"worth {gain.value:.2f}× the tokens{around}" if laddered else f"{gain.value:.2f}× per step{around}"


def understated(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant that gains per step seems to lose per second, with no ladder to decide."""
    step, seconds = row.step_gain, row.wall_clock_gain
    return not result.ladder and step is not None and seconds is not None and step.value >= 1.0 > seconds.value


def answer(result: StudyResult) -> tuple[Tone, str]:
    """Does a variant pay off per second, at the last size? "Yes" and "No" only if the corrected intervals say so."""
    rows = [row for row in result.rows(result.sizes[-1]) if row.name != result.baseline]
    if result.target is not None and any(row.race is not None for row in rows):
        return _answer_of_race(rows, result)
    timed = [row for row in rows if row.wall_clock_gain is not None]
    if not timed:
        return "unsure", _answer_by_loss(rows, result)
    best = _best(timed)
    at = at_size(best.size, result)
    per_second = f"{_seconds(best):.2f}× per second{at}"
    largest = _seconds(best) == max(map(_seconds, timed))
    which = f"the best of {len(timed)}" if largest else "the best significant variant"
    named = f"{which}, {best.name}," if len(timed) > 1 else best.name
    if pays(best) and (failed := _failed_seeds(best, result)):
        return "unsure", f"Not shown: {named} is {per_second}, but {failed}"
    if pays(best):
        pooled = "" if best.shrunk is None else f"about {best.shrunk.value:.2f}× per second{at}"
        return "good", f"Yes: {named} is {pooled or per_second}"
    if len(timed) == len(rows) and all(loses(row) for row in timed):
        if understated(best, result):
            return "unsure", f"Not shown: {named} is {per_second} by steps, which understate it: use --ladder"
        if any(understated(row, result) for row in timed):
            return "unsure", f"Not shown: {named} is {per_second}, but others gain per step: use --ladder"
        return "bad", f"No: {named} is {per_second}"
    return "unsure", f"Not shown: {named} is {per_second}, {_why_not_shown(best, result)}"


def explanation(result: StudyResult) -> str:
    """One sentence on where an answer about seconds comes from, or how to get one if the machine was busy.

    Empty for other answers, which explain themselves.
    """
    best, (tone, _) = best_row(result), answer(result)
    if best is None or result.target is not None:
        return ""
    gain, speed, seconds = best.equivalent_tokens or best.step_gain, best.throughput_ratio, best.wall_clock_gain
    if best.timing is not None and speed_problem(best, result) in ("busy", "scattered"):
        return f"For a yes or no, remove {TIMINGS}/ from the study's folder and repeat the command on an idle machine."
    if gain is None or speed is None or seconds is None:
        return ""
    facts = (
        f"For the same loss{at_size(best.size, result)} {best.name} needs {1 / gain.value:.2f}× the tokens of "
        f"{result.baseline}, and each takes {1 / speed.value:.2f}× the time"
    )
    if failed := _failed_seeds(best, result):
        return f"{facts}; {failed}, and those left may be the lucky ones."
    if tone == "unsure":
        return f"{facts}; a yes needs a whole interval above 1, a no needs it below."
    side = "above" if tone == "good" else "below"
    return f"{facts}; the whole {ends_of(best.corrected or seconds)} is {side} 1, where both are equally fast."


def _answer_of_race(rows: Sequence[VariantResult], result: StudyResult) -> tuple[Tone, str]:
    tested = [(row.race.ratio.value, row.race.adjusted, row) for row in rows
              if row.race is not None and row.race.ratio is not None and row.race.adjusted is not None]  # fmt: skip
    if not tested:
        return "unsure", f"Not shown: no variant can be tested against {result.baseline} to a loss of {result.target:g}"
    shown = [each for each in tested if each[1] < RACE_LEVEL]
    ratio, p, row = min(shown or tested, key=lambda each: each[0])
    words = f"{row.name} reaches {result.target:g} in {ratio:.3f}× the seconds of {result.baseline}"
    where = at_size(row.size, result)
    return ("good", f"Yes: {words}{where}") if shown else ("unsure", f"Not shown: {words}{where}, but p = {p:.2g}")


def _why_not_shown(row: VariantResult, result: StudyResult) -> str:
    gain, after = row.wall_clock_gain, row.corrected
    if gain is None or gain.ends is None:
        return "but one seed gives no interval" if gain is None or gain.count < 2 else "without an interval"
    if says_nothing(gain) or gain.low is None or gain.high is None:
        return "but the interval is too wide to tell"
    if gain.holds(1.0):
        return f"interval {gain.low:.2f} to {gain.high:.2f}"
    if not enough_runs(row):
        return f"but {_too_few(row)}"
    if after is not None and after.low is not None and after.high is not None and after.holds(1.0):
        compared = counted(comparisons(row.size, result), "comparison")
        return f"interval {after.low:.2f} to {after.high:.2f} after correction for {compared}"
    return "but other variants are not measured well enough"


def _answer_by_loss(rows: Sequence[VariantResult], result: StudyResult) -> str:
    """The answer if no gain per second is known well enough: about loss, if the difference is significant."""
    compared = by_loss(rows)
    if not compared:
        return _no_answer(rows, result)
    lower = [row for row in compared if is_lower(row)]
    best = (lower or compared)[0]
    change = best.difference
    assert change is not None  # by_loss returns only rows with a difference
    against = f"{change.value:+.4f} against {result.baseline}{', one seed' if change.count == 1 else ''}"
    if not lower and change.low is not None:
        unclear = f", {_not_clear(best, result)}" * change.below(0.0)
        ends = f"interval {change.low:+.4f} to {change.high:+.4f}{unclear}"
        loss = f"no lower loss is shown ({best.name} {change.value:+.4f}, {ends})"
    elif len(compared) == 1:
        loss = f"the loss of {best.name} is {against}"
    else:
        loss = f"{best.name} has {'the lowest' if best is compared[0] else 'a lower'} loss, {against}"
    return f"Not shown{at_size(best.size, result)}: {_why_no_speed(rows, result)}; {loss}"


def _why_no_speed(rows: Sequence[VariantResult], result: StudyResult) -> str:
    problems = {speed_problem(row, result) for row in rows} - {"unknown"}
    if not problems:
        return "speeds are unknown"
    if "" in problems:
        return "gains per second are unknown"
    if "busy" in problems:
        return "speeds were timed while the machine was busy"
    if all(row.timing is not None for row in rows if row.throughput_ratio is not None):
        return "speeds scatter too much"
    return f"speeds {'were not measured alone' if result.side_by_side > 1 else 'scatter too much'} (use --time-alone)"


def _no_answer(rows: Sequence[VariantResult], result: StudyResult) -> str:
    """Why nothing is compared: runs are missing or have failed."""
    size = result.sizes[-1]
    compared = [run for run in result.runs if run.size == size and run.budget == 1.0]
    if not compared or any(run.status == "missing" for run in compared):
        done = sum(run.status == "complete" for run in result.runs)
        return f"No answer yet: {done} of {len(result.runs)} runs are complete"
    names = [result.baseline, *(row.name for row in rows)]
    failed = [name for name in names if not result.complete(size, name)]
    if len(failed) == len(names):
        return "No answer: every run failed"
    if failed:
        who = ", ".join(failed) if len(failed) <= MAX_FAILED_NAMES else f"{len(failed)} variants"
        return f"No answer: {who} failed"
    if not rows:
        return f"No comparison: {result.baseline} is the only variant"
    return f"No answer: no variant completed a seed that {result.baseline} completed"


def _failed_seeds(row: VariantResult, result: StudyResult) -> str:
    """How many seeds of a variant failed, for instance because the loss was not finite; empty if none did."""
    runs = [run for run in result.runs if (run.size, run.variant, run.budget) == (row.size, row.name, 1.0)]
    failed = sum(run.status == "failed" for run in runs)
    return f"{failed} of its {counted(len(runs), 'seed')} failed" if failed else ""


def best_row(result: StudyResult) -> VariantResult | None:
    """The row of the answer: the largest gain per second, else the lowest loss; significant ones take precedence.

    None if nothing is compared.
    """
    rows = [row for row in result.rows(result.sizes[-1]) if row.difference is not None]
    timed = [row for row in rows if row.wall_clock_gain is not None]
    return _best(timed) if timed else next(iter(by_loss(filter(is_lower, rows)) or by_loss(rows)), None)


def _best(timed: Sequence[VariantResult]) -> VariantResult:
    """The largest significant gain per second; if none is significant, the largest of all."""
    return max([row for row in timed if pays(row)] or timed, key=_seconds)


def _seconds(row: VariantResult) -> float:
    return -1.0 if row.wall_clock_gain is None else row.wall_clock_gain.value


def by_gain(rows: Iterable[VariantResult], baseline: str) -> list[VariantResult]:
    """Rows by gain, largest first: per second if any is stated, else per token; baseline at 1, unknown gains last."""
    rows = list(rows)
    key = gain_key(rows)

    def place(row: VariantResult) -> float:
        gain = getattr(row, key)
        return -1.0 if row.name == baseline else math.inf if gain is None else -gain.value

    return sorted(rows, key=place)


def gain_key(rows: Sequence[VariantResult]) -> str:
    """Which gain a table is sorted by: the first that any row has."""
    return next((key for key in GAINS if any(getattr(row, key) is not None for row in rows)), GAINS[-1])


def by_loss(rows: Iterable[VariantResult]) -> list[VariantResult]:
    """The rows comparable with the baseline, lowest loss first."""
    compared = [(row.difference.value, row) for row in rows if row.difference is not None]
    return [row for _, row in sorted(compared, key=lambda pair: pair[0])]


def comparisons_sentence(result: StudyResult) -> str:
    """How many gains are significant after correction for their number, and the best one shrunk; empty for one gain."""
    size = result.sizes[-1]
    rows, compared = result.rows(size), comparisons(size, result)
    if compared < 2:
        return ""
    clear = f"gains per second above 1: {sum(map(pays, rows))}, below 1: {sum(map(loses, rows))}"
    sentence = f"After Holm's correction for {compared} comparisons, {clear}."
    best = best_row(result)
    if best is None or best.shrunk is None:
        return sentence
    pooled, low, high = best.shrunk, best.shrunk.low, best.shrunk.high
    around = f"({ends_of(pooled)})" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
    return (
        f"{sentence} The best was selected after the fact; pooled with the others, {best.name} is "
        f"{pooled.value:.2f}× {around}."
    )


def validation_sentence(result: StudyResult) -> str:
    """How many validation tokens the losses cover, and whether the error from sampling them is known."""
    if result.validated_tokens is None or result.dataset is None:
        return ""
    share = f"{result.validated_tokens:,} of the {result.dataset.validation_tokens:,} validation tokens"
    compared = by_loss(result.rows(result.sizes[-1]))
    unknown = bool(compared) and all(row.text_error is None for row in compared)
    sampling = " The error from sampling this text is not known." * unknown
    fewer = result.curve_tokens is not None and result.curve_tokens < result.validated_tokens
    part = f" Curves and step-wise gains use the first {result.curve_tokens or 0:,} of them." * fewer
    return f"Losses are measured on {share}.{part}{sampling}"


def text_sentences(result: StudyResult) -> list[str]:
    """Reasons to doubt the losses: a tiny validation text, or models worse than token frequencies."""
    sentences, size, losses = [], result.sizes[-1], _last_losses(result)
    if result.validated_tokens is not None and result.validated_tokens < TINY_VALIDATION:
        sentences.append(
            f"The validation text is tiny ({counted(result.validated_tokens, 'token')}), so losses on it are uncertain."
        )
    if result.dataset is not None and losses and min(losses) > result.dataset.unigram_entropy:
        sentences.append(
            f"Every model{at_size(size, result)} does worse than predicting by token frequency alone "
            f"({result.dataset.unigram_entropy:.4f} nats per token), so their differences mean nothing: train longer."
        )
    return sentences


def _last_losses(result: StudyResult) -> list[float]:
    """The last losses of the variants at the last size."""
    return [row.loss.value for row in result.rows(result.sizes[-1]) if row.loss is not None]


def dataset_sentence(result: StudyResult) -> str:
    """The unigram entropy, and how far even the worst variant of the last size is below it; empty without text."""
    facts, size, losses = result.dataset, result.sizes[-1], _last_losses(result)
    if facts is None:
        return ""
    gap = facts.unigram_entropy - max(losses) if losses else 0.0
    below = math.floor(100 * round(gap, 6)) / 100  # 'at least' is never rounded up
    learned = f"; every variant{at_size(size, result)} ends at least {below:.2f} below it" if below > 0 else ""
    return (
        f"Unigram entropy of the validation text: {facts.unigram_entropy:.4f} nats per token "
        f"(the loss of a model that knows only token frequencies){learned}."
    )


def side_by_side_sentence(result: StudyResult) -> str:
    """How speeds were measured: in isolation, or while runs shared the machine; empty if runs were sequential."""
    timed = [(row, row.timing) for row in result.variants if row.timing is not None]
    if not timed and result.side_by_side < 2:
        return ""
    if not timed:
        return (
            f"{result.side_by_side} runs shared this machine and slowed each other down: measure speeds "
            "and wall-clock gains with --time-alone before relying on them."
        )
    devices = ", ".join(sorted({timing.device for _, timing in timed}))
    rest = [row.name for row in result.variants if row.timing is None and row.throughput_ratio is not None]
    but = f", except {', '.join(dict.fromkeys(rest))}, measured in training (--time-alone)" if rest else ""
    alone = f"Speeds are those of each variant's step timed alone, after its runs ({devices}){but}."
    busy = [sized_name(row, result) for row, timing in timed if timing.busy]
    if not busy:
        return alone
    return (
        f"{alone} The steps of {', '.join(busy)} were timed while the machine was busy (they spread by more than "
        f"{MAX_IDLE_SPREAD:.0%}), so no gain per second follows from them: remove {TIMINGS}/ from the study's folder "
        "and run the study again when it is idle."
    )


def ladder_sentences(result: StudyResult) -> list[str]:
    """Caveats on gains per token: there is no ladder, or its law misses the baseline's own losses."""
    if any(understated(row, result) for row in result.rows(result.sizes[-1])):
        return [
            "Gains per second are from step-wise gains, read off the curve of a single schedule: they "
            "understate the value of a lower loss. Use --ladder before concluding that a variant does not pay."
        ]
    return [sentence for ladder in result.ladder if (sentence := _misfit_sentence(ladder, result))]


def joint_sentence(result: StudyResult) -> str:
    """The law of sizes and budgets with its numbers, and the data behind it; empty without one."""
    if result.joint is None:
        return ""
    joint, tokens = result.joint, result.joint.tokens
    one = [ladder.size for ladder in result.ladder if len(ladder.rungs) < 2]
    sentences = [f"{result.baseline} at {len(joint.parameters)} sizes:"]
    by_tokens = f"{tokens.scale:.4g}·D^−{tokens.exponent:.3f}"
    if size := joint.size:
        by_size = f"{size.floor:.3f} + {size.scale:.4g}·N^−{size.exponent:.3f}"
        sentences.append(f"L = {by_size} + {by_tokens}, N parameters in matrices and head, D tokens.")
    else:
        floors = "with one floor per size, since two sizes do not determine E + A·N^−a"
        sentences.append(f"L = E_N + {by_tokens}, {floors}.")
    if law := joint.compute:
        sentences.append(
            f"For the budgets of one model, L = {law.floor:.3f} + {law.scale:.4g}·C^−{law.exponent:.3f}, C FLOPs."
        )
    if one:
        sentences.append(f"{', '.join(one)} has one budget and uses the fit of the others.")
    if result.projected and len(joint.parameters) < 3:
        sentences.append("Two sizes always lie on a line, so the trend of the projection is unchecked.")
    return " ".join(sentences)


def race_sentence(result: StudyResult, size: str) -> str:
    """Which variants reach the target in significantly fewer seconds, and which do not; empty without a race."""
    rows = [row for row in result.rows(size) if row.name != result.baseline and row.race is not None]
    if result.target is None or not rows:
        return ""
    faster, others, unknown = list[str](), list[str](), list[str]()
    for row in rows:
        each = row.race
        if each is None or each.ratio is None or each.adjusted is None:
            unknown.append(row.name)
            continue
        words = f"{row.name} in {each.ratio.value:.3f}× the seconds (p = {each.adjusted:.2g})"
        (faster if each.adjusted < RACE_LEVEL else others).append(words)
    needed = f"every seed, {MIN_SEEDS} at least, to reach it after its first validation, and steps timed alone"
    parts = {
        f"Shown to reach {result.target:g} before {result.baseline}": faster,
        "Not shown": others,
        f"Not tested (needs {needed})": unknown,
    }
    return " ".join(f"{words}: {', '.join(variants)}." for words, variants in parts.items() if variants)


def _misfit_sentence(ladder: LadderResult, result: StudyResult) -> str:
    """Empty if the law recovers the tokens of each budget to within MAX_LADDER_MISFIT."""
    if ladder.law is None:
        return ""
    worths = [(ladder.law.tokens(rung.loss.value) / rung.tokens, rung.tokens) for rung in ladder.rungs]
    worth, tokens = max(worths, key=lambda pair: abs(math.log(pair[0])))
    if abs(math.log(worth)) <= MAX_LADDER_MISFIT:
        return ""
    return (
        f"The law of the ladder{at_size(ladder.size, result)} misses the losses of "
        f"{result.baseline}: its run of {count(tokens)} tokens would be worth {worth:.2f}× its own tokens. "
        "Equivalent tokens are off by a similar factor; very short runs do not follow the law."
    )


def own_baseline_sentence(result: StudyResult) -> str:
    """If results are relative to another variant: the study's own baseline, and its remaining uses; else empty."""
    if result.own_baseline is None:
        return ""
    rows = result.variants
    uses = [
        *["models were matched to it"] * any(row.matching for row in rows),
        *["steps were timed relative to its step"] * any(row.timing is not None for row in rows),
    ]
    still = f": {' and '.join(uses)}" * bool(uses)
    return f"Variants are compared with {result.baseline}. The study's own baseline is {result.own_baseline}{still}."


def matching_sentences(result: StudyResult) -> list[str]:
    """The changes that matching made, one sentence per variant."""
    to_match = f" to match {result.own_baseline or 'the baseline'}'s parameters ("
    own_ratio = {row.size: row.parameters_ratio for row in result.variants if row.name == result.own_baseline}
    return [
        f"{sized_name(row, result)}: {row.matching}"
        f"{' (parameters ' if FOR_FLOPS in row.matching or NOT_COUNTED in row.matching else to_match}"
        f"{row.parameters_ratio / own_ratio.get(row.size, 1.0) - 1:+.2%})."
        for row in result.variants
        if row.matching
    ]


def lacking_sentences(result: StudyResult) -> list[str]:
    """Which runs lack measurements that others have, and how to make them."""
    return [
        f"{LACKED[option]} are missing for {', '.join(runs[:MAX_RUN_NAMES])}"
        f"{f' and {len(runs) - MAX_RUN_NAMES} more' * (len(runs) > MAX_RUN_NAMES)}: "
        f"--{option} measures them on a machine with their weights."
        for option, runs in result.lacking.items()
    ]


def unequal_seeds(result: StudyResult) -> str:
    """Which variants lack seeds that others have, as in "mgr: 2 of 3 seeds"; empty if all have the same."""
    parts = []
    for size in result.sizes:
        done = {row.name: {run.seed for run in result.complete(size, row.name)} for row in result.rows(size)}
        if len(set(map(frozenset, done.values()))) == 1:
            continue
        lacking: dict[int, list[str]] = {}
        for name, seeds in done.items():
            if len(seeds) < len(result.seeds):
                lacking.setdefault(len(seeds), []).append(name)
        for seen, names in sorted(lacking.items(), reverse=True):
            who = ", ".join(names) if len(names) <= MAX_RUN_NAMES else f"{len(names)} variants"
            parts.append(f"{who}{at_size(size, result)}: {seen} of {counted(len(result.seeds), 'seed')}")
    return "; ".join(parts)


def study_sentences(result: StudyResult) -> list[str]:
    """All sentences below the tables of a terminal or a Markdown page."""
    unequal = unequal_seeds(result)
    compared = [row for row in result.rows(result.sizes[-1]) if row.name != result.baseline]
    sentences = [
        own_baseline_sentence(result),
        validation_sentence(result),
        *text_sentences(result),
        dataset_sentence(result),
        *matching_sentences(result),
        *(rate.sentence(len(result.sizes) > 1) for rate in result.tuning),
        *(verdict(row, result) for row in compared),
        comparisons_sentence(result),
        f"Seeds differ ({unequal}): Δ loss uses only those that a variant shares with "
        f"{result.baseline}." * bool(unequal),
        side_by_side_sentence(result),
        *(race_sentence(result, size) for size in result.sizes),
        joint_sentence(result),
        *ladder_sentences(result),
        *lacking_sentences(result),
        *(f"{run.folder} did not complete: {run.problem}" for run in result.runs if run.status == "failed"),
    ]
    return [sentence for sentence in sentences if sentence]
