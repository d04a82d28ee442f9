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
def record(into: dict[str, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect every tap of the forward passes inside the block; tensors keep their graph.

    `into` receives them one by one as they are published, so a dict of one's own can reduce what it need not keep.
    """
    global _seen
    seen = {} if into is None else into
    previous, _seen = _seen, seen
    try:
        yield seen
    finally:
        _seen = previous


def recording() -> bool:
    """Whether anybody looks."""
    return _seen is not None


def tap(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    """Publish a tensor; a function is only called, and its tensor only computed, while someone records."""
    if _seen is not None:
        _seen[name] = value if isinstance(value, Tensor) else value()
