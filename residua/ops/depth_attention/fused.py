"""Attention over depth on fused kernels: the operators that launch them, and `depth_attention` for one read.

The operators are opaque to `torch.compile` and take no part in autograd; the functions that call them do. A source is
[..., C] and its tokens are all the leading axes; per-token scalars are fp32 rows of `pitch(tokens)`.
"""

# No `from __future__ import annotations` here: custom_op reads the signatures as they are.
import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops import fused as shared
from residua.ops.depth_attention import reference
from residua.ops.depth_attention.reference import Activation, KeyNorm

ADDRESSES = 32
"""Tensors per launch of the kernel that collects their addresses."""


def attend(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    norm_weight: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    key_norm: KeyNorm = "rms",
    activation: Activation = "softmax",
    return_weights: bool = False,
) -> Any:
    """`depth_attention` in one pass over the sources; its backward reads each once and writes its gradient once.

    One source has weight 1 whatever the query, whose gradient is then exactly zero: the reference's, not our rounding.
    """
    if len(sources) == 1:
        return reference.depth_attention(sources, query, norm_weight=norm_weight, scale=scale, eps=eps)
    u = scale * query.float() * (1.0 if norm_weight is None else norm_weight.float())
    return _attend(eps, u, *sources)


def serves(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    norm_weight: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    key_norm: KeyNorm = "rms",
    activation: Activation = "softmax",
    return_weights: bool = False,
) -> bool:
    """Whether the fused path takes these inputs: sources alike in shape and dtype, where kernels run."""
    if key_norm != "rms" or activation != "softmax" or return_weights or len(sources) == 0:
        return False
    first = sources[0]
    alike = all(v.shape == first.shape and v.dtype == first.dtype and v.device == first.device for v in sources)
    return alike and query.shape == first.shape[-1:] and shared.serves(first)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, u: Tensor, *sources: Tensor) -> Tensor:
        values = [v.contiguous() for v in sources]
        h, lse, scores, rstd = depth_attend(values, u, eps)
        ctx.save_for_backward(u, h, lse, scores, rstd, *values)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        u, h, lse, scores, rstd, *values = ctx.saved_tensors
        du, *dv = depth_attend_backward(values, u, dh.contiguous(), h, lse, scores, rstd)
        return None, du, *dv


@torch.compiler.allow_in_graph
def _attend(eps: float, u: Tensor, *sources: Tensor) -> Tensor:
    h: Tensor = _Attend.apply(eps, u, *sources)
    return h


