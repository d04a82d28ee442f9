"""`residua bench ops` from end to end: which cases, on what, and the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from residua.bench import show
from residua.bench.cases import Case, Function, Shape, depth_paths, operators
from residua.bench.ceilings import Ceilings, measure_ceilings
from residua.bench.operators import OpResult, bench_operator, implementations
from residua.bench.peers import peers
from residua.train.environment import describe_environment

DEPTH = "depth"
WITH_PEERS = ("cuda",)
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Plan:
    """What will be timed."""

    shape: Shape
    device: torch.device
    cases: dict[str, Callable[[], Case]]
    ways: dict[str, Callable[[Function], Function]]


@dataclass(frozen=True)
class Report:
    """What was."""

    shape: Shape
    environment: dict[str, Any]
    ceilings: Ceilings
    results: list[OpResult]


def plan(names: Sequence[str], ways: Sequence[str], precision: str, settings: dict[str, int]) -> Plan:
    """Check what was asked for; no names mean every operator and the whole depths."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = precision or ("bfloat16" if device.type == "cuda" else "float32")
    if precision not in PRECISIONS:
        raise ValueError(f"--precision = {precision!r} does not exist: choose from {', '.join(PRECISIONS)}.")
    shape = Shape(**settings, dtype=PRECISIONS[precision])
    known = {name: {name: make} for name, make in operators(shape, device).items()}
    known[DEPTH] = depth_paths(shape, device)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."
            raise ValueError(f"operator {name!r} does not exist: {hint}")
    cases = {case: make for name in names or known for case, make in known[name].items()}
    return Plan(shape, device, cases, implementations(device, ways))


def run(plan: Plan, repeats: int, tell: Callable[[str], object] = lambda text: None) -> Report:
    """Time every case, one after another; `tell` hears which."""
    ceilings = measure_ceilings(plan.device)
    results = []
    for name, make in plan.cases.items():
        tell(name)
        case = make()
        functions = {way: wrap(case.function) for way, wrap in plan.ways.items()}
        others = _others(name, case) if plan.device.type in WITH_PEERS else {}
        results += bench_operator(case, functions, plan.device, ceilings, repeats, others)
    return Report(plan.shape, describe_environment(plan.device), ceilings, results)


def _others(name: str, case: Case) -> dict[str, Function]:
    """The peers of a case; for a depth of reads, those of a read."""
    if case.by_reads is None:
        return peers(name)
    return {peer: case.by_reads(read) for peer, read in peers("depth_attention").items()}


def show_report(report: Report, out: Path | None) -> None:
    """Print the tables and write the JSON."""
    console, shape = show.open_console(), report.shape
    show.print_ceilings(console, report.environment, report.ceilings)
    console.print(f"{shape.tokens} tokens of width {shape.width}, {shape.dtype}".replace("torch.", ""))
    show.print_operators(console, report.results)
    if out is not None:
        show.write_json(out, show.operator_report(report.environment, report.ceilings, shape, report.results))
        console.print(f"written to {out}", soft_wrap=True)
