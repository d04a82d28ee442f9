"""How operators are registered with `torch.library`, and how their kernels are compiled before a model runs.

Triton would compile each kernel at its first launch. Much of a compilation runs outside Python, so threads help. (For
training, `train/compile/precompile.py` uses helper processes: they take seconds to start, but `torch.compile` takes
longer.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from residua.ops._runtime.launch import device_guard

R = TypeVar("R")

_LIBRARY = torch.library.Library("residua", "FRAGMENT")

launchers: dict[str, Callable[..., Any]] = {}
"""The function behind `residua::name`, by name."""

listeners: list[Callable[[str, str, tuple[Any, ...], dict[str, Any]], None]] = []
"""Called for each traced operator: the module that registers it, its name, arguments and settings (fake tensors)."""


class Call(NamedTuple):
    """A call of an operator that a dry run skipped."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    settings: dict[str, Any]


_calls: list[Call] | None = None


@contextmanager
def dry_run() -> Iterator[list[Call]]:
    """Inside the block, operators that may be compiled ahead return empty results, and their calls are collected."""
    global _calls
    before, _calls = _calls, []
    try:
        yield _calls
    finally:
        _calls = before


def launcher(
    name: str, *, ahead: bool = True, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Iterator[R]]], Callable[..., R]]:
    """Register a launcher as `residua::name` and return the operator. `torch.compile` sees one opaque call without a
    gradient.

    A launcher is a generator. It yields empty results of the right shapes, then fills them; if it must return other
    tensors, it yields those at the end. Tracing stops at the first yield, so a launcher is its own shape function. Its
    annotations are the operator's schema. Its kernels start on the GPU of its results. It is defined on a library, not
    by `custom_op`: a training step makes two hundred calls, and the wrappers of `custom_op` would cost more than the
    kernels.
    `ahead`: to compile its kernels, `precompile` may call it on a CPU with tensors whose memory is never touched; off
    if it also multiplies matrices. `mutates`: the arguments that it writes to.
    """

    def register(launch: Callable[..., Iterator[R]]) -> Callable[..., R]:
        def run(*args: Any, **settings: Any) -> Any:
            steps = launch(*args, **settings)
            results = next(steps)
            outputs: Any = (results,) if isinstance(results, Tensor) else results
            with device_guard(outputs[0]) if outputs else nullcontext():
                *_, results = results, *steps
            return results

        def traced(*args: Any, **settings: Any) -> Any:
            for listener in listeners if ahead else ():
                listener(launch.__module__, name, args, settings)
            return next(launch(*args, **settings))

        def launched(*args: Any, **settings: Any) -> Any:
            if _calls is None:
                return run(*args, **settings)
            _calls.append(Call(name, run, args, settings))
            return next(launch(*args, **settings))

        launchers[name] = wraps(launch)(run)
        signature = inspect.signature(launch, eval_str=True)
        (returned,) = get_args(signature.return_annotation)
        run.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        _LIBRARY.define(torch.library.infer_schema(run, op_name=name, mutates_args=mutates))
        _LIBRARY.impl(name, launched if ahead else run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"residua::{name}", traced, lib=_LIBRARY)
        operator: Callable[..., R] = getattr(torch.ops.residua, name).default
        return operator

    return register


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the tensors among the inputs in `ctx.saved_tensors`, the others in `ctx.settings`."""
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]


Backward = Callable[..., Sequence[Any]]


def differentiate(
    operator: Any, save: Callable[[Any, tuple[Any, ...], Any], None] = save_inputs
) -> Callable[[Backward], Backward]:
    """Give an operator a gradient: `save(ctx, inputs, output)` stores everything `backward(ctx, *gradients)` needs.

    `backward` returns the gradients of the inputs, and may leave out those at the end that have none.
    """

    count = len(operator._schema.arguments)  # reading a schema copies all its arguments

    def register(backward: Backward) -> Backward:
        def complete(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            given = backward(ctx, *gradients)
            return *given, *[None] * (count - len(given))

        torch.library.register_autograd(operator, complete, setup_context=save, lib=_LIBRARY)
        return backward

    return register


def compile_ahead(forward: Callable[[], object]) -> None:
    """Call `forward` without its kernels, then launch each operator's kernels in a separate thread.

    The kernels' results are discarded. `forward` should be small, because the tensors of all calls stay in memory until
    the end.
    """
    with dry_run() as calls:
        forward()
    by_name: dict[str, list[Call]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    if by_name:
        with ThreadPoolExecutor(len(by_name)) as threads:
            list(threads.map(_launch, by_name.values()))


@torch.inference_mode()
def _launch(calls: list[Call]) -> None:
    tensors = [x for call in calls for x in tree_leaves(call.args) if isinstance(x, Tensor)]
    # creating a TMA descriptor needs a CUDA context, which a thread lacks until PyTorch runs something in it
    torch.zeros(1, device=tensors[0].device)
    for call in calls:
        call.run(*call.args, **call.settings)
