"""Hyper-connections: tile sizes, and launching the kernels.

A step's forward pass reads X and y and writes X' and h, (2N + 2)C numbers per token. Its backward pass reads the
gradients of X' and h, X and y, and writes the gradients of X and y, (3N + 3)C; then it reads X' once more for φ's
gradient, a matrix product over tokens. At most PASSES streams are served by two kernels each way, which read another
NC forward and (N + 2)C backward, as far as the cache does not hold them; more streams by single kernels.
`normed_step`, which has the norm after the junction inside, moves no more than `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import cdiv, on, power, sum_rows
from residua.ops.hyper_connection import kernels, kernels_passes

PASSES = 4
"""Most streams that the kernels in two passes take: what a thread can hold."""


class Tile(NamedTuple):
    """Tokens and channels of a tile, warps, and what the compiler may use."""

    tokens: int
    block: int
    warps: int
    stages: int = 1
    """Of a pipeline of loads."""
    ahead: int = 0
    """Blocks that `spread` loads before it needs them: 0 or 1."""
    registers: int | None = None
    """Most registers of a thread, where fewer than the compiler wants let another program in."""

    def lanes(self, size: int) -> int:
        """How many threads hold a row of a tile of numbers of `size` bytes, at most 16 bytes each."""
        return self.block // min(16 // size, max(1, self.tokens * self.block // (32 * self.warps)))

    def settings(self) -> dict[str, Any]:
        tile = {"TOKENS": self.tokens, "BLOCK": self.block, "num_warps": self.warps, "num_stages": self.stages}
        return tile if self.registers is None else {**tile, "maxnreg": self.registers}


class Norm(NamedTuple):
    """The norm after a junction: its gain, the scalars of h, and a program's rows of the gain's gradient."""

    gain: Tensor | None = None
    stats: Tensor | None = None
    eps: float = 0.0
    partial: Tensor | None = None


NO_NORM = Norm()
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
SHARES = 1
"""Into how many shares of its channels a row is divided when it is written."""

# Tokens of a tile, channels of a block (half as many for more than 4 streams), warps: forward and backward.
FORWARD, BACKWARD = (32, 64, 4), (16, 64, 4)


def step_outputs(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    logits, rstd = (
        streams.new_empty((streams.shape[0], _numbers(streams, phi, norm)), dtype=torch.float32) for _ in "zr"
    )
    weights = streams.new_empty(streams.shape[:2], dtype=torch.float32)
    return torch.empty_like(streams), torch.empty_like(update), logits, rstd, weights


def step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [M, N, C], h [M, C], z and the rstd of each of its numbers [M, Z], and pre [M, N]."""
    made = step_outputs(streams, update, post, mix, bias, scale, phi, norm, eps)
    post, mix, parts = _dense(post), _dense(mix), _parts(phi, streams.dtype)
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *FORWARD)
    if tokens and streams.shape[1] <= PASSES:
        _write_and_read(streams, update, post, mix, bias, scale, parts, made, norm, eps)
    elif tokens:
        with on(streams):
            kernels.forward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](
                streams, update, post, mix, scale, bias, parts[0], parts[-1], *made,
                tokens, post.stride(0), mix.stride(0), eps, SPLIT=len(parts) > 1, **sizes,
            )  # fmt: skip
    return made


