"""Mixture of experts: its equations, no token dropped, routers, precision, compilation and size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from residua import ops
from residua.config import choices
from residua.model.context import Context
from residua.model.decoder import build
from residua.model.ffn import GatedFFN
from residua.model.moe import MoE, SigmoidRouter, balance_loss
from residua.model.size import measure, shapes
from residua.train.optimizer import hidden_matrices
from residua.train.step import recompute_sublayers
from tests.golden import kimi, parts
from tests.golden.compare import agree, leaves_of, random, randomise
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly

WIDTH, HIDDEN, EXPERTS = 16, 8, 5
TABLE = {"kind": "moe", "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2}


BIASED: dict[str, Any] = TABLE | {"router": {"kind": "sigmoid_scores", "scale": 2.446}}
NONE = Context(None, None)


def mixture(**options: Any) -> MoE:
    config = choices.MoE(**(TABLE | options))
    return randomise(MoE(config, 0, WIDTH, std=0.3, output_std=0.3))


def biased(**options: Any) -> MoE:
    """A mixture whose router has sigmoid scores and a correcting bias away from zero."""
    module = mixture(**(BIASED | options))
    module.router.bias.copy_(0.2 * torch.randn(module.count, generator=torch.Generator().manual_seed(3)))
    return module


def run(module: nn.Module, x: Tensor) -> Tensor:
    y, anchors, _ = module(x, (), NONE)
    assert anchors == ()
    return y


def visits(module: MoE, t: Tensor, normalize: bool) -> dict[int, Tensor]:
    """The experts of one token and their weights."""
    router = module.router
    groups = router.groups and (*router.groups[:2], 2 if isinstance(router, SigmoidRouter) else 1)
    sizes = {"top_k": router.top_k, "scale": router.scale, "groups": groups}
    if isinstance(router, SigmoidRouter):
        return kimi.route(router.weight, router.bias, t, **sizes, normalize=normalize)
    p = torch.softmax(router.weight @ t + (0 if router.offset is None else router.offset), 0)
    return kimi.weigh(p, p.tolist(), **sizes, normalize=normalize)


def token_by_token(module: MoE, x: Tensor, *, gated: bool = True, normalize: bool = True) -> Tensor:
    """The equations, one token and one expert at a time."""
    up, out = (w.unflatten(0, (module.count, -1)) for w in (module.experts.up, module.experts.out))

    none = torch.zeros(module.count, 1, dtype=x.dtype)
    up_bias, out_bias = (
        none if b is None else b.unflatten(0, (module.count, -1))
        for b in (module.experts.up_bias, module.experts.out_bias)
    )
    one = torch.eye(HIDDEN, dtype=x.dtype)

    def expert(e: int, t: Tensor) -> Tensor:
        h = up[e] @ t + up_bias[e]
        if module.experts.kind == "clamped_swiglu":  # of gate and up themselves, unchanged
            states = parts.clamped_swiglu(h, *torch.eye(2 * HIDDEN, dtype=x.dtype).chunk(2), one)
        else:
            states = silu(h[:HIDDEN]) * h[HIDDEN:] if gated else relu(h) ** 2
        return out[e] @ states + out_bias[e]

    rows = [sum(w * expert(e, t) for e, w in visits(module, t, normalize).items()) for t in x.flatten(0, 1)]
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    ("build_mixture", "top_k", "normalize"),
    [
        *((mixture, top_k, True) for top_k in (2, 3, 5)),
        *((mixture, top_k, False) for top_k in (1, 3)),  # the weights are the router's probabilities
        *((biased, *case) for case in ((2, True), (3, True), (1, False))),
    ],
)
def test_mixture_matches_its_equations(build_mixture: Any, top_k: int, normalize: bool) -> None:
    module, x = build_mixture(top_k=top_k, shared=0, normalize=normalize), random(2, 7, WIDTH)
    agree([run(module, x)], [token_by_token(module, x, normalize=normalize)], leaves_of(module, x=x))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "relu2"])
def test_biases_of_router_and_experts_are_added(activation: str) -> None:
    module, x = mixture(shared=0, bias=True, activation=activation), random(2, 7, WIDTH, scale=4.0)
    agree([run(module, x)], [token_by_token(module, x, gated=activation != "relu2")], leaves_of(module, x=x))
    before, edges = run(module, x), module.inner_edges("moe")
    assert len(edges) == (activation != "clamped_swiglu")  # a clipped branch passes no factor on
    for edge in edges:
        edge.fold(torch.rand(HIDDEN, dtype=x.dtype) + 0.5)
    torch.testing.assert_close(run(module, x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build_mixture", [mixture, biased])
def test_experts_of_the_best_groups_are_chosen(build_mixture: Any) -> None:
    """The best group by its largest softmax score, or by its two largest sigmoid scores (DeepSeek-V2 and V3)."""
    kind = "softmax_scores" if build_mixture is mixture else "sigmoid_scores"
    router = {"kind": kind, "scale": 1.7, "groups": 3, "top_groups": 2}
    module, x = build_mixture(experts=9, top_k=4, shared=0, router=router), random(2, 9, WIDTH)
    agree([run(module, x)], [token_by_token(module, x)], leaves_of(module, x=x))


@pytest.mark.parametrize("router", ["softmax_scores", "sigmoid_scores"])
def test_top_1_routing_has_a_constant_weight_and_no_gradient(router: str) -> None:
    """Not one of rounding either, which AdamW would make full steps of."""
    module, x = mixture(top_k=1, shared=0, router={"kind": router}).float(), random(2, 7, WIDTH, grad=False).float()
    y = run(module, x)
    torch.testing.assert_close(y, token_by_token(module, x))
    y.square().sum().backward()
    assert module.router.weight.grad is None and module.experts.up.grad.any()


def test_plain_and_gated_shared_experts_match_their_equations() -> None:
    module, x = mixture(activation="relu2", shared=2, shared_gate="sigmoid"), random(2, 7, WIDTH)
    shared = relu(x @ module.shared.up.weight.T) ** 2 @ module.shared.out.weight.T
    assert module.shared.up.weight.shape == (2 * HIDDEN, WIDTH)
    gate = torch.sigmoid(x @ module.shared_gate.weight.T)
    expected = token_by_token(module, x, gated=False) + gate * shared
    agree([run(module, x)], [expected], leaves_of(module, x=x))


def test_no_token_is_dropped_if_all_choose_the_same_experts() -> None:
    module, x = mixture(shared=0), random(2, 9, WIDTH, grad=False)
    with torch.no_grad():
        module.router.weight.zero_()  # a tie everywhere: topk takes the same two for all
    assert (run(module, x).abs().sum(-1) > 0).all()
    load = module(x, (), NONE)[2].load
    assert sorted(load.tolist()) == pytest.approx([0, 0, 0, 0.5, 0.5])


def test_routing_counts_choices_and_averages_probabilities() -> None:
    module, x = mixture(), random(2, 7, WIDTH, grad=False)
    routing = module(x, (), NONE)[2]
    logits = x.flatten(0, 1) @ module.router.weight.T
    chosen = logits.softmax(-1).topk(2).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    torch.testing.assert_close(routing.load, counts / 28.0, check_dtype=False)
    torch.testing.assert_close(routing.probability, logits.softmax(-1).mean(0))
    torch.testing.assert_close(routing.z, logits.logsumexp(-1).square().mean())


def test_balance_loss_has_its_minimum_of_one_at_balanced_load() -> None:
    uniform = torch.full((EXPERTS,), 1 / EXPERTS)
    anything = torch.rand(EXPERTS).softmax(-1)
    assert balance_loss(uniform, anything) == pytest.approx(1.0)
    assert balance_loss(anything, anything) > 1.0  # Σ p² ≥ 1/E
    one = torch.eye(EXPERTS)[0]
    assert balance_loss(one, one) == EXPERTS


def test_the_bias_moves_by_the_rate_against_the_load() -> None:
    router = biased().router
    router.bias.zero_()
    router.correct(torch.tensor([0.2, 0.2 + 1e-12, 0.5, 0.1, 0.0], dtype=torch.float64), rate=0.25)
    assert router.bias.tolist() == [0, 0, -0.25, 0.25, 0.25]


def test_balance_loss_gets_scores_that_sum_to_one() -> None:
    module, x = biased(), random(2, 7, WIDTH, grad=False)
    routing = module(x, (), NONE)[2]
    scores = torch.sigmoid(x.flatten(0, 1) @ module.router.weight.T)
    torch.testing.assert_close(routing.probability, (scores / scores.sum(-1, keepdim=True)).mean(0))
    assert routing.load.sum() == pytest.approx(1)


def test_the_bias_is_saved_and_starts_at_zero_on_any_device() -> None:
    config = small(ffn=BIASED)
    names = [name for name in build(config).state_dict() if name.endswith("router.bias")]
    assert len(names) == config.layers
    model = shapes(config)
    model.to_empty(device="cpu").reset_parameters()
    assert all((model.state_dict()[name] == 0).all() for name in names)


def test_optimizer_sees_every_expert_as_a_separate_matrix() -> None:
    declared = hidden_matrices(mixture())
    assert declared["experts.up"] == (HIDDEN,) * 2 * EXPERTS
    assert declared["experts.out"] == (WIDTH,) * EXPERTS
    assert "router.weight" not in declared


@pytest.mark.parametrize("build_mixture", [mixture, biased])
def test_routing_uses_single_precision_under_autocast(build_mixture: Any) -> None:
    module, x = build_mixture().float(), random(2, 7, WIDTH, grad=False).float()
    exact = module(x, (), NONE)[2]
    with torch.autocast("cpu", torch.bfloat16):
        y, _, routing = module(x, (), NONE)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(routing, exact)


def test_recomputing_keeps_routing_and_gradients() -> None:
    tokens, targets = tokens_and_targets()

    def gradients(recompute: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        model = build(small(ffn=TABLE)).double()
        if recompute:
            recompute_sublayers(model)
        ce, _, routing = model.routed_losses(tokens, targets)
        assert routing is not None and routing.load.shape == (3, EXPERTS)
        (ce + balance_loss(routing.load, routing.probability).sum() + routing.z.sum()).backward()
        return (ce, *routing, *(p.grad for p in model.parameters()))

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", only_nightly(["none", "sublayers"], but=["sublayers"]))
def test_grouped_products_compile_into_one_graph(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; PyTorch has the same product on a CPU."""
    monkeypatch.setattr(ops.grouped_linear, "_serves", lambda *tensors: True)
    model = build(small(ffn=TABLE, layers=1))
    batch = tokens_and_targets()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.routed_losses(*batch)
        if recompute == "sublayers":
            recompute_sublayers(model)
        found = torch.compile(model.routed_losses, backend="aot_eager", fullgraph=True)(*batch)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    (found[0] + balance_loss(found[2].load, found[2].probability).sum()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_pure_loss_excludes_the_balance_loss() -> None:
    model = build(small(ffn=TABLE))
    batch = tokens_and_targets()
    assert model.loss(*batch) == model.routed_losses(*batch)[0]
    assert build(small()).routed_losses(*batch)[2] is None


@pytest.mark.parametrize(("options", "width"), [({}, 3 * HIDDEN), ({"dense_hidden": 20}, 20)])
def test_the_first_layers_of_a_mixture_can_be_dense(options: dict[str, int], width: int) -> None:
    """By default as wide as the experts that a token visits elsewhere: two and a shared one."""
    config = small(ffn=BIASED | {"dense_layers": 2} | options)
    model = build(config)
    bodies = [sublayer.body for sublayer in model.sublayers][1::2]
    assert [type(body) for body in bodies] == [GatedFFN, GatedFFN, MoE]
    assert bodies[0].out.weight.shape == (WIDTH, width)
    _, _, routing = model.routed_losses(*tokens_and_targets())
    assert routing is not None and routing.load.shape == (1, EXPERTS)
    assert isinstance(bodies[2].router, SigmoidRouter) and measure(config).idle == 3 * 3 * HIDDEN * WIDTH


def test_size_counts_experts_a_token_does_not_visit() -> None:
    table = {"hidden": 8, "experts": 16, "top_k": 3, "activation": "relu2"}
    sparse = measure(small(ffn={"kind": "moe", **table}))
    dense = measure(small(ffn={"kind": "relu2", "hidden": 4 * 8}))
    expert, layers, router = 2 * 8 * 16, 3, 16 * 16
    assert sparse.idle == layers * 13 * expert
    assert sparse.active == dense.active + layers * router
    assert sparse.parameters == dense.parameters + layers * (13 * expert + router)
    assert sparse.flops_per_token == dense.flops_per_token + 6 * layers * router
