"""Operators of a forward pass over whole sequences without gradients, in plain PyTorch.

Junctions come together with the norm after them: what a junction makes is written once, normed. Rows are [M, C], all
tokens of a batch; equations are those of `depth_attention` and `multi_gate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.numeric import rms, wide
from residua.ops.mix_projection.reference import Mixing
from residua.ops.multi_gate.reference import gates, multi_gate
from residua.ops.norm_rotate.reference import rotate

KEY_EPS = 1e-6

Gains = tuple[Tensor, Tensor]
"""The gains [D] of QK-norm, for queries and keys."""


class Queries(NamedTuple):
    """u_l = scale · w_l ⊙ g_l of every read of a model: [reads, C] in float32, and as two bfloat16 parts
    [reads, 2, C]."""

    u: Tensor
    parts: Tensor


class Streams(NamedTuple):
    """The n streams [M, C] of `multi_gate`, and the writes since these were stored.

    A write is its update [M, C] and β [M, n] in at least float32.
    """

    stored: tuple[Tensor, ...]
    updates: tuple[Tensor, ...] = ()
    betas: tuple[Tensor, ...] = ()

    def later(self, update: Tensor, beta: Tensor) -> Streams:
        """After one more write that is not stored."""
        return Streams(self.stored, (*self.updates, update), (*self.betas, beta))


def turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Gains | None, cos: Tensor, sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Queries [B, T, H, D] and keys [B, T, H_kv, D], normed and rotated, from a projection [B, T, R].

    It begins with the queries and goes on with the keys. gains [D] of both, None: no norm; cos, sin [T, D/2].
    """
    width = 2 * cos.shape[-1]
    first, second = heads * width, (heads + kv_heads) * width
    q, k = (x.unflatten(-1, (-1, width)) for x in (projected[..., :first], projected[..., first:second]))
    if gains is not None:
        q, k = (rms(x, eps, gain) for x, gain in zip((q, k), gains, strict=True))
    return rotate(q, (cos, sin)), rotate(k, (cos, sin))


def enter_heads(
    projected: Tensor,
    heads: int,
    gains: Gains | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    mixing: Mixing | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """`turn_heads`, with the keys and the values that follow them written to `keys`, `values` [B, T, H_kv, D].

    Values may be mixed with an anchor. Returns the queries.
    """
    kv_heads, width = keys.shape[2:]
    q, k = turn_heads(projected, heads, kv_heads, gains, cos, sin, eps=eps)
    first = (heads + kv_heads) * width
    v = projected[..., first : first + kv_heads * width].unflatten(-1, (-1, width))
    keys.copy_(k)
    values.copy_(v if mixing is None else mixing(v))
    return q


def source_scores(y: Tensor, base: Tensor | None, queries: Queries, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The scores of a new source for the reads from `first` on.

        v = y or base + y,   z_l = u_l · RMS(v)

    Returns z [count, M], whose columns beyond the M tokens mean nothing, and v [M, C].
    """
    v = y if base is None else base + y
    keys = rms(wide(v), KEY_EPS)
    return queries.u[first : first + count].to(keys.dtype) @ keys.mT, v


def read_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """Consecutive reads of the same sources: lse [readers, M], and o = Σ_i softmax(z)_i v_i [M, C] of each.

    scores[i] are those of source i by `source_scores`, the first reader's in row rows[i].
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
    """One read of the `others`, whose scores are known, and of the newest source, with the norm after it.

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
    held: Streams, y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor, *,
    store: bool = True, competitive: bool = True, eps: float = 1e-6,
) -> tuple[Tensor, Streams]:  # fmt: skip
    """`multi_gate` and the norm after it: weight ⊙ RMS(h) [M, C], and the streams after the write.

    With `store` they are written, else the write is only noted: n rows are read again instead of being written.
    """
    streams = wide(torch.stack(held.stored, 1))
    for update, beta in zip(held.updates, held.betas, strict=True):
        streams = streams + beta.to(streams.dtype)[..., None] * (wide(update)[:, None] - streams)
    hidden, after = multi_gate(streams, wide(y), gate_query, gate_bias, pool_query, competitive=competitive)
    normed = rms(hidden, eps, weight).to(y.dtype)
    if store:
        return normed, Streams(after.to(y.dtype).unbind(1))
    return normed, held.later(y, gates(streams, gate_query, gate_bias, competitive=competitive))
