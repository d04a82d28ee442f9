"""Mixture of experts: its equations, no token dropped, precision, compilation and size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from residua import ops
from residua.config import choices
from residua.config.settings import ConfigError
from residua.model.context import Context
from residua.model.decoder import build
from residua.model.moe import MoE, balance_loss
from residua.model.size import measure
from residua.train.optimizer import hidden_matrices
from residua.train.step import recompute_sublayers
from tests.golden.compare import agree, leaves_of, random, randomise
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly

WIDTH, HIDDEN, EXPERTS = 16, 8, 5
TABLE = {"kind": "moe", "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2}


def mixture(**options: object) -> MoE:
    config = choices.MoE(**(TABLE | options))
    return randomise(MoE(config, 0, WIDTH, std=0.3, output_std=0.3))


def run(module: nn.Module, x: Tensor) -> Tensor:
    y, anchors, _ = module(x, (), Context(None, None))
    assert anchors == ()
    return y


def token_by_token(module: MoE, x: Tensor, *, gated: bool, normalize: bool = True) -> Tensor:
    """The equations, one token and one expert at a time."""
    up, out = (w.unflatten(0, (EXPERTS, -1)) for w in (module.experts.up, module.experts.out))

    def expert(e: int, t: Tensor) -> Tensor:
        h = up[e] @ t
        return out[e] @ (silu(h[:HIDDEN]) * h[HIDDEN:] if gated else relu(h) ** 2)

    rows = []
    for t in x.flatten(0, 1):
        p = torch.softmax(module.router.weight @ t, 0)
        chosen = p.argsort(descending=True)[: module.router.top_k].tolist()
        total = sum(p[j] for j in chosen) if normalize else 1
        rows.append(sum(p[e] / total * expert(e, t) for e in chosen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_mixture_is_its_equations(top_k: int) -> None:
    module, x = mixture(top_k=top_k, shared=0), random(2, 7, WIDTH)
    agree([run(module, x)], [token_by_token(module, x, gated=True)], leaves_of(module, x=x))


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_that_are_not_normalized_are_the_routers_probabilities(top_k: int) -> None:
    module, x = mixture(top_k=top_k, shared=0, normalize=False), random(2, 7, WIDTH)
    agree([run(module, x)], [token_by_token(module, x, gated=True, normalize=False)], leaves_of(module, x=x))


@pytest.mark.parametrize("router", ["softmax_scores", "sigmoid_scores"])
def test_one_expert_has_a_constant_weight_without_a_gradient(router: str) -> None:
    """Not one of rounding either, which AdamW would make full steps of."""
    module, x = mixture(top_k=1, shared=0, router={"kind": router}).float(), random(2, 7, WIDTH, grad=False).float()
    y = run(module, x)
    torch.testing.assert_close(y, token_by_token(module, x, gated=True))
    y.square().sum().backward()
    assert module.router.weight.grad is None and module.experts.up.grad.any()


def test_plain_experts_and_shared_ones_with_a_gate_are_their_equations() -> None:
    module, x = mixture(activation="relu2", shared=2, shared_gate="sigmoid"), random(2, 7, WIDTH)
    shared = relu(x @ module.shared.up.weight.T) ** 2 @ module.shared.out.weight.T
    assert module.shared.up.weight.shape == (2 * HIDDEN, WIDTH)
    gate = torch.sigmoid(x @ module.shared_gate.weight.T)
    expected = token_by_token(module, x, gated=False) + gate * shared
    agree([run(module, x)], [expected], leaves_of(module, x=x))


def test_no_token_is_dropped_when_all_choose_the_same_experts() -> None:
    module, x = mixture(shared=0), random(2, 9, WIDTH, grad=False)
    with torch.no_grad():
        module.router.weight.zero_()  # a tie everywhere: topk takes the same two for all
    assert (run(module, x).abs().sum(-1) > 0).all()
    load = module(x, (), Context(None, None))[2].load
    assert sorted(load.tolist()) == pytest.approx([0, 0, 0, 0.5, 0.5])


def test_routing_counts_choices_and_averages_probabilities() -> None:
    module, x = mixture(), random(2, 7, WIDTH, grad=False)
    routing = module(x, (), Context(None, None))[2]
    logits = x.flatten(0, 1) @ module.router.weight.T
    chosen = logits.softmax(-1).topk(2).indices
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    torch.testing.assert_close(routing.load, counts / 28.0, check_dtype=False)
    torch.testing.assert_close(routing.probability, logits.softmax(-1).mean(0))
    torch.testing.assert_close(routing.z, logits.logsumexp(-1).square().mean())


def test_balanced_load_gives_the_loss_its_minimum_of_one() -> None:
    uniform = torch.full((EXPERTS,), 1 / EXPERTS)
    anything = torch.rand(EXPERTS).softmax(-1)
    assert balance_loss(uniform, anything) == pytest.approx(1.0)
    assert balance_loss(anything, anything) > 1.0  # Σ p² ≥ 1/E
    one = torch.eye(EXPERTS)[0]
    assert balance_loss(one, one) == EXPERTS


def test_every_expert_is_a_matrix_of_its_own_to_the_optimizer() -> None:
    declared = hidden_matrices(mixture())
    assert declared["experts.up"] == (HIDDEN,) * 2 * EXPERTS
    assert declared["experts.out"] == (WIDTH,) * EXPERTS
    assert "router.weight" not in declared


def test_the_router_decides_in_single_precision_under_autocast() -> None:
    module, x = mixture().float(), random(2, 7, WIDTH, grad=False).float()
    exact = module(x, (), Context(None, None))[2]
    with torch.autocast("cpu", torch.bfloat16):
        y, _, routing = module(x, (), Context(None, None))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(routing, exact)


def test_recomputed_sublayers_give_the_same_losses_routing_and_gradients() -> None:
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
def test_compile_sees_one_graph_where_the_product_is_grouped(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_pure_loss_has_no_part_of_the_balance_loss() -> None:
    model = build(small(ffn=TABLE))
    batch = tokens_and_targets()
    assert model.loss(*batch) == model.routed_losses(*batch)[0]
    assert build(small()).routed_losses(*batch)[2] is None


def test_size_counts_the_experts_a_token_does_not_visit() -> None:
    table = {"hidden": 8, "experts": 16, "top_k": 3, "activation": "relu2"}
    sparse = measure(small(ffn={"kind": "moe", **table}))
    dense = measure(small(ffn={"kind": "relu2", "hidden": 4 * 8}))
    expert, layers, router = 2 * 8 * 16, 3, 16 * 16
    assert sparse.idle == layers * 13 * expert
    assert sparse.active == dense.active + layers * router
    assert sparse.parameters == dense.parameters + layers * (13 * expert + router)
    assert sparse.flops_per_token == dense.flops_per_token + 6 * layers * router


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 6}, "ffn.top_k = 6 is more than ffn.experts = 5"),
        ({"shared": 0, "shared_gate": "sigmoid"}, "ffn.shared_gate = 'sigmoid'"),
        ({"activation": "swigl"}, "did you mean 'swiglu'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(ffn=TABLE | changes)
