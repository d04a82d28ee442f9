"""Delta rules: tile sizes and kernel launches; `delta_mixer` launches three operators' kernels on shared tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, dense_last, dense_like
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import INTERPRETED, shared_memory
from residua.ops.delta_rule.reference import CHUNK
from residua.ops.gated_output import launch as output_launch
from residua.ops.short_convolution import launch as convolution_launch

kernels = Kernels("residua.ops.delta_rule.kernels")
kernels_backward = Kernels("residua.ops.delta_rule.kernels_backward")

RATES = 6
"""Numbers per token that `chunk_kernel` computes for the other kernels."""


class BlockPlan(NamedTuple):
    """Each program processes a block of a head's columns."""

    block: int
    warps: int = 4
    stages: int = 1

    def settings(self, width: int) -> dict[str, int]:
        return {"BLOCK": min(self.block, width), "STAGES": self.stages, "num_warps": self.warps}

    def programs(self, rows: int, width: int) -> tuple[int]:
        """The grid of a scan: a program per block."""
        return (rows * cdiv(width, self.block),)


CHUNKS, CHANNEL_CHUNKS = BlockPlan(32, warps=2), BlockPlan(32)
GRADIENTS, CHANNEL_GRADIENTS = BlockPlan(32, stages=2), BlockPlan(32)
STEP = BlockPlan(32)
NORM_EPS = 1e-6
"""eps of the norms of queries and keys in `delta_mixer`."""


def scan_plan(x: Tensor) -> BlockPlan:
    """The plan of both scans. Two stages of heads of 128 need up to 149 KB of shared memory."""
    return BlockPlan(64, stages=2 if shared_memory(x) >= 150_000 else 1)


class Sizes(NamedTuple):
    batch: int
    length: int
    heads: int
    group: int
    """Value heads per key head."""
    key_width: int
    value_width: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Sizes:
        batch, length, heads, value_width = v.shape
        return cls(batch, length, heads, heads // k.shape[2], k.shape[3], value_width)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return cdiv(self.length, CHUNK)

    def arguments(self, *strided: Tensor) -> tuple[int, ...]:
        """The arguments of every kernel after its pointers: sizes, then the strides of batch, token and head."""
        sizes = self.length, self.chunks, self.rows, self.heads, self.group
        return (*sizes, *(stride for x in strided for stride in x.stride()[:3]))


class Decayed(NamedTuple):
    """Additional results of `chunk_kernel` with a decay per channel."""

    overlap: Tensor
    """(k, k) below the diagonal, [B·H, N, C, C]."""
    totals: Tensor
    decayed: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, g: Tensor) -> Decayed:
        s = Sizes.of(k, v)
        shape = s.batch, s.heads, s.chunks * CHUNK, s.key_width
        overlap = v.new_empty((s.rows, s.chunks, CHUNK, CHUNK))
        return cls(overlap, g.new_empty(shape), v.new_empty((3, *shape)))

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """The q and k that enter a chunk and the k that leaves it, [B, N·C, H, K]."""
        q, k, out = self.decayed.transpose(2, 3)
        return q, k, out


