"""Inputs of a forward pass: documents, a cache, no tokens at all; and refusals of anything else."""

from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua.model.context import number_documents
from residua.model.decoder import Decoder
from tests.golden.compare import randomise
from tests.model.small import VOCABULARY, small, tokens_and_targets
from tests.nightly import only_nightly

MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax", "heads": 2},
    "window": {"kind": "softmax", "heads": 2, "window": 8},
    "sink": {"kind": "softmax", "heads": 2, "sink": "learned"},
    "mla": {"kind": "mla", "heads": 2, "head_dim": 8, "shared_dim": 4, "rank": 12},
    "gated_deltanet": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8},
    "kimi_delta": {"kind": "kimi_delta", "heads": 2, "head_dim": 8},
    "hybrid": {
        "kind": "hybrid", "softmax_every": 2, "softmax": {"heads": 2},
        "linear": {"key_heads": 1, "value_heads": 2, "head_dim": 8},
    },
}  # fmt: skip
RETURNS = torch.tensor([[0, 0, 1, 1, 0, 0]])
NOTHING = torch.zeros(1, 0, dtype=torch.int64)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def random_model(mixer: str) -> Decoder:
    return randomise(residua.build(small(layers=2, attention=MIXERS[mixer])), 0.3)


def other_first_token(tokens: Tensor) -> Tensor:
    return torch.cat([(tokens[:, :1] + 1) % VOCABULARY, tokens[:, 1:]], 1)


@every_mixer
def test_document_is_a_run_of_equal_ids_even_if_an_id_recurs(mixer: str) -> None:
    model = random_model(mixer)
    tokens, _ = tokens_and_targets(batch=1)
    before, after = model(tokens, RETURNS), model(other_first_token(tokens), RETURNS)
    targets = torch.full_like(tokens, -100).index_fill(1, torch.arange(2, 6), 3)
    for loss in (model.loss, lambda *given, segments: model.losses(*given, segments=segments)[0]):
        one, two = (loss(given, targets, segments=RETURNS) for given in (tokens, other_first_token(tokens)))
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(after[:, 2:], before[:, 2:], rtol=0, atol=1e-12)
    assert (before[:, 1] - after[:, 1]).abs().max() > 1e-6
    assert torch.equal(before, model(tokens, torch.tensor([[7, 7, 3, 3, 4, 4]])))


def test_documents_are_numbered_from_zero_in_each_row() -> None:
    assert number_documents(None) is None
    numbers = number_documents(torch.tensor([[3, 1, 1, 3], [5, 5, 5, 5]]))
    assert numbers is not None and numbers.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", only_nightly(["softmax", "gated_deltanet"], but=["softmax"]))
def test_a_model_with_documents_compiles_into_one_graph(mixer: str) -> None:
    torch._dynamo.reset()
    model = random_model(mixer)
    tokens, _ = tokens_and_targets(batch=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, RETURNS), model(tokens, RETURNS), rtol=0, atol=1e-12)


@every_mixer
def test_documents_and_a_cache_cannot_be_given_together(mixer: str) -> None:
    model = random_model(mixer)
    tokens, _ = tokens_and_targets(batch=1)
    for run in (model, model.hidden):
        with pytest.raises(ValueError, match="a cache continues one document per row, so segments cannot be used"):
            run(tokens, RETURNS, model.new_cache(1, 6))


@every_mixer
def test_empty_input_gives_empty_logits_and_zero_gradients(mixer: str) -> None:
    model = random_model(mixer)
    for segments in (None, NOTHING):
        logits = model(NOTHING, segments)
        assert logits.shape == (1, 0, VOCABULARY)
        model.zero_grad()
        logits.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@every_mixer
@torch.no_grad()
def test_empty_input_does_not_change_a_cache(mixer: str) -> None:
    model = random_model(mixer)
    tokens, _ = tokens_and_targets(batch=1)
    cache, expected = model.new_cache(1, 6), model(tokens)
    for part in (NOTHING, tokens[:, :4], NOTHING, tokens[:, 4:]):
        got = model(part, cache=cache)
        assert got.shape == (*part.shape, VOCABULARY)
    torch.testing.assert_close(got, expected[:, 4:], rtol=0, atol=1e-12)


@every_mixer
@torch.no_grad()
def test_one_sequence_is_broadcast_to_every_row_of_a_cache(mixer: str) -> None:
    model = random_model(mixer)
    start, more = tokens_and_targets(batch=1)[0], tokens_and_targets(batch=2)[0][:, :2]
    cache = model.new_cache(2, 8)
    first = model(start, cache=cache)
    expected = model(torch.cat([start.expand(2, -1), more], 1))
    torch.testing.assert_close(torch.cat([first, model(more, cache=cache)], 1), expected, rtol=0, atol=1e-12)


@every_mixer
def test_a_cache_of_another_batch_size_is_refused(mixer: str) -> None:
    model, (tokens, _) = random_model(mixer), tokens_and_targets(batch=2)
    with pytest.raises(ValueError, match=r"the cache has 3 rows and the tokens have 2: new_cache\(2, …\) makes one"):
        model(tokens, cache=model.new_cache(3, 6))
    with pytest.raises(ValueError, match="the cache has 1 row and the tokens have 2"):
        model(tokens, cache=model.new_cache(1, 6))


@every_mixer
def test_tokens_of_another_shape_are_refused(mixer: str) -> None:
    model = random_model(mixer)
    tokens, targets = tokens_and_targets()
    with pytest.raises(ValueError, match=r"not a torch.int64 tensor of shape \(6,\): tokens\[None\] is a batch of one"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"tokens \[B, T\], or their vectors \[B, T, 16\], not .* \(2, 6, 1\)\.$"):
        model.loss(tokens[..., None], targets)
    with pytest.raises(ValueError, match=r"not a torch.float64 tensor of shape \(2, 6\)\.$"):
        model(tokens.double())
    assert torch.equal(model(model.embed(tokens)), model(tokens))


def test_a_list_of_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a tensor of tokens \[B, T\], not list: use torch.tensor\(…\)"):
        random_model("softmax")([[1, 2]])
