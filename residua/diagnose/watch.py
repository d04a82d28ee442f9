"""Named taps for people: what `docs/taps.md` lists, while a block is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor

from residua.model import taps as published
from residua.model.decoder import Decoder


class _Chosen(dict[str, Tensor]):
    """Keeps the names that match one of the patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self.patterns = patterns

    def __setitem__(self, name: str, value: Tensor) -> None:
        if any(fnmatchcase(name, pattern) for pattern in self.patterns):
            super().__setitem__(name, value)


@contextmanager
def taps(model: Decoder, *patterns: str) -> Iterator[dict[str, Tensor]]:
    """Record what a Residua model publishes in the forward passes inside the block, by name (docs/taps.md).

    with residua.diagnose.taps(model, "depth.*.weights") as seen:
        model(tokens)
    seen["depth.3.weights"]                        # [B, T, sources]

    Without patterns everything is kept. Tensors keep their graph; nothing is recorded, and nothing extra computed,
    outside the block.
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"{type(model).__name__} publishes no taps: they are those of a Residua model (residua.build)."
        )
    with published.record(_Chosen(patterns or ("*",))) as seen:
        yield seen
