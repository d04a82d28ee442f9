"""Published names for tensors inside a model (docs/taps.md). Nothing is kept unless someone records.

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
"""The layer that is running, counted by executions: a layer of a loop taps its heads once a turn."""
_NAME = re.compile(r"(\w+)\.(\d+)\.(\w+)")


@contextmanager
def record(into: dict[str, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect every tap of the forward passes inside the block; tensors keep their graph.

    `into` receives them one by one, so a dict of your own can reduce tensors instead of keeping them.
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
    """Whether someone records."""
    return _seen is not None


def tap(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    """Publish a tensor; a function is called, and its tensor computed, only while someone records."""
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
    """Attach hooks for the length of the block."""
    attached = handles()
    try:
        yield
    finally:
        for handle in attached:
            handle.remove()
