"""Routing to experts: the fused kernels against an independent transcription in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from tests.golden.compare import agree
from tests.ops.harness import interpreter, on_gpu, relative

pytestmark = pytest.mark.slow


def inputs(
    tokens: int, experts: int, width: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, width), torch.randn(experts, width) * 2 / width**0.5
    return {"x": x.to(device, dtype), "weight": weight.to(device)}


def by_token(x: Tensor, weight: Tensor, top_k: int, **settings: Any) -> ops.Routed:
    """The equations, one token at a time, in Python's own lists."""
    experts = len(weight)
    bias = settings.get("bias")
    bias = torch.zeros(experts) if bias is None else bias
    weights, chosen, probabilities, squares = [], [], [], []
    visits: list[list[int]] = [[] for _ in range(experts)]
    for t, row in enumerate(x):
        logits = weight @ row
        sigmoid = settings.get("score") == "sigmoid"
        scores = 1 / (1 + torch.exp(-logits)) if sigmoid else torch.exp(logits) / torch.exp(logits).sum()
        ranked = sorted(range(experts), key=lambda e: -(scores[e].item() + bias[e].item()))[:top_k]
        total = sum(scores[e] for e in ranked) if settings.get("normalize", True) else 1.0
        weights.append(torch.stack([settings.get("scale", 1.0) * scores[e] / total for e in ranked]))
        chosen.append(ranked)
        probabilities.append(scores / scores.sum())
        squares.append(torch.log(torch.exp(logits).sum()) ** 2)
        for j, e in enumerate(ranked):
            visits[e].append(t * top_k + j)
    counts = torch.tensor([len(v) for v in visits])
    order = torch.tensor([slot for v in visits for slot in v])
    load = counts.double() / counts.sum()
    p, z = torch.stack(probabilities).mean(0), torch.stack(squares).mean()
    return ops.Routed(torch.stack(weights), torch.tensor(chosen), order, counts.cumsum(0), load, p, z)


def compare(found: ops.Routed, truth: ops.Routed) -> None:
    for name in ("chosen", "order", "ends"):
        assert torch.equal(getattr(found, name).cpu().long(), getattr(truth, name).long()), name
    torch.testing.assert_close(found.load.cpu().double(), truth.load.double(), rtol=1e-6, atol=0)


def graded(routed: ops.Routed, leaves: list[Tensor]) -> list[Tensor]:
    """Weights, probability, z, and the gradients of a random functional of them."""
    source = torch.Generator().manual_seed(2)
    values = [routed.weights, routed.probability, routed.z]
    goals = [torch.randn(v.shape, generator=source).to(v) * math.sqrt(v.numel()) for v in values]
    return [*(v.detach() for v in values), *torch.autograd.grad(values, leaves, goals)]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalize": False},
    {"score": "sigmoid", "scale": 2.5, "bias": True},
    {"score": "sigmoid", "normalize": False},
]


def with_bias(settings: dict[str, Any], experts: int, device: str = "cpu") -> dict[str, Any]:
    bias = torch.linspace(-0.3, 0.3, experts, device=device)
    return settings | ({"bias": bias} if settings.get("bias") else {})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_reference_matches_its_equations(settings: dict[str, Any]) -> None:
    leaves = {name: t.double().requires_grad_() for name, t in inputs(9, 5, 6).items()}
    settings = with_bias(settings, 5)
    found, truth = (f(*leaves.values(), 3, **settings) for f in (ops.route.reference, by_token))
    compare(found, truth)
    agree([found.weights, found.probability, found.z], [truth.weights, truth.probability, truth.z], leaves)


@interpreter
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("tokens, experts, width, top_k", [(37, 5, 24, 2), (50, 17, 33, 8), (1, 2, 8, 1)])
def test_interpreted_kernels_equal_float64_with_every_gradient(settings, tokens, experts, width, top_k) -> None:
    made, settings = inputs(tokens, experts, width), with_bias(settings, experts)
    leaves = [t.requires_grad_() for t in made.values()]
    exact = [t.detach().double().requires_grad_() for t in made.values()]
    with ops.backend("triton"):
        found = ops.route(*leaves, top_k, **settings)
    truth = by_token(*exact, top_k, **settings)
    compare(found, truth)
    for a, b in zip(graded(found, leaves), graded(truth, exact), strict=True):
        assert relative(a, b) < 1e-5 or (a - b).abs().max() < 1e-7


@interpreter
def test_ties_go_to_the_first_experts() -> None:
    x, weight = torch.randn(40, 8), torch.zeros(6, 8)
    with ops.backend("triton"):
        routed = ops.route(x, weight, 2)
    assert routed.chosen.unique(dim=0).tolist() == [[0, 1]]
    assert routed.ends.tolist() == [40, 80, 80, 80, 80, 80]
    assert routed.order.sort().values.tolist() == list(range(80))


@interpreter
def test_nan_scores_still_give_every_slot_a_place() -> None:
    """Kernels that use the order must not read outside of it, even with NaN logits."""
    made = inputs(40, 6, 8)
    made["x"][3], made["x"][7, 0], made["x"][9] = float("nan"), float("inf"), float("-inf")
    with ops.backend("triton"):
        routed = ops.route(*made.values(), 3)
    assert routed.order.sort().values.tolist() == list(range(120))
    assert routed.chosen.min() >= 0 and routed.chosen.max() < 6 and routed.weights[3].isnan().all()


@on_gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("tokens, experts, width, top_k", [(4097, 16, 512, 3), (1000, 256, 264, 8), (3, 64, 128, 6)])
def test_gpu_kernels_are_close_to_float64_and_repeatable(settings, tokens, experts, width, top_k) -> None:
    made = inputs(tokens, experts, width, "cuda", torch.bfloat16)
    settings = with_bias(settings, experts, "cuda")
    leaves = [t.requires_grad_() for t in made.values()]
    exact = [t.detach().double().requires_grad_() for t in made.values()]
    with ops.backend("triton"):
        found = ops.route(*leaves, top_k, **settings)
        again = ops.route(*leaves, top_k, **settings)
    truth = ops.route.reference(*exact, top_k, **settings)
    compare(found, ops.Routed(*(t.detach().cpu() for t in truth)))
    assert all(map(torch.equal, found, again))
    first = graded(found, leaves)
    for a, b in zip(first, graded(truth, exact), strict=True):
        assert relative(a, b) < (5e-3 if a.dtype is torch.bfloat16 else 1e-4)
    assert all(map(torch.equal, first, graded(again, leaves)))
