"""One operator writes all head gradients in one piece, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import residua
from residua import ops
from residua.train.compile.rewrites.packed_heads import pack_head_gradients
from tests.golden.compare import randomise
from tests.model.small import small
from tests.nightly import only_nightly
from tests.ops.harness import assert_equal, interpreter
from tests.train.compile.rewriting import Differentiated, calls, differentiated, loss_of, rewritten

pytestmark = [pytest.mark.slow, interpreter]
aten = torch.ops.aten
BACKWARD, PACKED = "residua.norm_rotate_backward.default", "residua.packed_heads_backward.default"


def trained(attention: dict[str, Any], layers: int) -> tuple[Differentiated, Differentiated]:
    """The loss and the gradients of a model, by its own graphs and by those with packed heads."""
    config = small(layers=layers, width=32, ffn={"kind": "relu2", "hidden": 32}, attention=attention)
    model = randomise(residua.build(config), 0.05).float()
    return differentiated(loss_of(model), list(model.parameters()), rewrite=pack_head_gradients, backend="auto")


@pytest.fixture
def fused_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the operator in question runs fused: the others have separate tests."""
    monkeypatch.setattr(ops.norm_rotate, "_serves", lambda *_, **__: True)


@pytest.mark.usefixtures("fused_heads")
@pytest.mark.parametrize("kv_heads", only_nightly([4, 2], but=[2]), ids=["as many", "grouped"])
def test_one_operator_per_layer_gives_the_plain_gradients(kv_heads: int) -> None:
    attention = {"kind": "softmax", "heads": 4, "kv_heads": kv_heads}
    plain, packed = trained(attention, layers=2)
    before, after = (calls(run.graphs[1]) for run in (plain, packed))
    assert before[BACKWARD] == 4 and before["aten.cat.default"] == 2
    assert after[PACKED] == 2 and not after[BACKWARD] and not after["aten.cat.default"]
    torch.testing.assert_close(packed.values, plain.values, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly  # in `make test`, a gate and anything else that is concatenated leave a graph unchanged
@pytest.mark.parametrize("attention", [{"qk_norm": "none"}, {"qk_norm": "none", "kv_heads": 1}], ids=str)
def test_a_graph_without_normed_heads_is_unchanged(attention: dict[str, Any]) -> None:
    plain, same = trained({"kind": "softmax", "heads": 2} | attention, layers=1)
    assert [str(m.graph) for m in same.graphs] == [str(m.graph) for m in plain.graphs]
    assert_equal(plain.values, same.values)


@pytest.mark.usefixtures("fused_heads")
def test_a_concatenation_that_includes_a_gate_is_unchanged() -> None:
    after = calls(trained({"kind": "softmax", "heads": 2, "gate": "elementwise"}, layers=1)[1].graphs[1])
    assert after[BACKWARD] == 2 and not after[PACKED]


def heads(n: int, order: str = "qkv", read_twice: bool = False, axis: int = -1, tables: int = 1) -> Callable[..., Any]:
    """The gradients of n query and 2 key and value heads, joined."""

    def joined(dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, w: Tensor, *table: Tensor) -> Any:
        made, backward = {"v": dv.transpose(1, 2).clone().flatten(2)}, torch.ops.residua.norm_rotate_backward
        made["q"], gain_q = backward(dq, q, w, *table[:2], 1e-6)
        made["k"], gain_k = backward(dk, k, w, *table[2 * tables - 2 :][:2], 1e-6)
        packed = torch.cat([made[s].flatten(2) for s in order], axis)
        return packed, gain_q, gain_k * 2, *([made["q"] + 1] if read_twice else [])

    return joined


def inputs(n: int, width: int = 8) -> list[Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape)

    size = (2, 5)
    grads = [draw(*size, n, width), draw(*size, 2, width), draw(2, 2, 5, width)]
    return [*grads, draw(*size, n, width), draw(*size, 2, width), draw(width), *(draw(5, width // 2) for _ in range(4))]


def traced(function: Callable[..., Any], given: list[Tensor]) -> GraphModule:
    return make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*given)


@pytest.mark.parametrize("n", [2, 6])
def test_values_are_packed_in_the_layout_attention_left(n: int) -> None:
    given = inputs(n)
    module = traced(heads(n), given)
    expected = module(*given)
    rewritten(module, pack_head_gradients)
    names = calls(module)
    assert names[PACKED] == 1 and not names[BACKWARD] and not names["aten.clone.default"]
    torch.testing.assert_close(module(*given), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"order": "kqv", "n": 6},
        {"order": "vqk"},
        {"order": "qk"},
        {"order": "qkvv"},
        {"order": "qqv"},
        {"read_twice": True},
        {"axis": 1},
        {"tables": 2},
    ],
    ids=str,
)
def test_other_graphs_are_unchanged(other: dict[str, Any]) -> None:
    settings = {"n": 2} | other
    module = traced(heads(**settings), inputs(settings["n"]))
    before = str(module.graph)
    pack_head_gradients(module.graph)
    assert str(module.graph) == before
