"""Attention over depth for a whole model, with a backward that writes each source's gradient once.

A source v_i is read by many reads l: h_l = Σ_i a_il v_i, a_l = softmax(z_l), z_il = rstd_i (u_l · v_i), with
u_l = scale · w_l ⊙ gain_l. Taken read by read, the backward would add to the gradient of every earlier source at every
read. Here read l only passes on dh_l and two numbers per token, its lse_l and δ_l = dh_l · h_l; the producer of v_i,
which autograd reaches when all its readers are done, does the rest in one pass:

    a_il = exp(z_il − lse_l)              dv_i = Σ_l a_il dh_l + rstd_i Σ_l dz_il u_l − v_i rstd_i²/C Σ_l dz_il z_il
    dz_il = a_il (dh_l · v_i − δ_l)       du_l = Σ_i Σ_tokens dz_il rstd_i v_i

What ties them together are *handles*: tensors without memory (stride 0) that a source hands out, one pair to each of
its readers. They carry no value forward; backward, their gradient is dh_l, the same tensor for every source, and the
pair (lse_l, δ_l). So the graph is an ordinary one, and compile, checkpointing and retain_graph need nothing special.
Since queries do not depend on the input, a source's scores for all its readers are computed when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from residua.ops import fused as shared
from residua.ops.backend import chosen_backend
from residua.ops.depth_attention import fused

State = tuple[Tensor, ...]


class Plan:
    """Which sources each read sees. Source 0 is the embedding, source k+1 is made of the output of sublayer k.

    sees: for each read, its sources in ascending order; the readers of a source must be consecutive.
    grows: for each source, whether it is the sum of the source before and a new output (a block's running sum).
    """

    def __init__(self, sees: Sequence[Sequence[int]], grows: Sequence[bool]) -> None:
        self.sees, self.grows = sees, (*grows, False)
        self.readers = [[k for k, seen in enumerate(sees) if source in seen] for source in range(len(grows))]
        for readers in self.readers:
            assert readers == list(range(readers[0], readers[0] + len(readers)))

    def living(self, k: int) -> list[int]:
        """The sources that anything after read k needs."""
        return [s for s in range(k + 2) if self.readers[s][-1] > k or (s == k + 1 and self.grows[s + 1])]


class Source(NamedTuple):
    """A source as the state carries it: its value outside of autograd, and handles for what is still to come."""

    value: Tensor
    scores: Tensor
    onward: tuple[Tensor, ...]
    """A handle for the source that grows out of this one, if there is one."""
    gradients: tuple[Tensor, ...]
    """For each coming reader: the handle whose gradient is dh."""
    stats: tuple[Tensor, ...]
    """For each coming reader: the handle whose gradient is (lse, δ)."""

    def after_read(self) -> Source:
        return self._replace(gradients=self.gradients[1:], stats=self.stats[1:])


def serves(x: Tensor, *, key_norm: str, activation: str) -> bool:
    """Whether a model that starts from x should run deferred: in training, where the kernels run."""
    able = key_norm == "rms" and activation == "softmax" and torch.is_grad_enabled() and chosen_backend() != "reference"
    return able and shared.serves(x)


def open(plan: Plan, x: Tensor, queries: Tensor, eps: float = 1e-6) -> State:
    """Begin with source 0; queries [reads, C] fp32 are the u_l of every read."""
    u = queries.detach().contiguous()
    source, chain = _make(plan, 0, x, None, u, queries, eps)
    return _pack(plan, -1, u, chain, {0: source})


def step(plan: Plan, k: int, y: Tensor, state: State, eps: float = 1e-6) -> tuple[Tensor, State]:
    """Make source k+1 of the output y of sublayer k, then read: h [..., C] and the next state."""
    u, chain, sources = _unpack(plan, k - 1, state)
    base = sources[k] if plan.grows[k + 1] else None
    y = y.to(sources[0].value.dtype)
    sources[k + 1], chain = _make(plan, k + 1, y, base, u, chain, eps)
    seen = [sources[s] for s in plan.sees[k]]
    h = _read(
        torch.compiler.is_compiling(), [k - plan.readers[s][0] for s in plan.sees[k]],
        [s.value for s in seen], [s.scores for s in seen], [s.gradients[0] for s in seen], [s.stats[0] for s in seen],
    )  # fmt: skip
    for s in plan.sees[k]:
        sources[s] = sources[s].after_read()
    return h, _pack(plan, k, u, chain, sources)


def values(plan: Plan, k: int, y: Tensor, state: State) -> list[Tensor]:
    """The sources that read k sees, outside of autograd: for looking at."""
    _, _, sources = _unpack(plan, k - 1, state)
    new = sources[k].value + y.detach() if plan.grows[k + 1] else y.detach()
    return [new if s == k + 1 else sources[s].value for s in plan.sees[k]]


def holds(plan: Plan, k: int, state: State) -> bool:
    """Whether this is a deferred state before step k rather than the plain list of sources."""
    return len(state) > len(plan.sees[k])


def _make(
    plan: Plan, s: int, y: Tensor, base: Source | None, u: Tensor, chain: Tensor, eps: float
) -> tuple[Source, Tensor]:
    first, count = plan.readers[s][0], len(plan.readers[s])
    value = y.detach().contiguous()
    if base is None:
        scores, rstd = fused.depth_scores(value, u, first, count, eps)
    else:
        value, scores, rstd = fused.depth_sum_scores(base.value, value, u, first, count, eps)
    handles = _fork(y, base.onward[0] if base else None, chain, value, scores, rstd, u, first, plan.grows[s + 1])
    ahead = 1 + plan.grows[s + 1]
    return Source(value, scores, handles[1:ahead], handles[ahead : ahead + count], handles[ahead + count :]), handles[0]


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, base: Tensor | None, chain: Tensor,
        value: Tensor, scores: Tensor, rstd: Tensor, u: Tensor, first: int, grows: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(value, scores, rstd, u)
        ctx.first, ctx.grows, ctx.grown = first, grows, base is not None
        ctx.set_materialize_grads(False)
        gradients = [_handle(value, value.shape) for _ in range(len(scores) + grows)]
        stats = [_handle(scores, (2, scores.shape[1])) for _ in scores]
        return _handle(u, u.shape), *gradients, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        value, scores, rstd, u = ctx.saved_tensors
        onward, *grads_of_reads = grads if ctx.grows else (None, *grads)
        count = len(scores)
        dh, stats = grads_of_reads[:count], grads_of_reads[count:]
        if all(g is None for g in grads):
            return (None, None, du, *[None] * 6)
        dh = [torch.zeros_like(value) if g is None else g for g in dh]
        stats = [torch.zeros_like(scores[:1]).expand(2, -1).contiguous() if g is None else g for g in stats]
        onward = None if onward is None else onward.contiguous()
        dv, du = fused.depth_source_gradient(value, scores, rstd, u, ctx.first, onward, dh, stats, du)
        return (dv, dv if ctx.grown else None, du, *[None] * 6)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: bool, rows: list[int], *tensors: Tensor) -> Tensor:
        ctx.count, ctx.compiled = len(rows), compiled
        h, lse = fused.depth_mix(tensors[: len(rows)], tensors[len(rows) : 2 * len(rows)], rows)
        ctx.save_for_backward(h, lse)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        dh = dh.contiguous()
        stats = (_plain_stats if ctx.compiled else fused.depth_stats)(dh, *ctx.saved_tensors)
        return (None, None, *[None] * (2 * ctx.count), *[dh] * ctx.count, *[stats] * ctx.count)


@torch.compiler.allow_in_graph
def _fork(
    y: Tensor, base: Tensor | None, chain: Tensor,
    value: Tensor, scores: Tensor, rstd: Tensor, u: Tensor, first: int, grows: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    handles: tuple[Tensor, ...] = _Fork.apply(y, base, chain, value, scores, rstd, u, first, grows)
    return handles


@torch.compiler.allow_in_graph
def _read(
    compiled: bool,
    rows: list[int],
    values: list[Tensor],
    scores: list[Tensor],
    gradients: list[Tensor],
    stats: list[Tensor],
) -> Tensor:
    h: Tensor = _Read.apply(compiled, rows, *values, *scores, *gradients, *stats)
    return h


def _plain_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    """`depth_stats` for the compiler, which fuses it into whatever makes dh."""
    delta = (dh.float() * h.float()).sum(-1).flatten()
    return torch.stack([lse, pad(delta, (0, len(lse) - len(delta)))])


def _handle(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=like.dtype, device=like.device)


def _pack(plan: Plan, k: int, u: Tensor, chain: Tensor, sources: dict[int, Source]) -> State:
    state = [u, chain]
    for s in plan.living(k):
        source = sources[s]
        state += [source.value, source.scores, *source.onward, *source.gradients, *source.stats]
    return tuple(state)


def _unpack(plan: Plan, k: int, state: State) -> tuple[Tensor, Tensor, dict[int, Source]]:
    u, chain, *rest = state
    tensors = iter(rest)

    def take(count: int) -> tuple[Tensor, ...]:
        return tuple(next(tensors) for _ in range(count))

    sources = {}
    for s in plan.living(k):
        value, scores = take(2)
        onward = take(1 if s == k + 1 and plan.grows[s + 1] else 0)
        ahead = sum(reader > k for reader in plan.readers[s])
        sources[s] = Source(value, scores, onward, take(ahead), take(ahead))
    return u, chain, sources