def step_gradients(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, n, _ = streams.shape
    g_post, g_mix, g_pre = (streams.new_empty((tokens, size), dtype=torch.float32) for size in (n, n * n, n))
    return torch.empty_like(streams), torch.empty_like(update), g_post, g_mix, g_pre, torch.empty_like(logits)


def step_backward(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of X and y; of post, mix and what makes pre, per token; and rstd · dz."""
    made = step_gradients(
        g_hidden, g_after, g_logits, streams, update, post, mix, scale, phi, logits, rstd, weights, norm
    )
    post, mix = _dense(post), _dense(mix)
    phi = phi.to(streams.dtype)
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *BACKWARD)
    if tokens and streams.shape[1] <= PASSES:
        inputs = (streams, update, post, mix, scale, phi, logits, rstd, weights)
        _sum_and_spread(g_hidden.contiguous(), g_after, g_logits, *inputs, made, norm)
    elif tokens:
        with on(streams):
            kernels.backward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](
                g_hidden if g_after is None else g_after.contiguous(), g_hidden.contiguous(),
                g_hidden if g_logits is None else g_logits.contiguous(),
                streams, update, post, mix, scale, phi, logits, rstd, weights, *made,
                tokens, post.stride(0), mix.stride(0), HAS_AFTER=g_after is not None, HAS_LOGITS=g_logits is not None,
                SQUARE=power(streams.shape[1] * (streams.shape[1] + 1)),
                **sizes,
            )  # fmt: skip
    return made


def serves_normed(streams: Tensor, norm: str) -> bool:
    """Whether `normed_step` takes these streams and this projection."""
    return streams.shape[-2] <= PASSES and norm != "none"


def normed_outputs(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, gain: Tensor,
    norm: str, eps: float, norm_eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = step_outputs(streams, update, post, mix, bias, scale, phi, norm, eps)
    tokens, n, _ = streams.shape
    return *made, streams.new_empty((tokens, n + 1), dtype=torch.float32)


def normed_step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, gain: Tensor,
    norm: str, eps: float, norm_eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `step`, with x = gain ⊙ RMS(h) [M, C] in place of h; then h·X'_i and 1/rms(h) of each token [M, N + 1]."""
    assert serves_normed(streams, norm)
    *made, stats = normed_outputs(streams, update, post, mix, bias, scale, phi, gain, norm, eps, norm_eps)
    if len(streams):
        inputs = (streams, update, _dense(post), _dense(mix), bias, scale, _parts(phi, streams.dtype))
        _write_and_read(*inputs, made, norm, eps, Norm(gain, stats, norm_eps))
    return *made, stats


def normed_gradients(
    g_normed: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, gain: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor,
    hidden_stats: Tensor, norm: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = (streams, update, post, mix, scale, phi, logits, rstd, weights)
    return *step_gradients(g_normed, g_after, g_logits, *inputs, norm), hidden_stats.new_empty(len(gain))


def normed_backward(
    g_normed: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, gain: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor,
    hidden_stats: Tensor, norm: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`step_backward` from the gradient of x; then the gradient of the gain in float32."""
    kept = (logits, rstd, weights)
    inputs = (streams, update, post, mix, scale, phi)
    *made, total = normed_gradients(g_normed, g_after, g_logits, *inputs, gain, *kept, hidden_stats, norm)
    partial = total.new_empty((cdiv(len(streams), _tile("spread", streams).tokens), len(total)))
    if len(streams):
        inputs = (streams, update, _dense(post), _dense(mix), scale, phi.to(streams.dtype))
        after_it = Norm(gain, hidden_stats, partial=partial)
        _sum_and_spread(g_normed.contiguous(), g_after, g_logits, *inputs, *kept, made, norm, after_it)
    with on(streams):
        sum_rows(partial, total)
    return *made, total


def _write_and_read(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, parts: Tensor,
    made: Sequence[Tensor], norm: str, eps: float, after_it: Norm = NO_NORM,
) -> None:  # fmt: skip
    after, hidden, logits, rstd, weights = made
    tokens, n, width = streams.shape
    write, read = _tile("write", streams), _whole_rows("read", streams)
    sizes = _numbers_of(streams, parts[0], norm)
    columns = sizes["Z"] + {"all": 1, "each": n, "none": 0}[norm]
    share = cdiv(cdiv(width, SHARES), write.block) * write.block
    shares = cdiv(width, share)
    sums = logits.new_empty((shares, tokens, columns))
    with on(streams):
        kernels_passes.write_kernel[(shares, cdiv(tokens, write.tokens))](
            streams, update, post, mix, bias, parts, after, hidden, weights, sums,
            tokens, post.stride(0), mix.stride(0), SUMS=columns, SHARE=share, PARTS=len(parts), **sizes,
            **write.settings(),
        )  # fmt: skip
        if norm != "none":
            kernels_passes.read_kernel[(cdiv(tokens, read.tokens),)](
                after, sums, scale, bias, after_it.gain, hidden, logits, rstd, weights, after_it.stats,
                tokens, eps, after_it.eps,
                SUMS=columns, SHARES=shares, NORMED=after_it.gain is not None, **sizes, **read.settings(),
            )  # fmt: skip


def _sum_and_spread(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, made: Sequence[Tensor],
    norm: str, after_it: Norm = NO_NORM,
) -> None:  # fmt: skip
    g_streams, g_update, g_post, g_mix, g_pre, g_z = made
    tokens = len(streams)
    sums, spread = _whole_rows("sums", streams), _tile("spread", streams)
    sizes = _numbers_of(streams, phi, norm)
    normed = after_it.gain is not None
    shrink, pull = torch.empty_like(g_pre), g_pre.new_empty(tokens) if normed else None
    strides = (post.stride(0), mix.stride(0))
    with on(streams):
        if norm != "none":
            kernels_passes.sums_kernel[(cdiv(tokens, sums.tokens),)](
                g_hidden, g_hidden if g_logits is None else g_logits.contiguous(), streams, update, post, mix, scale,
                after_it.gain, logits, rstd, weights, after_it.stats, g_pre, g_z, shrink, pull, tokens, *strides,
                HAS_LOGITS=g_logits is not None, NORMED=normed, **sizes, **sums.settings(),
            )  # fmt: skip
        kernels_passes.spread_kernel[(cdiv(tokens, spread.tokens),)](
            g_hidden if g_after is None else g_after.contiguous(), g_hidden, g_z, shrink, streams, update, post, mix,
            weights, phi, after_it.gain, after_it.stats, pull, g_streams, g_update, g_post, g_mix, g_pre,
            after_it.partial, tokens, *strides, LANES=spread.lanes(streams.element_size()), AHEAD=spread.ahead,
            HAS_AFTER=g_after is not None, NORMED=normed, **sizes, **spread.settings(),
        )  # fmt: skip


def phi_output(g_z: Tensor, normed: Tensor) -> Tensor:
    return g_z.new_empty((g_z.shape[1], normed.shape[1]))


def phi_gradient(g_z: Tensor, normed: Tensor) -> Tensor:
    """g_zᵀ normed [K, W] in float32, of g_z [M, K] and normed [M, W]; in parts of a fixed number of rows."""
    total = phi_output(g_z, normed)
    (rows, size), width, tile = g_z.shape, normed.shape[1], _tile("phi", normed)
    columns = cdiv(width, tile.block)
    parts = max(1, PHI_PROGRAMS * fused.multiprocessors(normed) // columns)
    each = cdiv(cdiv(rows, parts), tile.tokens) * tile.tokens
    partial = total.new_empty((cdiv(rows, each) if rows else 0, total.numel()))
    with on(normed):
        if rows:
            kernels_passes.phi_kernel[(columns, len(partial))](
                g_z, normed, partial, rows, each, W=width, K=size, RANK=max(16, power(size)), ROWS=tile.tokens,
                BLOCK=tile.block, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        sum_rows(partial, total.view(-1))
    return total


def _parts(phi: Tensor, dtype: torch.dtype) -> Tensor:
    """φ in the streams' dtype [1 or 2, *phi]: rounded, and if that loses something, what it loses."""
    if phi.dtype == dtype or not phi.numel():
        return phi.to(dtype)[None]
    parts = phi.new_empty((2, *phi.shape), dtype=dtype)
    parts[0] = phi
    torch.sub(phi, parts[0], out=parts[1])
    return parts


def _tile(kernel: str, x: Tensor) -> Tile:
    return TILES[kernel][x.element_size()]


def _whole_rows(kernel: str, streams: Tensor) -> Tile:
    """A tile of the same size that has whole rows of few tokens, held in registers."""
    tile = _tile(kernel, streams)
    tokens = min(tile.tokens, max(1, 4096 // power(streams.shape[-1])))
    return tile._replace(tokens=tokens, block=tile.tokens * tile.block // tokens)


def _numbers(streams: Tensor, phi: Tensor, norm: str) -> int:
    """How many numbers z has for a token."""
    return len(phi) * {"all": 1, "each": streams.shape[1], "none": 0}[norm]


def _dense(x: Tensor) -> Tensor:
    """Numbers of one token side by side; tokens may share them (stride 0)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(streams: Tensor, phi: Tensor, norm: str, tokens: int, block: int, warps: int) -> dict[str, Any]:
    tile = {"TOKENS": tokens, "BLOCK": block if streams.shape[1] <= 4 else block // 2}
    return {**_numbers_of(streams, phi, norm), **tile, "num_warps": warps, "num_stages": 1}


def _numbers_of(streams: Tensor, phi: Tensor, norm: str) -> dict[str, Any]:
    _, n, width = streams.shape
    numbers = _numbers(streams, phi, norm)
    return {"C": width, "N": n, "K": len(phi), "Z": numbers, "RANK": max(16, power(numbers)), "NORM": norm}