@torch.library.custom_op("residua::depth_attend", mutates_args=())
def depth_attend(sources: Sequence[Tensor], u: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [..., C], lse [pitch], scores and rstd [sources, pitch] of one query u [C]."""
    h, lse, scores, rstd = _attend_outputs(sources, u, eps)
    width, tokens = _extent(h)
    if tokens:
        sources = [_aligned(v) for v in sources]
        tile = _row_tile(width)
        with _on(h):
            _kernels().attend_kernel[(_blocks(tokens, tile["TOKENS"]),)](
                _addresses(sources, [lse] * len(sources)), u.contiguous(), h, lse, scores, rstd,
                tokens, len(sources), pitch(tokens), eps, UNROLL=_unroll(), **tile,
            )  # fmt: skip
    return h, lse, scores, rstd


@depth_attend.register_fake
def _attend_outputs(sources: Sequence[Tensor], u: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    row = pitch(_extent(h)[1])
    return h, u.new_empty(row), u.new_empty(len(sources), row), u.new_empty(len(sources), row)


@torch.library.custom_op("residua::depth_attend_backward", mutates_args=())
def depth_attend_backward(
    sources: Sequence[Tensor], u: Tensor, dh: Tensor, h: Tensor, lse: Tensor, scores: Tensor, rstd: Tensor
) -> list[Tensor]:
    """du [C], then the gradient of each source."""
    grads = [torch.empty_like(v) for v in sources]
    width, tokens = _extent(h)
    if tokens == 0:
        return [torch.zeros_like(u), *grads]
    sources = [_aligned(v) for v in sources]
    tile = _row_tile(width)
    parts, tiles = _shares(h, _blocks(tokens, tile["TOKENS"]), per_core=16)
    du_parts = u.new_empty(parts, width)
    with _on(h):
        _kernels().attend_backward_kernel[(parts,)](
            _addresses(sources, grads), u.contiguous(), _aligned(dh), h, lse, scores, rstd, du_parts,
            tokens, len(sources), pitch(tokens), tiles, **tile,
        )  # fmt: skip
    return [du_parts.sum(0), *grads]


@depth_attend_backward.register_fake
def _(sources, u, dh, h, lse, scores, rstd):  # type: ignore[no-untyped-def]
    return [torch.empty_like(u), *(torch.empty_like(v) for v in sources)]


@torch.library.custom_op("residua::depth_scores", mutates_args=())
def depth_scores(v: Tensor, u: Tensor, first: int, count: int, eps: float) -> tuple[Tensor, Tensor]:
    """z_l = rstd (u_l · v) [count, pitch] for the readers from `first` on, and rstd [pitch]."""
    z, rstd = _scores_outputs(v, u, first, count, eps)
    _launch_scores(None, v, None, u, z, rstd, first, eps)
    return z, rstd


@depth_scores.register_fake
def _scores_outputs(v: Tensor, u: Tensor, first: int, count: int, eps: float) -> tuple[Tensor, Tensor]:
    row = pitch(_extent(v)[1])
    return u.new_empty(count, row), u.new_empty(row)


@torch.library.custom_op("residua::depth_sum_scores", mutates_args=())
def depth_sum_scores(
    base: Tensor, y: Tensor, u: Tensor, first: int, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """v = base + y, and `depth_scores` of v."""
    v = torch.empty_like(y)
    z, rstd = _scores_outputs(v, u, first, count, eps)
    _launch_scores(base, y, v, u, z, rstd, first, eps)
    return v, z, rstd


@depth_sum_scores.register_fake
def _(base, y, u, first, count, eps):  # type: ignore[no-untyped-def]
    return torch.empty_like(y), *_scores_outputs(y, u, first, count, eps)


def _launch_scores(
    base: Tensor | None, y: Tensor, v: Tensor | None, u: Tensor, z: Tensor, rstd: Tensor, first: int, eps: float
) -> None:
    width, tokens = _extent(y)
    if tokens == 0:
        return
    y = _aligned(y)
    tile = _product_tile(width, len(z), y)
    with _on(y):
        _kernels().scores_kernel[(_blocks(tokens, tile["TOKENS"]),)](
            y if base is None else _aligned(base), y, y if v is None else v, u, z, rstd,
            tokens, first, len(z), z.stride(0), eps, C=width, ADD=base is not None, **tile,
        )  # fmt: skip


@torch.library.custom_op("residua::depth_mix", mutates_args=())
def depth_mix(sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """h = Σ_i softmax(z)_i v_i and lse [pitch]; source i's score is scores[i][rows[i]]."""
    h, lse = _mix_outputs(sources, scores, rows)
    width, tokens = _extent(h)
    if tokens:
        columns = min(256, max(16, _power(width)))
        block = 2048 // columns
        sources = [_aligned(v) for v in sources]
        with _on(h):
            table = _addresses(sources, [z[row] for z, row in zip(scores, rows, strict=True)])
            _kernels().mix_kernel[(_blocks(tokens, block), _blocks(width, columns))](
                table, h, lse, tokens, len(sources), C=width, TOKENS=block, COLUMNS=columns, LANES=32, UNROLL=_unroll()
            )
    return h, lse


@depth_mix.register_fake
def _mix_outputs(sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    h = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    return h, scores[0].new_empty(scores[0].shape[1])


@torch.library.custom_op("residua::depth_stats", mutates_args=())
def depth_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    """[2, pitch]: a read's lse and δ = dh · h."""
    stats = lse.new_empty(2, len(lse))
    width, tokens = _extent(h)
    if tokens:
        tile = _row_tile(width)
        with _on(h):
            _kernels().stats_kernel[(_blocks(tokens, tile["TOKENS"]),)](
                _aligned(dh), _aligned(h), lse, stats, tokens, len(lse), **tile
            )
    return stats


@depth_stats.register_fake
def _(dh, h, lse):  # type: ignore[no-untyped-def]
    return lse.new_empty(2, len(lse))


@torch.library.custom_op("residua::depth_source_gradient", mutates_args=())
def depth_source_gradient(
    v: Tensor, z: Tensor, rstd: Tensor, u: Tensor, first: int,
    onward: Tensor | None, dh: Sequence[Tensor], stats: Sequence[Tensor], du: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A source's gradient [..., C] from all its readers, z's rows in order, and du [readers of the model, C] so far.

    `onward` is the gradient that reaches the source otherwise.
    """
    dv, new_du = torch.empty_like(v), torch.empty_like(u)
    width, tokens = _extent(v)
    if tokens == 0:
        return dv, new_du.zero_() if du is None else new_du.copy_(du)
    count, row = z.shape
    v, dh = _aligned(v), [_aligned(g) for g in dh]
    value_grad, slopes, pull = torch.empty_like(v), torch.empty_like(z), torch.empty_like(rstd)
    rows, products = _row_tile(width), _product_tile(width, count, v)
    blocks = _blocks(width, products["COLUMNS"])
    parts, tiles = _shares(v, _blocks(tokens, products["TOKENS"]), per_core=2 / blocks)
    du_parts = u.new_empty(parts, count, width)
    with _on(v):
        kernels = _kernels()
        kernels.mix_backward_kernel[(_blocks(tokens, rows["TOKENS"]),)](
            _addresses(dh, stats), v, v if onward is None else _aligned(onward), z, rstd, value_grad, slopes, pull,
            tokens, count, row, ADD=onward is not None, UNROLL=_unroll(), **rows,
        )  # fmt: skip
        kernels.scores_backward_kernel[(blocks, parts)](
            value_grad, v, slopes, pull, u, dv, du_parts, tokens, first, count, row, tiles, C=width, **products
        )
        block = 4096 if shared.INTERPRETED else 256
        kernels.add_parts_kernel[(_blocks(u.numel(), block),)](
            du_parts, du_parts if du is None else du, new_du, u.numel(), first * width, count * width, parts,
            ADD=du is not None, PARTS=16, BLOCK=block,
        )  # fmt: skip
    return dv, new_du


@depth_source_gradient.register_fake
def _(v, z, rstd, u, first, onward, dh, stats, du):  # type: ignore[no-untyped-def]
    return torch.empty_like(v), torch.empty_like(u)


def pitch(tokens: int) -> int:
    """Length of a row of per-token scalars: every row starts 16-byte aligned."""
    return (tokens + 15) // 16 * 16


@cache
def _kernels() -> Any:
    from residua.ops.depth_attention import triton

    assert isinstance(triton, ModuleType)
    return triton


def _extent(v: Tensor) -> tuple[int, int]:
    """Width and tokens."""
    return v.shape[-1], math.prod(v.shape[:-1])


def _aligned(x: Tensor) -> Tensor:
    """Contiguous at a 16-byte address: kernels are compiled for that alone."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _addresses(tensors: Sequence[Tensor], scalars: Sequence[Tensor]) -> Tensor:
    """int64 [2·tensors]: the addresses of the tensors, then of their scalars. A kernel writes it, not the host."""
    count = len(tensors)
    table = torch.empty(2 * count, dtype=torch.int64, device=tensors[0].device)
    for start in range(0, count, ADDRESSES):
        kernel = _kernels().address_kernel[(1,)]
        kernel(
            _padded(tensors[start : start + ADDRESSES]), _padded(scalars[start : start + ADDRESSES]),
            table, start, count, MOST=ADDRESSES, num_warps=1,
        )  # fmt: skip
    return table


def _padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (*tensors, *[tensors[0]] * (ADDRESSES - len(tensors)))


def _unroll() -> int:
    """Rows in flight at once."""
    return 2 if shared.INTERPRETED else 4


def _row_tile(width: int) -> dict[str, Any]:
    """For kernels that reduce over whole rows: a row in two pieces, one warp to a token, so no barriers."""
    low = 1 << max(0, (width - 1).bit_length() - 1)
    high = max(_power(width - low), min(256, low))
    tile = {"C": width, "LOW": low, "HIGH": high}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16}
    return {**tile, "TOKENS": 1, "num_warps": 1 if width <= 1536 else 4}


def _product_tile(width: int, readers: int, v: Tensor) -> dict[str, Any]:
    """For kernels that are matrix products between tokens and readers.

    From 64 readers on, four warps would make asynchronous products that still read a buffer while the pipeline loads
    the next tile into it: results that differ from run to run. Two warps make none.
    """
    padded = max(16, _power(readers))
    tile = {"NARROW": v.dtype == torch.bfloat16 and not shared.INTERPRETED, "READERS": padded}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, _power(width)))}
    if padded > 32:
        return {**tile, "TOKENS": 32, "COLUMNS": min(32, max(16, _power(width))), "num_warps": 2}
    return {**tile, "TOKENS": 64, "COLUMNS": min(64, max(16, _power(width)))}


def _shares(x: Tensor, blocks: int, per_core: float) -> tuple[int, int]:
    """Split `blocks` among programs that loop: how many programs, and how many blocks each."""
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    tiles = _blocks(blocks, max(2, round(cores * per_core)))
    return _blocks(blocks, tiles), tiles


def _power(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _on(x: Tensor) -> Any:
    return torch.cuda.device_of(x)
