"""Choosing an implementation."""

import inspect
import pydoc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from residua import ops
from residua.ops._runtime import launch, triton_support
from residua.ops._runtime.backend import Operator
from residua.ops._runtime.tracing import differentiable


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = ops.chosen_backend()
    yield
    ops.backend(before)


def double(x: torch.Tensor) -> torch.Tensor:
    """2x, slowly."""
    return x + x


@pytest.fixture
def operator() -> Operator:
    """Two distinguishable paths: the fused one returns zeros and takes only vectors."""
    return Operator(double, fused=torch.zeros_like, serves=lambda x: x.dim() == 1)


def test_backend_setter_lasts_until_the_next_call() -> None:
    ops.backend("reference")
    assert ops.chosen_backend() == "reference"
    ops.backend("auto")
    assert ops.chosen_backend() == "auto"


def test_backend_context_restores_choice_after_error() -> None:
    ops.backend("reference")
    with ops.backend("auto"):
        assert ops.chosen_backend() == "auto"
        with pytest.raises(RuntimeError), ops.backend("triton"):
            raise RuntimeError
        assert ops.chosen_backend() == "auto"
    assert ops.chosen_backend() == "reference"


def test_unknown_backend_is_refused_and_changes_nothing() -> None:
    ops.backend("reference")
    with pytest.raises(ValueError, match=r"backend 'tritn' does not exist: did you mean 'triton'\?"):
        ops.backend("tritn")
    with pytest.raises(ValueError, match="backend 'cuda' does not exist: choose one of auto, reference, triton"):
        ops.backend("cuda")
    assert ops.chosen_backend() == "reference"


def test_triton_refuses_an_operator_without_a_fused_path() -> None:
    plain = Operator(double)
    with ops.backend("triton"), pytest.raises(ValueError, match="no fused kernel of double for these inputs"):
        plain(torch.ones(2))
    with ops.backend("auto"):
        assert plain(torch.ones(2)).sum() == 4


def test_each_choice_runs_the_path_it_names(operator: Operator) -> None:
    vector, matrix = torch.ones(2), torch.ones(2, 2)
    with ops.backend("auto"):
        assert operator(vector).sum() == 0
        assert operator(matrix).sum() == 8
    with ops.backend("reference"):
        assert operator(vector).sum() == 4
    with ops.backend("triton"):
        assert operator(vector).sum() == 0
        with pytest.raises(ValueError, match=r"use backend\('auto'\) or backend\('reference'\)"):
            operator(matrix)


def test_an_operator_has_the_name_and_docstring_of_its_reference(operator: Operator) -> None:
    assert operator.__name__ == "double"
    assert operator.__doc__ == "2x, slowly."


@pytest.mark.parametrize("name", [name for name in ops.__all__ if isinstance(getattr(ops, name), Operator)])
def test_help_shows_the_parameters_of_a_public_operator(name: str) -> None:
    operator = getattr(ops, name)
    signature = inspect.signature(operator)
    assert signature == inspect.signature(operator.reference)
    text = pydoc.render_doc(operator, renderer=pydoc.plaintext)
    assert f"{name}{signature}" in text and "Operator object" not in text
    assert (inspect.getdoc(operator) or "").splitlines()[0] in text


@pytest.mark.parametrize("operator", [ops.gated_delta, ops.kimi_delta])
def test_delta_rule_docs_state_equation_and_every_argument(operator: Operator) -> None:
    words = operator.__doc__ or ""
    assert "S_t = " in words and "o_t = S_tᵀ q_t" in words and "naive" not in words
    assert all(argument in words for argument in inspect.signature(operator).parameters)


def test_an_operator_as_a_class_attribute_is_not_bound(operator: Operator) -> None:
    holder = type("Holder", (), {"operator": operator})
    assert holder().operator is operator and holder.operator is operator


def test_a_kernel_is_looked_up_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(launch, "import_module", lambda name: imported.append(name) or inspect)
    kernels = launch.Kernels("inspect")
    assert imported == []
    assert [kernels.signature, kernels.signature] == [inspect.signature] * 2 and imported == ["inspect"]


ROWS = torch.randn(6, 16)
HEAD = ROWS, torch.randn(8, 16), torch.arange(6)
EXPERTS = ROWS, torch.randn(2, 32, 16), torch.randn(2, 16, 16), torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("operator", "args", "left"),
    [
        (ops.linear_cross_entropy, HEAD, {"softcap": 1.0}),
        (ops.training_cross_entropy, HEAD, {"softcap": 1.0}),
        (ops.route, (*HEAD[:2], 2), {"groups": (4, 2, 1)}),
        (ops.route, (*HEAD[:2], 2), {"offset": torch.zeros(8)}),
        (ops.expert_ffn, (*EXPERTS, "swiglu"), {"up_bias": torch.zeros(2, 32), "out_bias": torch.zeros(2, 16)}),
    ],
)
def test_unsupported_calls_fall_back_to_the_reference(operator: Operator, args: tuple, left: dict) -> None:
    with ops.backend("triton"):
        assert operator.fuses(*args) and not operator.fuses(*args, **left)
        assert not ops.expert_ffn.fuses(*EXPERTS, "clamped_swiglu")


@pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_forward_mode_derivatives_come_from_the_reference() -> None:
    """To them the result of some kernels is a constant: that of the cross-entropy had the derivative 0."""
    x, weight, tangent = torch.randn(3, 16), torch.rand(16), torch.randn(3, 16)
    norm = partial(ops.rms_norm, weight=weight, eps=1e-6)
    _, expected = torch.func.jvp(norm, (x,), (tangent,))
    assert expected.abs().max() > 0.1
    with ops.backend("triton"):
        assert ops.rms_norm.fuses(x, weight=weight, eps=1e-6)
        with pytest.raises(ValueError, match="has no fused kernel of rms_norm for these inputs"):
            torch.func.jvp(norm, (x,), (tangent,))


@pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_forward_mode_through_cross_entropy_is_refused() -> None:
    hidden, weight, targets = torch.randn(3, 16), torch.randn(9, 16), torch.tensor([1, 0, 8])
    with ops.backend("triton"), pytest.raises(ValueError, match="has no fused kernel of linear_cross_entropy"):
        torch.func.jvp(lambda h: ops.linear_cross_entropy(h, weight, targets)[0], (hidden,), (hidden,))


def test_functions_with_gradients_refuse_keyword_arguments() -> None:
    @differentiable(lambda ctx, g: (2 * g,))
    def scaled(ctx: Any, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    assert scaled(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="scaled takes arguments by position, not factor by name"):
        scaled(torch.ones(2), factor=3.0)
