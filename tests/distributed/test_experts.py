"""Experts divided among ranks, on a mesh of one rank: outputs, gradients, and memory kept for the backward pass."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from residua.config import choices
from residua.config.run import ParallelConfig
from residua.distributed.experts import DividedExperts
from residua.distributed.mesh import one_rank
from residua.model.moe import Experts
from residua.storage.shard_files import local
from tests.distributed.live import LiveBytes

WIDTH, COUNT = 8, 4


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank that exchanges tokens with itself, and gathers from itself."""
    with one_rank(torch.device("cpu"), ParallelConfig()) as mesh:
        config = SimpleNamespace(experts=1, slices=2, shard=1, data=1)
        yield SimpleNamespace(config=config, shards=mesh.shards, experts=dist.group.WORLD, slices=dist.group.WORLD)


def experts(activation: Any, hidden: int = 16) -> Experts:
    table = choices.MoE(hidden=hidden, experts=COUNT, top_k=2, activation=activation)
    return Experts(table, WIDTH, std=0.3, output_std=0.3).double()


def divided(whole: Experts, mesh: Any, precision: torch.dtype, *, again: bool = True) -> DividedExperts:
    apart = DividedExperts(whole, mesh, precision, again)
    with torch.no_grad():
        for here, there in ((apart.up, whole.up), (apart.out, whole.out)):
            local(here).copy_(there)
    return apart


def passed(module: torch.nn.Module, x: Tensor, ends: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the matrices."""
    x = x.clone().requires_grad_()
    y = module(x, ends)
    y.square().sum().backward()
    return [y, x.grad, *(local(p.grad) for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("ends", [[3, 3, 7, 10], [0, 0, 0, 0], [0, 0, 0, 5]], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_divided_experts_compute_the_same_as_whole_experts(
    mesh: Any, activation: str, ends: list[int], again: bool
) -> None:
    """Holds even if no token visits an expert of this rank."""
    whole = experts(activation)
    x = torch.randn(ends[-1], WIDTH, dtype=torch.float64)
    expected = passed(whole, x, torch.tensor(ends, dtype=torch.int32))
    apart = divided(whole, mesh, torch.float64, again=again)
    found = passed(apart, x, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gathered_experts_are_not_held_for_the_backward_pass(mesh: Any) -> None:
    """They are gathered again; if the sublayer is recomputed anyway, the recomputation does that."""
    whole = experts("relu2", hidden=512)
    x, ends = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    held = {}
    for again in (True, False):
        apart = divided(whole, mesh, torch.float64, again=again)
        with LiveBytes() as live:
            y = apart(x.requires_grad_(), ends)
            held[again] = live.now
            y.sum().backward()
    matrices = 8 * (whole.up.numel() + whole.out.numel())
    assert held[False] - held[True] == matrices
