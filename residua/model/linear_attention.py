"""Linear attention by the delta rule, with a decay per head (Gated DeltaNet) or per channel (Kimi Delta Attention).

Both: project → convolve → delta rule → norm, gate → out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from residua.config import choices
from residua.model.body import Body
from residua.model.cache import RecurrentCache
from residua.model.context import Anchors, Context
from residua.model.equivalence import Edge, divide_rows
from residua.model.norm import RMSNorm
from residua.model.projection import Projection
from residua.ops._runtime.numeric import begins, wide
from residua.ops.delta_rule import delta_mixer, gated_delta, gated_delta_step, kimi_delta, step
from residua.ops.gated_output import gated_output
from residua.ops.short_convolution import convolve_heads, short_convolution, unit

DECAY_RATES = (1.0, 16.0)
TIME_STEPS = (1e-3, 1e-1)


class DeltaCache(NamedTuple):
    """Everything later tokens need from earlier ones, in fixed size.

    recent: [B, kernel − 1, channels], the inputs that the short convolution still sees; state: [B, H, D, D], the state
    of the delta rule.
    """

    recent: Tensor
    state: Tensor


class ShortConvolution(nn.Module):
    """y_t = silu(Σ_j weight_j ⊙ x_{t−j}), j = 0 … kernel − 1, over tokens of the same document.

    Weights start uniform in ±1/√kernel, as in torch's convolutions.
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
        """The next `recent` for the same arguments: the last inputs, zero where they belong to an earlier document."""
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


