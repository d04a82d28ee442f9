"""Hyper-connections: tile sizes, and launching the kernels.

A step's forward pass reads X and y and writes X' and h, (2N + 2)C numbers per token. Its backward pass reads the
gradients of X' and h, X and y, and writes the gradients of X and y, (3N + 3)C; then it reads X' once more for φ's
gradient, a matrix product over tokens. Each direction has two kernels; they read another NC forward and (N + 2)C
backward, unless the cache still holds them. Fusing the following norm, given by its gain, moves no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, next_power_of_2, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.hyper_connection.kernels")
kernels_backward = Kernels("residua.ops.hyper_connection.kernels_backward")
kernels_weights = Kernels("residua.ops.hyper_connection.kernels_weights")


class Tile(NamedTuple):
    """Tokens and channels of a tile, warps, and limits for the compiler."""

    tokens: int
    block: int
    warps: int
    stages: int = 1
    """Stages of a pipeline of loads."""
    ahead: int = 0
    """Blocks that `spread` loads before it needs them: 0 or 1."""

    def lanes(self, size: int) -> int:
        """The number of threads that hold a tile's row of numbers of `size` bytes, at most 16 bytes per thread."""
        return self.block // min(16 // size, max(1, self.tokens * self.block // (32 * self.warps)))

    def settings(self) -> dict[str, Any]:
        return {"TOKENS": self.tokens, "BLOCK": self.block, "num_warps": self.warps, "num_stages": self.stages}


