"""Published names for what can be looked at inside a model (docs/taps.md). Nothing is kept unless someone asks.

with taps.record() as seen:
    model(tokens)
seen["sublayer.3.output"]                      # [B, T, C]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_seen: dict[str, Tensor] | None = None


@contextmanager
def record() -> Iterator[dict[str, Tensor]]:
    """Collect every tap of the forward passes inside the block; tensors keep their graph."""
    global _seen
    previous, _seen = _seen, {}
    try:
        yield _seen
    finally:
        _seen = previous


def tap(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    """Publish a tensor; a function is only called, and its tensor only computed, while someone records."""
    if _seen is not None:
        _seen[name] = value if isinstance(value, Tensor) else value()
