"""Kimi Delta Attention: linear attention by the delta rule with a decay per channel."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from residua.config import choices
from residua.model.cache import RecurrentCache
from residua.model.context import Anchors, Context
from residua.model.edges import Edge, divide_rows
from residua.model.linear_attention import DeltaCache, ShortConvolution, start_decay
from residua.model.norm import RMSNorm
from residua.model.projection import Projection
from residua.ops._runtime.numeric import wide
from residua.ops.delta_rule import kimi_delta, step
from residua.ops.short_convolution import unit


class KimiDeltaAttention(nn.Module):
    """The sequence mixer of most layers of Kimi Linear (arXiv 2510.26692).

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)         short causal convolutions with silu
        q ← q / (‖q‖ √D),   k ← k / ‖k‖                         per head
        g = −exp(A_log) softplus(W_f↑ W_f↓ x + dt_bias)         per channel of each head; A_log one per head
        β = σ(W_b x)                                            one per head
        S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t
        y = W_out (RMSNorm(o) ⊙ σ(W_g↑ W_g↓ x))                 the norm per head, one gain for all

    W_f and W_g have the rank of one head. State and convolution start over with each document. The recurrence knows the
    order: no rotary positions. `gates` holds W_b, W_f↓ and W_g↓, `decay` W_f↑, `gate` W_g↑.
    """

    role = "linear attention"

    def __init__(self, config: choices.KimiDelta, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.parts = (config.heads, config.head_dim, config.head_dim)
        self.project = Projection(width, 3 * inner, std=std, parts=(inner,) * 3)
        self.gates = Projection(width, sum(self.parts), std=std, parts=self.parts)
        self.decay = Projection(config.head_dim, inner, std=std)
        self.gate = Projection(config.head_dim, inner, std=std)
        self.convolve = ShortConvolution(3 * inner, config.convolution)
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.norm = RMSNorm(choices.RMSNorm(eps=config.eps), config.head_dim)
        self.out = Projection(inner, width, std=output_std)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start_decay(self.A_log, self.dt_bias)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        if context.now is None:
            return self.advance(x, segments=context.segments)[0], anchors
        y, after = self.advance(x, DeltaCache(*context.cache.state), real=context.now.real, ends=context.now.ends)
        context.cache.keep(after)
        return y, anchors

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> RecurrentCache:
        """The state of `batch` rows, whose size does not depend on `capacity`; `like` gives dtype and device."""
        past, channels = self.convolve.weight.shape[0] - 1, self.convolve.weight.shape[1]
        shapes = (batch, past, channels), (batch, self.heads, self.head_dim, self.head_dim)
        return RecurrentCache(*shapes, like=(like, wide(like)))

    def advance(
        self,
        x: Tensor,
        cache: DeltaCache | None = None,
        segments: Tensor | None = None,
        real: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, DeltaCache]:
        """y [B, T, C] for the tokens x [B, T, C] that follow those in `cache`, and the cache after them.

        Serves prefill and decoding; a single token takes the recurrent step. The first token of x continues the cached
        document. Padding, where `real` [B, T] is False and from ends [B] on, does not change the cache.
        """
        recent, state = cache or (None, None)
        qkv = self.project(x)
        if real is not None:
            qkv = qkv.masked_fill(~real[..., None], 0)
        qkv, recent = self.convolve(qkv, recent, segments, ends)
        q, k, v = (self._by_head(part) for part in qkv.chunk(3, -1))
        q, k = unit(q) * self.head_dim**-0.5, unit(k)
        b, decay, gate = self.gates(x).split(self.parts, -1)
        beta, g = torch.sigmoid(wide(b)), self._log_decay(decay)
        if real is not None:
            beta, g = beta.masked_fill(~real[..., None], 0), g.masked_fill(~real[..., None, None], 0)
        if x.shape[1] == 1:
            o, state = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
            o = o[:, None]
        else:
            o, state = kimi_delta(q, k, v, g, beta, segments=segments, state=state)
        y: Tensor = self.out((self.norm(o) * torch.sigmoid(self._by_head(self.gate(gate)))).flatten(-2))
        return y, DeltaCache(recent, state)

    def _log_decay(self, low: Tensor) -> Tensor:
        """g [B, T, H, D] in at least float32, of the low-rank map's middle [B, T, D]."""
        steps = softplus(wide(self.decay(low)) + wide(self.dt_bias))
        return -wide(self.A_log).exp()[:, None] * self._by_head(steps)

    def _by_head(self, x: Tensor) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (self.heads, self.head_dim))
        return by_head

    def readers(self) -> tuple[Tensor, ...]:
        """Every matrix [R, C] that reads the input."""
        return self.project.weight, self.gates.weight

    def inner_edges(self, name: str) -> list[Edge]:
        """From the norm's gain, which all heads share, to the output; and through the low-rank gate."""
        channel = torch.arange(self.heads * self.head_dim) % self.head_dim
        divide = partial(divide_rows, self.gates, self.heads + self.head_dim, self.head_dim)
        return [
            Edge(f"{name}.gate", (self.gate.weight,), torch.arange(self.head_dim), divide, self.gate),
            Edge(f"{name}.norm", (self.out.weight,), channel, self.norm.divide, self.out),
        ]
