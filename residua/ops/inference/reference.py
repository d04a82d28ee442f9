"""Operators of inference in plain PyTorch, for prompts and for decoding one token per row.

A junction includes the norm after it: its output is written once, normed, in one launch when fused. Rows are [M, C],
all tokens of a batch; equations are those of `depth_attention` and `multi_gate`. None has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from residua.ops._runtime.numeric import rms, wide
from residua.ops.mix_projection.reference import Mixing
from residua.ops.multi_gate.reference import gates, multi_gate
from residua.ops.norm_rotate.reference import rotate

KEY_EPS = 1e-6

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu2": lambda x: relu(x).square(),
    "gelu": gelu,
    "swiglu": lambda gate, up: silu(gate) * up,
    "glu": lambda gate, up: torch.sigmoid(gate) * up,
}
GATED = ("swiglu", "glu")

Gains = tuple[Tensor, Tensor]
"""The gains [D] of QK-norm, for queries and keys."""


class Queries(NamedTuple):
    """u_l = scale · w_l ⊙ g_l for every read of a model: [reads, C] in float32, and split into two bfloat16 parts
    [reads, 2, C]."""

    u: Tensor
    parts: Tensor

    @classmethod
    def of(cls, u: Tensor) -> Queries:
        coarse = u.bfloat16()
        return cls(u.contiguous(), torch.stack([coarse, (u - coarse).bfloat16()], 1))


class Streams(NamedTuple):
    """The n streams [M, C] of `multi_gate`, and the writes since they were stored.

    A write is its update [M, C] and β [M, n] in at least float32.
    """

    stored: tuple[Tensor, ...]
    updates: tuple[Tensor, ...] = ()
    betas: tuple[Tensor, ...] = ()

    def later(self, update: Tensor, beta: Tensor) -> Streams:
        """The streams after one more deferred write."""
        return Streams(self.stored, (*self.updates, update), (*self.betas, beta))


def add_norm(base: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """h = base + y; returns weight ⊙ RMS(h) and h."""
    h = base + y
    return rms(h, eps, weight), h


def read_sources(
    sources: Sequence[Tensor],
    y: Tensor,
    base: Tensor | None,
    queries: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Several reads of the same sources at once (Attention Residuals, phase one of two, arXiv 2603.15031).

        v = y or base + y, the newest source
        z_is = queries_s · RMS(v_i),   o_s = Σ_i softmax(z_s)_i v_i,   lse_s = log Σ_i exp(z_is)

    sources, y, base [M, C]; queries [S, C] include scale and gain. The first read is a sublayer's input, so it is
    normed. Returns weight ⊙ RMS(o_0) [M, C], v [M, C], and for the other reads o [S−1, M, C], lse and ‖o‖² [S−1, M], in
    at least float32.
    """
    v = y if base is None else base + y
    values = torch.stack([wide(source) for source in (*sources, v)], 1)
    logits = torch.einsum("mnc,sc->smn", rms(values, KEY_EPS), queries.to(values.dtype))
    o = torch.einsum("smn,mnc->smc", logits.softmax(-1), values)
    normed = rms(o[0], eps, weight).to(v.dtype)
    return normed, v, o[1:], logits[1:].logsumexp(-1), o[1:].square().sum(-1)


