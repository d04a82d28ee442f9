"""What the device can do at best, measured in the same run as everything that is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from residua.bench.timing import Sample, time_each


@dataclass(frozen=True)
class Ceilings:
    """Copy bandwidth (bytes read plus written, per second) and the rate of a large matrix product in `dtype`."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    dtype: str


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy a tensor far larger than any cache, and multiply two square matrices; random data, medians.

    The product is in the precision that training uses there: bf16 on a GPU, fp32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    elements, side, repeats = (2**30, 8192, 20) if on_gpu else (2**24, 512, 5)

    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = _median(lambda: target.copy_(source), repeats, device)
    bytes_moved = 2 * source.numel() * source.element_size()

    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = _median(lambda: torch.mm(a, b, out=product), repeats, device)
    return Ceilings(bytes_moved / copy, 2 * side**3 / matmul, str(dtype).removeprefix("torch."))


def _median(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    time_each(work, 3, device)
    return Sample.of(time_each(work, repeats, device)).median
