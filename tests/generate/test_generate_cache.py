"""Prefill, chunked prefill and token-by-token decoding are one forward pass, for every combination of components."""

import pytest
import torch
from torch import Tensor

import residua
from residua.generate.generator import prefill
from residua.generate.transfer import integers, padded
from residua.model.decoder import Decoder
from tests.model.combinations import ATTENTIONS, ROWS, config_of, name_of
from tests.model.pairwise import Row
from tests.model.small import small
from tests.nightly import covering

pytestmark = pytest.mark.slow

LENGTHS = (7, 4, 1)
AHEAD = 2
TOLERANCE = 1e-12


def random_model(row: Row) -> Decoder:
    """A model in which every part has an effect: parameters that start at zero are random too."""
    model = residua.build(config_of(row)).double().eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def sequences() -> list[Tensor]:
    return [torch.randint(23, (length + AHEAD,)) for length in LENGTHS]


@torch.no_grad()
def uncached(model: Decoder, tokens: list[Tensor]) -> list[Tensor]:
    """Each sequence alone, in one pass without a cache."""
    return [model(row[None])[0] for row in tokens]


@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
@torch.no_grad()
def test_cached_batched_chunked_logits_equal_uncached_single(row: Row) -> None:
    model, tokens = random_model(row), sequences()
    expected = uncached(model, tokens)
    for chunk in (7, 3, 1):
        cache = model.new_cache(len(tokens), max(LENGTHS) + AHEAD)
        prompts = [sequence[:length].tolist() for sequence, length in zip(tokens, LENGTHS, strict=True)]
        got = [model.logits(prefill(model, cache, prompts, chunk))]
        for ahead in range(AHEAD):
            following = torch.stack([s[length + ahead] for s, length in zip(tokens, LENGTHS, strict=True)])
            got.append(model(following[:, None], cache=cache)[:, 0])
        for ahead, logits in enumerate(got):
            for i, length in enumerate(LENGTHS):
                torch.testing.assert_close(logits[i], expected[i][length - 1 + ahead], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sink", ["none", "learned"])
@torch.no_grad()
def test_static_and_growing_caches_give_equal_logits(sink: str) -> None:
    model = residua.build(small(attention={"kind": "softmax", "heads": 2, "sink": sink})).double()
    tokens = torch.randint(23, (2, 5))
    expected = model(tokens)
    cache = model.new_cache(2, 9)
    prefill(model, cache, tokens[:, :3].tolist())
    cache.static = True
    for t in (3, 4):
        logits = model(tokens[:, t : t + 1], cache=cache)[:, 0]
        torch.testing.assert_close(logits, expected[:, t], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mixer", ["plain", "linear"])
@torch.no_grad()
def test_a_cleared_cache_starts_empty(mixer: str) -> None:
    model = residua.build(small(attention=ATTENTIONS[mixer])).double()
    tokens = torch.randint(23, (1, 6))
    cache = model.new_cache(1, 8)
    model.hidden(torch.randint(23, (1, 7)), cache=cache)
    cache.clear()
    torch.testing.assert_close(model(tokens, cache=cache), model(tokens), rtol=0, atol=TOLERANCE)


def test_a_full_cache_refuses_more_tokens_in_one_sentence() -> None:
    model = residua.build(small())
    cache = model.new_cache(1, 4)
    model.hidden(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(
        ValueError, match=r"the cache has room for 4 tokens, but 3 \+ 2 are needed: build a larger " r"one\."
    ):
        model.hidden(torch.zeros(1, 2, dtype=torch.int64), cache=cache)


def test_cache_stores_only_grouped_keys_and_values() -> None:
    model = residua.build(small(attention={"kind": "softmax", "heads": 4, "kv_heads": 2}))
    shapes = {tuple(tensor.shape) for tensor in model.new_cache(3, 5, torch.bfloat16).tensors()}
    assert shapes == {(3, 5, 2, 4)}


def test_rows_of_tokens_are_padded_into_one_tensor() -> None:
    rows = [[5, 2**40, 7], [], [1]]
    assert torch.equal(padded(rows, 4), torch.tensor([[5, 2**40, 7, 0], [0, 0, 0, 0], [1, 0, 0, 0]]))
    assert padded([[]], 0).shape == (1, 0)
    assert integers([]).dtype == torch.int64
