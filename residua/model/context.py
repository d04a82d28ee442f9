"""What every sublayer of one forward pass shares: positions and who may look at whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from residua.model.cache import Now

Anchors = tuple[Tensor, ...]
"""The anchor projections, one per pathway in the configured order; empty until they are written."""


class Context(NamedTuple):
    """The sublayers' surroundings.

    rotary: cos and sin [T, head_dim/2], or [B, T, head_dim/2] while decoding, in float32; None for a model without
    softmax attention; segments: [B, T] document ids, None where a sequence is one document; now and cache: while
    decoding, where the tokens stand and what this very sublayer keeps of earlier ones (`model/cache.py`).
    """

    rotary: tuple[Tensor, Tensor] | None
    segments: Tensor | None
    now: Now | None = None
    cache: Any = None
