"""The gated delta rule by flash-linear-attention: our half of it on any machine, the kernels themselves on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.gated_delta import autograd, library
from residua.ops.gated_delta.reference import chunked
from tests.ops.test_gated_delta import inputs, short_documents

LENGTH = 130


class StandIn(torch.autograd.Function):
    """As the package's: one autograd function whose backward pass is its own arithmetic."""

    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments)
        return chunked(*arguments[:5], state=arguments[5])

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        saved, found = ctx.saved_tensors, []

        def differentiate() -> None:
            leaves = [x.detach().requires_grad_() for x in saved]
            found.extend(torch.autograd.grad(chunked(*leaves[:5], state=leaves[5]), leaves, given))

        # PyTorch suspends autograd inside an operator; a thread of its own has it
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
        return tuple(found)


def kernels(*arguments: Tensor, scale: float, initial_state: Tensor, output_final_state: bool) -> Any:
    assert scale == 1.0 and output_final_state
    return StandIn.apply(*arguments, initial_state)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_kernels", lambda: kernels)


def single(length: int, device: str = "cpu") -> dict[str, Tensor]:
    return {name: x.detach().float().to(device).requires_grad_() for name, x in inputs(length).items()}


def both(found: Sequence[Tensor], expected: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[str, float]:
    """Relative RMS errors of the outputs and of every gradient of one random scalar of them."""
    weights = [torch.randn_like(x) for x in expected]
    pairs = list(zip(found, expected, strict=True))
    for outputs in (found, expected):
        assert all(output.requires_grad for output in outputs)
    ours, theirs = (torch.autograd.grad(outputs, leaves, weights) for outputs in (found, expected))
    pairs += list(zip(ours, theirs, strict=True))
    names = ["o", "last", "q", "k", "v", "g", "beta", "state"]
    return {
        name: float((a.double() - b.double()).detach().norm() / b.detach().double().norm())
        for name, (a, b) in zip(names, pairs, strict=True)
    }


@pytest.mark.parametrize("documents", ["one", "many"])
def test_our_half_passes_arguments_documents_and_every_gradient_on(stand_in: None, documents: str) -> None:
    arguments = single(LENGTH)
    segments = short_documents(LENGTH) if documents == "many" else None
    found = autograd.gated_delta(**arguments, segments=segments)
    errors = both(found, chunked(**arguments, segments=segments), list(arguments.values()))
    assert max(errors.values()) < 1e-5, errors


def test_operators_give_the_shapes_and_strides_that_compiled_code_expects(stand_in: None) -> None:
    """The stand-in's output is a transposed view, and the values come as a part of something wider."""
    arguments = [x.detach() for x in single(LENGTH).values()]
    arguments[2] = arguments[2].repeat(1, 1, 1, 2)[..., : arguments[2].shape[-1]]
    fake = ("test_schema", "test_faketensor")
    torch.library.opcheck(autograd._forward, arguments, test_utils=fake)
    given = [torch.randn_like(x) for x in autograd._forward(*arguments)]
    torch.library.opcheck(autograd._backward, [*given, *arguments], test_utils=fake)


def test_the_last_state_may_go_unused(stand_in: None) -> None:
    arguments = single(LENGTH)
    leaves = list(arguments.values())
    found, expected = (torch.autograd.grad(f(**arguments)[0].sum(), leaves) for f in (autograd.gated_delta, chunked))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_a_state_the_first_document_begins_empty(stand_in: None) -> None:
    arguments = single(LENGTH)
    del arguments["state"]
    found, expected = autograd.gated_delta(**arguments), chunked(**arguments)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compile_sees_one_graph(stand_in: None) -> None:
    arguments, segments = single(LENGTH), short_documents(LENGTH)
    compiled = torch.compile(autograd.gated_delta, fullgraph=True, backend="aot_eager")
    found = compiled(**arguments, segments=segments)
    errors = both(found, autograd.gated_delta(**arguments, segments=segments), list(arguments.values()))
    assert max(errors.values()) < 1e-6, errors


def test_the_package_is_not_touched_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package fails without a GPU, so it must not be imported just because it is installed."""
    monkeypatch.setattr(library, "INSTALLED", True)
    monkeypatch.setattr(library, "_kernels", lambda: pytest.fail("the package was imported"))
    arguments = {name: x.detach().bfloat16() for name, x in inputs(70).items()}
    o, _ = ops.gated_delta(**arguments)
    assert o.isfinite().all()


def test_a_backend_that_insists_says_that_it_cannot() -> None:
    arguments = {name: x.detach() for name, x in inputs(7).items()}
    with ops.backend("triton"), pytest.raises(ValueError, match="no fused gated_delta"):
        ops.gated_delta(**arguments)


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "runs"),
    [
        ((3, 6, 0), (9, 0), False, False),
        ((3, 7, 0), (9, 0), False, False),
        ((3, 7, 1), (9, 0), False, True),
        ((3, 3, 1), (9, 0), False, True),
        ((3, 6, 0), (8, 0), False, True),
        ((3, 6, 0), (9, 0), True, True),
    ],
)
def test_a_backward_pass_that_triton_gets_wrong_is_not_asked_for(
    triton: tuple[int, ...], capability: tuple[int, int], tilelang: bool, runs: bool
) -> None:
    assert library.compiles_backward(triton, capability, tilelang) == runs
    assert len(library.triton_version()) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not library.INSTALLED, reason="needs flash-linear-attention")
@pytest.mark.parametrize("documents", ["one", "many"])
@pytest.mark.parametrize(("length", "heads"), [(130, (2, 4)), (1000, (4, 4)), (64, (1, 4))])
def test_kernels_follow_the_reference_in_half_precision(length: int, heads: tuple[int, int], documents: str) -> None:
    key_heads, value_heads = heads
    shape = (2, length)
    q, k = (torch.nn.functional.normalize(torch.randn(*shape, key_heads, 64), dim=-1) for _ in range(2))
    arguments = {
        "q": q,
        "k": k,
        "v": torch.randn(*shape, value_heads, 64),
        "g": -torch.rand(*shape, value_heads),
        "beta": torch.rand(*shape, value_heads),
        "state": torch.randn(2, value_heads, 64, 64),
    }
    low = {"q", "k", "v"}
    arguments = {
        name: x.cuda().to(torch.bfloat16 if name in low else torch.float32).requires_grad_()
        for name, x in arguments.items()
    }
    segments = short_documents(length).cuda() if documents == "many" else None
    wide = {name: x.detach().double().requires_grad_() for name, x in arguments.items()}
    if not library.takes(arguments["k"], arguments["v"]):
        pytest.skip("this Triton compiles the library's backward pass wrongly")
    found = ops.gated_delta(**arguments, segments=segments)
    expected = chunked(**wide, segments=segments)
    weights = [torch.randn_like(x) for x in expected]
    probes = [w.to(x.dtype) for w, x in zip(weights, found, strict=True)]
    ours = torch.autograd.grad(found, list(arguments.values()), probes)
    theirs = torch.autograd.grad(expected, list(wide.values()), weights)
    for name, a, b in zip(("o", "last", *arguments), (*found, *ours), (*expected, *theirs), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.02, name


@pytest.mark.gpu
@pytest.mark.skipif(not library.INSTALLED, reason="needs flash-linear-attention")
def test_kernels_read_on_where_no_gradient_is_wanted() -> None:
    """Any Triton compiles the forward pass."""
    heads, shape = 2, (1, 130)
    q, k = (torch.nn.functional.normalize(torch.randn(*shape, heads, 64), dim=-1) for _ in range(2))
    low = [x.cuda().bfloat16() for x in (q, k, torch.randn(*shape, heads, 64))]
    gates = [-torch.rand(*shape, heads).cuda(), torch.rand(*shape, heads).cuda()]
    with torch.no_grad():
        assert library.takes(low[1], low[2])
        found, expected = ops.gated_delta(*low, *gates), chunked(*(x.double() for x in (*low, *gates)))
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.02
