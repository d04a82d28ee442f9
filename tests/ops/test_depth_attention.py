"""Depth attention against its equation, and its two phases."""

import pytest
import torch

from residua import ops
from residua.ops.inference import reference as inference
from tests.golden.attnres import Reader, two_phase
from tests.golden.compare import agree, close, each_token, random


def sources_of(count: int, width: int, *, batch: int = 2, length: int = 3) -> list[torch.Tensor]:
    return [random(batch, length, width, seed=10 + i) for i in range(count)]


def named(sources: list[torch.Tensor], **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"source {i}": v for i, v in enumerate(sources)} | others


@pytest.mark.parametrize("width", [7, 32, 33])
@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_depth_attention_matches_its_equation(count: int, width: int) -> None:
    v, w, g = sources_of(count, width), random(width, seed=1), random(width, seed=2)
    ours = ops.depth_attention(v, w, norm_weight=g)
    golden = each_token(lambda x, rest: [Reader(w, g)([x, *rest])], v[0], v[1:])
    agree([ours], golden, named(v, query=w, gain=g), silent=("query", "gain") if count == 1 else ())


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("key_norm", ["rms", "none"])
@pytest.mark.parametrize("gain", [True, False])
def test_every_depth_attention_option_matches_its_equation(activation: str, key_norm: str, gain: bool) -> None:
    v, w = sources_of(4, 7), random(7, seed=1)
    g = random(7, seed=2) if gain else None
    options = {"scale": 0.3, "key_norm": key_norm, "activation": activation, "eps": 1e-2}
    hidden, weights = ops.depth_attention(v, w, norm_weight=g, return_weights=True, **options)
    reader = Reader(w, g, **options)
    golden = each_token(lambda x, rest: [reader([x, *rest]), torch.stack(reader.weights([x, *rest]))], v[0], v[1:])
    agree([hidden, weights], golden, named(v, query=w) | ({"gain": g} if gain else {}))


def test_one_source_passes_through_without_a_query_gradient() -> None:
    (v,), w = sources_of(1, 33), random(33, seed=1)
    hidden = ops.depth_attention([v], w)
    assert torch.equal(hidden, v)
    (dw,) = torch.autograd.grad(hidden.square().sum(), [w])
    assert dw.abs().max() < 1e-14


@pytest.mark.parametrize("finished", [1, 2, 9, 33])
@pytest.mark.parametrize("scale", [0.7, 1e4])
def test_two_phase_decoding_equals_one_phase_and_the_paper(finished: int, scale: float) -> None:
    """A block's reads of the finished sources, of which the first is a sublayer's input; then one merges its sum."""
    *v, p = (x.detach().flatten(0, 1) for x in sources_of(finished + 1, 33))
    first, query, gain = (random(33, seed=seed).detach() for seed in (1, 2, 3))
    queries, ones = scale * torch.stack([first, query]) * gain, torch.ones_like(gain)
    normed, _, *begun = inference.read_sources(v[:-1], v[-1], None, queries, ones)
    merged, _ = inference.read_partial([x[0] for x in begun], p, None, queries[1], ones)
    for ours, w, sources in ((normed, first, v), (merged, query, [*v, p])):
        close("one", ours, ops.rms(ops.depth_attention(sources, w, norm_weight=gain, scale=scale)), 1e-12)
    reader = Reader(scale * query, gain)
    (golden,) = each_token(lambda x, rest: [two_phase(rest, x, reader)], p[None], [x[None] for x in v])
    close("paper", merged, ops.rms(golden[0]), 1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 7), (7,), (2, 1, 2, 7)])
def test_any_leading_shape_is_accepted_even_an_empty_one(shape: tuple[int, ...]) -> None:
    v, w = [random(*shape, seed=i) for i in range(3)], random(7, seed=5)
    hidden, weights = ops.depth_attention(v, w, return_weights=True)
    assert hidden.shape == shape
    assert weights.shape == (*shape[:-1], 3)
    hidden.sum().backward()
    assert w.grad is not None and w.grad.isfinite().all()


def test_missing_sources_and_mismatched_shapes_are_refused() -> None:
    v = sources_of(2, 7)
    with pytest.raises(ValueError, match="at least one source"):
        ops.depth_attention([], random(7))
    with pytest.raises(ValueError, match=r"source 1 has shape \(2, 3, 9\), source 0 has \(2, 3, 7\)"):
        ops.depth_attention([v[0], random(2, 3, 9)], random(7))
    with pytest.raises(ValueError, match=r"query has shape \(9,\), expected \(7,\)"):
        ops.depth_attention(v, random(9))