TILES = {
    "write": {2: Tile(64, 32, 4, 3), 4: Tile(16, 32, 4)},
    "read": {2: Tile(4, 256, 4), 4: Tile(4, 128, 4)},
    "sums": {2: Tile(4, 256, 4), 4: Tile(4, 128, 4)},
    "spread": {2: Tile(32, 32, 4, 2, ahead=1), 4: Tile(32, 16, 4)},
    "phi": {2: Tile(64, 128, 4, 4), 4: Tile(32, 64, 4)},
}
"""By kernel and by the bytes of a number. `read` and `sums` take fewer tokens where rows are longer than 1,024."""
PHI_PROGRAMS = 2
"""Programs per multiprocessor that sum φ's gradient."""
WEIGHTS_TOKENS = 32
"""Tokens per program that computes write weights: one warp, one token per thread."""


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of X and y; of post, mix and the input of pre, per token; and rstd · dz."""


@launcher("hyper_step")
def step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, norm: str,
    eps: float, gain: Tensor | None = None, norm_eps: float = 0.0,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """X' [M, N, C], h [M, C], z and the rstd of each of its numbers [M, Z], and pre [M, N]; then an empty [M, 0].

    With a gain, x = gain ⊙ RMS(h) replaces h, and h·X'_i and 1/rms(h) of each token [M, N + 1] come last.
    """
    tokens, n, _ = streams.shape
    after, hidden, logits, rstd = _empty_step(streams, update, phi, norm)
    weights, stats = (logits.new_empty((tokens, size)) for size in (n, 0 if gain is None else n + 1))
    yield after, hidden, logits, rstd, weights, stats
    if not tokens:
        return
    post, mix, parts = _dense(post), _dense(mix), _parts(phi, streams.dtype)
    write, read = _tile("write", streams), _whole_rows("read", streams)
    sizes = _numbers_of(streams, parts[0], norm)
    columns = sizes["Z"] + {"all": 1, "each": n, "none": 0}[norm]
    sums = logits.new_empty((tokens, columns))
    kernels.write_kernel[(cdiv(tokens, write.tokens),)](
        streams, update, post, mix, bias, parts, after, hidden, weights, sums, rstd,
        tokens, post.stride(0), mix.stride(0), eps,
        SUMS=columns, PARTS=len(parts), GIVEN=False, **sizes, **write.settings(),
    )  # fmt: skip
    if norm != "none":
        kernels.read_kernel[(cdiv(tokens, read.tokens),)](
            after, sums, scale, bias, gain, hidden, logits, rstd, weights, None if gain is None else stats,
            tokens, eps, norm_eps, SUMS=columns, NORMED=gain is not None, **sizes, **read.settings(),
        )  # fmt: skip


def _empty_step(streams: Tensor, update: Tensor, phi: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = (streams.shape[0], _numbers(streams, phi, norm))
    logits, rstd = (streams.new_empty(numbers, dtype=torch.float32) for _ in "zr")
    return torch.empty_like(streams), torch.empty_like(update), logits, rstd


@launcher("hyper_step_backward")
def step_backward(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, norm: str,
    gain: Tensor | None = None, hidden_stats: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """`Gradients`, then an empty [0]; with a gain, from x's gradient, then the gain's gradient [C] in float32."""
    g_streams, g_update, g_post, g_mix, g_pre, g_z = outputs = _empty_gradients(streams, update, logits)
    g_gain = g_post.new_empty(0 if gain is None else len(gain))
    yield *outputs, g_gain
    tokens = len(streams)
    g_hidden, post, mix, phi = g_hidden.contiguous(), _dense(post), _dense(mix), phi.to(streams.dtype)
    sums, spread = _whole_rows("sums", streams), _tile("spread", streams)
    sizes, strides = _numbers_of(streams, phi, norm), (post.stride(0), mix.stride(0))
    normed, shrink = gain is not None, torch.empty_like(g_pre)
    pull, partial = None, None
    if gain is not None:
        pull, partial = g_pre.new_empty(tokens), g_gain.new_empty((cdiv(tokens, spread.tokens), len(gain)))
    if tokens and norm != "none":
        kernels_backward.sums_kernel[(cdiv(tokens, sums.tokens),)](
            g_hidden, g_hidden if g_logits is None else g_logits.contiguous(), streams, update, post, mix, scale,
            gain, logits, rstd, weights, hidden_stats, g_pre, g_z, shrink, pull, tokens, *strides,
            HAS_LOGITS=g_logits is not None, NORMED=normed, **sizes, **sums.settings(),
        )  # fmt: skip
    if tokens:
        kernels_backward.spread_kernel[(cdiv(tokens, spread.tokens),)](
            g_hidden if g_after is None else g_after.contiguous(), g_hidden, g_z, shrink, streams, update, post,
            mix, weights, phi, gain, hidden_stats, pull, g_streams, g_update, g_post, g_mix, g_pre,
            partial, None, None, None, tokens, *strides, LANES=spread.lanes(streams.element_size()),
            AHEAD=spread.ahead, HAS_AFTER=g_after is not None, NORMED=normed, GIVEN=False, HAS_LOGITS=False,
            **sizes, **spread.settings(),
        )  # fmt: skip
    if partial is not None:
        sum_rows(partial, g_gain)


def _empty_gradients(streams: Tensor, update: Tensor, logits: Tensor) -> Gradients:
    tokens, n, _ = streams.shape
    g_post, g_mix, g_pre = (streams.new_empty((tokens, size), dtype=torch.float32) for size in (n, n * n, n))
    return torch.empty_like(streams), torch.empty_like(update), g_post, g_mix, g_pre, torch.empty_like(logits)


@launcher("single_pass_step")
def single_pass_step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, pre: Tensor, phi: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """X' [M, N, C], h [M, C], z and the rstd of each of its numbers [M, Z], from pre [M, N]."""
    after, hidden, logits, rstd = outputs = _empty_step(streams, update, phi, "each")
    yield outputs
    tokens, tile = len(streams), _tile("write", streams)
    post, mix, parts = _dense(post), _dense(mix), _parts(phi, streams.dtype)
    sizes = _numbers_of(streams, parts[0], "each")
    if tokens:
        kernels.write_kernel[(cdiv(tokens, tile.tokens),)](
            streams, update, post, mix, None, parts, after, hidden, pre.contiguous(), logits, rstd,
            tokens, post.stride(0), mix.stride(0), eps,
            SUMS=sizes["Z"], PARTS=len(parts), GIVEN=True, **sizes, **tile.settings(),
        )  # fmt: skip


@launcher("single_pass_backward")
def single_pass_backward(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, pre: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor,
) -> Iterator[Gradients]:  # fmt: skip
    """Gradients in one pass: of X and y; of post, mix and pre, per token; and rstd · dz."""
    outputs = _empty_gradients(streams, update, logits)
    yield outputs
    g_streams, g_update, g_post, g_mix, g_pre, g_z = outputs
    tokens, tile = len(streams), _tile("spread", streams)
    g_hidden, post, mix, phi = g_hidden.contiguous(), _dense(post), _dense(mix), phi.to(streams.dtype)
    if tokens:
        kernels_backward.spread_kernel[(cdiv(tokens, tile.tokens),)](
            g_hidden if g_after is None else g_after.contiguous(), g_hidden, g_z, None, streams, update, post, mix,
            pre.contiguous(), phi, None, None, None, g_streams, g_update, g_post, g_mix, g_pre, None,
            None if g_logits is None else g_logits.contiguous(), logits, rstd,
            tokens, post.stride(0), mix.stride(0), LANES=tile.lanes(streams.element_size()), AHEAD=tile.ahead,
            HAS_AFTER=g_after is not None, NORMED=False, GIVEN=True, HAS_LOGITS=g_logits is not None,
            **_numbers_of(streams, phi, "each"), **tile.settings(),
        )  # fmt: skip


