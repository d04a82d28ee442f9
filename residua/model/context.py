"""What all sublayers of one forward pass share: positions, documents, and the caches while decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from residua.model.anchors import Sharing
    from residua.model.cache import Now

Anchors = tuple[Tensor, ...]
"""The anchor projections, one per pathway in the configured order; empty until they are written.

In training a handle follows for each layer that has yet to mix them (`anchors.Sharing`)."""


class Context(NamedTuple):
    """What a sublayer is given besides its input.

    rotary: cos and sin [T, head_dim/2], or [B, T, head_dim/2] while decoding, in float32, followed by those of layers
    with a window if they differ; None for a model without softmax attention. segments: [B, T], the number of each
    token's document in its row; None if each sequence is one document. now, cache: while decoding, positions of tokens
    and what this sublayer keeps of earlier tokens (`model/cache.py`). across: attends in place of `attend` if other
    ranks have the other tokens of the sequences; segments then has all tokens, and rotary those of this rank.
    caches: `cache` of every sublayer. sharing: the layers that mix the anchors, if one gradient pass serves them.
    """

    rotary: tuple[Tensor, ...] | None
    segments: Tensor | None
    now: Now | None = None
    cache: Any = None
    across: Callable[..., Tensor] | None = None
    caches: Sequence[Any] | None = None
    sharing: Sharing | None = None

    def at(self, k: int) -> Context:
        """The context of sublayer k."""
        return self if self.caches is None else self._replace(cache=self.caches[k])
