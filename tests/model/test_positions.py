"""Tokens that are not the whole sequence have explicit positions: queries attend, and rotate, as in the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua.model.decoder import build
from residua.model.sdpa import attend
from tests.model.small import small, tokens_and_targets

SOME = torch.tensor([5, 0, 1, 6])


def heads(count: int) -> Tensor:
    return torch.randn(2, 8, count, 4, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)])
@pytest.mark.parametrize("documents", [False, True])
def test_queries_at_positions_attend_as_in_the_whole_sequence(
    window: int | None, sink: Tensor | None, documents: bool
) -> None:
    q, k, v = heads(4), heads(2), heads(2)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]) if documents else None
    whole = attend(q, k, v, segments=segments, sink=sink, window=window)
    some = attend(q[:, SOME], k, v, segments=segments, sink=sink, window=window, positions=SOME)
    torch.testing.assert_close(some, whole[:, SOME], rtol=1e-12, atol=1e-12)


def test_angles_are_those_of_the_positions() -> None:
    model, (tokens, targets) = build(small()), tokens_and_targets(length=8)
    whole, some = model._rotary(tokens), model._rotary(tokens[:, :4], positions=SOME)
    assert whole is not None and some is not None
    assert all(torch.equal(found, table[SOME]) for found, table in zip(some, whole, strict=True))
    given = model.routed_losses(tokens, targets, positions=torch.arange(8))
    assert given[0] == model.routed_losses(tokens, targets)[0]
    assert model.routed_losses(tokens, targets, positions=2 * torch.arange(8))[0] != given[0]
