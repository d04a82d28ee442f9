"""FP8 codes: launching the kernels, three for all weights of one shape and one for any other tensor.

Each fp32 weight is read twice, and its code is written; another kernel reads the codes and writes them transposed.
Other tensors are read only once: with torch 2.11's compiler, max|x| of 32,768 × 8,192 alone takes four times as long as
a copy (0.999 ms on an H200).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, addresses, cdiv, dense_like, device_guard, either, triton_type
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors
from residua.ops.low_precision.fp8 import E4M3, E4M3_MAX, E5M2, EMPTY_SCALE, EncodedWeight

kernels = Kernels("residua.ops.fp8_codes.kernels")

BLOCK = 65536 if INTERPRETED else 8192
TILE = 128
"""Rows and columns of codes that a program transposes: a cache line each."""


class Tiling(NamedTuple):
    """How programs share a tensor."""

    block: int
    """Values that a program processes at a time."""
    warps: int
    programs: int
    """Most programs per multiprocessor."""


# The fastest of seven on an H200, over widths of 1,280 to 8,192 (docs/lab/kernels.md). One program per block is 1 to 5
# percent faster still from 6,144 on, but torch.compile launches two reductions for more than 8,192 maxima.
TILINGS = {"values": Tiling(1024, 4, 16), "squares": Tiling(2048, 4, 8), "slopes": Tiling(4096, 8, 4)}


def encode_weights(weights: Sequence[Tensor], into: Sequence[EncodedWeight]) -> None:
    """The fused twin of the reference."""
    groups: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, EncodedWeight]]] = {}
    for weight, encoded in zip(weights, into, strict=True):
        groups.setdefault((weight.shape, weight.dtype), []).append((weight, encoded))
    for ((rows, columns), dtype), group in groups.items():
        count, first, size = len(group), group[0][0], rows * columns
        codes, turned, scales = zip(*(encoded for _, encoded in group), strict=True)
        table = addresses([w for w, _ in group], [t.data_ptr() for t in (*codes, *scales)])
        bits = torch.zeros(count, dtype=torch.int32, device=first.device)
        sizes = {"W": triton_type(dtype), "BLOCK": BLOCK, "num_warps": 8}
        with device_guard(first):
            kernels.largest_kernel[(cdiv(size, BLOCK), count)](table, bits, size, **sizes)
            kernels.encode_kernel[(cdiv(size, BLOCK), count)](
                table, bits, count, size, LIMIT=E4M3_MAX, EMPTY=EMPTY_SCALE, STEPWISE=INTERPRETED, **sizes
            )
        # not in encode_kernel: transposing tiles there gave wrong codes of float32 weights on an H200 (Triton 3.6)
        transpose_codes([pair for pair in zip(codes, turned, strict=True) if pair[1] is not None])


def transpose_codes(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the transpose [K, N] of codes [N, K], all of one shape, with one launch. Moves bytes, so nothing rounds.

    A step of 24 layers of 2,048 with two micro-batches takes 1.5 % less time than with a `copy_` for each matrix
    (docs/lab/kernels.md). To compare, copy here and run `residua bench step mgr-l-prenorm model.layers=24
    model.width=2048 model.ffn.hidden=8192 model.attention.heads=16 train.micro_batch=8 train.accumulate=2
    train.precision=fp8`.
    """
    if pairs:
        codes, turned = zip(*pairs, strict=True)
        rows, columns = codes[0].shape
        table = addresses(codes, [t.data_ptr() for t in turned])
        with device_guard(codes[0]):
            kernels.transpose_kernel[(cdiv(rows, TILE) * cdiv(columns, TILE), len(codes))](
                table, len(codes), rows, columns, TILE=TILE, num_warps=8
            )


@launcher("fp8_values")
def _values(x: Tensor, scale: Tensor, gradient: bool) -> Iterator[list[Tensor]]:
    """The codes of x, and the bits of its largest magnitude."""
    outputs = _empty("values", x, gradient)
    yield outputs
    _launch("values", scale, x, None, None, *outputs)


@launcher("fp8_squares")
def _squares(h: Tensor, scale: Tensor) -> Iterator[list[Tensor]]:
    """a = relu(h)², its codes, and the bits of its largest magnitude."""
    outputs = [dense_like(h), *_empty("squares", h, False)]
    yield outputs
    _launch("squares", scale, h, None, *outputs)


@launcher("fp8_slopes")
def _slopes(g: Tensor, a: Tensor, scale: Tensor) -> Iterator[list[Tensor]]:
    """p = g ⊙ 2√a, its codes, and the bits of its largest magnitude."""
    outputs = [dense_like(g), *_empty("slopes", g, True)]
    yield outputs
    _launch("slopes", scale, g, a, *outputs)


def _empty(kind: str, x: Tensor, gradient: bool) -> list[Tensor]:
    """The codes of x, and one maximum per program."""
    tiling = TILINGS[kind]
    programs = max(1, min(cdiv(x.numel(), tiling.block), tiling.programs * multiprocessors(x)))
    return [dense_like(x, E5M2 if gradient else E4M3), x.new_empty(programs, dtype=torch.int32)]


def _launch(
    kind: str, scale: Tensor, x: Tensor, a: Tensor | None, y: Tensor | None, codes: Tensor, bits: Tensor
) -> None:
    block, warps, _ = TILINGS[kind]
    kernels.values_kernel[(len(bits),)](
        x.contiguous(), either(a, x).contiguous(), scale, either(y, x), codes, bits, x.numel(),
        KIND=kind, GRADIENT=codes.dtype is E5M2, STEPWISE=INTERPRETED, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _largest(bits: Tensor) -> Tensor:
    return bits.amax().view(torch.float32)


def encode_values(x: Tensor, scale: Tensor, *, gradient: bool = False) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference."""
    codes, bits = _values(x, scale, gradient)
    return codes, _largest(bits)


def encode_squares(h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused twin of the reference."""
    a, codes, bits = _squares(h, scale)
    return a, codes, _largest(bits)


def encode_slopes(g: Tensor, a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused twin of the reference."""
    p, codes, bits = _slopes(g, a, scale)
    return p, codes, _largest(bits)
