"""Compares FP8 linear layers with bf16 by size: the product alone, and including the rounding of its input.

On a CPU, where bf16 is mostly emulated, the baseline is fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear

from residua.ops.low_precision.fp8 import Fp8, encode_fp8
from residua.quantize.fp8_gemm import SCALINGS, Fp8Projection, find_product
from residua.quantize.schemes import find_scheme
from residua.report.terminal import new_table
from residua.train.timing import Sample

SCHEMES = ("fp8-row", "fp8-group", "fp8")


@dataclass(frozen=True)
class LinearResult:
    """One size and scheme: seconds of the plain layer, of the FP8 product, and of the product with input rounding."""

    tokens: int
    inputs: int
    outputs: int
    scheme: str
    plain: Sample
    product: Sample | None = None
    layer: Sample | None = None
    disagreement: float | None = None
    problem: str | None = None


def bench_linear(
    tokens: int, widths: Sequence[tuple[int, int]], device: torch.device, *, repeats: int, tell: Callable[[str], None]
) -> list[LinearResult]:
    """Time [tokens, inputs] × [outputs, inputs]ᵀ for every (inputs, outputs) and scheme."""
    results = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for inputs, outputs in widths:
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        w = torch.randn(outputs, inputs, device=device, dtype=dtype) * inputs**-0.5
        plain = Sample.measure(partial(linear, x, w), repeats, device, warmup=5)
        for scheme in SCHEMES:
            tell(f"{tokens} × {inputs} → {outputs}, {scheme}")
            results.append(_scheme(x, w, scheme, plain, repeats))
    return results


def _scheme(x: Tensor, w: Tensor, scheme: str, plain: Sample, repeats: int) -> LinearResult:
    scaling, tile = SCALINGS[scheme]
    product = find_product(scaling, x.device)
    shape = (x.shape[0], x.shape[1], w.shape[0], scheme, plain)
    if product is None:
        return LinearResult(*shape, problem=f"no {scaling}-wise FP8 product on this device")
    chosen = find_scheme(scheme)
    weight = cast(Fp8, chosen.weight(w))
    low = encode_fp8(x, tile)
    layer = Fp8Projection(weight, tile, product)
    torch.compiler.reset()  # one method is compiled for every size and scheme, up to a limit
    rounded: Any = torch.compile(layer, dynamic=False, fullgraph=True) if x.is_cuda else layer
    expected = linear(chosen.activation(x), weight.dequantize())
    timed = partial(Sample.measure, repeats=repeats, device=x.device, warmup=5)
    with torch.no_grad():
        return LinearResult(
            *shape,
            product=timed(lambda: product(low.codes, weight.codes, low.scale, weight.scale)),
            layer=timed(lambda: rounded(x)),
            disagreement=float((layer(x).float() - expected).norm() / expected.norm()),
        )


def print_linear(console: Console, results: Sequence[LinearResult]) -> None:
    """Print one row per size and scheme; × is the speedup over the plain layer."""
    measured = ("plain ms", "product ms", "×", "with rounding ms", "×", "from simulation")
    table = new_table(("tokens × inputs → outputs", "scheme"), measured)
    for row in results:
        table.add_row(f"{row.tokens} × {row.inputs} → {row.outputs}", row.scheme, *_cells(row))
    console.print(table)
    console.print(
        "plain: bf16 on a GPU, fp32 on a CPU. ×: speed-up over plain. with rounding: including scaling and "
        "rounding of the input (compiled on a GPU). from simulation: relative distance to the simulated product.",
        soft_wrap=True,
    )


def _cells(row: LinearResult) -> list[str]:
    first = f"{row.plain.median * 1e3:.3f}"
    if row.product is None or row.layer is None:
        return [first, row.problem or "–"]
    speeds = [(s.median * 1e3, row.plain.median / s.median) for s in (row.product, row.layer)]
    return [first, *(cell for ms, times in speeds for cell in (f"{ms:.3f}", f"{times:.2f}")), f"{row.disagreement:.1e}"]
