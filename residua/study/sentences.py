"""The cells and sentences that the terminal, Markdown and HTML tables share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from residua.reading import counted
from residua.report import Column, Value
from residua.study.ladder import Law
from residua.study.plan import TIMINGS, PlannedRun, StudyPlan
from residua.study.results import Interval, LadderResult, ScalingResult, StudyResult, VariantResult
from residua.study.timing import BUSY, StepTiming

NONE = "—"
ONE = Value(NONE, key=1.0)  # the baseline's own gain: not shown, but sorted
WIDEST = 1000.0  # high / low of an interval of ratios; a wider interval is not shown
TOO_WIDE = "interval too wide"
MISFIT = 0.05  # by how much, in logarithms, a ladder's law may miss the tokens of a budget without a word
SAYS_NOTHING = 2.0  # high / low of an interval around 1; from a wider one follows no verdict


def columns(result: StudyResult) -> list[Column]:
    """The columns of the study's table, with what they mean."""
    level = f"{result.confidence * 100:g} %"
    how = "each step timed alone" if any(row.timing is not None for row in result.variants) else "in training"
    gain = "equivalent tokens" if result.ladder else "step-wise gain"
    return [
        Column("variant", "the architecture; the baseline is the one the others are compared with", numeric=False),
        Column("parameters", "all parameters, including embedding and head, and the difference to the baseline"),
        Column("validation loss", "cross-entropy in nats per token on the fixed validation set after the last step: "
               "mean over seeds ± standard error, with n where it has fewer runs than the study has seeds. Lower is "
               "better"),
        Column("bits/byte", "the same loss per byte of text, which does not depend on the tokenizer"),
        Column(f"Δ loss [{level}]", "loss minus the baseline's, paired by seed (same data order), with its "
               f"{level} Student-t interval. If it contains 0, no difference was shown"),
        Column("step-wise gain", "baseline tokens / our tokens to reach the same loss, the worse of the two final "
               "losses. Above 1: the variant needs fewer tokens"),
        *([EQUIVALENT] if result.ladder else []),
        Column("throughput", f"our tokens per second / the baseline's, {how}"),
        Column("wall-clock gain", f"{gain} × throughput: baseline seconds / our seconds to the same loss"),
        Column("memory", "peak memory of one run: GPU allocations, or the process's resident set on a CPU"),
        *([TRAINING] if _has_train_loss(result) else []),
    ]  # fmt: skip


TRAINING = Column(
    "training loss",
    "mean over the last 200 steps, but no more than a tenth of the run, in nats per token: mean over seeds ± standard "
    "error",
)
EQUIVALENT = Column(
    "equivalent tokens",
    "tokens that the baseline, trained with a full schedule of its own, needs for our loss / our tokens. From the fit "
    "L(D) = E + B·D^−b through the baseline's budgets; * lies outside them",
)


def cells(row: VariantResult, result: StudyResult) -> list[Value]:
    """One row of the table."""
    baseline = result.baseline
    against = row if row.name != baseline else None
    return [
        Value(row.name, "" if against else "(baseline)"),
        Value(count(row.parameters), f"({row.parameters_ratio - 1:+.2%})" if against else "", row.parameters),
        _loss(row.loss, len(result.seeds)),
        Value(NONE if row.bits_per_byte is None else f"{row.bits_per_byte.value:.4f}"),
        _difference(against.difference) if against else Value(NONE, key=0.0),
        _ratio(against.step_gain) if against else ONE,
        *(
            [_ratio(row.equivalent_tokens, "*" if row.extrapolated else "") if against else ONE]
            if result.ladder
            else []
        ),
        _throughput(row, baseline),
        _ratio(against.wall_clock_gain) if against else ONE,
        Value(NONE if row.memory_gib is None else f"{row.memory_gib:.2f} GiB"),
        *([_loss(row.train_loss, len(result.seeds))] if _has_train_loss(result) else []),
    ]


def _has_train_loss(result: StudyResult) -> bool:
    """Whether the training loss of a variant is known: results of older versions lack it."""
    return any(row.train_loss is not None for row in result.variants)


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
        sure = f"{_direction(change.value)} (n = {change.count})"
    return f"{who}: {sure}; {_gains(row, result)}."


