"""Junctions of whole layers against the references of single ones: reads in shares, and gated writes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops import inference
from residua.ops.inference import Streams, reference
from residua.ops.whole_layers import launch
from residua.ops.whole_layers.launch import Layer, Layers, Shape, Vectors
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow
pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, ROWS = 24, 2
DOWN, NORM = 4, 5
"""Phases: one prepares the junction after a layer, the other is that junction and the final norm."""


def some_layers(depth: int, device: str, junction: str = "read", width: int = WIDTH, **settings: Any) -> Layers:
    """Blocks have `size` sublayers. Unwritten memory is NaN."""
    shape = Shape(width, 1, 1, 8, 8, "relu2", 1e-6, junction, **settings)
    matrices = [torch.zeros(s, device=device) for s in ((24, width), (width, 8), (8, width), (width, 8))]
    keys, table = torch.zeros(ROWS, 16, 1, 8, device=device), torch.zeros(16, 4, device=device)
    junctions = torch.randn(2 * depth + 1, 3, width, device=device)
    biases = torch.randn(2 * depth + 1, shape.streams + 1, device=device)
    layers = Layers(shape, [Layer(*matrices, keys, keys)] * depth, Vectors(junctions, biases, None, table, table))
    for buffer in (layers._state, layers._ready, layers._hidden):
        buffer.fill_(float("nan"))
    return layers


def normed_after(layers: Layers, depth: int, y: Tensor) -> Tensor:
    """The normed result of the junction after `depth` layers, the last of which had y as its output."""
    lengths = torch.zeros(ROWS, dtype=torch.int64, device=y.device)
    if depth:
        layers._launch(lengths, depth - 1, depth, DOWN)
    layers.y.copy_(y)
    layers._launch(lengths, depth, depth, NORM)
    return layers.normed


COUNTS = [(1, 9, 18), (2, 9, 9), (3, 9, 6), (4, 9, 5), (5, 9, 4), (9, 9, 2), (17, 17, 2), (34, 17, 1), (72, 36, 1)]


@pytest.mark.parametrize("spare", [1, 4])
@pytest.mark.parametrize(("count", "depth", "size"), COUNTS)
@pytest.mark.parametrize("device", DEVICES)
def test_merged_partial_reads_equal_the_read_of_all_sources(
    device: str, count: int, depth: int, size: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_division", lambda x: (2, spare))
    layers = some_layers(depth, device, size=size)
    sources = torch.randn(count, ROWS, WIDTH, device=device) * torch.arange(1, count + 1, device=device)[:, None, None]
    y, base = torch.randn(2, ROWS, WIDTH, device=device)
    layers._state[1], layers._state[2 : 2 + count] = base, sources
    gain, query, _ = layers.vectors.junctions[-1].double()
    begun = base.double() if (2 * depth - 1) % size else None
    want, *_ = reference.read_sources(sources.double().unbind(), y.double(), begun, query[None], gain)
    assert (normed_after(layers, depth, y) - want).norm() < 3e-6 * want.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_sublayer_reads_only_the_embedding(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_division", lambda x: (2, 4))
    layers, y = some_layers(1, device), torch.randn(ROWS, WIDTH, device=device)
    want = layers.vectors.junctions[0, 0] * torch.nn.functional.rms_norm(y, (WIDTH,), eps=1e-6)
    torch.testing.assert_close(normed_after(layers, 0, y), want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("competitive", [True, False])
@pytest.mark.parametrize("streams", [2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_gated_junction_in_two_parts_equals_the_whole_one(device: str, streams: int, competitive: bool) -> None:
    layers = some_layers(2, device, "gate", streams=streams, competitive=competitive)
    s, y = torch.randn(streams, ROWS, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device)
    layers._state[streams:] = s
    gain, pool, query = layers.vectors.junctions[-1].double()
    bias = layers.vectors.biases[-1, : streams + competitive].double()
    held, weights = Streams(s.double().unbind()), (query, bias, pool, gain)
    want, _ = reference.gate_norm(held, y.double(), *weights, competitive=competitive)
    assert (normed_after(layers, 2, y) - want).norm() < 3e-6 * want.norm()


@pytest.mark.parametrize("share", only_nightly([1.0, 0.1, 1e-2, 1e-3, 1e-5], but=[1.0, 1e-3]))
@pytest.mark.parametrize("device", DEVICES)
def test_norm_from_dot_products_survives_cancellation(device: str, share: float) -> None:
    """Two streams and their opposites, pooled with equal weights: h is `share` of a stream, and so is the update."""
    layers = some_layers(2, device, "gate", 96, streams=4)
    first, second, rest, y = torch.randn(4, ROWS, 96, device=device)
    s, y, (weight, zero, _) = [first, second, share * rest - first, -second], share * y, layers.vectors.junctions[-1]
    weight.fill_(1)
    layers.vectors.junctions[-1, 1:], layers.vectors.biases[-1] = 0, 0
    layers._state[4:] = torch.stack(s)
    whole = (y, zero, layers.vectors.biases[-1], zero, weight)
    want, _ = reference.gate_norm(Streams(tuple(x.double() for x in s)), *(x.double() for x in whole))

    def error(normed: Tensor) -> float:
        return float((normed.double().norm(dim=-1) / want.norm(dim=-1) - 1).abs().max())

    with ops.backend("triton"):
        direct = error(inference.gate_norm(Streams(tuple(s)), *whole)[0])
    assert error(normed_after(layers, 2, y)) < max(2 * direct, 3e-6)
