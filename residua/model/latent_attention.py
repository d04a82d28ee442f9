"""Multi-head latent attention: softmax attention whose keys and values are computed from one small vector per token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from residua import ops
from residua.config import choices
from residua.model.body import Body
from residua.model.cache import KeyValueCache, Now
from residua.model.context import Anchors, Context
from residua.model.equivalence import Edge
from residua.model.norm import RMSNorm
from residua.model.projection import Projection, is_plain
from residua.model.sdpa import attend, attend_cached, attend_latents
from residua.model.taps import tap


class LatentAttention(Body):
    """MLA (DeepSeek-V2, arXiv 2405.04434), with rotary positions or, as in Kimi Linear, without positions.

        c = RMSNorm(W_c x),   s = R W_s x                       rank and shared elements: all that is cached
        k_h = [W_uk,h c ; s],   v_h = W_uv,h c                  per head, s the same for all
        q_h = [W_q,h x ; R W_qs,h x]                            of RMSNorm(W_q↓ x) in place of x if `query_rank` is set
        y = W_out [softmax(q_h k_hᵀ / √(head_dim + shared)) v_h]_h

    R rotates by position, in the half-split convention (`model/rope.py`); without positions it is the identity.
    Decoding one token uses the absorbed form: q_hᵀ W_uk,h c = (W_uk,hᵀ q_h)ᵀ c, so queries score the cached c directly,
    weights average c, and W_uv,h is applied to the average. Keys and values of earlier tokens are never recomputed.

    `project` holds W_q (or W_q↓) and [W_c; W_s], `expand` the rows [W_uk,h; W_uv,h] head by head.
    """

    role = "attention"
    window = None
    sink = None
    softcap = None

    def __init__(
        self, config: choices.LatentAttention, layer: int, width: int, *, std: float, output_std: float
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.rank = layer, config.heads, config.rank
        self.key_dim, self.shared_dim, self.value_dim = config.head_dim, config.shared_dim, config.value_width
        self.turns = config.turned(width) > 0
        queries = config.heads * (config.head_dim + config.shared_dim)
        self.rows = (config.query_rank or queries, config.rank + config.shared_dim)
        self.project = Projection(width, sum(self.rows), std=std, parts=self.rows)
        self.query_norm, self.query = None, None
        if config.query_rank is not None:
            self.query_norm = RMSNorm(choices.RMSNorm(), config.query_rank)
            self.query = Projection(config.query_rank, queries, std=std)
        self.norm = RMSNorm(choices.RMSNorm(), config.rank)
        self.expand = Projection(config.rank, config.heads * (self.key_dim + self.value_dim), std=std)
        self.out = Projection(config.heads * self.value_dim, width, std=output_std)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        q, c, shared = self._project(x, context)
        now = context.now
        if now is not None:
            follows = now.visible is not None or now.until is not None
            c, shared = context.cache.extend(c, shared, now)
            if follows and x.shape[1] == 1 and is_plain(self.expand):
                y = self._absorbed(q, c, shared, now)
                return self.out(y.flatten(-2)), anchors
        k, v = self._expanded(c, shared)
        for name, heads in (("query", q), ("key", k), ("value", v)):
            tap(f"attention.{self.layer}.{name}", heads)
        attending = context.across or attend
        y = attending(q, k, v, segments=context.segments) if now is None else attend_cached(q, k, v, now)
        return self.out(y.flatten(-2)), anchors

    def _project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, key + shared], latents [B, T, 1, rank] and the keys' shared part [B, T, 1, shared]."""
        q, c, shared = self.project(x).split([self.rows[0], self.rank, self.shared_dim], -1)
        if self.query is not None and self.query_norm is not None:
            q = self.query(self.query_norm(q))
        q, c, shared = q.unflatten(-1, (self.heads, -1)), self.norm(c)[..., None, :], shared[..., None, :]
        if self.turns:
            assert context.rotary is not None
            table = context.rotary[0], context.rotary[1]
            plain, turned = q.split([self.key_dim, self.shared_dim], -1)
            q, shared = torch.cat([plain, ops.rotate(turned, table)], -1), ops.rotate(shared, table)
        return q, c, shared

    def _expanded(self, c: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H, key + shared] and values [B, S, H, value] of the latents."""
        both = self.expand(c.squeeze(-2)).unflatten(-1, (self.heads, -1))
        k, v = both.split([self.key_dim, self.value_dim], -1)
        return torch.cat([k, shared.expand(*k.shape[:-1], -1).to(k.dtype)], -1), v

    def _absorbed(self, q: Tensor, c: Tensor, shared: Tensor, now: Now) -> Tensor:
        """The heads' outputs [B, 1, H, value] for one query per row, computed directly from the latents."""
        key, value = self._expanding().split([self.key_dim, self.value_dim], 1)
        plain, turned = q[:, 0].split([self.key_dim, self.shared_dim], -1)
        met = torch.einsum("bhd,hdr->bhr", plain, key.to(q.dtype))
        mean = attend_latents(met, turned, c.squeeze(-2), shared.squeeze(-2), now, scale=q.shape[-1] ** -0.5)
        return torch.einsum("bhr,hdr->bhd", mean, value.to(q.dtype))[:, None]

    def _expanding(self) -> Tensor:
        """The matrix of `expand` by head, [H, key + value, rank]."""
        by_head: Tensor = self.expand.weight.unflatten(0, (self.heads, -1))
        return by_head

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> KeyValueCache:
        """A cache of latents and of the key parts that all heads share."""
        return KeyValueCache(batch, capacity, 1, self.rank, like, value_dim=self.shared_dim)

    @property
    def query_heads(self) -> tuple[int, int]:
        return self.heads, self.value_dim

    def readers(self) -> tuple[Tensor, ...]:
        return (self.project.weight,)

    def inner_edges(self, name: str) -> list[Edge]:
        """From the norms of the latents to the maps that read them, and from the values to the output."""
        edges = []
        if self.query is not None and self.query_norm is not None:
            reads, ranks = (self.query.weight,), torch.arange(self.rows[0])
            edges.append(Edge(f"{name}.query", reads, ranks, self.query_norm.divide, self.query))
        latents = Edge(f"{name}.latents", (self.expand.weight,), torch.arange(self.rank), self.norm.divide, self.expand)
        channel = torch.arange(self.heads * self.value_dim)
        return [
            *edges,
            latents,
            Edge(f"{name}.values", (self.out.weight,), channel, partial(_divide_values, self), self.out),
        ]


@torch.no_grad()
def _divide_values(attention: LatentAttention, by: Tensor) -> None:
    rows = attention._expanding()[:, attention.key_dim :]
    rows.div_(by.view(attention.heads, attention.value_dim, 1))
