"""Mixture of experts: many feed-forwards, of which each token visits a few, and the loss that balances their load.

    p = softmax(W_r x),   T = the k largest of p,   w_e = p_e / Σ_{j∈T} p_j
    y = Σ_{e∈T} w_e FFN_e(x) + FFN_shared(x)

Softmax comes before top-k. The weights of the chosen experts are scaled to sum to one, or left unchanged
(`normalize = false`: w_e = p_e). Routers compute in at least float32. No token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua import ops
from residua.config import choices
from residua.model.body import Body
from residua.model.context import Anchors, Context
from residua.model.equivalence import Edge, divide_square
from residua.model.ffn import FFNS, GatedFFN
from residua.model.projection import is_watched
from residua.model.taps import tap
from residua.ops._runtime.numeric import no_autocast, wide
from residua.ops.expert_ffn import expert_hidden
from residua.ops.expert_slots import combine, dispatch, slots_of


class Routing(NamedTuple):
    """How one layer, or a stack of layers [L, …], routed the tokens of a batch.

    load: [E], the share f_e of all choices that fell on each expert, without gradient; probability: [E], the mean P_e
    of the router's probabilities; z: the mean of its squared log-sum-exp. All are means over tokens, so a batch's
    values are the means over its equal parts.
    """

    load: Tensor
    probability: Tensor
    z: Tensor

    @classmethod
    def stack(cls, layers: Sequence[Routing]) -> Routing:
        return cls(*(torch.stack(part) for part in zip(*layers, strict=True)))


def balance_loss(load: Tensor, probability: Tensor) -> Tensor:
    """E · Σ_e f_e P_e (Switch Transformer, arXiv 2101.03961), one number per layer.

    With f_e = 1/E it is 1 for any P; that is also its minimum if f = P. For balance over the global batch
    (arXiv 2501.11873), pass means of f and P over all micro-batches and ranks.
    """
    return load.shape[-1] * (load * probability).sum(-1)


FAIR = 1e-9
"""A smaller difference between a load and the fair share is only rounding."""


class Router(nn.Module):
    """p = softmax(W x); each token visits the `top_k` experts with the largest p, weighted by their normalised p.

    Weights are multiplied by `scale`. With groups, only experts of the best groups can be chosen (`ops.route`).
    """

    def __init__(self, config: choices.MoE, width: int, *, std: float) -> None:
        super().__init__()
        self.top_k, self.std, self.normalize = config.top_k, std, config.normalize
        self.constant_weight = config.constant_weight
        self.scale, self.groups = config.router.scale, config.router.choice_of_groups
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.offset = nn.Parameter(torch.empty(config.experts)) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def forward(self, x: Tensor) -> ops.Routed:
        """Route x [N, C]."""
        routed = self._route(x)
        # Rounding would give a constant a small nonzero gradient, and AdamW would turn it into full steps.
        return routed._replace(weights=routed.weights.detach()) if self.constant_weight else routed

    def _route(self, x: Tensor) -> ops.Routed:
        return ops.route(
            x, self.weight, self.top_k, normalize=self.normalize, scale=self.scale, groups=self.groups,
            offset=self.offset, **self._scoring(),
        )  # fmt: skip

    def _scoring(self) -> dict[str, Any]:
        """The arguments of `ops.route` that depend on the kind of router."""
        return {}

    def correct(self, load: Tensor, rate: float) -> None:
        """Adjust the router after a step in which expert e got the share load[e] [E] of all choices; here a no-op."""


class SigmoidRouter(Router):
    """Scores per expert, and a bias that balances the load without a loss (DeepSeek-V3, arXiv 2412.19437; Kimi Linear).

        s = σ(W x),   T = the k largest of s + b,   w_e = scale · s_e / Σ_{j∈T} s_j

    b has no gradient and does not enter the weights. After each step it moves by a fixed rate, up for experts with less
    than the fair share of the step's choices and down for those with more. It is a buffer: checkpoints hold it.
    """

    bias: Tensor

    def __init__(self, config: choices.MoE, width: int, *, std: float) -> None:
        super().__init__(config, width, std=std)
        self.register_buffer("bias", torch.zeros(config.experts))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "bias" in self._buffers:  # the base class fills the weight before the bias exists
            nn.init.zeros_(self.bias)

    def _scoring(self) -> dict[str, Any]:
        return {"score": "sigmoid", "bias": self.bias}

    @torch.no_grad()
    def correct(self, load: Tensor, rate: float) -> None:
        lack = 1 / len(load) - load
        self.bias.add_(torch.where(lack.abs() < FAIR, 0.0, rate * lack.sign()).to(self.bias.dtype))


ROUTERS: dict[str, type[Router]] = {"softmax_scores": Router, "sigmoid_scores": SigmoidRouter}


class Experts(nn.Module):
    """The stacked matrices of all experts: `up` [E·rows, C], gate and up if gated, and `out` [E·C, H].

    Muon orthogonalises each expert's matrices separately. With biases, `up_bias` [E·rows] and `out_bias` [E·C].
    """

    rounded = ("up", "out")

    def __init__(self, config: choices.MoE, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.kind, self.count = config.activation, config.experts
        self.std, self.output_std = std, output_std
        gated = issubclass(FFNS[config.activation][0], GatedFFN)
        rows, columns = (config.hidden,) * (1 + gated) * config.experts, (width,) * config.experts
        self.up = nn.Parameter(torch.empty(sum(rows), width))
        self.out = nn.Parameter(torch.empty(sum(columns), config.hidden))
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"up": rows, "out": columns}
        self.up_bias = nn.Parameter(torch.empty(sum(rows))) if config.bias else None
        self.out_bias = nn.Parameter(torch.empty(sum(columns))) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=self.std)
        nn.init.normal_(self.out, std=self.output_std) if self.output_std else nn.init.zeros_(self.out)
        for bias in (self.up_bias, self.out_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows of x [slots, C], sorted by expert, which end at `ends` [E]; [slots, C]."""
        y: Tensor = ops.expert_ffn(x, *self.stacks(), ends, self.kind, **expert_biases(self))
        return y

    def run(self, x: Tensor, ends: Tensor, up: Tensor, out: Tensor) -> Tensor:
        """`forward` with the given matrices, one per entry of `ends`, of some or all experts; without biases."""
        up, out = up.unflatten(0, (len(ends), -1)), out.unflatten(0, (len(ends), -1))
        y: Tensor = ops.expert_ffn(x, up, out, ends, self.kind)
        return y

    def visited(self, x: Tensor, routed: ops.Routed) -> Tensor:
        """[N, C]: for each token of x [N, C], Σ over its experts of weight · result, without a pass that sorts rows."""
        way = {"order": routed.order, "weights": routed.weights, **expert_biases(self)}
        y: Tensor = ops.expert_ffn(x, *self.stacks(), routed.ends, self.kind, **way)
        return y

    def stacks(self) -> tuple[Tensor, Tensor]:
        """Each expert's matrices: up [E, rows, C] and out [E, C, H]."""
        return self.up.unflatten(0, (self.count, -1)), self.out.unflatten(0, (self.count, -1))

    def inner_edges(self, name: str) -> list[Edge]:
        """From the hidden states to the outputs, for gated and relu² experts."""
        if not self._gated() and self.kind != "relu2":
            return []
        channel = torch.arange(self.out.shape[1])
        return [Edge(name, (self.out,), channel, self._divide_states, self, partial(_states, self))]

    @torch.no_grad()
    def _divide_states(self, by: Tensor) -> None:
        whole = [self.up] if self.up_bias is None else [self.up, self.up_bias[:, None]]
        for rows in (stack.unflatten(0, (self.count, -1)) for stack in whole):
            if self._gated():
                rows[:, len(by) :].div_(by[:, None])
            else:
                divide_square(rows, by)

    def _gated(self) -> bool:
        return FFNS[self.kind][0] is GatedFFN


