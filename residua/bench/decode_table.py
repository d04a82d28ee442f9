"""Decoding latencies as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from residua.bench.ceilings import Ceilings
from residua.bench.decode import DecodeResult
from residua.bench.show import number


def print_decode(console: Console, results: Sequence[DecodeResult], ceilings: Ceilings) -> None:
    """One row per model, batch size and case, ratios to the first case."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for title in ("model", "case", "engine"):
        table.add_column(title, no_wrap=True)
    for title in ("batch", "step µs", "p10–p90", "time ×", "tokens/s", "kernels", "GB/s", "of copy"):
        table.add_column(title, justify="right", no_wrap=True)
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
        "GB/s: weights and cache that a step reads, each once; of copy: over the copy bandwidth, which counts "
        "bytes read and written. kernels: launches in a step.",
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
