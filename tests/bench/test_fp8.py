"""FP8 linear layers are timed, compared with the simulation, and missing products are reported."""

import io
import json
from dataclasses import asdict

import torch
from rich.console import Console

from residua.bench.fp8 import bench_linear, print_linear
from residua.quantize.fp8_gemm import SCALINGS, find_product

CPU = torch.device("cpu")


def test_every_scheme_is_timed_or_states_a_reason() -> None:
    results = bench_linear(8, [(64, 48), (32, 16)], CPU, repeats=2, tell=lambda text: None)
    assert [(r.inputs, r.outputs) for r in results] == [(64, 48)] * 3 + [(32, 16)] * 3
    for row in results:
        if find_product(SCALINGS[row.scheme][0], CPU) is None:
            assert row.problem is not None and row.product is None
        else:
            assert row.product is not None and row.layer is not None and row.disagreement is not None
            assert row.product.median > 0 and row.disagreement < 1e-2
    text = io.StringIO()
    print_linear(Console(file=text, width=160), results)
    assert "8 × 64 → 48" in text.getvalue()
    assert json.loads(json.dumps([asdict(row) for row in results]))[0]["scheme"] in SCALINGS
