"""Published names for tensors inside a model (docs/taps.md). Tensors are stored only inside `record`.

with taps.record() as seen:
    model(tokens)
seen["sublayer.3.output"]                      # [B, T, C]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_seen: dict[str, Tensor] | None = None
_layer: int | None = None
"""The running layer, counted by executions: a layer in a loop taps its heads once per turn."""
_NAME = re.compile(r"(\w+)\.(\d+)\.(\w+)")


@contextmanager
def record(into: dict[str, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect every tap of the forward passes inside the block; tensors keep their autograd graph.

    `into` receives tensors one at a time, so a custom dict can reduce them instead of storing them.
    """
    global _seen, _layer
    tensors = {} if into is None else into
    previous, _seen, _layer = _seen, tensors, None
    try:
        yield tensors
    finally:
        _seen, _layer = previous, None


def parts(name: str) -> tuple[str, int, str] | None:
    """`depth.3.weights` → ("depth", 3, "weights"); None for a name without a number."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def recording() -> bool:
    """Whether taps are being recorded."""
    return _seen is not None


def tap(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    """Publish a tensor; if it is given as a function, the function runs only while taps are recorded."""
    global _layer
    if _seen is None:
        return
    numbered = parts(name)
    if numbered is not None and numbered[0] == "sublayer":
        _layer = numbered[1] // 2
    elif numbered is not None and numbered[0] in ("attention", "moe") and _layer is not None:
        name = f"{numbered[0]}.{_layer}.{numbered[2]}"
    _seen[name] = value if isinstance(value, Tensor) else value()


@contextmanager
def hooked(handles: Callable[[], list[RemovableHandle]]) -> Iterator[None]:
    """Attach hooks for the duration of the block."""
    attached = handles()
    try:
        yield
    finally:
        for handle in attached:
            handle.remove()
