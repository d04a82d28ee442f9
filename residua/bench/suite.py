"""`residua bench ops` from start to finish: chooses the cases, times them, prints and writes the report.

Kernels of other libraries for the same operators are timed in the same run, if they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from residua.bench import show
from residua.bench.cases import Case, Function, Shape, depth_paths, operators
from residua.bench.operators import Ceilings, OpResult, bench_operator, implementations, measure_ceilings
from residua.config.settings import suggest
from residua.errors import UserError
from residua.machine import choose_device
from residua.train.environment import describe_environment

DEPTH = "depth"
WITH_PEERS = ("cuda",)
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class SuitePlan:
    """The cases to time, and the implementations to time them with."""

    shape: Shape
    device: torch.device
    cases: dict[str, Callable[[], Case]]
    ways: dict[str, Callable[[Function], Function]]


@dataclass(frozen=True)
class Report:
    """The results so far, of `planned` rows."""

    shape: Shape
    environment: dict[str, Any]
    ceilings: Ceilings
    results: list[OpResult]
    planned: int


def plan(names: Sequence[str], ways: Sequence[str], precision: str, settings: dict[str, int]) -> SuitePlan:
    """Check the request and plan it; without names, every operator and all depth paths."""
    device = choose_device("auto")
    precision = precision or ("bfloat16" if device.type == "cuda" else "float32")
    if precision not in PRECISIONS:
        raise UserError(f"--precision = {precision!r} does not exist: choose from {', '.join(PRECISIONS)}.")
    shape = Shape(**settings, dtype=PRECISIONS[precision])
    known = {name: {name: make} for name, make in operators(shape, device).items()}
    known[DEPTH] = depth_paths(shape, device)
    for name in names:
        if name not in known:
            raise UserError(f"operator {name!r} does not exist: {suggest(name, known)}")
    cases = {case: make for name in names or known for case, make in known[name].items()}
    return SuitePlan(shape, device, cases, implementations(device, ways))


def count_rows(plan: SuitePlan) -> int:
    """How many rows the tables will have, counted by building the cases on the meta device."""
    nowhere = torch.device("meta")
    sketches = {**operators(plan.shape, nowhere), **depth_paths(plan.shape, nowhere)}
    return sum(len(plan.ways) + len(_installed(plan, name, sketches[name]())) for name in plan.cases)


def run(
    plan: SuitePlan,
    repeats: int,
    tell: Callable[[str], object] = lambda text: None,
    keep: Callable[[Report], object] = lambda report: None,
) -> Report:
    """Time every case in turn; `tell` receives the name of each, `keep` the report after every row."""
    environment, ceilings = describe_environment(plan.device), measure_ceilings(plan.device)
    report = Report(plan.shape, environment, ceilings, [], count_rows(plan))
    for name, make in plan.cases.items():
        case = make()
        functions = {way: wrap(case.function) for way, wrap in plan.ways.items()}
        others = _installed(plan, name, case)
        for result in bench_operator(case, functions, plan.device, ceilings, repeats, others, tell):
            report.results.append(result)
            keep(report)
    return report


def _installed(plan: SuitePlan, name: str, case: Case) -> dict[str, Function]:
    return _others(name, case) if plan.device.type in WITH_PEERS else {}


def _others(name: str, case: Case) -> dict[str, Function]:
    """The peers of a case. For a depth path, the peers of one read, applied to every read."""
    if case.by_reads is None:
        return case.peers | peers(name)
    return {peer: case.by_reads(read) for peer, read in peers("depth_attention").items()}


class SuiteProgress(show.BenchProgress):
    """Stores the measurements; a log gets one line per finished row."""

    keeps_log = False

    def __init__(self, rows: int, out: Path | None, console: Console | None = None) -> None:
        super().__init__(rows, console)
        self.report: Report | None = None
        self._out = out

    def keep(self, report: Report) -> None:
        """Store the report, rewrite the file and, in a log, print a line."""
        self.report = report
        self.finish_part()
        if self._out is not None and show.can_be_replaced(self._out):
            show.write_json(self._out, as_json(report))
        self._log(f"{show.operator_line(report.results[-1])} ({self._place()})")


def run_suite(plan: SuitePlan, repeats: int, out: Path | None) -> None:
    """Measure and show the results. If it ends early, the rows so far are still printed and written to the file."""
    progress, bench = SuiteProgress(count_rows(plan), out), show.Bench(plan.device, out)
    try:
        with progress:
            run(plan, repeats, progress.tell, progress.keep)
    finally:
        if progress.report is not None:
            show_report(progress.report, bench)


def as_json(report: Report) -> dict[str, Any]:
    """The contents of the file: seconds, bytes, FLOP/s. A stopped run has fewer results than `planned_rows`."""
    return {
        "kind": "ops",
        "environment": report.environment,
        "ceilings": asdict(report.ceilings),
        "shape": {**asdict(report.shape), "dtype": str(report.shape.dtype).removeprefix("torch.")},
        "planned_rows": report.planned,
        "results": [asdict(result) for result in report.results],
    }


def show_report(report: Report, bench: show.Bench) -> None:
    """Print the tables and write the JSON."""
    shape = report.shape
    bench.print_device(report.ceilings)
    bench.console.print(f"{shape.tokens} tokens of width {shape.width}, {shape.dtype}".replace("torch.", ""))
    show.print_operators(bench.console, report.results)
    if len(report.results) < report.planned:
        bench.console.print(f"stopped early: {len(report.results)} of {report.planned} rows were measured")
    show.save_report(bench.console, bench.out, as_json(report))


def peers(operator: str) -> dict[str, Function]:
    """The installed peer implementations of an operator; they take the inputs of its case."""
    candidates: dict[str, dict[str, Function]] = {
        "depth_attention": {"fla": _fla_attention, "liger_kernel": _liger_attention},
        "manifold_hyper": {"liger_kernel": _liger_manifold_hyper},
        "gated_delta": {"fla": _fla_gated_delta},
        "gated_delta_long": {"fla": _fla_gated_delta},
        "kimi_delta": {"fla": _fla_kimi_delta},
        "linear_cross_entropy": {"liger_kernel": _liger_cross_entropy},
        "training_cross_entropy": {"liger_kernel": _liger_cross_entropy},
    }
    return {name: peer for name, peer in candidates.get(operator, {}).items() if find_spec(name) is not None}


def _fla_attention(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
    from fla.ops.attnres import fused_attnres

    return [fused_attnres(query, list(sources), gain)]


def _liger_attention(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
    """Liger takes stacked sources, so the time includes stacking them."""
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    return [LigerAttnResFunction.apply(torch.stack(sources), query, gain, 1e-6)]


def _fla_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Sequence[Tensor]:
    """fla refuses the backward pass on Hopper with Triton 3.4.0 to 3.7.0, which miscompile it (its issue 640)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return [chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]]


def _fla_kimi_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Sequence[Tensor]:
    from fla.ops.kda import chunk_kda

    return [chunk_kda(q, k, v, g, beta, scale=1.0)[0]]


def _liger_manifold_hyper(
    X: Tensor, y: Tensor, post: Tensor, mix: Tensor, phi: Tensor, a: Tensor, b: Tensor
) -> Sequence[Tensor]:
    """Liger's three operators of one junction; its Sinkhorn normalizes rows first, at the same cost."""
    from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction

    X = LigerMHCPostResFunction.apply(X, y, post, mix)
    settings = (True, 20, 1e-6, 0.0, 1e-6, 2.0)
    pre, post, mix = LigerMHCCoeffsFunction.apply(X, phi.T.to(X.dtype), b, *a.unbind(), *settings)
    return [LigerMHCPreFunction.apply(X, pre), X, post, mix]


def _liger_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Sequence[Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return [LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-5)(weight.to(hidden.dtype), hidden, targets)]
