"""What every sublayer of one forward pass shares: positions and who may look at whom."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Anchors = tuple[Tensor, ...]
"""The anchor projections, one per pathway in the configured order; empty until they are written."""


class Context(NamedTuple):
    """The sublayers' surroundings.

    rotary: cos and sin [T, head_dim/2] in float32, None for a model without softmax attention;
    segments: [B, T] document ids, None where a sequence is one document.
    """

    rotary: tuple[Tensor, Tensor] | None
    segments: Tensor | None
