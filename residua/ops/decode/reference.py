"""Operators of decoding in plain PyTorch: a junction together with the norm after it, and attention to a cache.

With one token per row, time is spent on launching kernels, so their number counts: each of these is one launch when
fused. Rows are [M, C]; equations are those of `depth_attention` and `multi_gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from residua.ops._runtime.numeric import rms, wide
from residua.ops.mix_projection.reference import Mixing
from residua.ops.multi_gate.reference import multi_gate
from residua.ops.norm_rotate.reference import rotate

KEY_EPS = 1e-6

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu2": lambda x: relu(x).square(),
    "gelu": gelu,
    "swiglu": lambda gate, up: silu(gate) * up,
    "glu": lambda gate, up: torch.sigmoid(gate) * up,
}
GATED = ("swiglu", "glu")


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

    sources, y, base [M, C]; queries [S, C], scale and gain included. The first read is a sublayer's input: it comes
    normed. Returns weight ⊙ RMS(o_0) [M, C], v [M, C], and of the other reads o [S−1, M, C], lse and ‖o‖² [S−1, M], in
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
    """Merge a block's running sum into one read of `read_sources`, which `finished` = (o, lse, ‖o‖²) holds (phase two).

        p = y or base + y,   t = sigmoid(query · RMS(p) − lse),   h = o + t (p − o)

    Returns weight ⊙ RMS(h) and p, both [M, C].
    """
    o, lse, _ = finished
    p = y if base is None else base + y
    values = wide(p)
    t = torch.sigmoid((rms(values, KEY_EPS) * query.to(values.dtype)).sum(-1) - lse)[:, None]
    return rms(o + t * (values - o), eps, weight).to(p.dtype), p


def gate_norm(
    streams: Sequence[Tensor],
    y: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    weight: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`multi_gate` and the norm after it: weight ⊙ RMS(h) [M, C], and the streams, each [M, C], after the write."""
    together = torch.stack([wide(stream) for stream in streams], 1)
    hidden, after = multi_gate(together, wide(y), gate_query, gate_bias, pool_query, competitive=competitive)
    return rms(hidden, eps, weight).to(y.dtype), after.to(y.dtype).unbind(1)


def activate(x: Tensor, kind: str) -> Tensor:
    """The activation of a feed-forward sublayer by the name of its kind; x [M, H], or of gated kinds [M, 2H]."""
    return ACTIVATIONS[kind](*x.chunk(2 if kind in GATED else 1, -1))


def enter_cache(
    projected: Tensor,
    heads: int,
    gains: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    mixing: Mixing | None = None,
) -> Tensor:
    """The heads of one token per row: queries and keys normed and rotated, keys and values put into their slots.

    projected [B, R] begins with `heads` queries and then the H_kv keys and values of keys, values [B, S, H_kv, D];
    gains [D] of queries and keys, None: no norm; cos, sin [positions, D/2], of every position that may occur;
    positions [B]. Values may be mixed with an anchor [B, H_kv, D]. Returns the queries [B, H, D].
    """
    kv, width = keys.shape[2:]
    q, k, v = projected[:, : (heads + 2 * kv) * width].unflatten(-1, (-1, width)).split([heads, kv, kv], 1)
    if gains is not None:
        q, k = (rms(x, KEY_EPS, gain) for x, gain in zip((q, k), gains, strict=True))
    table = (cos[positions, None], sin[positions, None])
    q, k = (rotate(x[:, None], table)[:, 0] for x in (q, k))
    rows = torch.arange(len(q), device=q.device)
    keys[rows, positions] = k.to(keys.dtype)
    values[rows, positions] = (v if mixing is None else mixing(v)).to(values.dtype)
    return q


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None = None) -> Tensor:
    """softmax(QKᵀ/√D) V of one token per row over the slots of a cache up to `until`, that one included.

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