def _shown_otherwise(row: VariantResult) -> str:
    """What shows a gain or loss per token though seed by seed no difference of the last losses is shown; else empty."""
    gain = row.equivalent_tokens or row.step_gain
    if gain is None or _around_one(gain):
        return ""
    if row.equivalent_tokens is None:
        return "one in the steps to the same loss is"
    return "the ladder, which pools the noise of all its runs, shows one"


def _gains(row: VariantResult, result: StudyResult) -> str:
    """The gains per token and per second, or why there are none."""
    if row.equivalent_tokens is None and row.step_gain is None:
        return f"no gain per step, {_why_no_gain(row, result)}"
    if row.throughput_ratio is None or row.wall_clock_gain is None:
        return f"{_per_token(row)}, and no speeds to compare"
    per_token = _per_token(row)
    if result.side_by_side > 1 and row.timing is None:
        return f"{per_token}; its speed was not measured alone, so no gain per second is stated (--time-alone)"
    if was_busy(row, result):
        return f"{per_token}; its speed was timed on a busy machine, so no gain per second is stated"
    if says_nothing(row.throughput_ratio):
        ends = _ends(row.throughput_ratio)
        return f"{per_token}; its speed against {result.baseline} is not shown ({ends}), nor a gain per second"
    speed, seconds = row.throughput_ratio.value, row.wall_clock_gain
    said = f"{per_token} at {speed:.2f}× the speed of {result.baseline}, so {seconds.value:.2f}× per second"
    if seconds.low is None and seconds.high is None:
        return said if row.difference is None or row.difference.low is None else f"{said}, without an interval"
    if says_nothing(seconds) or _around_one(seconds):
        return f"{said}, but no gain or loss per second is shown ({_ends(seconds)})"
    return f"{said} ({_ends(seconds)})"


def _per_token(row: VariantResult) -> str:
    if row.equivalent_tokens is not None:
        said = _bracketed("extrapolated" if row.extrapolated else "", row.equivalent_tokens)
        return f"worth {row.equivalent_tokens.value:.2f}× the tokens{said}"
    assert row.step_gain is not None  # one of the two is known
    return f"{row.step_gain.value:.2f}× per step{_bracketed('', row.step_gain)}"


def _bracketed(word: str, ratio: Interval) -> str:
    """A word and the interval in brackets; nothing where neither is known."""
    known = ratio.low is not None or ratio.high is not None
    parts = [part for part in (word, _ends(ratio) if known else "") if part]
    return f" ({', '.join(parts)})" if parts else ""


def _why_no_gain(row: VariantResult, result: StudyResult) -> str:
    ours, baseline = ({run.seed for run in result.complete(row.size, name)} for name in (row.name, result.baseline))
    if not ours & baseline:
        return "since no seed completed in both"
    return "which needs two validations or more of each run (train.validate_every) and losses that fall after the first"


