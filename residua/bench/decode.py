"""Decoding latency: one token per row on a filled cache, several models side by side.

The models take turns in every round, so that a change of the device's clock affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from residua import ops
from residua.bench.show import Tell, number
from residua.bench.step import Case
from residua.bench.timing import Ceilings
from residua.generate.engine import Step, build_step, launched_step, resolve_engine
from residua.generate.generator import weight_bytes
from residua.model.cache import Cache
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits
from residua.report.terminal import new_table
from residua.storage.model_folder import place, ready
from residua.train.timing import Sample, release_memory, synchronize, time_each

STEPS = 8
"""Steps per timing."""


@dataclass(frozen=True)
class DecodeResult:
    """The time of one model's decoding step at one batch size, and its ratio to the first model's.

    A step reads `weight_bytes` of weights and `cache_bytes` of the cache, and launches `kernels` kernels.
    """

    model: str
    case: str
    batch: int
    engine: str
    weight_bytes: int
    cache_bytes: int
    step: Sample
    ratio: float
    kernels: int | None

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights and cache read per second."""
        return (self.weight_bytes + self.cache_bytes) / self.step.median


@dataclass
class _Contender:
    case: Case
    cache: Cache
    run: Step
    weights: int
    read: int
    kernels: int | None
    seconds: list[float]


@torch.inference_mode()
def bench_decode(
    model: str,
    cases: Sequence[Case],
    device: torch.device,
    *,
    batch: int,
    filled: int,
    engine: str,
    rounds: int,
    tell: Tell = lambda text, share: None,
) -> list[DecodeResult]:
    """Time `rounds` × 8 steps of every case with `filled` tokens in each row of the cache, ratios to the first.

    `tell` gets what is done and the share of the whole that is behind it: building counts as half.
    """
    engine = resolve_engine(engine, device)
    contenders = []
    for done, case in enumerate(cases):
        tell(f"{model}, batch {batch}: building {case.name}", done / len(cases) / 2)
        contenders.append(_contender(case, device, batch, filled, engine))
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    for done in range(rounds):
        tell(f"{model}, batch {batch}: round {done + 1} of {rounds}", (1 + done / rounds) / 2)
        for contender in contenders:
            contender.seconds.append(_round(contender, tokens, filled, device))
    samples = [Sample.of(c.seconds) for c in contenders]
    results = [
        DecodeResult(
            model, c.case.name, batch, engine, c.weights, c.read, sample, sample.median / samples[0].median, c.kernels
        )
        for c, sample in zip(contenders, samples, strict=True)
    ]
    contenders.clear()
    release_memory(device)
    return results


def build_random(case: Case, device: torch.device) -> Decoder:
    """The model of a case with random weights, ready to run, in bfloat16 on a GPU."""
    torch.manual_seed(case.config.train.seed)
    with torch.device("meta"):
        built = build_if_it_fits(case.config.model, case.name)
    model = built.to_empty(device=device)
    model.reset_parameters()
    return place(ready(model), device)


def _contender(case: Case, device: torch.device, batch: int, filled: int, engine: str) -> _Contender:
    model = build_random(case, device)
    cache = model.new_cache(batch, filled + STEPS)
    for tensor in cache.tensors():
        tensor.normal_(std=0.1)
    cache.lengths.fill_(filled)
    cache.reach, cache.static = filled, True
    with ops.backend(case.backend):
        kernels = _kernels(launched_step(model, cache, engine), cache) if device.type == "cuda" else None
        cache.lengths.fill_(filled)
        run = build_step(model, cache, engine)
        run(torch.zeros(batch, dtype=torch.int64, device=device))
    read = sum(t.numel() * t.element_size() for t in cache.tensors()) * filled // (filled + STEPS)
    return _Contender(case, cache, run, weight_bytes(model, batch), read, kernels, [])


def _round(contender: _Contender, tokens: Tensor, filled: int, device: torch.device) -> float:
    def steps() -> None:
        for _ in range(STEPS):
            contender.run(tokens)

    def rewind() -> None:
        contender.cache.lengths.fill_(filled)
        contender.cache.reach = filled

    with ops.backend(contender.case.backend):
        rewind()
        steps()  # warms the device's cache, as steady decoding does
        (seconds,) = time_each(steps, 1, device, before=rewind)
    synchronize(device)
    return seconds / STEPS


def _kernels(step: Step, cache: Cache) -> int:
    """How many kernels the device runs in one step."""
    tokens = torch.zeros_like(cache.lengths)
    step(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step(tokens)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def print_decode(console: Console, results: Sequence[DecodeResult], ceilings: Ceilings) -> None:
    """One row per model, batch size and case, ratios to the first case."""
    measured = ("batch", "step µs", "p10–p90", "time ×", "tokens/s", "kernels", "GB/s", "of copy")
    table = new_table(("model", "case", "engine"), measured)
    for result in results:
        rate = result.bytes_per_second
        table.add_row(
            result.model,
            result.case,
            result.engine,
            str(result.batch),
            f"{result.step.median * 1e6:,.1f}",
            f"{result.step.p10 * 1e6:,.1f}–{result.step.p90 * 1e6:,.1f}",
            f"{result.ratio:.3f}",
            f"{result.batch / result.step.median:,.0f}",
            number(result.kernels, "d"),
            f"{rate / 1e9:,.0f}",
            f"{rate / ceilings.copy_bytes_per_second:.0%}",
        )
    console.print(table)
    console.print(
        "GB/s: weights and cache, each read once per step. of copy: GB/s as a share of the copy bandwidth, which "
        "counts bytes read and written. kernels: launches per step.",
        soft_wrap=True,
    )


def decode_report(
    environment: dict[str, Any], ceilings: Ceilings, settings: dict[str, Any], results: Sequence[DecodeResult]
) -> dict[str, Any]:
    """Everything as plain JSON: seconds and bytes."""
    return {
        "kind": "decode",
        "environment": environment,
        "ceilings": asdict(ceilings),
        "settings": settings,
        "results": [asdict(result) | {"bytes_per_second": result.bytes_per_second} for result in results],
    }
