"""Rewritten graphs compute the same, and only parts that become faster are rewritten."""

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from residua.train.compile.rewrites import weight_gradients
from residua.train.compile.rewrites.weight_gradients import best_split, split_weight_gradients
from tests.train.compile.rewriting import rewriting

aten = torch.ops.aten


def compiled(module: nn.Module, seen: list[GraphModule]) -> nn.Module:
    """Run from the graphs that inductor would be given, rewritten."""
    return torch.compile(module, backend=rewriting(split_weight_gradients, seen=seen), dynamic=False)  # type: ignore[return-value]


def gradients(model: nn.Module, x: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    return list(torch.autograd.grad((y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), parameters))


def products(module: GraphModule) -> tuple[int, int]:
    targets = [node.target for node in module.graph.nodes]
    return targets.count(aten.mm.default), targets.count(aten.bmm.default)


@pytest.mark.slow
def test_split_weight_gradients_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "_suits", lambda g, x: True)
    monkeypatch.setattr(weight_gradients, "multiprocessors", lambda x: 132)
    monkeypatch.setattr(weight_gradients, "best_split", lambda tokens, rows, columns, count: 4 if rows == 24 else 1)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.GELU(), nn.Linear(24, 8, bias=False))
    x, weights = torch.randn(4, 64, 16), [model[0].weight, model[2].weight]
    graphs: list[GraphModule] = []
    split = gradients(compiled(model, graphs), x, weights)
    whole = gradients(model, x, weights)
    exact = gradients(model.double(), x.double(), [model[0].weight, model[2].weight])
    forward, backward = (products(graph) for graph in graphs)
    assert forward == (2, 0)
    assert backward == (2, 1)  # of two weight gradients and one input gradient
    assert all(g.dtype == torch.float32 for g in split)
    for ours, theirs, truth in zip(split, whole, exact, strict=True):
        error = [(g.double() - truth).norm() / truth.norm() for g in (ours, theirs)]
        assert error[0] <= 1.5 * error[1] < 0.02
    torch.testing.assert_close(split[1], whole[1], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_rounding_seen_by_other_readers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that stays in bfloat16 is the sum, rounded once more."""
    monkeypatch.setattr(weight_gradients, "_suits", lambda g, x: True)
    monkeypatch.setattr(weight_gradients, "multiprocessors", lambda x: 132)
    monkeypatch.setattr(weight_gradients, "best_split", lambda *_: 2)
    torch.compiler.reset()
    model = nn.Linear(16, 24, bias=False).bfloat16()
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    graphs: list[GraphModule] = []
    (ours,) = gradients(compiled(model, graphs), x, [model.weight])
    (theirs,) = gradients(model, x, [model.weight])
    assert ours.dtype == torch.bfloat16 and products(graphs[-1])[1] == 1
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-1)


@pytest.mark.slow
def test_a_cpu_graph_is_unchanged() -> None:
    torch.compiler.reset()
    model, graphs = nn.Linear(16, 24, bias=False), []  # type: ignore[var-annotated]
    gradients(compiled(model, graphs), torch.randn(64, 16), [model.weight])
    assert all(products(graph)[1] == 0 for graph in graphs)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "splits"),
    [
        (16384, 5120, 1280, 4),  # 160 tiles of 320×128: two waves, the second nearly empty
        (16384, 1280, 5120, 4),
        (16384, 3840, 1280, 1),  # 120 tiles: nearly a whole wave
        (16384, 8192, 2048, 1),
        (16384, 1280, 1280, 8),
        (32768, 3072, 768, 2),  # 64 tiles of 192×192
        (32768, 2304, 768, 8),
        (32768, 768, 768, 8),
        (16384 + 8, 5120, 1280, 1),  # does not divide
    ],
)
def test_sums_are_split_if_waves_are_half_empty(tokens: int, rows: int, columns: int, splits: int) -> None:
    assert best_split(tokens, rows, columns, multiprocessors=132) == splits
