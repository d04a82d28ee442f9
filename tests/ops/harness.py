"""Shared by tests of fused operators: marks for devices, outputs with every gradient, and one measure of errors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops._runtime import triton_support

interpreter = pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1")


def on_gpu(test: Any) -> Any:
    """Compiled kernels, on a GPU only."""
    return pytest.mark.gpu(pytest.mark.skipif(triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=0")(test))


def choose(choice: str, operator: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """The operator on a backend."""

    def run(*args: Any, **others: Any) -> Any:
        with ops.backend(choice):
            return operator(*args, **settings, **others)

    return run


def results(run: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs of a function and gradients of all inputs, in `dtype` if there is one, for the same probes each time."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    made = run(*leaves)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    source = torch.Generator().manual_seed(1)
    # numbers that bfloat16 has too: the same in every dtype
    probes = [torch.randn(y.shape, generator=source).bfloat16().to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, probes, allow_unused=True, materialize_grads=True)]


def named_results(
    run: Callable[..., Any], inputs: Mapping[str, Tensor], outputs: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`results` of named arguments: the outputs, and the gradient "g x" of each input x."""
    found = results(lambda *leaves: run(**dict(zip(inputs, leaves, strict=True))), list(inputs.values()), dtype)
    return dict(zip((*outputs[: len(found) - len(inputs)], *(f"g {name}" for name in inputs)), found, strict=True))


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = (x.detach().double().cpu() for x in (a, b))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def assert_close(ours: Any, exact: Any, tolerance: float, names: Sequence[str] = ()) -> None:
    """Every tensor of a list, or of a dictionary, has at most this relative error."""
    if isinstance(exact, Mapping):
        names, ours, exact = list(exact), [ours[name] for name in exact], list(exact.values())
    assert len(ours) == len(exact)
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        error = relative(a, b)
        assert error <= tolerance, f"{names[i] if names else f'tensor {i}'}: relative error {error:.2e}"


def assert_equal(ours: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """The same bits."""
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def gradients(run: Callable[..., Any], inputs: Sequence[Tensor], compiled: bool = False) -> tuple[Tensor, ...]:
    """Of the sum of squares of a function's results, which may be one compiled graph."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    made = function(*leaves)
    total = sum(y.square().sum() for y in ([made] if isinstance(made, Tensor) else made))
    return torch.autograd.grad(total, leaves)


def assert_one_graph(run: Callable[..., Any], inputs: Sequence[Tensor], exact: bool = True) -> None:
    """The compiled function has the eager one's gradients: the same bits, or nearly."""
    eager, compiled = (gradients(run, inputs, compiled) for compiled in (False, True))
    if exact:
        assert_equal(eager, compiled)
    else:
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-6)
