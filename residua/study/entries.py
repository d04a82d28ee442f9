"""The cells that the terminal, Markdown and HTML tables share."""

from __future__ import annotations

from collections.abc import Sequence

from residua.report import Column, Value
from residua.study.inference import loses, pays, speed_is_shown
from residua.study.results import Interval, ScalingResult, StudyResult, VariantResult

NONE = "—"
UNSTATED = "not stated"  # a speed or gain that was measured too badly to draw conclusions from
ONE = Value(NONE, key=1.0)  # the baseline's own gain: not shown, but sorted
WIDEST = 1000.0  # high / low of an interval of ratios; a wider interval is not shown
TOO_WIDE = "interval too wide"
PAYS = "pays"


def columns(result: StudyResult) -> list[Column]:
    """The columns of the study's table, with what they mean."""
    level = f"{result.confidence * 100:g} %"
    how = "each step timed alone" if any(row.timing is not None for row in result.variants) else "in training"
    gain = "equivalent tokens" if result.ladder else "step-wise gain"
    return [
        Column("variant", "the architecture; the baseline is the one the others are compared with", numeric=False),
        Column("parameters", "all parameters, including embedding and head, and the difference to the baseline"),
        Column("validation loss", f"cross-entropy in nats per token after the last step{_on_text(result)}: "
               "mean over seeds ± standard error, with n where it has fewer runs than the study has seeds. Lower is "
               "better"),
        Column("bits/byte", "the same loss per byte of text, which does not depend on the tokenizer"),
        Column(f"Δ loss [{level}]", "loss minus the baseline's, paired by seed (same data order), with its "
               f"{level} Student-t interval. If it contains 0, no difference was shown"),
        *([TEXT_ERROR] if _has_text_error(result) else []),
        Column("step-wise gain", "baseline tokens / our tokens to reach the same loss, the worse of the two final "
               "losses. Above 1: the variant needs fewer tokens"),
        *([EQUIVALENT] if result.ladder else []),
        Column("throughput", f"our tokens per second / the baseline's, {how}"),
        Column("wall-clock gain", f"{gain} × throughput: baseline seconds / our seconds to the same loss"),
        *([_corrected(level)] if _is_corrected(result) else []),
        Column("memory", "peak memory of one run: GPU allocations, or the process's resident set on a CPU"),
        *([TRAINING] if _has_train_loss(result) else []),
    ]  # fmt: skip


def _corrected(level: str) -> Column:
    return Column(
        PAYS,
        f"whether the wall-clock gain is clear of 1, and its {level} interval, after Holm's correction for the number "
        "of variants compared. Without a ladder, three seeds are needed",
    )


def _on_text(result: StudyResult) -> str:
    if result.validated_tokens is None or result.dataset is None:
        return ""
    return f", on {result.validated_tokens:,} of {result.dataset.validation_tokens:,} validation tokens"


TEXT_ERROR = Column(
    "± text",
    "the standard error of Δ loss from sampling validation text: the variant and the baseline read the same documents, "
    "and are paired by them. The interval of Δ loss is of seeds alone",
)


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
        *([_error(row.text_error)] if _has_text_error(result) else []),
        _ratio(against.step_gain) if against else ONE,
        *(
            [_ratio(row.equivalent_tokens, "*" if row.extrapolated else "") if against else ONE]
            if result.ladder
            else []
        ),
        _throughput(row, result),
        _per_second(against, result) if against else ONE,
        *([_judged(row) if against else ONE] if _is_corrected(result) else []),
        Value(NONE if row.memory_gib is None else f"{row.memory_gib:.2f} GiB"),
        *([_loss(row.train_loss, len(result.seeds))] if _has_train_loss(result) else []),
    ]


def _has_text_error(result: StudyResult) -> bool:
    """Whether losses by document are known: results of older versions lack them."""
    return any(row.text_error is not None for row in result.variants)


def _error(value: float | None) -> Value:
    return Value(NONE if value is None else f"± {value:.4f}", key=value)


def _is_corrected(result: StudyResult) -> bool:
    """Whether any size has several gains per second, so that their intervals are corrected for each other."""
    return any(sum(row.corrected is not None for row in result.rows(size)) > 1 for size in result.sizes)


def _has_train_loss(result: StudyResult) -> bool:
    """Whether the training loss of a variant is known: results of older versions lack it."""
    return any(row.train_loss is not None for row in result.variants)


def precision_columns(recipes: Sequence[str]) -> list[Column]:
    """The columns of the low-precision table."""
    return [
        Column("variant", numeric=False),
        Column("peak activation", "the largest value that any sublayer reads; mean over seeds"),
        Column(
            "residual-sink ratio",
            "mean |h| over tokens and depth, largest dimension / median dimension",
        ),
        Column(
            "loss",
            "validation loss in high precision (bf16 on a GPU, fp32 on a CPU), on the part of the validation text that "
            "runs are validated on while they train",
        ),
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
    return Value(shown, f"({TOO_WIDE})" if too_wide(value) else f"[{low}, {high}]", value.value)


def too_wide(value: Interval) -> bool:
    """Whether the seeds disagree so much that the ends of the interval are a factor of 1,000 apart."""
    return value.low is not None and value.high is not None and value.high > WIDEST * value.low


def _per_second(row: VariantResult, result: StudyResult) -> Value:
    if row.wall_clock_gain is None and row.throughput_ratio is not None and not speed_is_shown(row, result):
        return Value(UNSTATED)
    return _ratio(row.wall_clock_gain)


def _judged(row: VariantResult) -> Value:
    if row.corrected is None:
        return Value(NONE)
    word = "pays" if pays(row) else "loses" if loses(row) else "not shown"
    return Value(word, _ratio(row.corrected).detail, row.corrected.low)


def _throughput(row: VariantResult, result: StudyResult) -> Value:
    speed = row.tokens_per_second if row.timing is None else row.timing.tokens_per_second
    if speed is None:
        return Value(NONE)
    rate = f"{count(speed)} tok/s"
    if row.name == result.baseline:
        compared = [other for other in result.rows(row.size) if other.throughput_ratio is not None]
        unstated = compared and not any(speed_is_shown(other, result) for other in compared)
        return Value(UNSTATED if unstated else rate, key=1.0)
    if row.throughput_ratio is None:
        return Value(rate)
    if not speed_is_shown(row, result):
        return Value(UNSTATED)
    return Value(f"{row.throughput_ratio.value:.2f}×", rate, row.throughput_ratio.value)