class DeltaMixer(Body):
    """Base class of both mixers: a state of fixed size, a short convolution, Mamba-2's decay, an output norm per head.

    State and convolution restart with each document. The recurrence encodes order, so there are no rotary positions.
    """

    role = "linear attention"

    heads: int
    """Value heads, each with a state [D, D]."""
    key_heads: int
    head_dim: int
    convolve: ShortConvolution
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    project: Projection
    gates: Projection
    norm: RMSNorm
    out: Projection
    rule: Callable[..., tuple[Tensor, Tensor]]
    one_step: Callable[..., tuple[Tensor, Tensor]]
    """The rule for one token."""
    gating: str
    """The activation of the output's gate."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Decay rates exp(A_log) uniform, time steps softplus(dt_bias) log-uniform: as Mamba-2 (arXiv 2405.21060)."""
        nn.init.uniform_(self.A_log, *DECAY_RATES).log_()
        least, most = (math.log(dt) for dt in TIME_STEPS)
        dt = nn.init.uniform_(self.dt_bias, least, most).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        if context.now is None:
            return self.advance(x, segments=context.segments)[0], anchors
        y, after = self.advance(x, DeltaCache(*context.cache.state), real=context.now.real, ends=context.now.ends)
        context.cache.keep(after)
        return y, anchors

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
        projected, g, beta, z = self.enter(x)
        qkv = projected[..., : self.convolve.weight.shape[1]]
        if cache is None and real is None:
            y, last = self.mix(projected, g, beta, z, segments)
            return self.out(y.flatten(-2)), DeltaCache(self.convolve.later(qkv, None, segments, ends), last)
        recent, state = cache or (None, None)
        if real is not None:
            padding = ~real[..., None]
            qkv, beta = qkv.masked_fill(padding, 0), beta.masked_fill(padding, 0)
            g = g.masked_fill(padding if g.dim() == 3 else padding[..., None], 0)
        qkv, recent = self.convolve(qkv, recent, segments, ends)
        heads = (self.key_heads, self.key_heads, self.heads)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, -2)
        y, last = self.follow(unit(q) * self.head_dim**-0.5, unit(k), v, g, beta, z, segments, state)
        return self.out(y.flatten(-2)), DeltaCache(recent, last)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The projection, starting with q, k and v before convolution; log decay g, share β, and the gate's input z."""
        raise NotImplementedError

    def mix(
        self, projected: Tensor, g: Tensor, beta: Tensor, z: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The normed and gated outputs [B, T, H, D] for whole sequences, and the last state."""
        weights, heads = self.convolve.weight, (self.key_heads, self.heads)
        q, k, v, _ = convolve_heads(projected, weights, *heads, segments=segments)
        return self.follow(q, k, v, g, beta, z, segments, None)

    def follow(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, z: Tensor, segments: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Like `mix`, from convolved q, k and v, continuing from `state`."""
        if v.shape[1] == 1:
            o, state = self.one_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
            o = o[:, None]
        else:
            o, state = self.rule(q, k, v, g, beta, segments=segments, state=state)
        return gated_output(o, z, self.norm.weight, eps=self.norm.eps, gate=self.gating), state

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> RecurrentCache:
        """The state, whose size does not depend on `capacity`."""
        past, channels = self.convolve.weight.shape[0] - 1, self.convolve.weight.shape[1]
        shapes = (batch, past, channels), (batch, self.heads, self.head_dim, self.head_dim)
        return RecurrentCache(*shapes, like=(like, wide(like)))

    def readers(self) -> tuple[Tensor, ...]:
        return self.project.weight, self.gates.weight

    def inner_edges(self, name: str) -> list[Edge]:
        """From the norm's gain, which all heads share, to the output; the gate in between is elementwise."""
        channel = torch.arange(self.heads * self.head_dim) % self.head_dim
        return [Edge(f"{name}.norm", (self.out.weight,), channel, self.norm.divide, self.out)]


class GatedDeltaNet(DeltaMixer):
    """The sequence mixer of Gated Delta Networks (arXiv 2412.06464), with the details of Qwen3-Next.

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)         short causal convolutions with silu
        q ← q / (‖q‖ √D),   k ← k / ‖k‖                         per head; each key head serves a run of value heads
        g = −exp(A_log) softplus(W_a x + dt_bias),   β = σ(W_b x)          one of each per value head
        S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t
        y = W_out (RMSNorm(o) ⊙ silu(W_z x))                    the norm per head, one gain for all

    `project` holds W_q, W_k, W_v and W_z, `gates` W_a and W_b.
    """

    rule, one_step, gating = staticmethod(gated_delta), staticmethod(gated_delta_step), "silu"

    def __init__(self, config: choices.GatedDeltaNet, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.value_heads, config.key_heads, config.head_dim
        keys, values = config.key_heads * config.head_dim, config.value_heads * config.head_dim
        self.rows = (keys, keys, values, values)
        self.other_parts = {("convolve.weight", 1): self.rows[:3]}  # keys: a parameter and an axis of it
        self.project = Projection(width, sum(self.rows), std=std, parts=self.rows)
        self.gates = Projection(width, 2 * config.value_heads, std=std, parts=(config.value_heads,) * 2)
        self.convolve = ShortConvolution(2 * keys + values, config.convolution)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = RMSNorm(choices.RMSNorm(), config.head_dim)
        self.out = Projection(values, width, std=output_std)
        self.reset_parameters()

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected = self.project(x)
        a, b = (wide(part) for part in self.gates(x).chunk(2, -1))
        g = -wide(self.A_log).exp() * softplus(a + wide(self.dt_bias))
        z = projected[..., sum(self.rows[:3]) :].unflatten(-1, (-1, self.head_dim))
        return projected, g, torch.sigmoid(b), z

    def mix(
        self, projected: Tensor, g: Tensor, beta: Tensor, z: Tensor, segments: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights = (self.convolve.weight, self.norm.weight)
        return delta_mixer(projected, g, beta, *weights, self.key_heads, segments=segments, eps=self.norm.eps)


class KimiDeltaAttention(DeltaMixer):
    """The sequence mixer of most layers of Kimi Linear (arXiv 2510.26692).

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x)         short causal convolutions with silu
        q ← q / (‖q‖ √D),   k ← k / ‖k‖                         per head
        g = −exp(A_log) softplus(W_f↑ W_f↓ x + dt_bias)         per channel of each head; A_log one per head
        β = σ(W_b x)                                            one per head
        S_t = (I − β_t k_t k_tᵀ) Diag(exp(g_t)) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t
        y = W_out (RMSNorm(o) ⊙ σ(W_g↑ W_g↓ x))                 the norm per head, one gain for all

    W_f and W_g have the rank of one head. `gates` holds W_b, W_f↓ and W_g↓, `decay` W_f↑, `gate` W_g↑.
    """

    rule, one_step, gating = staticmethod(kimi_delta), staticmethod(step), "sigmoid"

    def __init__(self, config: choices.KimiDelta, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.heads, config.heads, config.head_dim
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

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected, (b, decay, gate) = self.project(x), self.gates(x).split(self.parts, -1)
        steps, by_head = softplus(wide(self.decay(decay)) + wide(self.dt_bias)), (self.heads, self.head_dim)
        g = -wide(self.A_log).exp()[:, None] * steps.unflatten(-1, by_head)
        return projected, g, torch.sigmoid(wide(b)), self.gate(gate).unflatten(-1, by_head)

    def inner_edges(self, name: str) -> list[Edge]:
        """As in the base class, and the edge through the low-rank gate."""
        divide = partial(divide_rows, self.gates, self.heads + self.head_dim, self.head_dim)
        gate = Edge(f"{name}.gate", (self.gate.weight,), torch.arange(self.head_dim), divide, self.gate)
        return [gate, *super().inner_edges(name)]