def read_partial(
    finished: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    base: Tensor | None,
    query: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Merge a block's running sum into `finished` = (o, lse, ‖o‖²), one read of `read_sources` (phase two).

        p = y or base + y,   t = sigmoid(query · RMS(p) − lse),   h = o + t (p − o)

    Returns weight ⊙ RMS(h) and p, both [M, C].
    """
    o, lse, _ = finished
    p = y if base is None else base + y
    values = wide(p)
    t = torch.sigmoid((rms(values, KEY_EPS) * query.to(values.dtype)).sum(-1) - lse)[:, None]
    return rms(o + t * (values - o), eps, weight).to(p.dtype), p


def source_scores(y: Tensor, base: Tensor | None, queries: Queries, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The scores of a new source for the reads from `first` on.

        v = y or base + y,   z_l = u_l · RMS(v)

    Returns z [count, M], possibly padded with meaningless columns after the M tokens, and v [M, C].
    """
    v = y if base is None else base + y
    keys = rms(wide(v), KEY_EPS)
    return queries.u[first : first + count].to(keys.dtype) @ keys.mT, v


def read_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """Consecutive reads of the same sources: lse [readers, M], and o = Σ_i softmax(z)_i v_i [M, C] for each.

    scores[i] are source i's, from `source_scores`; the first reader's are in row rows[i].
    """
    z = torch.stack([s[row : row + readers, : len(v)] for v, s, row in zip(sources, scores, rows, strict=True)], -1)
    values = torch.stack([wide(v) for v in sources], 1)
    o = torch.einsum("lmn,mnc->lmc", z.softmax(-1).to(values.dtype), values)
    return z.logsumexp(-1), o.to(sources[0].dtype).unbind()


def read_norm(
    others: Sequence[Tensor],
    scores: Sequence[Tensor],
    rows: Sequence[int],
    y: Tensor,
    base: Tensor | None,
    query: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """One read of the `others`, with known scores, and of the newest source, followed by the norm.

        v = y or base + y,   h = Σ_i softmax(z)_i v_i  with  z = query · RMS(v)  for the newest

    The score of others[i] is scores[i][rows[i]]. Returns weight ⊙ RMS(h) and v, both [M, C].
    """
    v = y if base is None else base + y
    values = torch.stack([wide(source) for source in (*others, v)], 1)
    newest = (rms(values[:, -1], KEY_EPS) * query.to(values.dtype)).sum(-1)
    known = [s[row, : len(v)].to(values.dtype) for s, row in zip(scores, rows, strict=True)]
    a = torch.stack([*known, newest], 1).softmax(-1)
    return rms((a[..., None] * values).sum(1), eps, weight).to(v.dtype), v


def gate_norm(
    state: Streams, y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor, *,
    store: bool = True, competitive: bool = True, eps: float = 1e-6,
) -> tuple[Tensor, Streams]:  # fmt: skip
    """`multi_gate` and the norm after it: weight ⊙ RMS(h) [M, C], and the streams after the write.

    With `store` the streams are written. Otherwise the write is deferred, and n rows are read again instead of written.
    """
    streams = wide(torch.stack(state.stored, 1))
    for update, beta in zip(state.updates, state.betas, strict=True):
        streams = streams + beta.to(streams.dtype)[..., None] * (wide(update)[:, None] - streams)
    hidden, after = multi_gate(streams, wide(y), gate_query, gate_bias, pool_query, competitive=competitive)
    normed = rms(hidden, eps, weight).to(y.dtype)
    if store:
        return normed, Streams(after.to(y.dtype).unbind(1))
    return normed, state.later(y, gates(streams, gate_query, gate_bias, competitive=competitive))


def turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Gains | None, cos: Tensor, sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Queries [B, T, H, D] and keys [B, T, H_kv, D], normed and rotated, from a projection [B, T, R].

    The projection holds the queries, then the keys. gains: [D] for each, None for no norm; cos, sin [T, D/2].
    """
    width = 2 * cos.shape[-1]
    first, second = heads * width, (heads + kv_heads) * width
    q, k = (x.unflatten(-1, (-1, width)) for x in (projected[..., :first], projected[..., first:second]))
    if gains is not None:
        q, k = (rms(x, eps, gain) for x, gain in zip((q, k), gains, strict=True))
    return rotate(q, (cos, sin)), rotate(k, (cos, sin))


def enter_cache(
    projected: Tensor,
    heads: int,
    gains: Gains | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None = None,
    mixing: Mixing | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """`turn_heads`, writing the keys, and the values that follow them, to their cache slots.

    Prompts [B, T, R] fill keys, values [B, T, H_kv, D], the first slots of all rows. With `positions` [B] there is one
    token per row [B, 1, R], and positions are their slots in keys, values [B, S, H_kv, D]; cos and sin then cover all
    positions. Values may be mixed with an anchor [B, T, H_kv, D]. Returns the queries [B, T, H, D].
    """
    kv_heads, width = keys.shape[2:]
    if positions is not None:
        cos, sin = cos[positions, None], sin[positions, None]
    q, k = turn_heads(projected, heads, kv_heads, gains, cos, sin, eps=eps)
    first = (heads + kv_heads) * width
    v = projected[..., first : first + kv_heads * width].unflatten(-1, (-1, width))
    v = v if mixing is None else mixing(v)
    if positions is None:
        keys.copy_(k)
        values.copy_(v)
    else:
        slot = (torch.arange(len(k), device=k.device), positions)
        keys[slot], values[slot] = k[:, 0].to(keys.dtype), v[:, 0].to(values.dtype)
    return q


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None = None) -> Tensor:
    """softmax(QKᵀ/√D) V for one token per row over cache slots up to and including `until`.

    q [B, H, D]; keys, values [B, S, H_kv, D] with H a multiple of H_kv; until [B]; `sink` [H] adds exp(sink) to each
    head's denominator. Returns [B, H, D].
    """
    groups = q.shape[1] // keys.shape[2]
    k, v = (wide(t).repeat_interleave(groups, 2) for t in (keys, values))
    scores = torch.einsum("bhd,bshd->bhs", wide(q), k) * q.shape[-1] ** -0.5
    hidden = torch.arange(keys.shape[1], device=q.device) > until[:, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None].expand(len(q), -1, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("bhs,bshd->bhd", weights, v).to(q.dtype)


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply a feed-forward's activation, given the name of its kind; x [M, H], or [M, 2H] for gated kinds."""
    return ACTIVATIONS[kind](*x.chunk(2 if kind in GATED else 1, -1))
