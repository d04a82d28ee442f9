"""Untrained studies: results and curves by formula, with as many variants as a page must support."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residua.report import Page
from residua.study import StudyConfig
from residua.study.figures import Records
from residua.study.gains import concluded
from residua.study.ladder import FittedLaw
from residua.study.page import study_page
from residua.study.records import RunRecord
from residua.study.results import DatasetFacts, LadderResult, LowPrecision, Rung, RunResult, StudyResult, VariantResult
from residua.study.statistics import Interval

NAMES = (
    "prenorm", "block_attnres", "mgr", "exoformer", "full_attnres", "mgr8", "highway", "hc", "mhc", "denseformer",
    "gated_attention", "mgr+exoformer_dynamic+gatednorm", "block_attnres+nuresformer_qk_headwise", "gatednorm",
    "preaffine", "resformer",
)  # fmt: skip
SEEDS, STEPS, PER_STEP = 3, 1000, 32_768
FREEDOM = 9.0  # as of a ladder of four budgets
ENVIRONMENT = {
    "residua": "0.2.0", "torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "python": "3.11.9",
    "commit": "0123456789abcdef0123456789abcdef01234567", "gpu": "NVIDIA H200",
    "sessions": [{"started": "2026-11-02T09:30:00+00:00"}],
}  # fmt: skip


@dataclass(frozen=True)
class Pretended:
    """A study, its results and its runs."""

    study: StudyConfig
    result: StudyResult
    records: dict[str, Records]

    def page(self, out: Path) -> Page:
        command = "residua compare study.toml --out runs/wiki --results wiki.json"
        return study_page(self.study, self.result, self.records, out, commands=[command])


def pretended(
    variants: int, seeds: int = SEEDS, ladder: bool = True, best: float = 1.06, name: str = "wiki"
) -> Pretended:
    """The best variant is `best` times as fast to the same loss as the baseline; the others fall off."""
    names = NAMES[:variants]
    chosen = range(seeds)
    rows = tuple(_row(name, index, seeds, ladder, best) for index, name in enumerate(names))
    result = StudyResult(
        name=name,
        baseline="prenorm",
        confidence=0.95,
        seeds=tuple(chosen),
        side_by_side=1,
        dataset=DatasetFacts(
            path="data/wiki", vocab_size=32_768, train_tokens=117_000_000, validation_tokens=1_200_000,
            bytes_per_token=4.31, unigram_entropy=7.4142,
        ),
        validated_tokens=131_072,
        variants=rows,
        ladder=(_ladder(),) if ladder else (),
        runs=tuple(_run(name, index, seed) for index, name in enumerate(names) for seed in chosen),
    )  # fmt: skip
    records = {name: [_record(name, index, seed) for seed in chosen] for index, name in enumerate(names)}
    study = StudyConfig(name=name, base="mini", variants=list(names), seeds=seeds, set=("train.steps=1000",))
    return Pretended(study, concluded(result), {"mini": records})


def with_rows(result: StudyResult, rows: Iterable[VariantResult]) -> StudyResult:
    """The study with other rows, and the values that follow from them."""
    return concluded(result.model_copy(update={"variants": tuple(rows)}))


def _change(index: int) -> float:
    """Δ loss: a few variants are better, more are hardly different, one is worse."""
    return 0.0 if index == 0 else -0.045 + 0.011 * (index - 1) * (1 + 0.1 * (index % 3))


def _speed(index: int) -> float:
    return 1.0 if index == 0 else 0.97 - 0.021 * (index % 7)


def _around(value: float, error: float, seeds: int) -> Interval:
    if seeds == 1:
        return Interval(value=value, count=1)
    ends = {"low": value - 4.3 * error, "high": value + 4.3 * error}
    return Interval(value=value, count=seeds, error=error, freedom=FREEDOM, **ends)


def _row(name: str, index: int, seeds: int, ladder: bool, best: float) -> VariantResult:
    loss, speed = 3.4128 + _change(index), _speed(index)
    gain = best / _speed(1) - 0.03 * (index - 1)
    against: dict[str, Any] = {}
    if index:
        against = {
            "difference": _around(_change(index), 0.0021 + 0.0007 * (index % 4), seeds),
            "step_gain": _around(1 + (gain - 1) * 0.7, 0.004, seeds),
            "equivalent_tokens": _around(gain, 0.006, seeds) if ladder else None,
            "extrapolated": gain > 1.09,
            "throughput_ratio": _around(speed, 0.001, 3),
            "wall_clock_gain": _around(gain * speed, 0.007, seeds),
        }
    costs = _around(0.004 + 0.003 * index, 0.0004, seeds)
    return VariantResult(
        name=name, size="mini", overrides=(), matching="ffn hidden 2048 → 2024" if index == 3 else "",
        parameters=124_000_000 + 41_000 * index, parameters_ratio=1 + 0.00033 * index, flops_per_token=7.4e8,
        loss=_around(loss, 0.0031, seeds), bits_per_byte=_around(loss / math.log(2) / 4.31, 0.001, seeds),
        tokens_per_second=182_000.0 * speed, memory_gib=14.2 + 0.9 * (index % 5), **against,
        low_precision=LowPrecision(
            peak_activation=120.0 + 40 * index, sink_ratio=30.0 / (1 + index), loss=_around(loss, 0.003, seeds),
            losses={"fp8": _around(loss + 0.004, 0.003, seeds), "nvfp4+smooth": None},
            costs={"fp8": costs, "nvfp4+smooth": None},
        ),
    )  # fmt: skip


def _ladder() -> LadderResult:
    law = FittedLaw(floor=2.6, scale=260.0, exponent=0.333)
    tokens = [share * STEPS * PER_STEP for share in (0.5, 1.0, 1.5, 2.0)]
    rungs = [Rung(tokens=t, loss=_around(law.floor + law.scale * t**-law.exponent, 0.004, 3)) for t in tokens]
    return LadderResult(size="mini", rungs=tuple(rungs), law=law)


def _run(name: str, index: int, seed: int) -> RunResult:
    return RunResult(
        variant=name, size="mini", seed=seed, folder=f"{name}-seed{seed}", status="complete", tokens=STEPS * PER_STEP,
        loss=3.4128 + _change(index) + 0.004 * seed, tokens_per_second=182_000.0 * _speed(index), memory_gib=14.2,
    )  # fmt: skip


def _record(name: str, index: int, seed: int) -> RunRecord:
    rows = []
    for step in range(50, STEPS + 1, 50):
        loss = 3.4128 + _change(index) * (step / STEPS) + 0.004 * seed + 60.0 / (step + 25) - 60.0 / (STEPS + 25)
        loss += 0.002 * math.sin(step / 70 + index + seed)
        common = {"step": step, "tokens": step * PER_STEP, "loss": loss}
        rows.append({**common, "seconds": step * PER_STEP / 182_000.0 / _speed(index), "bits_per_byte": loss / 3})
    return RunRecord(
        Path("runs") / f"{name}-seed{seed}", PER_STEP, rows, rows, _inside(name, index), environment=ENVIRONMENT
    )


def _inside(name: str, index: int) -> dict[str, Any]:
    """An inspection by the trainer of a model of twelve layers."""
    readers = list(range(24))
    found: dict[str, Any] = {
        "sublayers": [
            {"sublayer": k, "output_rms": 0.3 * (1.1 - 0.005 * index) ** k, "gradient_rms": 1e-3 / (k + 1 + index)}
            for k in readers
        ]
    }
    if "attnres" in name or "dense" in name:
        rows = [[0.0 if j % 5 == 4 else 1.0 / (2 + k - j) for j in range(k + 2)] for k in readers]
        found["depth_weights"] = {"readers": readers, "mean": [[v / sum(row) for v in row] for row in rows]}
    if "mgr" in name:
        found["beta"] = [{"sublayer": k, "mean": [0.1, 0.2, 0.05, 0.3]} for k in readers[3:]]
    if "exoformer" in name or "gated" in name:
        found["gates"] = [{"layer": k, "mean": 0.5 - 0.01 * index, "closed": 0.05 * k} for k in range(12)]
    return found
