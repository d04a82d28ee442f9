"""Launching the kernels of attention over depth, which compute a source's scores and gradients for many readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, addresses, aligned, cdiv, dense_like, extent, next_power_of_2
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import INTERPRETED
from residua.ops.depth_attention.plan import MAX_FUSED_READERS
from residua.ops.depth_attention.tiles import (
    NUMBERS,
    SLOPES,
    UNROLL,
    mix_tile,
    piece_tile,
    pitch,
    row_tile,
    scores_gradient_tile,
    scores_tile,
    shares,
    stack_tile,
)

kernels = Kernels("residua.ops.depth_attention.kernels")
kernels_backward = Kernels("residua.ops.depth_attention.kernels_backward")
kernels_block = Kernels("residua.ops.depth_attention.kernels_block")


def row_address(scores: Tensor, index: int) -> int:
    """The address of a row of scalars."""
    return scores.data_ptr() + index * scores.stride(0) * scores.element_size()


def parts(u: Tensor) -> Tensor:
    """u [reads, C] as the sum of two bf16 parts [reads, 2, C]."""
    coarse = u.bfloat16()
    return torch.stack([coarse, (u - coarse).bfloat16()], 1)


@launcher("depth_parts")
def depth_parts(u: Tensor) -> Iterator[Tensor]:
    """`parts` as an operator, because a compiler might skip the rounding."""
    yield parts(u)


@launcher("depth_scores")
def depth_scores(v: Tensor, u: Tensor, first: int, count: int, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    """z_l = rstd (u_l · v) [count, pitch] for readers from `first` on, and rstd [pitch]; u may be in `parts`."""
    outputs = _empty_scores(v, count)
    yield outputs
    _launch_scores(None, v, None, u, *outputs, first, eps)


def _empty_scores(v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length = pitch(extent(v)[1])
    return v.new_empty(count, length, dtype=torch.float32), v.new_empty(length, dtype=torch.float32)


@launcher("depth_sum_scores")
def depth_sum_scores(
    base: Tensor, y: Tensor, u: Tensor, first: int, count: int, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """v = base + y, and `depth_scores` of v."""
    v, (z, rstd) = torch.empty_like(y), _empty_scores(y, count)
    yield v, z, rstd
    _launch_scores(base, y, v, u, z, rstd, first, eps)


def _launch_scores(
    base: Tensor | None, y: Tensor, v: Tensor | None, u: Tensor, z: Tensor, rstd: Tensor, first: int, eps: float
) -> None:
    width, tokens = extent(y)
    if tokens == 0:
        return
    y = aligned(y)
    tile = scores_tile(width, len(z), u, tokens)
    kernels.scores_kernel[(cdiv(tokens, tile["TOKENS"]),)](
        y if base is None else aligned(base), y, y if v is None else v, u, z, rstd,
        tokens, first, len(z), z.stride(0), eps, ADD=base is not None, **tile,
    )  # fmt: skip


@launcher("depth_mix")
def depth_mix(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """h = Σ_i softmax(z)_i v_i and lse [pitch]; source i's score is scores[i][rows[i]]."""
    h, lse = dense_like(sources[0]), scores[0].new_empty(scores[0].shape[1])
    yield h, lse
    width, tokens = extent(h)
    if tokens:
        tile = mix_tile(width)
        sources = [aligned(v) for v in sources]
        kernels.mix_kernel[(cdiv(tokens, tile["TOKENS"]), cdiv(width, tile["COLUMNS"]))](
            addresses(sources, [*map(row_address, scores, rows)]), h, lse,
            tokens, len(sources), LANES=32, UNROLL=UNROLL, **tile,
        )  # fmt: skip


@launcher("depth_mix_group")
def depth_mix_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> Iterator[list[Tensor]]:
    """`depth_mix` for consecutive readers; rows[i] has the first one's scores: lse [readers, pitch], then each h."""
    lse, h = scores[0].new_empty(readers, scores[0].shape[1]), [dense_like(sources[0]) for _ in range(readers)]
    yield [lse, *h]
    width, tokens = extent(h[0])
    if tokens:
        count, length, tile = len(sources), lse.stride(0), stack_tile(h[0], readers, columns=128, stages=2)
        sources, weights = [aligned(v) for v in sources], lse.new_empty(count, length, readers)
        first = [*map(row_address, scores, rows)]
        table = addresses(sources, [*(o.data_ptr() for o in h), *first])
        kernels.weights_kernel[(cdiv(tokens, NUMBERS["TOKENS"]),)](
            table, weights, lse, tokens, count, length, READERS=readers, SIZE=_numbers(readers), **NUMBERS
        )
        kernels.mix_group_kernel[(cdiv(tokens, tile["TOKENS"]), cdiv(width, tile["COLUMNS"]))](
            table, weights, h[0], tokens, count, length, READERS=readers, **tile
        )


