"""The ceilings of a device: the copy bandwidth and matrix product rate that results are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from residua.train.timing import Sample


@dataclass(frozen=True)
class Ceilings:
    """Copy bandwidth (bytes read plus written, per second) and the rate of a large matrix product in `dtype`."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    dtype: str


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a copy much larger than any cache, and the product of two square matrices; random data, medians.

    The product is in the precision that training uses: bf16 on a GPU, fp32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    elements, side, repeats = (2**30, 8192, 20) if on_gpu else (2**24, 512, 5)

    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = Sample.measure(lambda: target.copy_(source), repeats, device).median
    bytes_moved = 2 * source.numel() * source.element_size()

    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = Sample.measure(lambda: torch.mm(a, b, out=product), repeats, device).median
    return Ceilings(bytes_moved / copy, 2 * side**3 / matmul, str(dtype).removeprefix("torch."))
