"""torch.utils.checkpoint around the steps of a topology: every gradient, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from residua.config import choices
from residua.errors import UserError
from residua.model.context import Reads
from residua.model.topology import State, Topology
from tests.golden.compare import close, random
from tests.model.depth import SMALL, random_topology, reads_of
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

SUBLAYERS, WIDTH = 6, 6
TOPOLOGIES = SMALL | {"boundary_attnres": choices.BoundaryAttnRes(sublayers_per_block=2)}
INVERTED = "multi_gate inverted"
NAMES = only_nightly(TOPOLOGIES, [*(name for name in TOPOLOGIES if " " not in name), INVERTED])

Step = Callable[[Topology, int, Tensor, State], tuple[Tensor, State]]


def plain(topology: Topology, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
    return topology.step(k, y, state)


def in_a_tuple(topology: Topology, k: int, y: Tensor, state: State, *, reentrant: bool) -> tuple[Tensor, State]:
    result: tuple[Tensor, State] = checkpoint(topology.step, k, y, state, use_reentrant=reentrant)
    return result


def out_in_a_tuple(topology: Topology, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
    def run(y: Tensor, *state: Tensor) -> tuple[Tensor, State]:
        return topology.step(k, y, state)

    result: tuple[Tensor, State] = checkpoint(run, y, *state, use_reentrant=True)
    return result


def one_by_one(topology: Topology, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
    def run(y: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        h, state = topology.step(k, y, state)
        reads.append(len(reads_of(h)))
        return *reads_of(h), *state

    reads: list[int] = []
    returned = checkpoint(run, y, *state, use_reentrant=True)
    h = Reads(*returned[:4]) if reads[0] == 4 else returned[0]
    return h, tuple(returned[reads[0] :])


def gradients(topology: Topology, step: Step, **options: Any) -> dict[str, Tensor]:
    """Those of the embedding, of the sublayers and of the topology."""
    leaves = {"embedding": random(2, 3, WIDTH)} | {f"f{k}": random(WIDTH, WIDTH, seed=k) for k in range(SUBLAYERS)}
    leaves |= dict(topology.named_parameters())
    topology.zero_grad()
    h, state = topology.open(leaves["embedding"].sin())
    for k in range(SUBLAYERS):
        h, state = step(topology, k, torch.tanh(sum(reads_of(h)) @ leaves[f"f{k}"]), state, **options)
    (h * torch.arange(WIDTH)).sum().backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        close(f"gradient of {name}", found[name], gradient)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_steps_have_every_gradient(name: str) -> None:
    topology = random_topology(TOPOLOGIES[name], SUBLAYERS, WIDTH)
    expected = gradients(topology, plain)
    agree(gradients(topology, in_a_tuple, reentrant=False), expected)
    if name == INVERTED:
        with pytest.raises(UserError, match=r"'invert' recomputes streams backwards.*use_reentrant=False"):
            gradients(topology, one_by_one)
    else:
        agree(gradients(topology, one_by_one), expected)


REFUSED = {"block_attnres", "hyper", "hyper static", "mhc", "mhc_lite", "dense", "multi_gate", "multi_gate independent"}


@pytest.mark.parametrize("name", NAMES)
def test_reentrant_tuple_checkpoints_are_correct_or_refused(name: str) -> None:
    topology = random_topology(TOPOLOGIES[name], SUBLAYERS, WIDTH)
    with pytest.raises(UserError, match="a reentrant checkpoint drops the gradients"):
        gradients(topology, in_a_tuple, reentrant=True)
    try:
        found = gradients(topology, out_in_a_tuple)
    except UserError:
        return
    assert name not in REFUSED
    agree(found, gradients(topology, plain))


def test_two_steps_in_one_reentrant_checkpoint_are_correct() -> None:
    topology = random_topology(choices.HyperConnections(), 2, WIDTH)
    x, results = random(2, 3, WIDTH), []
    for reentrant in (None, True):

        def layer(h: Tensor, *state: Tensor) -> Tensor:
            for k in range(2):
                h, state = topology.step(k, torch.tanh(h), state)
            return h

        h, state = topology.open(x.sin())
        h = layer(h, *state) if reentrant is None else checkpoint(layer, h, *state, use_reentrant=reentrant)
        x.grad = None
        h.square().sum().backward()
        results.append(x.grad.clone())
    close("gradient", results[1], results[0])


def test_no_grad_steps_accept_tensors_that_require_grad() -> None:
    topology = random_topology(choices.HyperConnections(), SUBLAYERS, WIDTH)
    with torch.no_grad():
        h, state = topology.open(random(2, 3, WIDTH))
        for k in range(SUBLAYERS):
            h, state = topology.step(k, random(2, 3, WIDTH, seed=k), state)
    assert not h.requires_grad