@launcher("depth_sum_read")
def depth_sum_read(
    base: Tensor, y: Tensor, u: Tensor, reader: int,
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """`depth_sum_scores` for one reader, then `depth_mix` of the sources and v: v, z, rstd, h, lse."""
    v, (z, rstd) = torch.empty_like(y), _empty_scores(y, 1)
    h, lse = torch.empty_like(v), torch.empty_like(rstd)
    yield v, z, rstd, h, lse
    width, tokens = extent(v)
    if tokens:
        tile = row_tile(width)
        sources = [aligned(s) for s in sources]
        kernels.sum_read_kernel[(cdiv(tokens, tile["TOKENS"]),)](
            addresses(sources, [*map(row_address, scores, rows)]), aligned(base), aligned(y), aligned(u[reader]),
            v, z, rstd, h, lse, tokens, len(sources), eps, LANES=8, UNROLL=UNROLL, **tile,
        )  # fmt: skip


@launcher("depth_stats")
def depth_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Iterator[Tensor]:
    """[2, pitch]: a read's lse and δ = dh · h."""
    stats = lse.new_empty(2, len(lse))
    yield stats
    width, tokens = extent(h)
    if tokens:
        tile = row_tile(width)
        kernels_backward.stats_kernel[(cdiv(tokens, tile["TOKENS"]),)](
            aligned(dh), aligned(h), lse, stats, tokens, len(lse), **tile
        )


@launcher("depth_source_gradient")
def depth_source_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """A source's gradient [..., C] from the readers from `first` on, and the du [readers of the model, C] so far.

    z's first len(dh) rows belong to these readers; `onward` is the gradient that reaches the source on other paths.
    """
    dv, new_du = torch.empty_like(v), torch.empty_like(u)
    yield dv, new_du
    if extent(v)[1] == 0:
        new_du.zero_() if du is None else new_du.copy_(du)
        return
    v, onward = aligned(v), None if onward is None else aligned(onward)
    dh, stats = [aligned(g) for g in dh], [aligned(s) for s in stats]
    how = _few_readers_gradient if len(dh) <= MAX_FUSED_READERS else _many_readers_gradient
    du_parts = how(v, z, rstd, u, first, onward, dh, stats, dv)
    _add_parts(du_parts, du, new_du, first)


def _few_readers_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], dv: Tensor,
) -> Tensor:  # fmt: skip
    width, tokens = extent(v)
    tile = piece_tile(v, len(dh))
    parts, tiles = shares(v, cdiv(tokens, tile["TOKENS"]), per_core=8 / tile.get("num_warps", 1))
    du_parts = u.new_empty(parts, len(dh), width)
    kernels_backward.few_readers_backward_kernel[(parts,)](
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
    kernels_backward.mix_backward_kernel[(cdiv(tokens, tile["TOKENS"]),)](
        table, v, v if onward is None else onward, z, rstd,
        dv, slopes, pull, tokens, len(dh), z.stride(0), ADD=onward is not None, UNROLL=UNROLL, **tile,
    )  # fmt: skip
    return _scores_gradient(table, v, slopes, pull, u, first)


@launcher("depth_block_gradient")
def depth_block_gradient(
    values: Sequence[Tensor], scores: Sequence[Tensor], rstds: Sequence[Tensor],
    u: Tensor, first: int, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """du, then `depth_source_gradient` of several sources from the same readers: the last rows of each one's scores."""
    new_du, dv = torch.empty_like(u), [torch.empty_like(v) for v in values]
    yield [new_du, *dv]
    width, tokens = extent(dv[0])
    if tokens == 0:
        new_du.zero_() if du is None else new_du.copy_(du)
        return
    values, count, length = [aligned(v) for v in values], len(dh), rstds[0].shape[0]
    dh, stats = [aligned(g) for g in dh], [aligned(s) for s in stats]
    size = len(values)
    slopes, pull = values[0].new_empty(size, count, length), u.new_empty(size, length)
    tile = stack_tile(values[0], size, columns=256, stages=1)
    parts = cdiv(width, tile["COLUMNS"])
    weights, dots = u.new_empty(count, length, size), u.new_empty(parts, count, length, size)
    pointers = [t.data_ptr() for t in (*stats, *values, *dv)]
    few = cdiv(tokens, NUMBERS["TOKENS"])
    table = addresses(
        dh, [*pointers, *(row_address(z, len(z) - count) for z in scores), *(r.data_ptr() for r in rstds)]
    )
    kernels_block.block_weights_kernel[(few,)](
        table, weights, tokens, count, length, SOURCES=size, SIZE=_numbers(size), **NUMBERS
    )
    kernels_block.block_backward_kernel[(cdiv(tokens, tile["TOKENS"]), parts)](
        table, values[0], weights, dots, tokens, count, length, SOURCES=size, **tile
    )
    kernels_block.block_slopes_kernel[(cdiv(tokens, SLOPES["TOKENS"]),)](
        table, weights, dots, slopes, pull, tokens, count, length,
        C=width, PARTS=parts, SOURCES=size, PADDED=next_power_of_2(size), **SLOPES,
    )  # fmt: skip
    _add_parts(_scores_gradient(table, values[0], slopes, pull, u, first), du, new_du, first)


def _numbers(each: int) -> int:
    """How many numbers a program with `NUMBERS` tokens processes at once, `each` per token."""
    return NUMBERS["TOKENS"] * next_power_of_2(each)


def _scores_gradient(table: Tensor, v: Tensor, slopes: Tensor, pull: Tensor, u: Tensor, first: int) -> Tensor:
    """Add the gradient through the scores to those of the sources in `table`, shaped like v; returns du in parts."""
    (width, tokens), (size, count, length) = extent(v), slopes.shape
    tile = scores_gradient_tile(width, count, v)
    blocks, per_core = cdiv(width, tile["COLUMNS"]), 2 if tile.get("num_warps") == 8 else 3
    parts, tiles = shares(v, cdiv(tokens, tile["TOKENS"]), per_core / blocks)
    du_parts = u.new_empty(parts, count, width)
    kernels_block.scores_backward_kernel[(blocks, parts)](
        table, v, slopes, pull, u, du_parts, tokens, first, count, length, tiles, SOURCES=size, **tile
    )
    return du_parts


def _add_parts(du_parts: Tensor, du: Tensor | None, new_du: Tensor, first: int) -> None:
    parts, count, width = du_parts.shape
    block = 4096 if INTERPRETED else 32
    kernels_backward.add_parts_kernel[(cdiv(new_du.numel(), block),)](
        du_parts, du_parts if du is None else du, new_du, new_du.numel(), first * width, count * width, parts,
        ADD=du is not None, PARTS=64 if parts <= 64 else 256, BLOCK=block,
    )  # fmt: skip


@launcher("depth_attend")
def depth_attend(sources: Sequence[Tensor], u: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """h [..., C], lse [pitch], scores and rstd [sources, pitch] of one query u [C]."""
    h = dense_like(sources[0])
    width, tokens = extent(h)
    count, row = len(sources), pitch(tokens)
    lse, scores, rstd = u.new_empty(row), u.new_empty(count, row), u.new_empty(count, row)
    yield h, lse, scores, rstd
    if tokens:
        sources = [aligned(v) for v in sources]
        tile = row_tile(width)
        kernels.attend_kernel[(cdiv(tokens, tile["TOKENS"]),)](
            addresses(sources, ()), aligned(u), h, lse, scores, rstd,
            tokens, len(sources), pitch(tokens), eps, UNROLL=UNROLL, **tile,
        )  # fmt: skip


@launcher("depth_attend_backward")
def depth_attend_backward(
    sources: Sequence[Tensor], u: Tensor, dh: Tensor, h: Tensor, lse: Tensor, scores: Tensor, rstd: Tensor
) -> Iterator[list[Tensor]]:
    """du [C], then the gradient of each source."""
    du, grads = torch.empty_like(u), [torch.empty_like(v) for v in sources]
    yield [du, *grads]
    width, tokens = extent(h)
    if tokens == 0:
        du.zero_()
        return
    sources = [aligned(v) for v in sources]
    tile = row_tile(width)
    parts, tiles = shares(h, cdiv(tokens, tile["TOKENS"]), per_core=16)
    du_parts = u.new_empty(parts, width)
    kernels_backward.attend_backward_kernel[(parts,)](
        addresses(sources, [g.data_ptr() for g in grads]), aligned(u), aligned(dh), h, lse, scores, rstd, du_parts,
        tokens, len(sources), pitch(tokens), tiles, **tile,
    )  # fmt: skip
    torch.sum(du_parts, 0, out=du)
