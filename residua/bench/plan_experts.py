"""What experts on different ranks (`parallel.experts`) change in a plan: counted from the equations.

The matrices of the experts are not gathered with their layer. The shard / experts ranks that have the same ones gather
these in bf16 for the forward pass, again for the backward, and reduce their gradients in fp32. Tokens travel: each of
a token's `top_k` rows of C elements goes in bf16 to the rank of its expert, unless it is there already, and the result
comes back; in the backward pass the gradients do the same, and with recomputation the rows travel once more. Nothing
overlaps these. Experts are taken to be equally loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from residua.config.model import ModelConfig
from residua.config.run import RunConfig


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that a rank sends in a step: rows of tokens, and weights of experts; and how many exchanges of rows."""

    tokens: float = 0.0
    weights: float = 0.0
    exchanges: float = 0.0


def expert_parameters(model: ModelConfig) -> float:
    """Parameters of all experts that tokens choose, in all layers."""
    ffn = model.ffn
    matrices = 3 if ffn.gated else 2
    return float(ffn.mixtures(model.layers) * ffn.experts * matrices * ffn.hidden * model.width)


def divided_parameters(config: RunConfig, layers: float) -> float:
    """Of so many layers, the parameters of experts that are divided among ranks, and not gathered with their layer."""
    if config.parallel.experts == 1:
        return 0.0
    return expert_parameters(config.model) * layers / config.model.layers


def expert_traffic(config: RunConfig, layers: float, tokens: float, micro: int) -> ExpertTraffic:
    """What a rank with so many layers sends for `micro` micro-batches of `tokens` tokens each."""
    ffn, parallel = config.model.ffn, config.parallel
    if parallel.experts == 1:
        return ExpertTraffic()
    share = layers / config.model.layers  # of what the whole model has
    mixtures = ffn.mixtures(config.model.layers) * share
    recomputed = config.train.recompute == "sublayers"
    trips = 6 if recomputed else 4
    rows = tokens * ffn.top_k * (parallel.experts - 1) / parallel.experts
    gathered = divided_parameters(config, layers) / parallel.experts
    return ExpertTraffic(
        tokens=trips * 2 * config.model.width * rows * mixtures * micro,
        weights=(2 + 2 + 4) * gathered * (parallel.slices - 1) / parallel.slices * micro,
        exchanges=(trips + (2 if recomputed else 1)) * mixtures * micro,
    )