def _scanned(s: Sizes, q: Tensor, k: Tensor, by_channel: Decayed | None) -> tuple[Sizes, Tensor, Tensor, Tensor]:
    """Queries and keys for both scans: entering q and k, leaving k; with `by_channel`, separate for each value head."""
    return (s, q, k, k) if by_channel is None else (s._replace(group=1), *by_channel.heads())


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of q and k, for each value head, and of v, g, beta and the first state."""


@launcher("delta_rule")
def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, begins: Tensor | None, state: Tensor | None, keep: bool
) -> Iterator[list[Tensor]]:
    """o and the last state; then tensors for backward: inverse, reads, rates, the Sᵀ at the start of each chunk, u,
    and for g [B, T, H, K] `Decayed`.

    g, beta and states are float32; begins [B, T] is uint8. `keep`: there will be a backward pass.
    """
    outputs = [*_empty_rule(k, v, g, keep), *(Decayed.empty(k, v, g) if g.dim() == k.dim() else ())]
    yield outputs
    _launch_rule(q, k, v, g, beta, begins, state, keep, outputs)


def _empty_rule(k: Tensor, v: Tensor, g: Tensor, keep: bool) -> list[Tensor]:
    s = Sizes.of(k, v)
    square = (s.rows, s.chunks, CHUNK, CHUNK)
    return [
        v.new_empty(v.shape),
        g.new_empty((s.batch, s.heads, s.key_width, s.value_width)),
        v.new_empty(square),
        v.new_empty(square),
        g.new_empty((RATES, s.rows, s.chunks * CHUNK)),
        v.new_empty((s.rows, s.chunks if keep else 0, s.value_width, s.key_width)),
        v.new_empty((s.rows, s.length if keep else 0, s.value_width)),
    ]


def _launch_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, begins: Tensor | None, state: Tensor | None, keep: bool,
    outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    o, last, inverse, reads, rates, states, u, *more = outputs
    by_channel = Decayed(*more) if more else None
    s, channels = Sizes.of(k, v), by_channel is not None
    q, k, v = (dense_last(x) for x in (q, k, v))
    g, plan, chunks = g.contiguous(), scan_plan(v), CHANNEL_CHUNKS if channels else CHUNKS
    overlap, totals, decayed = by_channel or (reads, rates, reads)
    kernels.chunk_kernel[(s.rows * s.chunks,)](
        q, k, g, beta.contiguous(), g if begins is None else begins.contiguous(), inverse, reads, rates,
        overlap, totals, decayed, *s.arguments(q, k), K=s.key_width, C=CHUNK, DOCUMENTS=begins is not None,
        PRECISION=_precision(v), CHANNELS=channels, BLOCK=min(chunks.block, s.key_width), num_warps=chunks.warps,
        num_stages=chunks.stages,
    )  # fmt: skip
    s, q, k, out = _scanned(s, q, k, by_channel)
    kernels.scan_kernel[plan.programs(s.rows, s.value_width)](
        q, k, v, inverse, reads, rates, out, totals, last if state is None else state.contiguous(),
        o, last, states, u, *s.arguments(q, k, v), K=s.key_width, V=s.value_width, C=CHUNK,
        STATE=state is not None, KEEP=keep, CHANNELS=channels, **plan.settings(s.value_width),
    )  # fmt: skip


@launcher("delta_rule_backward")
def backward(
    d_o: Tensor, d_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor], from_state: bool
) -> Iterator[Gradients]:
    """The gradients; `saved` are the tensors that `forward` returns for this."""
    outputs = _empty_gradients(q, k, v, saved, from_state)
    yield outputs
    _launch_backward(d_o, d_last, q, k, v, saved, from_state, outputs)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor], from_state: bool) -> Gradients:
    s, (_, _, rates, _, _, *by_channel) = Sizes.of(k, v), saved
    dq, dk = (q.new_empty((s.batch, s.length, s.heads, s.key_width)) for _ in "qk")
    dbeta = rates.new_empty((s.batch, s.length, s.heads))
    dg = torch.empty_like(dq, dtype=torch.float32) if by_channel else torch.empty_like(dbeta)
    d_state = rates.new_empty((s.batch if from_state else 0, s.heads, s.key_width, s.value_width))
    return dq, dk, v.new_empty(v.shape), dg, dbeta, d_state


def _launch_backward(
    d_o: Tensor, d_last: Tensor | None, q: Tensor, k: Tensor, v: Tensor, saved: Sequence[Tensor], from_state: bool,
    outputs: Gradients,
) -> None:  # fmt: skip
    *gradients, d_state = outputs
    inverse, reads, rates, states, u, *more = saved
    by_channel = Decayed(*more) if more else None
    s, channels = Sizes.of(k, v), by_channel is not None
    q, k, v, d_o = (dense_last(x) for x in (q, k, v, d_o))
    d_states, dr = torch.empty_like(states), v.new_empty((s.rows, s.length, s.value_width))
    plan = scan_plan(v)
    overlap, totals, _ = by_channel or (reads, rates, reads)
    scanned, q_in, k_in, k_out = _scanned(s, q, k, by_channel)
    kernels_backward.scan_kernel[plan.programs(s.rows, s.value_width)](
        q_in, k_in, d_o, inverse, reads, rates, k_out, totals, rates if d_last is None else d_last.contiguous(),
        dr, d_state, d_states, *scanned.arguments(q_in, k_in, d_o), K=s.key_width, V=s.value_width, C=CHUNK,
        LAST=d_last is not None, STATE=from_state, CHANNELS=channels, **plan.settings(s.value_width),
    )  # fmt: skip
    if by_channel is None:
        kernels_backward.gradient_kernel[(s.rows * s.chunks,)](
            q, k, v, d_o, reads, rates, states, u, d_states, dr, *gradients, *s.arguments(q, k, v, d_o),
            K=s.key_width, V=s.value_width, C=CHUNK, **GRADIENTS.settings(s.key_width),
        )  # fmt: skip
        return
    dq, dk, dv, dg, dbeta = gradients
    pairs, diagonal = v.new_empty((s.rows * s.chunks, 2, CHUNK, CHUNK)), torch.empty_like(rates[0])
    kernels_backward.channel_pairs_kernel[(s.rows * s.chunks,)](
        v, d_o, rates, u, dr, overlap, dv, dbeta, pairs, diagonal, *s.arguments(v, d_o),
        V=s.value_width, C=CHUNK,
    )  # fmt: skip
    kernels_backward.channel_gradient_kernel[(s.rows * s.chunks,)](
        q, k, d_o, rates, states, u, d_states, dr, pairs, diagonal, totals, dq, dk, dg, dbeta,
        *s.arguments(q, k, d_o), K=s.key_width, V=s.value_width, C=CHUNK,
        **CHANNEL_GRADIENTS.settings(s.key_width),
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    """The precision of the products that invert: a bfloat16 result gains nothing beyond TensorFloat-32."""
    return "tf32" if x.dtype is torch.bfloat16 and not INTERPRETED else "ieee"


@launcher("gated_delta_step", mutates=("state",))
def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Iterator[Tensor]:
    """o [B, H, V] for one token; overwrites the state [B, H, K, V], float32 and contiguous."""
    o = v.new_empty(v.shape)
    yield o
    q, k, v = (dense_last(x) for x in (q, k, v))
    (_, heads, value_width), (_, key_heads, key_width) = v.shape, k.shape
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    kernels.step_kernel[STEP.programs(v.shape[0] * heads, value_width)](
        q, k, v, g.contiguous(), beta.contiguous(), state, o, heads, heads // key_heads, *strides,
        K=key_width, V=value_width, BLOCK=min(STEP.block, value_width), num_warps=STEP.warps,
    )  # fmt: skip


@launcher("delta_mixer")
def mixer(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    key_heads: int, eps: float, keep: bool,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """y and the last state; then tensors for backward: q, k, v, o and those of the delta rule.

    Separate operators would copy the gate's gradient next to those of q, k and v. They would also need a separate pass
    to add the gradients of a key head, one for each value head that it serves.
    """
    q, k, v = convolution_launch.empty_heads(projected, convolution, key_heads, g.shape[-1])
    o, last, *saved = rule = _empty_rule(k, v, g, keep)
    y = o.new_empty(o.shape)
    yield [y, last, q, k, v, o, *saved]
    convolution_launch.launch_forward(projected, convolution, begins, NORM_EPS, q, k, v)
    _launch_rule(q, k, v, g, beta, begins, None, keep, rule)
    z = projected[..., convolution.shape[1] :].unflatten(-1, o.shape[2:])
    output_launch.launch_forward(o, z, gain, eps, y)


@launcher("delta_mixer_backward")
def mixer_backward(
    dy: Tensor, d_last: Tensor | None, projected: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    saved: Sequence[Tensor], eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of the projection, g, beta, the convolution and the gain."""
    q, k, v, o, *of_rule = saved
    dq, dk, dv, dg, dbeta, _ = gradients = _empty_gradients(q, k, v, of_rule, False)
    d_projected, d_convolution = dense_like(projected), dg.new_empty(convolution.shape)
    d_gain = dg.new_empty(gain.shape)
    yield d_projected, dg, dbeta, d_convolution, d_gain
    d_o = o.new_empty(o.shape)
    z, d_z = (x[..., convolution.shape[1] :].unflatten(-1, o.shape[2:]) for x in (projected, d_projected))
    output_launch.launch_backward(dy, o, z, gain, eps, d_o, d_z, d_gain)
    _launch_backward(d_o, d_last, q, k, v, of_rule, False, gradients)
    convolution_launch.launch_backward(
        dq, dk, dv, projected, convolution, begins, NORM_EPS, k.shape[2], d_projected, d_convolution
    )
