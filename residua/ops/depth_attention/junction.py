"""The operators that `deferred.py` is made of; a source's scores and gradients are for many readers at once.

None is differentiated: `deferred.py` says what the gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.ops._runtime import fused as shared
from residua.ops._runtime.addresses import addresses
from residua.ops._runtime.launch import aligned, divided, extent, on, operator, power
from residua.ops.depth_attention.launch import (
    NUMBERS,
    SLOPES,
    UNROLL,
    kernels,
    mix_tile,
    piece_tile,
    pitch,
    row,
    row_tile,
    scores_gradient_tile,
    scores_tile,
    shares,
    stack_tile,
)
from residua.ops.depth_attention.plan import FEW


def _parts_output(u: Tensor) -> Tensor:
    return u.new_empty(len(u), 2, u.shape[1], dtype=torch.bfloat16)


@operator("depth_parts(Tensor u) -> Tensor", _parts_output)
def depth_parts(u: Tensor) -> Tensor:
    """u [reads, C] as the sum of two bf16 parts [reads, 2, C]; opaque, as a compiler may leave out the rounding."""
    coarse = u.bfloat16()
    return torch.stack([coarse, (u - coarse).bfloat16()], 1)


def _scores_outputs(v: Tensor, u: Tensor, first: int, count: int, eps: float) -> tuple[Tensor, Tensor]:
    length = pitch(extent(v)[1])
    return v.new_empty(count, length, dtype=torch.float32), v.new_empty(length, dtype=torch.float32)


@operator("depth_scores(Tensor v, Tensor u, int first, int count, float eps) -> (Tensor, Tensor)", _scores_outputs)
def depth_scores(v: Tensor, u: Tensor, first: int, count: int, eps: float) -> tuple[Tensor, Tensor]:
    """z_l = rstd (u_l · v) [count, pitch] for the readers from `first` on, and rstd [pitch]; u may be in parts."""
    z, rstd = _scores_outputs(v, u, first, count, eps)
    _launch_scores(None, v, None, u, z, rstd, first, eps)
    return z, rstd


def _sum_outputs(
    base: Tensor, y: Tensor, u: Tensor, first: int, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), *_scores_outputs(y, u, first, count, eps)


@operator(
    "depth_sum_scores(Tensor base, Tensor y, Tensor u, int first, int count, float eps) -> (Tensor, Tensor, Tensor)",
    _sum_outputs,
)
def depth_sum_scores(
    base: Tensor, y: Tensor, u: Tensor, first: int, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """v = base + y, and `depth_scores` of v."""
    v, z, rstd = _sum_outputs(base, y, u, first, count, eps)
    _launch_scores(base, y, v, u, z, rstd, first, eps)
    return v, z, rstd


def _launch_scores(
    base: Tensor | None, y: Tensor, v: Tensor | None, u: Tensor, z: Tensor, rstd: Tensor, first: int, eps: float
) -> None:
    width, tokens = extent(y)
    if tokens == 0:
        return
    y = aligned(y)
    tile = scores_tile(width, len(z), u)
    with on(y):
        kernels().forward.scores_kernel[(divided(tokens, tile["TOKENS"]),)](
            y if base is None else aligned(base), y, y if v is None else v, u, z, rstd,
            tokens, first, len(z), z.stride(0), eps, ADD=base is not None, **tile,
        )  # fmt: skip


def _mix_outputs(sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    h = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    return h, scores[0].new_empty(scores[0].shape[1])


@operator("depth_mix(Tensor[] sources, Tensor[] scores, int[] rows) -> (Tensor, Tensor)", _mix_outputs)
def depth_mix(sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """h = Σ_i softmax(z)_i v_i and lse [pitch]; source i's score is scores[i][rows[i]]."""
    h, lse = _mix_outputs(sources, scores, rows)
    width, tokens = extent(h)
    if tokens:
        tile = mix_tile(width)
        sources = [aligned(v) for v in sources]
        with on(h):
            kernels().forward.mix_kernel[(divided(tokens, tile["TOKENS"]), divided(width, tile["COLUMNS"]))](
                addresses(sources, [*map(row, scores, rows)]), h, lse,
                tokens, len(sources), LANES=32, UNROLL=UNROLL, **tile,
            )  # fmt: skip
    return h, lse


