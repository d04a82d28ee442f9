"""Whole layers divide the sources of a read among programs; merged, the shares are the read of all sources."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua.ops.decode import launch_layers, reference
from residua.ops.decode.launch_layers import Layer, Layers, Shape, Vectors

pytestmark = pytest.mark.slow
pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, ROWS = 24, 2
DOWN, NORM = 4, 5
"""Phases: one prepares the junction after a layer, the other is that junction and the final norm."""


def some_layers(depth: int, size: int, device: str) -> Layers:
    """Blocks have `size` sublayers. What nothing has written yet is NaN."""
    shape = Shape(WIDTH, 1, 1, 8, 8, "relu2", 1e-6, "read", size=size)
    matrices = [torch.zeros(s, device=device) for s in ((24, WIDTH), (WIDTH, 8), (8, WIDTH), (WIDTH, 8))]
    keys, table = torch.zeros(ROWS, 16, 1, 8, device=device), torch.zeros(16, 4, device=device)
    junctions = torch.randn(2 * depth + 1, 3, WIDTH, device=device)
    layers = Layers(shape, [Layer(*matrices, keys, keys)] * depth, Vectors(junctions, keys, None, table, table))
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
def test_merged_shares_are_the_read_of_all_sources(
    device: str, count: int, depth: int, size: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_layers, "_division", lambda x: (2, spare))
    layers = some_layers(depth, size, device)
    sources = torch.randn(count, ROWS, WIDTH, device=device) * torch.arange(1, count + 1, device=device)[:, None, None]
    y, base = torch.randn(2, ROWS, WIDTH, device=device)
    layers._state[1], layers._state[2 : 2 + count] = base, sources
    gain, query, _ = layers.vectors.junctions[-1].double()
    begun = base.double() if (2 * depth - 1) % size else None
    want, *_ = reference.read_sources(sources.double().unbind(), y.double(), begun, query[None], gain)
    assert (normed_after(layers, depth, y) - want).norm() < 3e-6 * want.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_sublayer_reads_the_embedding_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_layers, "_division", lambda x: (2, 4))
    layers, y = some_layers(1, 1, device), torch.randn(ROWS, WIDTH, device=device)
    want = layers.vectors.junctions[0, 0] * torch.nn.functional.rms_norm(y, (WIDTH,), eps=1e-6)
    torch.testing.assert_close(normed_after(layers, 0, y), want, rtol=0, atol=3e-6)
