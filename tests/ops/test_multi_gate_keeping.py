"""Which junctions of an inverted chain keep their streams, and what their gradients gain from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.multi_gate import reference as plain
from residua.ops.multi_gate.inversion import (
    MAX_AMPLIFIED_ERROR,
    UNBOUNDED_AMPLIFICATION,
    amplification,
    junctions_to_keep,
)

TOKENS, N, WIDTH, JUNCTIONS = 96, 4, 16, 14
HALF_BIT = torch.finfo(torch.bfloat16).eps / 2


def test_amplification_is_that_of_the_largest_gate_that_is_not_kept() -> None:
    beta = torch.tensor([[0.5, 0.75], [0.9, 0.2]], dtype=torch.float64)
    assert [float(amplification(beta, share)) for share in (0.0, 0.1, 0.25, 0.5, 1.0)] == pytest.approx(
        [10, 4, 4, 2, 1]
    )
    assert float(amplification(torch.tensor([0.99, 0.1]), 0.0)) == UNBOUNDED_AMPLIFICATION


def test_junctions_keep_their_streams_only_where_the_product_is_not_bearable() -> None:
    most = MAX_AMPLIFIED_ERROR / HALF_BIT
    assert most == 64
    assert junctions_to_keep(dict.fromkeys(range(3, 9), 2.0), (), HALF_BIT) == []  # 2⁶
    assert junctions_to_keep(dict.fromkeys(range(3, 10), 2.0), (), HALF_BIT) == [6]  # every fourth: 2³ is the room left
    assert junctions_to_keep(dict.fromkeys(range(3, 10), 2.0), (6,), HALF_BIT) == []
    assert junctions_to_keep({3: 1.1, 4: UNBOUNDED_AMPLIFICATION, 5: 1.1}, (), HALF_BIT) == [4]
    assert junctions_to_keep(dict.fromkeys(range(20), 2.0), (), torch.finfo(torch.float32).eps / 2) == []


def chain(dtype: torch.dtype, *, keep: tuple[int, ...] | None) -> tuple[list[Tensor], dict[int, float]]:
    """Gradients of a chain in which half of the junctions overwrite half of one stream; None keeps all streams."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    streams, updates = normal(TOKENS, N, WIDTH), [normal(TOKENS, WIDTH) for _ in range(JUNCTIONS)]
    weights = []
    for k in range(JUNCTIONS):
        bias = torch.tensor([0.0, math.log(1.5), -1.8, -1.8, -1.8] if 3 <= k < 10 else [3.0, 0, 0, 0, 0])
        weights.append([0.1 * normal(WIDTH), bias.double() + 0.1 * normal(N + 1), normal(WIDTH)])
    exact = torch.promote_types(dtype, torch.float32)
    s, f = streams.to(dtype).requires_grad_(), [u.to(dtype).requires_grad_() for u in updates]
    w = [[x.to(exact).requires_grad_() for x in own] for own in weights]
    state, total, amplified = (s,), torch.zeros((), dtype=torch.float64), {}
    for k in range(JUNCTIONS):
        amplified[k] = float(amplification(plain.gates(state[0], *w[k][:2]).detach(), 0.01))
        if keep is None:
            h, state = ops.multi_gate_chain(state, f[k], *w[k])
        else:
            h, state = ops.multi_gate_inverted(state, f[k], *w[k], last=k == JUNCTIONS - 1 or k in keep)
        total = total + (normal(TOKENS, WIDTH) * h).sum()
    return list(torch.autograd.grad(total, [s, *f, *(x for own in w for x in own)])), amplified


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def test_gradients_in_bfloat16_are_then_nearly_those_of_kept_streams() -> None:
    exact, amplified = chain(torch.float64, keep=None)
    keep = tuple(junctions_to_keep({k: amplified[k] for k in range(JUNCTIONS - 1)}, (), HALF_BIT))
    assert 0 < len(keep) < 7
    kept, inverted, some = (worst(chain(torch.bfloat16, keep=k)[0], exact) for k in (None, (), keep))
    assert inverted > 10 * kept and some < 2 * kept, (kept, inverted, some, keep)
    assert worst(chain(torch.float64, keep=keep)[0], exact) < 1e-11


@pytest.mark.nightly
def test_compiled_code_follows_what_is_kept() -> None:
    from residua.config.topologies import Invert, MultiGate
    from residua.model.topology import build_topology

    topology = build_topology(MultiGate(streams=2, memory=Invert()), 4, WIDTH)
    step = torch.compile(lambda k, y, state: topology.step(k, y, state), backend="eager")
    streams, y = torch.randn(1, 3, 2, WIDTH, requires_grad=True), torch.randn(1, 3, WIDTH)
    assert len(step(2, y, (streams,))[1]) == 2  # the streams, and the link to the next junction
    topology.recovery().kept = (2,)
    assert len(step(2, y, (streams,))[1]) == 1
