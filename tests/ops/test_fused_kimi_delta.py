"""The kernels of the delta rule with a decay per channel, in the interpreter, against references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.kimi_delta import reference
from tests.ops.test_gated_delta import short_documents
from tests.ops.test_kimi_delta import inputs

autograd = pytest.importorskip("residua.ops.kimi_delta.autograd")
pytestmark = pytest.mark.slow


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    total = sum((y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum() for y in outputs)
    return torch.autograd.grad(total, leaves)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 2e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        assert float((a.detach().double() - b.detach()).abs().max()) <= tolerance * float(b.detach().abs().max())


@pytest.mark.parametrize("decay", [0.5, 20.0])
def test_products_and_their_gradients_are_the_references(decay: float) -> None:
    """Decays from weak to so strong that exp(G) of a chunk is e⁻⁶⁰⁰; what is above the diagonal is not used."""
    exact = [torch.randn(1, 64, 5, dtype=torch.float64) for _ in range(2)]
    exact.append((-decay * torch.rand(1, 64, 5, dtype=torch.float64)).float().cumsum(1).double())
    single = [x.float().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    found, expected = (
        tuple(pairs.tril() for pairs in products(*tiles))
        for products, tiles in ((autograd._products, single), (reference._decayed_products, exact))
    )
    close(found, expected)
    close(gradients(found, single), gradients(expected, exact))


@pytest.mark.nightly
@pytest.mark.parametrize(("length", "documents"), [(70, True), (130, False)])
def test_the_rule_gives_the_values_and_gradients_of_the_loop(length: int, documents: bool) -> None:
    exact = inputs(length, key_heads=2)
    single = {name: x.detach().float().requires_grad_() for name, x in exact.items()}
    segments = short_documents(length) if documents else None
    with ops.backend("triton"):
        found = ops.kimi_delta(**single, segments=segments)
    expected = reference.naive(**exact, segments=segments)
    close(found, expected)
    first = gradients(found, list(single.values()))
    close(first, gradients(expected, list(exact.values())))
    with ops.backend("triton"):
        again = gradients(ops.kimi_delta(**single, segments=segments), list(single.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.nightly
def test_products_are_an_operator_that_torch_can_check() -> None:
    tiles = [torch.randn(1, 64, 5) for _ in range(2)] + [(-torch.rand(1, 64, 5)).cumsum(1)]
    torch.library.opcheck(autograd._forward, tiles, test_utils=("test_schema", "test_faketensor"))
