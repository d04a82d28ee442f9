"""Models with experts in bfloat16: rounding flips near ties between experts, here as in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua import ops
from residua.model.moe import Router, SigmoidRouter
from residua.ops.expert_slots import sort_slots
from residua.storage.load import load
from tests.convert.tiny import KIMI, build, logits

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.nightly
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
}
WIDE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
HEADS = {"num_key_value_heads": 8, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT = HEADS | {"kv_lora_rank": 64}
DELTA = {"linear_head_dim": 32, "linear_num_heads": 8, "layer_types": KIMI["layer_types"] * 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", SIZES | WIDE | {"head_dim": 32, "norm_topk_prob": True}),
    "kimi": ("KimiLinear", KIMI | SIZES | WIDE | LATENT | DELTA),
}
TOKENS = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(1))


def routers(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if type(part).__name__.endswith("Router")]


def choices(model: nn.Module) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits of the tokens; for each layer with experts the input of its router, and the experts it chose, in order."""
    inputs: list[Tensor] = []
    chosen: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], routed: Any) -> None:
        inputs.append(given[0].flatten(0, -2))
        chosen.append((routed.chosen if isinstance(routed, ops.Routed) else routed[2]).long().sort(-1).values)

    hooks = [router.register_forward_hook(keep) for router in routers(model)]
    found = logits(model, TOKENS).float()
    for hook in hooks:
        hook.remove()
    return found, inputs, chosen


def send(router: Router, chosen: Tensor, x: Tensor) -> ops.Routed:
    """The routing of x to experts that are chosen already."""
    scores = linear(x.float(), router.weight.float())
    scores = scores.sigmoid() if isinstance(router, SigmoidRouter) else scores.softmax(-1)
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * getattr(router, "scale", 1.0)
    order, _, ends, _ = sort_slots(chosen, len(router.weight))
    mean = scores.mean(0)
    return ops.Routed(weights, chosen, order.to(torch.int32), ends, mean, mean, mean.sum())


def others(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """The share of tokens that visit another set of experts."""
    pairs = zip(first, second, strict=True)
    return float(torch.stack([(one != two).any(-1).float().mean() for one, two in pairs]).mean())


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_changes_logits_only_through_flipped_experts(name: str, tmp_path: Path) -> None:
    architecture, keys = MODELS[name]
    build(architecture, **keys).to(torch.bfloat16).save_pretrained(tmp_path)
    exact, _, experts = choices(load(tmp_path).eval())
    open_theirs = transformers.AutoModelForCausalLM.from_pretrained
    theirs, inputs, their_experts = choices(open_theirs(tmp_path, dtype=torch.bfloat16).eval())
    model = load(tmp_path).eval().to(torch.bfloat16)
    ours, _, our_experts = choices(model)
    same = [router(x).chosen.long().sort(-1).values for router, x in zip(routers(model), inputs, strict=True)]
    for router, chosen in zip(routers(model), experts, strict=True):
        router.forward = partial(send, router, chosen)
    forced = logits(model, TOKENS).float()

    errors = ((found - exact).square().mean().sqrt() for found in (theirs, ours, forced))
    their_error, error, forced_error = map(float, errors)
    assert error < 1.5 * their_error  # neither order of rounding is better
    assert forced_error < error / 2.5
    assert others(our_experts, experts) > 0.02 and others(their_experts, experts) > 0.02
    assert others(same, their_experts) < 0.01  # with one input, the routers agree
    print(f"{name}: {their_error:.3f} {error:.3f} {forced_error:.3f} of {float(exact.abs().max()):.2f}")
