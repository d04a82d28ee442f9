"""Gated DeltaNet, linear attention by the gated delta rule: project → convolve → delta rule → norm, gate → out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from residua.config import choices
from residua.model.cache import RecurrentCache
from residua.model.context import Anchors, Context
from residua.model.edges import Edge
from residua.model.norm import RMSNorm
from residua.model.projection import Projection
from residua.ops._runtime.numeric import begins, wide
from residua.ops.delta_rule import delta_mixer, gated_delta, gated_delta_step
from residua.ops.gated_output import gated_output
from residua.ops.short_convolution import short_convolution, unit

DECAY_RATES = (1.0, 16.0)
TIME_STEPS = (1e-3, 1e-1)


class DeltaCache(NamedTuple):
    """All that later tokens need of earlier ones, of fixed size.

    recent: [B, kernel − 1, channels], the inputs that the short convolution still sees; state: [B, H, D, D], the delta
    rule's.
    """

    recent: Tensor
    state: Tensor


class ShortConvolution(nn.Module):
    """y_t = silu(Σ_j weight_j ⊙ x_{t−j}), j = 0 … kernel − 1, over tokens of the same document.

    Starts uniform in ±1/√kernel, as torch's convolutions do.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self, x: Tensor, recent: Tensor | None, segments: Tensor | None, ends: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, channels], which follows `recent` (zeros if None); returns y and the next `recent`.

        If `ends` is given, row b of x is real up to ends[b] and padding after.
        """
        past = self.weight.shape[0] - 1
        known = pad(x, (0, 0, past, 0)) if recent is None else torch.cat([recent, x], 1)
        y = short_convolution(known, self.weight, segments)
        return y, self.later(x, recent, segments, ends)

    def later(self, x: Tensor, recent: Tensor | None, segments: Tensor | None, ends: Tensor | None = None) -> Tensor:
        """The next `recent`, of the same arguments: the last inputs, zero where they are of an earlier document."""
        past, length = self.weight.shape[0] - 1, x.shape[1]
        if ends is None:
            known = x[:, max(0, length - past) :]
            if length < past:
                before = x.new_zeros((x.shape[0], past, x.shape[2])) if recent is None else recent
                known = torch.cat([before[:, length:], known], 1)
            document = pad(begins(x, segments).cumsum(1), (past, 0))
            return known.masked_fill((document[:, length:] != document[:, -1:])[..., None], 0)
        known = pad(x, (0, 0, past, 0)) if recent is None else torch.cat([recent, x], 1)
        last = ends[:, None] + torch.arange(past, device=x.device)
        return known.gather(1, last[..., None].expand(-1, -1, x.shape[-1]))


class GatedDeltaNet(nn.Module):
    """The sequence mixer of Gated Delta Networks (arXiv 2412.06464), with the details of Qwen3-Next.

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)         short causal convolutions with silu
        q ← q / (‖q‖ √D),   k ← k / ‖k‖                         per head; each key head serves a run of value heads
        g = −exp(A_log) softplus(W_a x + dt_bias),   β = σ(W_b x)          one of each per value head
        S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t
        y = W_out (RMSNorm(o) ⊙ silu(W_z x))                    the norm per head, one gain for all

    State and convolution start over with each document. The recurrence knows the order: no rotary positions.
    """

    role = "linear attention"

    def __init__(self, config: choices.GatedDeltaNet, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        keys, values = config.key_heads * config.head_dim, config.value_heads * config.head_dim
        self.rows = (keys, keys, values, values)
        self.other_parts = {("convolve.weight", 1): self.rows[:3]}  # of a parameter, along an axis
        self.project = Projection(width, sum(self.rows), std=std, parts=self.rows)
        self.gates = Projection(width, 2 * config.value_heads, std=std, parts=(config.value_heads,) * 2)
        self.convolve = ShortConvolution(2 * keys + values, config.convolution)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = RMSNorm(choices.RMSNorm(), config.head_dim)
        self.out = Projection(values, width, std=output_std)
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
        heads = self.rows[2] // self.head_dim
        shapes = (batch, past, channels), (batch, heads, self.head_dim, self.head_dim)
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
        projected = self.project(x)
        qkv, z = projected.split([sum(self.rows[:3]), self.rows[3]], -1)
        a, b = (wide(part) for part in self.gates(x).chunk(2, -1))
        g = -wide(self.A_log).exp() * softplus(a + wide(self.dt_bias))
        beta = torch.sigmoid(b)
        if cache is None and real is None:
            weights, key_heads = (self.convolve.weight, self.norm.weight), self.rows[0] // self.head_dim
            o, last = delta_mixer(projected, g, beta, *weights, key_heads, segments=segments, eps=self.norm.eps)
            return self.out(o.flatten(-2)), DeltaCache(self.convolve.later(qkv, None, segments, ends), last)
        recent, state = cache or (None, None)
        if real is not None:
            qkv = qkv.masked_fill(~real[..., None], 0)
            g, beta = (gate.masked_fill(~real[..., None], 0) for gate in (g, beta))
        qkv, recent = self.convolve(qkv, recent, segments, ends)
        q, k, v, z = (part.unflatten(-1, (-1, self.head_dim)) for part in (*qkv.split(self.rows[:3], -1), z))
        q, k = unit(q) * self.head_dim**-0.5, unit(k)
        if x.shape[1] == 1:
            o, state = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
            o = o[:, None]
        else:
            o, state = gated_delta(q, k, v, g, beta, segments=segments, state=state)
        y: Tensor = self.out(gated_output(o, z, self.norm.weight, eps=self.norm.eps).flatten(-2))
        return y, DeltaCache(recent, state)

    def readers(self) -> tuple[Tensor, ...]:
        """Every matrix [R, C] that reads the input."""
        return self.project.weight, self.gates.weight

    def inner_edges(self, name: str) -> list[Edge]:
        """From the norm's gain, which all heads share, to the output; the gate multiplies channel by channel."""
        channel = torch.arange(self.rows[2]) % self.head_dim
        return [Edge(f"{name}.norm", (self.out.weight,), channel, self.norm.divide, self.out)]


@torch.no_grad()
def start_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """Decay rates exp(A_log) uniform, time steps softplus(dt_bias) log-uniform: Mamba-2's (arXiv 2405.21060)."""
    nn.init.uniform_(A_log, *DECAY_RATES).log_()
    least, most = (math.log(dt) for dt in TIME_STEPS)
    dt = nn.init.uniform_(dt_bias, least, most).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
