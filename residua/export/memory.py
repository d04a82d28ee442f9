"""Two ways to run in less memory: weights that accelerate keeps elsewhere, and sublayers that are computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextmanager
def offloaded_weights(decoder: Any) -> Iterator[None]:
    """Load what accelerate has offloaded: a sublayer's weights while it runs, all others for the whole forward pass.

    accelerate loads the weights of a module when the module is called. Topologies, anchors and gated norms read
    parameters of modules that they do not call.
    """
    with ExitStack() as stack:
        if not torch.compiler.is_compiling() and any(map(_is_offloaded, decoder.modules())):
            for part in (decoder.topology, decoder.anchors, decoder.norm):
                stack.enter_context(_loaded(part))
            for sublayer in decoder.sublayers:
                _load_when_called(sublayer, stack)
        yield


def _load_when_called(module: nn.Module, until: ExitStack) -> None:
    call = ExitStack()
    before = module.register_forward_pre_hook(lambda module, _: call.enter_context(_loaded(module)))
    after = module.register_forward_hook(lambda *_: call.close(), always_call=True)
    until.callback(before.remove)
    until.callback(after.remove)


def _is_offloaded(module: nn.Module) -> bool:
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


@contextmanager
def _loaded(module: nn.Module) -> Iterator[None]:
    """Have all weights of a module in memory; its parts neither load nor drop theirs when they are called."""
    parts: list[Any] = [part for part in module.modules() if _is_offloaded(part)]
    for part in parts:
        part._hf_hook.pre_forward(part)
        part._hf_hook.offload = False
    try:
        yield
    finally:
        for part in parts:
            part._hf_hook.offload = True
            part._hf_hook.post_forward(part, None)


def recomputed(
    forward: Callable[..., Any], checkpoint: Callable[..., Any], h: Tensor, anchors: tuple[Tensor, ...], context: Any
) -> Any:
    """A sublayer's `forward` under torch's `checkpoint`.

    Anchors go in and results come out one by one: reentrant checkpointing passes no gradient to tensors in a tuple.
    """
    shape: Any = None

    def run(h: Tensor, *anchors: Tensor) -> tuple[Any, ...]:
        nonlocal shape
        tensors, shape = pytree.tree_flatten(forward(h, anchors, context))
        return tuple(tensors)

    tensors = checkpoint(run, h, *anchors)
    return pytree.tree_unflatten(tensors, shape)
