"""Positions: explicit ones of tokens that are not the whole sequence, and learned ones of each document."""

import pytest
import torch
from torch import Tensor

from residua.errors import UserError
from residua.model.cache import Now
from residua.model.decoder import Places, build
from residua.model.sdpa import attend, attend_cached
from tests.golden.compare import agree, leaves_of, random, randomise
from tests.model.small import in_parts, small, tokens_and_targets

SOME = torch.tensor([5, 0, 1, 6])


def heads(count: int) -> Tensor:
    return torch.randn(2, 8, count, 4, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)])
@pytest.mark.parametrize("documents", [False, True])
def test_queries_at_positions_attend_as_in_the_full_sequence(
    window: int | None, sink: Tensor | None, documents: bool
) -> None:
    q, k, v = heads(4), heads(2), heads(2)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8]) if documents else None
    whole = attend(q, k, v, segments=segments, sink=sink, window=window)
    some = attend(q[:, SOME], k, v, segments=segments, sink=sink, window=window, positions=SOME)
    torch.testing.assert_close(some, whole[:, SOME], rtol=1e-12, atol=1e-12)


def test_capped_decoding_up_to_a_slot_equals_a_mask() -> None:
    """On a GPU a token that is decoded has no mask but a last slot."""
    (q, k, v), until = (heads(4)[:, :1], heads(2), heads(2)), torch.tensor([3, 6])
    visible = (torch.arange(8) <= until[:, None])[:, None, None]
    alone, masked = Now(until[:, None], None, until, None, None), Now(until[:, None], visible, until, None, None)
    torch.testing.assert_close(attend_cached(q, k, v, alone, softcap=0.3), attend_cached(q, k, v, masked, softcap=0.3))


def test_rotary_angles_follow_the_given_positions() -> None:
    model, (tokens, targets) = build(small()), tokens_and_targets(length=8)
    whole, some = model._rotary(tokens), model._rotary(tokens[:, :4], positions=SOME)
    assert whole is not None and some is not None
    assert all(torch.equal(found, table[SOME]) for found, table in zip(some, whole, strict=True))
    given = model.routed_losses(tokens, targets, positions=torch.arange(8))
    assert given[0] == model.routed_losses(tokens, targets)[0]
    assert model.routed_losses(tokens, targets, positions=2 * torch.arange(8))[0] != given[0]


DOCUMENTS = torch.tensor([[7, 7, 7, 3, 3, 9], [2, 2, 2, 2, 2, 2]])


def test_learned_positions_are_added_by_place_in_the_document() -> None:
    table = randomise(Places(6, 5, std=0.1))
    x = random(2, 6, 5)
    rows = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    expected = torch.stack([torch.stack([x[b, t] + table.weight[rows[b][t]] for t in range(6)]) for b in range(2)])
    agree([table(x, DOCUMENTS)], [expected], leaves_of(table, x=x))


def test_learned_positions_restart_in_each_document() -> None:
    attention = {"kind": "softmax", "heads": 2, "unturned_layers": [0, 1, 2]}  # angles are rounded to float32
    model = build(small(learned_positions=8, attention=attention)).double()
    tokens, _ = tokens_and_targets()
    packed = model(tokens, DOCUMENTS)[0]
    alone = torch.cat([model(part[None])[0] for part in tokens[0].split([3, 2, 1])])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(in_parts(model, tokens, [2, 3, 1]), model(tokens), rtol=1e-12, atol=1e-12)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    model, tokens = build(small(learned_positions=8)), torch.zeros(1, 9, dtype=torch.int64)
    for call in (lambda: model(tokens), lambda: model.new_cache(1, 9)):
        with pytest.raises(UserError, match="learned_positions = 8 but got 9 tokens"):
            call()
    with pytest.raises(UserError, match="where ranks divide sequences"):
        model.routed_losses(tokens[:, :4], tokens[:, :4], positions=SOME)
    with pytest.raises(UserError, match="context = 8 is more than learned_positions = 7"):
        small(learned_positions=7)