def _group_outputs(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> list[Tensor]:
    like = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    others = [torch.empty_like(like) for _ in range(readers - 1)]
    return [scores[0].new_empty(readers, scores[0].shape[1]), like, *others]


@operator("depth_mix_group(Tensor[] sources, Tensor[] scores, int[] rows, int readers) -> Tensor[]", _group_outputs)
def depth_mix_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> list[Tensor]:
    """`depth_mix` for some readers in a row, the first's scores being rows[i]: lse [readers, pitch], then each h."""
    lse, *h = outputs = _group_outputs(sources, scores, rows, readers)
    width, tokens = extent(h[0])
    if tokens:
        count, length, tile = len(sources), lse.stride(0), stack_tile(h[0], readers, columns=128, stages=2)
        sources, weights = [aligned(v) for v in sources], lse.new_empty(count, length, readers)
        first = [*map(row, scores, rows)]
        table = addresses(sources, [*(o.data_ptr() for o in h), *first])
        with on(lse):
            kernels().forward.weights_kernel[(divided(tokens, NUMBERS["TOKENS"]),)](
                table, weights, lse, tokens, count, length, READERS=readers, SIZE=_numbers(readers), **NUMBERS
            )
            kernels().forward.mix_group_kernel[(divided(tokens, tile["TOKENS"]), divided(width, tile["COLUMNS"]))](
                table, weights, h[0], tokens, count, length, READERS=readers, **tile
            )
    return outputs


def _sum_read_outputs(
    base: Tensor, y: Tensor, u: Tensor, reader: int,
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    v, z, rstd = _sum_outputs(base, y, u, reader, 1, eps)
    return v, z, rstd, torch.empty_like(v), torch.empty_like(rstd)


@operator(
    "depth_sum_read(Tensor base, Tensor y, Tensor u, int reader, Tensor[] sources, Tensor[] scores, int[] rows,"
    " float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sum_read_outputs,
)
def depth_sum_read(
    base: Tensor, y: Tensor, u: Tensor, reader: int,
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`depth_sum_scores` for one reader and, after it, `depth_mix` of the sources and v: v, z, rstd, h, lse."""
    v, z, rstd, h, lse = outputs = _sum_read_outputs(base, y, u, reader, sources, scores, rows, eps)
    width, tokens = extent(v)
    if tokens:
        tile = row_tile(width)
        sources = [aligned(s) for s in sources]
        with on(v):
            kernels().forward.sum_read_kernel[(divided(tokens, tile["TOKENS"]),)](
                addresses(sources, [*map(row, scores, rows)]), aligned(base), aligned(y), aligned(u[reader]),
                v, z, rstd, h, lse, tokens, len(sources), eps, LANES=8, UNROLL=UNROLL, **tile,
            )  # fmt: skip
    return outputs


def _stats_outputs(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    return lse.new_empty(2, len(lse))


@operator("depth_stats(Tensor dh, Tensor h, Tensor lse) -> Tensor", _stats_outputs)
def depth_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    """[2, pitch]: a read's lse and δ = dh · h."""
    stats = _stats_outputs(dh, h, lse)
    width, tokens = extent(h)
    if tokens:
        tile = row_tile(width)
        with on(h):
            kernels().backward.stats_kernel[(divided(tokens, tile["TOKENS"]),)](
                aligned(dh), aligned(h), lse, stats, tokens, len(lse), **tile
            )
    return stats


def _gradient_outputs(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(v), torch.empty_like(u)


@operator(
    "depth_source_gradient(Tensor v, Tensor z, Tensor rstd, Tensor u, int first, Tensor? onward, Tensor[] dh,"
    " Tensor[] stats, Tensor? du) -> (Tensor, Tensor)",
    _gradient_outputs,
)
def depth_source_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A source's gradient [..., C] from the readers from `first` on, and du [readers of the model, C] so far.

    Theirs are the first len(dh) rows of z; `onward` is the gradient that reaches the source otherwise.
    """
    dv, new_du = _gradient_outputs(v, z, rstd, u, first, onward, dh, stats, du)
    if extent(v)[1] == 0:
        return dv, new_du.zero_() if du is None else new_du.copy_(du)
    v, onward = aligned(v), None if onward is None else aligned(onward)
    dh, stats = [aligned(g) for g in dh], [aligned(s) for s in stats]
    with on(v):
        how = _few_readers_gradient if len(dh) <= FEW else _many_readers_gradient
        du_parts = how(v, z, rstd, u, first, onward, dh, stats, dv)
        _add_parts(du_parts, du, new_du, first)
    return dv, new_du


def _few_readers_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], dv: Tensor,
) -> Tensor:  # fmt: skip
    width, tokens = extent(v)
    tile = piece_tile(v, len(dh))
    parts, tiles = shares(v, divided(tokens, tile["TOKENS"]), per_core=8 / tile.get("num_warps", 1))
    du_parts = u.new_empty(parts, len(dh), width)
    kernels().backward.few_readers_backward_kernel[(parts,)](
        addresses(dh, [s.data_ptr() for s in stats]), v, v if onward is None else onward, z, rstd, u, dv, du_parts,
        tokens, first, z.stride(0), tiles, READERS=len(dh), ADD=onward is not None, **tile,
    )  # fmt: skip
    return du_parts


def _many_readers_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], dv: Tensor,
) -> Tensor:  # fmt: skip
    width, tokens = extent(v)
    tile = row_tile(width)
    slopes, pull = v.new_empty(1, len(dh), z.shape[1]), torch.empty_like(rstd)[None]
    slopes[..., tokens:] = 0
    table = addresses(dh, [*(s.data_ptr() for s in stats), v.data_ptr(), dv.data_ptr()])
    kernels().backward.mix_backward_kernel[(divided(tokens, tile["TOKENS"]),)](
        table, v, v if onward is None else onward, z, rstd,
        dv, slopes, pull, tokens, len(dh), z.stride(0), ADD=onward is not None, UNROLL=UNROLL, **tile,
    )  # fmt: skip
    return _scores_gradient(table, v, slopes, pull, u, first)


def _block_outputs(
    values: Sequence[Tensor], scores: Sequence[Tensor], rstds: Sequence[Tensor],
    u: Tensor, first: int, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    new_du = torch.empty_like(u)
    return [new_du, *[torch.empty_like(v) for v in values]]


@operator(
    "depth_block_gradient(Tensor[] values, Tensor[] scores, Tensor[] rstds, Tensor u, int first, Tensor[] dh,"
    " Tensor[] stats, Tensor? du) -> Tensor[]",
    _block_outputs,
)
def depth_block_gradient(
    values: Sequence[Tensor], scores: Sequence[Tensor], rstds: Sequence[Tensor],
    u: Tensor, first: int, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """du, then `depth_source_gradient` of some sources from the same readers, the last rows of each one's scores."""
    new_du, *dv = outputs = _block_outputs(values, scores, rstds, u, first, dh, stats, du)
    width, tokens = extent(dv[0])
    if tokens == 0:
        new_du.zero_() if du is None else new_du.copy_(du)
        return outputs
    values, count, length = [aligned(v) for v in values], len(dh), rstds[0].shape[0]
    dh, stats = [aligned(g) for g in dh], [aligned(s) for s in stats]
    size = len(values)
    slopes, pull = values[0].new_empty(size, count, length), u.new_empty(size, length)
    tile = stack_tile(values[0], size, columns=256, stages=1)
    parts = divided(width, tile["COLUMNS"])
    weights, dots = u.new_empty(count, length, size), u.new_empty(parts, count, length, size)
    held = [t.data_ptr() for t in (*stats, *values, *dv)]
    few = divided(tokens, NUMBERS["TOKENS"])
    with on(u):
        table = addresses(dh, [*held, *(row(z, len(z) - count) for z in scores), *(r.data_ptr() for r in rstds)])
        run = kernels().backward
        run.block_weights_kernel[(few,)](
            table, weights, tokens, count, length, SOURCES=size, SIZE=_numbers(size), **NUMBERS
        )
        run.block_backward_kernel[(divided(tokens, tile["TOKENS"]), parts)](
            table, values[0], weights, dots, tokens, count, length, SOURCES=size, **tile
        )
        run.block_slopes_kernel[(divided(tokens, SLOPES["TOKENS"]),)](
            table, weights, dots, slopes, pull, tokens, count, length,
            C=width, PARTS=parts, SOURCES=size, PADDED=power(size), **SLOPES,
        )  # fmt: skip
        _add_parts(_scores_gradient(table, values[0], slopes, pull, u, first), du, new_du, first)
    return outputs


def _numbers(each: int) -> int:
    """How many numbers a program of `NUMBERS` works on at once, `each` for a token."""
    return NUMBERS["TOKENS"] * power(each)


def _scores_gradient(table: Tensor, v: Tensor, slopes: Tensor, pull: Tensor, u: Tensor, first: int) -> Tensor:
    """Add what comes through the scores to the gradients of some sources like v, those in `table`; du in parts."""
    (width, tokens), (size, count, length) = extent(v), slopes.shape
    tile = scores_gradient_tile(width, count, v)
    blocks, per_core = divided(width, tile["COLUMNS"]), 2 if tile.get("num_warps") == 8 else 3
    parts, tiles = shares(v, divided(tokens, tile["TOKENS"]), per_core / blocks)
    du_parts = u.new_empty(parts, count, width)
    kernels().backward.scores_backward_kernel[(blocks, parts)](
        table, v, slopes, pull, u, du_parts, tokens, first, count, length, tiles, SOURCES=size, **tile
    )
    return du_parts


def _add_parts(du_parts: Tensor, du: Tensor | None, new_du: Tensor, first: int) -> None:
    parts, count, width = du_parts.shape
    block = 4096 if shared.INTERPRETED else 32
    kernels().backward.add_parts_kernel[(divided(new_du.numel(), block),)](
        du_parts, du_parts if du is None else du, new_du, new_du.numel(), first * width, count * width, parts,
        ADD=du is not None, PARTS=64 if parts <= 64 else 256, BLOCK=block,
    )  # fmt: skip
