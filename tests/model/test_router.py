"""Routers with sigmoid scores and a correcting bias, and mixtures whose first layers are dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from residua.config import choices
from residua.config.settings import ConfigError
from residua.model.context import Context
from residua.model.decoder import build
from residua.model.ffn import GatedFFN
from residua.model.moe import MoE
from residua.model.router import SigmoidRouter
from residua.model.size import measure, shapes
from tests.golden import kimi
from tests.golden.compare import agree, leaves_of, random, randomise
from tests.model.small import small, tokens_and_targets

WIDTH, HIDDEN, EXPERTS = 16, 8, 5
SIGMOID = {"kind": "sigmoid_scores", "scale": 2.446}
TABLE: dict[str, Any] = {"kind": "moe", "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2, "router": SIGMOID}


def mixture(**options: Any) -> MoE:
    module = randomise(MoE(choices.MoE(**(TABLE | options)), 0, WIDTH, std=0.3, output_std=0.3))
    module.router.bias.copy_(0.2 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)))
    return module


def golden(module: MoE, x: Tensor, normalize: bool) -> Tensor:
    up, out = (w.unflatten(0, (EXPERTS, -1)) for w in (module.experts.up, module.experts.out))
    router, rows = module.router, []
    for t in x.flatten(0, 1):
        visits = kimi.route(router.weight, router.bias, t, top_k=router.top_k, scale=router.scale, normalize=normalize)
        states = {e: up[e] @ t for e in visits}
        rows.append(sum(w * out[e] @ (silu(states[e][:HIDDEN]) * states[e][HIDDEN:]) for e, w in visits.items()))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("top_k", "normalize"), [(2, True), (3, True), (1, False)])
def test_a_sigmoid_router_is_its_equations(top_k: int, normalize: bool) -> None:
    module, x = mixture(top_k=top_k, normalize=normalize, shared=0), random(2, 9, WIDTH)
    y, _, _ = module(x, (), Context(None, None))
    agree([y], [golden(module, x, normalize)], leaves_of(module, x=x))


def test_the_bias_selects_and_leaves_the_weights_alone() -> None:
    router = mixture().router
    x = random(9, WIDTH, grad=False)
    router.bias.zero_()
    router.bias[3] = 10
    weights, chosen, *_ = router(x)
    assert (chosen == 3).any(-1).all()
    scores = torch.sigmoid(x @ router.weight.T).gather(-1, chosen)
    torch.testing.assert_close(weights, 2.446 * scores / scores.sum(-1, keepdim=True))


def test_the_bias_moves_by_the_rate_against_the_load() -> None:
    router = mixture().router
    router.bias.zero_()
    router.correct(torch.tensor([0.2, 0.2 + 1e-12, 0.5, 0.1, 0.0], dtype=torch.float64), rate=0.25)
    assert router.bias.tolist() == [0, 0, -0.25, 0.25, 0.25]


def test_routing_tells_the_balance_loss_scores_that_sum_to_one() -> None:
    module, x = mixture(), random(2, 7, WIDTH, grad=False)
    routing = module(x, (), Context(None, None))[2]
    scores = torch.sigmoid(x.flatten(0, 1) @ module.router.weight.T)
    torch.testing.assert_close(routing.probability, (scores / scores.sum(-1, keepdim=True)).mean(0))
    assert routing.load.sum() == pytest.approx(1)


def test_the_bias_is_saved_and_starts_at_zero_on_any_device() -> None:
    config = small(ffn=TABLE)
    names = [name for name in build(config).state_dict() if name.endswith("router.bias")]
    assert len(names) == config.layers
    model = shapes(config)
    model.to_empty(device="cpu").reset_parameters()
    assert all((model.state_dict()[name] == 0).all() for name in names)


def test_autocast_does_not_change_the_choice() -> None:
    module, x = mixture().float(), random(2, 7, WIDTH, grad=False).float()
    exact = module(x, (), Context(None, None))[2]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x, (), Context(None, None))[2], exact)


@pytest.mark.parametrize(("options", "width"), [({}, 3 * HIDDEN), ({"dense_hidden": 20}, 20)])
def test_the_first_layers_of_a_mixture_can_be_dense(options: dict[str, int], width: int) -> None:
    """By default as wide as what a token visits elsewhere: two experts and a shared one."""
    config = small(ffn=TABLE | {"dense_layers": 2} | options)
    model = build(config)
    bodies = [sublayer.body for sublayer in model.sublayers][1::2]
    assert [type(body) for body in bodies] == [GatedFFN, GatedFFN, MoE]
    assert bodies[0].out.weight.shape == (WIDTH, width)
    _, _, routing = model.routed_losses(*tokens_and_targets())
    assert routing is not None and routing.load.shape == (1, EXPERTS)
    assert isinstance(bodies[2].router, SigmoidRouter) and measure(config).idle == 3 * 3 * HIDDEN * WIDTH


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dense_layers": 3}, "ffn.dense_layers = 3 leaves layers = 3 without experts"),
        ({"dense_hidden": 3}, "ffn.dense_hidden = 3 is the width of dense layers"),
        ({"router": {"kind": "sigmoid_scores", "scale": 0}}, "ffn.router"),
        ({"router": {"kind": "sigmoid_score"}}, "did you mean 'sigmoid_scores'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(ffn=TABLE | changes)