def expert_biases(experts: Any) -> dict[str, Tensor]:
    """Each expert's biases, if there are any: up_bias [E, rows] and out_bias [E, C]."""
    pairs = {"up_bias": experts.up_bias, "out_bias": experts.out_bias}
    return {name: bias.view(experts.count, -1) for name, bias in pairs.items() if bias is not None}


def expert_states(experts: Any, x: Tensor, ends: Tensor) -> Tensor:
    """The input of the experts' last matrices, in x's dtype: x [slots, C] → [slots, H]."""
    up = experts.up.detach().to(x.dtype).unflatten(0, (experts.count, -1))
    return expert_hidden(x, up, ends, experts.kind, expert_biases(experts).get("up_bias"))


def _states(experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
    with no_autocast(x):
        return expert_states(experts, wide(x), ends)


class SharedGate(nn.Module):
    """σ(w · x), one factor per token on the shared expert's output (Qwen2-MoE)."""

    def __init__(self, width: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(linear(x, self.weight.to(x.dtype)))


class MoE(Body):
    """The feed-forward of a layer as a mixture of experts; it also returns its `Routing`."""

    role = "mixture of experts"

    def __init__(self, config: choices.MoE, layer: int, width: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.layer, self.count = layer, config.experts
        self.router = ROUTERS[config.router.kind](config, width, std=std)
        self.experts = Experts(config, width, std=std, output_std=output_std)
        shape, act = FFNS[config.activation]
        hidden = config.shared * config.hidden
        sizes: dict[str, Any] = {"std": std, "output_std": output_std, "bias": config.bias}
        self.shared = shape(act, width, hidden, **sizes) if hidden else None
        self.shared_gate = SharedGate(width, std=std) if config.shared_gate == "sigmoid" else None

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors, Routing]:
        tokens = x.flatten(0, -2)
        routed = self.router(tokens)
        y = self._visited(tokens, routed).view_as(x)
        if self.shared is not None:
            shared, _ = self.shared(x, anchors, context)
            y = y + (shared if self.shared_gate is None else self.shared_gate(x) * shared)
        tap(f"moe.{self.layer}.load", routed.load)
        tap(f"moe.{self.layer}.chosen", lambda: routed.chosen.long().view(*x.shape[:-1], -1))
        return y, anchors, Routing(routed.load, routed.probability, routed.z)

    def _visited(self, tokens: Tensor, routed: ops.Routed) -> Tensor:
        """Σ over each token's experts of weight · result. Replaced or hooked experts get sorted rows."""
        if type(self.experts) is Experts and not is_watched(self.experts):
            return self.experts.visited(tokens, routed)
        slots = slots_of(routed.order, routed.ends, routed.weights.shape[1])
        return combine(self.experts(dispatch(tokens, slots), slots.ends), routed.weights, slots)

    def readers(self) -> tuple[Tensor, ...]:
        """The router and every expert: a factor that skipped the router would change the routing."""
        shared = () if self.shared is None else self.shared.readers()
        gate = () if self.shared_gate is None else (self.shared_gate.weight,)
        return (self.router.weight, self.experts.up, *shared, *gate)

    def inner_edges(self, name: str) -> list[Edge]:
        """The edges inside the shared expert, and those inside the others, which share one factor per channel."""
        shared = [] if self.shared is None else self.shared.inner_edges(f"{name}.shared")
        return [*shared, *self.experts.inner_edges(f"{name}.experts")]


def mixtures(model: nn.Module) -> list[MoE]:
    """Every mixture of experts of a model."""
    return [module for module in model.modules() if isinstance(module, MoE)]