@launcher("hyper_phi_gradient")
def phi_gradient(g_z: Tensor, normed: Tensor) -> Iterator[Tensor]:
    """g_zᵀ normed [K, W] in float32, for g_z [M, K] and normed [M, W], summed in parts of a fixed number of rows."""
    total = g_z.new_empty((g_z.shape[1], normed.shape[1]))
    yield total
    (rows, size), width, tile = g_z.shape, normed.shape[1], _tile("phi", normed)
    columns = cdiv(width, tile.block)
    parts = max(1, PHI_PROGRAMS * multiprocessors(normed) // columns)
    each = cdiv(cdiv(rows, parts), tile.tokens) * tile.tokens
    partial = total.new_empty((cdiv(rows, each) if rows else 0, total.numel()))
    if rows:
        kernels_backward.phi_kernel[(columns, len(partial))](
            g_z, normed, partial, rows, each, W=width, K=size, RANK=max(16, next_power_of_2(size)),
            ROWS=tile.tokens, BLOCK=tile.block, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    sum_rows(partial, total)


@launcher("manifold_weights")
def write_weights(
    logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """post [..., N] and mix [..., N, N]."""
    post = logits.new_empty((*logits.shape[:-1], streams), dtype=torch.float32)
    mix = post.new_empty((*post.shape, streams))
    yield post, mix
    tokens = logits.shape[:-1].numel()
    if tokens:
        kernels_weights.forward_kernel[(cdiv(tokens, WEIGHTS_TOKENS),)](
            logits, scale, bias, post, mix, tokens, iterations, **_weights_sizes(streams)
        )


@launcher("manifold_weights_backward")
def weights_backward(
    g_post: Tensor | None, g_mix: Tensor | None, logits: Tensor, scale: Tensor, bias: Tensor, streams: int,
    iterations: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The gradients of z, and of scale and bias in one row."""
    g_logits, total = torch.empty_like(logits), scale.new_empty(len(scale) + len(bias), dtype=torch.float32)
    yield g_logits, total
    tokens = logits.shape[:-1].numel()
    programs = cdiv(tokens, WEIGHTS_TOKENS)
    partial = total.new_empty((programs, len(total)))
    scratch = total.new_empty((iterations - 1, 2 * streams * tokens))
    if tokens:
        kernels_weights.backward_kernel[(programs,)](
            logits if g_post is None else g_post.contiguous(), logits if g_mix is None else g_mix.contiguous(),
            logits, scale, bias, g_logits, partial, scratch, tokens, iterations,
            HAS_POST=g_post is not None, HAS_MIX=g_mix is not None, **_weights_sizes(streams),
        )  # fmt: skip
    sum_rows(partial, total)


def _weights_sizes(n: int) -> dict[str, int]:
    return {"N": n, "SIDE": next_power_of_2(n), "K": n * (n + 2), "TOKENS": WEIGHTS_TOKENS, "num_warps": 1}


def _parts(phi: Tensor, dtype: torch.dtype) -> Tensor:
    """φ in the streams' dtype [1 or 2, *phi]: rounded, and the rounding error if there is one."""
    if phi.dtype == dtype or not phi.numel():
        return phi.to(dtype)[None]
    parts = phi.new_empty((2, *phi.shape), dtype=dtype)
    parts[0] = phi
    torch.sub(phi, parts[0], out=parts[1])
    return parts


def _tile(kernel: str, x: Tensor) -> Tile:
    return TILES[kernel][x.element_size()]


def _whole_rows(kernel: str, streams: Tensor) -> Tile:
    """A tile of the same size with whole rows of fewer tokens, held in registers."""
    tile = _tile(kernel, streams)
    tokens = min(tile.tokens, max(1, 4096 // next_power_of_2(streams.shape[-1])))
    return tile._replace(tokens=tokens, block=tile.tokens * tile.block // tokens)


def _numbers(streams: Tensor, phi: Tensor, norm: str) -> int:
    """The number of entries of z per token."""
    return len(phi) * {"all": 1, "each": streams.shape[1], "none": 0}[norm]


def _dense(x: Tensor) -> Tensor:
    """x with each token's numbers contiguous; tokens may share them (stride 0)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _numbers_of(streams: Tensor, phi: Tensor, norm: str) -> dict[str, Any]:
    _, n, width = streams.shape
    numbers = _numbers(streams, phi, norm)
    return {"C": width, "N": n, "K": len(phi), "Z": numbers, "RANK": max(16, next_power_of_2(numbers)), "NORM": norm}
