"""Routers: which experts a token visits, and with what weights. All of it in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices

FAIR = 1e-9
"""Loads that differ by less from the fair share do so by rounding alone."""


class Router(nn.Module):
    """p = softmax(W x), and the `top_k` experts of each token with the largest p; their p, normalised, are weights."""

    def __init__(self, config: choices.MoE, width: int, *, std: float) -> None:
        super().__init__()
        self.top_k, self.std, self.normalize = config.top_k, std, config.normalize
        self.constant_weight = config.constant_weight
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> ops.Routed:
        """Route x [N, C]."""
        routed = self._route(x)
        # The gradient of a constant would not be 0 but rounding, and AdamW makes full steps of it.
        return routed._replace(weights=routed.weights.detach()) if self.constant_weight else routed

    def _route(self, x: Tensor) -> ops.Routed:
        return ops.route(x, self.weight, self.top_k, normalize=self.normalize)

    def correct(self, load: Tensor, rate: float) -> None:
        """After a step in which expert e got the share load[e] [E] of all choices. Moves nothing here."""


class SigmoidRouter(Router):
    """Scores per expert, and a bias that balances the load without a loss (DeepSeek-V3, arXiv 2412.19437; Kimi Linear).

        s = σ(W x),   T = the k largest of s + b,   w_e = scale · s_e / Σ_{j∈T} s_j

    b has no gradient and is no part of the weights. After each step it moves by a fixed rate, up for experts with less
    than the fair share of the step's choices and down for those with more. It is a buffer: checkpoints hold it.
    """

    bias: Tensor

    def __init__(self, config: choices.MoE, width: int, *, std: float) -> None:
        super().__init__(config, width, std=std)
        assert isinstance(config.router, choices.SigmoidRouter)
        self.scale = config.router.scale
        self.register_buffer("bias", torch.zeros(config.experts))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "bias" in self._buffers:  # the weight is filled before there is a bias
            nn.init.zeros_(self.bias)

    def _route(self, x: Tensor) -> ops.Routed:
        return ops.route(
            x, self.weight, self.top_k, normalize=self.normalize, score="sigmoid", bias=self.bias, scale=self.scale
        )

    @torch.no_grad()
    def correct(self, load: Tensor, rate: float) -> None:
        lack = 1 / len(load) - load
        self.bias.add_(torch.where(lack.abs() < FAIR, 0.0, rate * lack.sign()).to(self.bias.dtype))


ROUTERS: dict[str, type[Router]] = {"softmax_scores": Router, "sigmoid_scores": SigmoidRouter}


def build_router(config: choices.MoE, width: int, *, std: float) -> Router:
    """The router a configuration describes."""
    return ROUTERS[config.router.kind](config, width, std=std)