def speed_is_shown(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant's speed is known well enough to draw conclusions from it."""
    shared = result.side_by_side > 1 and row.timing is None
    return row.throughput_ratio is not None and not (
        shared or was_busy(row, result) or says_nothing(row.throughput_ratio)
    )


def was_busy(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant's step, or the baseline's beside it, was timed while the machine was busy."""
    return any(timing.busy for timing in _timings(row, result))


def _timings(row: VariantResult, result: StudyResult) -> list[StepTiming]:
    """The steps timed alone that a variant's speed is from: its own, and the baseline's on the same device."""
    if row.timing is None:
        return []
    baseline = next((other.timing for other in result.rows(row.size) if other.name == result.baseline), None)
    return [row.timing, *([baseline] if baseline is not None and baseline.device == row.timing.device else [])]


def says_nothing(ratio: Interval) -> bool:
    """Whether an interval of a ratio holds 1 and is so wide that no verdict follows from it."""
    if ratio.low is None and ratio.high is None:
        return False  # one run: no interval was asked
    return _around_one(ratio) and (ratio.low is None or ratio.high is None or ratio.high > SAYS_NOTHING * ratio.low)


def _around_one(ratio: Interval) -> bool:
    return (ratio.low is None or ratio.low <= 1.0) and (ratio.high is None or ratio.high >= 1.0)


def _ends(ratio: Interval) -> str:
    """An interval in words, or that it is too wide, as in the table."""
    if _too_wide(ratio):
        return TOO_WIDE
    low, high = ("" if end is None else f"{end:.2f}" if end < 100 else f"{end:.2g}" for end in (ratio.low, ratio.high))
    return "interval " + (f"{low} to {high}" if low and high else f"above {low}" if low else f"below {high}")


def dataset_sentence(result: StudyResult) -> str:
    """The unigram entropy, and by how much even the worst variant of the last size is below it; empty without text."""
    facts, size = result.dataset, result.sizes[-1]
    if facts is None:
        return ""
    losses = [row.loss.value for row in result.rows(size) if row.loss is not None]
    gap = facts.unigram_entropy - max(losses) if losses else 0.0
    below = math.floor(100 * round(gap, 6)) / 100  # 'at least' is never rounded up
    learned = f"; every variant{at_size(size, result)} ends at least {below:.2f} below it" if below > 0 else ""
    return (
        f"Unigram entropy of the validation text: {facts.unigram_entropy:.4f} nats per token "
        f"(the loss of a model that knows only token frequencies){learned}."
    )


def at_size(size: str, result: StudyResult) -> str:
    """ " at SIZE" if the study has several sizes."""
    return f" at {size}" if len(result.sizes) > 1 else ""


def side_by_side_sentence(result: StudyResult) -> str:
    """How speeds were measured: alone, or while runs shared the machine; empty if there was one run at a time."""
    timed = [row for row in result.variants if row.timing is not None]
    if timed:
        devices = ", ".join(sorted({row.timing.device for row in timed if row.timing is not None}))
        rest = [row.name for row in result.variants if row.timing is None and row.throughput_ratio is not None]
        but = f", but that of {', '.join(dict.fromkeys(rest))}, which is from training (--time-alone)" if rest else ""
        alone = f"Speeds are those of each variant's step timed alone, after its runs ({devices}){but}."
        return " ".join(said for said in (alone, _busy_sentence(result)) if said)
    if result.side_by_side < 2:
        return ""
    return (
        f"{result.side_by_side} runs shared this machine, so they slowed each other down: measure speeds and "
        "wall-clock gains with --time-alone before relying on them."
    )


def _busy_sentence(result: StudyResult) -> str:
    """Whose steps were timed while the machine was busy; empty if none."""
    several = len(result.sizes) > 1
    who = [
        f"{row.name}{f' ({row.size})' if several else ''}"
        for row in result.variants
        if row.timing is not None and row.timing.busy
    ]
    if not who:
        return ""
    return (
        f"The steps of {', '.join(who)} were timed while the machine was busy (they spread by more than {BUSY:.0%}), "
        f"so no gain per second follows from them: remove {TIMINGS}/ and run the study again when it is idle."
    )


def understated(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant that gains per step seems to lose per second, where there is no ladder to tell."""
    return not result.ladder and _at_least_one(row.step_gain) and _below_one(row.wall_clock_gain)


def ladder_sentences(result: StudyResult) -> list[str]:
    """What to know about gains per token: that there is no ladder, or that its law misses the baseline's own losses."""
    if any(understated(row, result) for row in result.rows(result.sizes[-1])):
        return [
            "Gains per second are from step-wise gains, on one schedule's curve: they understate what a lower loss is "
            "worth. Use --ladder before concluding that a variant does not pay."
        ]
    return [said for ladder in result.ladder if (said := _misfit(ladder, result))]


def _misfit(ladder: LadderResult, result: StudyResult) -> str:
    """Empty if the law gives each budget its own tokens back, but for MISFIT."""
    if ladder.law is None:
        return ""
    law = Law(**ladder.law.model_dump())
    worths = [(law.tokens(rung.loss.value) / rung.tokens, rung.tokens) for rung in ladder.rungs]
    worth, tokens = max(worths, key=lambda pair: abs(math.log(pair[0])))
    if abs(math.log(worth)) <= MISFIT:
        return ""
    return (
        f"The law of the ladder{at_size(ladder.size, result)} misses the losses of "
        f"{result.baseline}: its run of {count(tokens)} tokens would be worth {worth:.2f}× its own tokens. Equivalent "
        "tokens are off by as much; runs that are too short do not follow the law."
    )


def _at_least_one(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.value >= 1.0


def _below_one(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.value < 1.0


def cost_sentences(plan: StudyPlan) -> list[str]:
    """What a search of learning rates and a ladder cost, and whether the ladder repeats text."""
    own, ladder, trials = (sum(_tokens(run) for run in runs) for runs in (plan.compared, plan.ladder, plan.trials))
    said = []
    for what, added in (("Tuning", trials), ("The ladder", ladder)):
        if added:
            share = f"({added / own:+.0%})"
            said.append(f"{what} adds {count(added)} training tokens to the {count(own)} of the comparison {share}.")
    largest = max(_tokens(run) for run in plan.runs)
    if plan.ladder and largest > plan.text_tokens:
        said.append(
            f"The largest budget reads the text {largest / plan.text_tokens:.1f} times. Repeated text teaches less "
            "than new text, which favours the variants."
        )
    return said


def _tokens(run: PlannedRun) -> int:
    return run.config.train.steps * run.config.tokens_per_step


def matching_sentences(result: StudyResult) -> list[str]:
    """What parameter matching changed, one sentence per variant."""
    several = len(result.sizes) > 1
    return [
        f"{row.name}{f' ({row.size})' if several else ''}: {row.matching} to match the baseline's parameters "
        f"({row.parameters_ratio - 1:+.2%})."
        for row in result.variants
        if row.matching
    ]


def precision_columns(recipes: Sequence[str]) -> list[Column]:
    """The columns of the low-precision table."""
    return [
        Column("variant", numeric=False),
        Column("peak activation", "the largest value that any sublayer reads; mean over seeds"),
        Column(
            "residual-sink ratio",
            "mean |h| over tokens and depth, largest dimension / median dimension",
        ),
        Column("loss", "validation loss in high precision (bf16 on a GPU, fp32 on a CPU)"),
        *(
            Column(name, f"loss after {_describe_recipe(name)}, and the increase over high precision")
            for name in recipes
        ),
    ]


def precision_cells(row: VariantResult) -> list[Value]:
    """One row of the low-precision table."""
    low = row.low_precision
    assert low is not None
    quantized = [
        Value("not finite") if (loss := low.losses[name]) is None or (cost := low.costs[name]) is None
        else Value(f"{loss.value:.4f}", f"({cost.value:+.4f}{'' if cost.error is None else f' ± {cost.error:.4f}'})")
        for name in low.losses
    ]  # fmt: skip
    return [
        Value(row.name),
        Value(f"{low.peak_activation:.4g}"),
        Value(f"{low.sink_ratio:.4g}"),
        _loss(low.loss),
        *quantized,
    ]


def _describe_recipe(name: str) -> str:
    """A recipe in words: W8A8 or W4A4, the scheme, and whether with SmoothQuant."""
    scheme, _, smoothing = name.partition("+")
    bits = "W4A4" if scheme.startswith("nvfp4") else "W8A8"
    return f"{bits} ({scheme}{', SmoothQuant' if smoothing else ''})"


def scaling_columns(confidence: float) -> list[Column]:
    """The columns of the scaling table."""
    level = f"{confidence * 100:g} %"
    return [
        Column("variant", numeric=False),
        Column("L = A·C^−α", "least-squares fit of ln L on ln C over all runs; C in training FLOPs"),
        Column("α", "how fast loss falls with compute"),
        Column("fitted loss", "the fit at the baseline's largest compute"),
        Column(
            f"compute advantage [{level}]",
            "baseline's compute for that loss / ours. Above 1 saves compute",
        ),
    ]


def scaling_cells(row: ScalingResult, baseline: str) -> list[Value]:
    """One row of the scaling table."""
    return [
        Value(row.name, "(baseline)" if row.name == baseline else ""),
        Value(f"{row.scale:.4g}·C^−{row.exponent:.4f}"),
        Value(f"{row.exponent:.4f}"),
        Value(f"{row.scale * row.at_compute**-row.exponent:.4f}"),
        Value(NONE) if row.name == baseline else _ratio(row.advantage),
    ]


def count(number: float) -> str:
    """1,234,567 as 1.23 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def _direction(change: float) -> str:
    if abs(change) < 0.5e-4:
        return "the same loss to four digits"
    return f"{'lower' if change < 0 else 'higher'} loss by {abs(change):.4f}"


LACKED = {"tasks": "Accuracies on tasks", "quantize": "Losses in low precision"}
NAMED = 6  # runs that a sentence names


def lacking_sentences(result: StudyResult) -> list[str]:
    """Which runs were not measured as others were, and how to do it."""
    told = []
    for option, runs in result.lacking.items():
        more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
        told.append(
            f"{LACKED[option]} are not complete for {', '.join(runs[:NAMED])}{more}: "
            f"--{option} measures them where their weights are."
        )
    return told


def unequal_seeds(result: StudyResult) -> str:
    """Which variants lack seeds that others have, as in "mgr: 2 of 3 seeds"; empty if all have the same."""
    told = []
    for size in result.sizes:
        done = {row.name: {run.seed for run in result.complete(size, row.name)} for row in result.rows(size)}
        if len(set(map(frozenset, done.values()))) == 1:
            continue
        lacking: dict[int, list[str]] = {}
        for name, seeds in done.items():
            if len(seeds) < len(result.seeds):
                lacking.setdefault(len(seeds), []).append(name)
        at = at_size(size, result)
        for seen, names in sorted(lacking.items(), reverse=True):
            who = ", ".join(names) if len(names) <= NAMED else f"{len(names)} variants"
            told.append(f"{who}{at}: {seen} of {counted(len(result.seeds), 'seed')}")
    return "; ".join(told)


def seeds_sentence(result: StudyResult) -> str:
    """Which variants lack seeds, and which seeds a difference is of then; empty if all have the same."""
    unequal = unequal_seeds(result)
    if not unequal:
        return ""
    return f"Seeds differ ({unequal}): Δ loss is over those that a variant shares with {result.baseline}."


def _loss(value: Interval | None, seeds: int = 0) -> Value:
    """Mean and standard error; the number of runs where it is 1, or less than `seeds`."""
    if value is None:
        return Value(NONE)
    runs = f" (n={value.count})" if value.count < seeds else ""
    return Value(f"{value.value:.4f}", "(n=1)" if value.error is None else f"± {value.error:.4f}{runs}")


def _difference(value: Interval | None) -> Value:
    if value is None:
        return Value(NONE)
    interval = "(n=1, no interval)" if value.low is None else f"[{value.low:+.4f}, {value.high:+.4f}]"
    return Value(f"{value.value:+.4f}", interval)


def _ratio(value: Interval | None, mark: str = "") -> Value:
    if value is None:
        return Value(NONE)
    shown = f"{value.value:.2f}×{mark}"
    if value.low is None and value.high is None:
        return Value(shown, key=value.value)
    low, high = ("…" if end is None else f"{end:.2f}" for end in (value.low, value.high))
    return Value(shown, f"({TOO_WIDE})" if _too_wide(value) else f"[{low}, {high}]", value.value)


def _too_wide(value: Interval) -> bool:
    """Whether the seeds disagree so much that the ends of the interval are a factor of 1,000 apart."""
    return value.low is not None and value.high is not None and value.high > WIDEST * value.low


def _throughput(row: VariantResult, baseline: str) -> Value:
    speed = row.tokens_per_second if row.timing is None else row.timing.tokens_per_second
    if speed is None:
        return Value(NONE)
    rate = f"{count(speed)} tok/s"
    if row.name == baseline or row.throughput_ratio is None:
        return Value(rate, key=1.0 if row.name == baseline else None)
    return Value(f"{row.throughput_ratio.value:.2f}×", rate, row.throughput_ratio.value)
