"""Attention over depth for a whole model, with a backward that writes each source's gradient once.

A source v_i is read by many reads l: h_l = Σ_i a_il v_i, a_l = softmax(z_l), z_il = rstd_i (u_l · v_i), with
u_l = scale · w_l ⊙ gain_l. Read by read, the backward would add to the gradient of every earlier source at every read.
Here read l only passes on dh_l and two numbers per token, lse_l and δ_l = dh_l · h_l. Autograd reaches the producer of
v_i after all its readers, and the producer does the rest in one pass:

    a_il = exp(z_il − lse_l)              dv_i = Σ_l a_il dh_l + rstd_i Σ_l dz_il u_l − v_i rstd_i²/C Σ_l dz_il z_il
    dz_il = a_il (dh_l · v_i − δ_l)       du_l = Σ_i Σ_tokens dz_il rstd_i v_i

*Handles* connect them: tensors without memory (stride 0), one pair from a source to each of its readers. They carry no
value forward; backward, their gradients are dh_l, the same tensor for every source, and the pair (lse_l, δ_l). The
graph is therefore ordinary, and compile, checkpointing and retain_graph need no special handling. Queries do not depend
on the input. So a source's scores for all its readers are computed when it is produced, and several reads are evaluated
together over the sources they share. One source's backward does most of its neighbours' work.

δ_l uses h_l as stored: in bf16 that adds half a percent of noise to du_l, zero on average.

This file has the state of a whole model and the functions `open` and `step`; the operators are in `autograd.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.ops._runtime.backend import chosen_backend
from residua.ops._runtime.triton_support import supports
from residua.ops.depth_attention import autograd, launch
from residua.ops.depth_attention.plan import FRONT, ReadPlan
from residua.ops.depth_attention.tiles import narrow

State = tuple[Tensor, ...]


def serves(x: Tensor, *, key_norm: str, activation: str) -> bool:
    """Whether a model with the embedding x should defer its backward: in training, if kernels can run."""
    able = key_norm == "rms" and activation == "softmax" and torch.is_grad_enabled() and chosen_backend() != "reference"
    return able and supports(x)


def open(plan: ReadPlan, x: Tensor, queries: Tensor, eps: float = 1e-6) -> State:
    """Begin with source 0; queries [reads, C] fp32 are the u_l of every read.

    The state is u, u in the form for scores of bf16 sources, the chain that collects du, and the partial results of a
    group of reads. For every source that is still needed, these follow: its detached value, scores and rstd; a handle
    for a later source, if that passes a gradient to this one; for each of its later readers the handle whose gradient
    is dh, then those for (lse, δ).
    """
    u = queries.detach().contiguous()
    value = x.detach().contiguous()
    parts = launch.depth_parts(u) if narrow(value) else u
    source = value, *launch.depth_scores(value, parts, 0, len(plan.readers[0]), eps)
    chain, *handles = _fork(plan, 0, x, source, [], u, queries)
    return u, parts, chain, *source, *handles


def step(plan: ReadPlan, k: int, y: Tensor, state: State, eps: float = 1e-6) -> tuple[Tensor, State]:
    """Create source k+1 from the output y of sublayer k, then read: h [..., C] and the next state."""
    table, (u, parts, link) = plan.steps[k], state[:FRONT]
    y = y.to(state[table.newest].dtype)
    source, h, lse, partial = _evaluate(plan, k, y.detach().contiguous(), state, eps)
    before = [state[i : i + 4] for i in table.onward]
    chain, *rest = _fork(plan, k + 1, y, source, before, u, link)
    handles = list(rest)  # torch 2.11's compiler treats `rest` as a tuple
    gradients, stats = [state[i] for i in table.gradients], [state[i] for i in table.stats]
    if k in plan.own_readers[k + 1]:
        first, readers = int(plan.goes_on(k + 1)), len(plan.own_readers[k + 1])
        stats.append(handles.pop(first + readers))
        gradients.append(handles.pop(first))
    h = autograd.read(gradients, stats, h, lse, torch.compiler.is_compiling())
    after = [u, parts, chain, *partial]
    for start, stop in table.unchanged:
        after += state[start:stop]
    return h, (*after, *source, *handles) if plan.keeps_new(k) else tuple(after)


def values(plan: ReadPlan, k: int, y: Tensor, state: State) -> list[Tensor]:
    """The sources that read k sees, detached, for diagnoses."""
    older = {place.source: state[place.start] for place in plan.before(k)}
    new = older[k] + y.detach() if plan.grows[k + 1] else y.detach()
    return [new if s == k + 1 else older[s] for s in plan.sees[k]]


def holds(plan: ReadPlan, k: int, state: State) -> bool:
    """Whether this is a deferred state before step k, not the plain list of sources."""
    return len(state) > len(plan.sees[k])


Source = tuple[Tensor, Tensor, Tensor]
"""The value of a source, its scores and its rstd."""


def _evaluate(plan: ReadPlan, k: int, y: Tensor, state: State, eps: float) -> tuple[Source, Tensor, Tensor, State]:
    """Everything step k computes, without autograd: source k+1, then h and lse of the read, then the partial reads.

    The first step of a group evaluates all its reads over the sources so far; `partial` holds their lse, and o_l of
    each later read. Such a read later runs over o_l, with score lse_l, and the newer sources.
    """
    table, (u, parts, _) = plan.steps[k], state[:FRONT]
    first, count = plan.readers[k + 1][0], len(plan.readers[k + 1])
    start, size = plan.group[k]
    partial = state[FRONT : FRONT + table.pending]
    values, scores, rows = [state[i] for i in table.values], [state[i + 1] for i in table.values], table.rows
    if k > start:
        values, scores, rows = [partial[1], *values], [partial[0], *scores], [k - start, *rows]
        partial = (partial[0], *partial[2:]) if len(partial) > 2 else ()
    base = state[table.newest] if plan.grows[k + 1] else None
    if base is not None and plan.fuses(k):
        value, z, rstd, h, lse = launch.depth_sum_read(base, y, u, k, values, scores, rows, eps)
        return (value, z, rstd), h, lse, partial
    if base is None:
        new: Source = (y, *launch.depth_scores(y, parts, first, count, eps))
    else:
        new = launch.depth_sum_scores(base, y, parts, first, count, eps)
    values, scores, rows = [*values, new[0]], [*scores, new[1]], [*rows, k - first]
    if k == start and size > 1:
        every_lse, h, *later = launch.depth_mix_group(values, scores, rows, size)
        return new, h, every_lse[0], (every_lse, *later)
    h, lse = launch.depth_mix(values, scores, rows)
    return new, h, lse, partial


def _fork(
    plan: ReadPlan, s: int, y: Tensor, source: Source, before: Sequence[State], u: Tensor, chain: Tensor
) -> tuple[Tensor, ...]:
    """The next link of the chain that collects du, then the handles of source s in the state's order.

    `before` are the sources, with their handles, to which this one passes a gradient.
    """
    onward = [source[3] for source in before]
    led = [t for source in before for t in source[:3]] if s in plan.leads else []
    return autograd.make_handles(
        y, chain, onward, led, *source, u, plan.readers[s][0], len(plan.own_readers[s]), plan.goes_on(s)
    )
