"""The inputs of a forward pass and of sublayers, and the values that all share: positions, documents, caches, ids.

A topology may give queries, keys and values separate inputs (`Reads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from residua.errors import UserError
from residua.ops._runtime.numeric import begins

if TYPE_CHECKING:
    from residua.model.anchor_sharing import Sharing
    from residua.model.cache import Cache, Now
    from residua.model.topology import Topology


Anchors = tuple[Tensor, ...]
"""The anchor projections, one per pathway in the configured order; empty until they are written.

In training, a handle follows for each layer that has not mixed them yet (`anchor_sharing.Sharing`)."""


class Context(NamedTuple):
    """Everything a sublayer gets in addition to its input.

    rotary: cos and sin [T, head_dim/2], or [B, T, head_dim/2] while decoding, in float32; None for a model without
    softmax attention. Next come those of layers with a window if these differ, and the positions [T] or [B, T] if
    queries grow with them. Last come cos and sin of layers without positions. segments: [B, T], the number of each
    token's document in its row; None if each sequence is one document. now, cache: while decoding, the positions of
    tokens and this sublayer's cache of earlier tokens (`model/cache.py`). across: replaces `attend` if other ranks hold
    the other tokens of the sequences; segments then covers all tokens, and rotary those of this rank. caches: `cache`
    of every sublayer. sharing: the layers that mix the anchors, if one gradient pass serves them. tokens: the ids
    [B, T] of the tokens, if the topology or the anchors read them (`reads_tokens`).
    """

    rotary: tuple[Tensor, ...] | None
    segments: Tensor | None
    now: Now | None = None
    cache: Any = None
    across: Callable[..., Tensor] | None = None
    caches: Sequence[Any] | None = None
    sharing: Sharing | None = None
    tokens: Tensor | None = None

    def at(self, k: int) -> Context:
        """The context of sublayer k."""
        return self if self.caches is None else self._replace(cache=self.caches[k])

    def ids_for(self, topology: Topology) -> tuple[Tensor, ...]:
        """The last arguments of `open` and `step` of a topology: the token ids if it reads them."""
        return () if self.tokens is None or not topology.reads_tokens else (self.tokens,)


def check_inputs(
    tokens: Tensor, segments: Tensor | None, cache: Cache | None, width: int, readers: Sequence[str] = ()
) -> None:
    """Refuse tokens that are neither ids [B, T] nor vectors [B, T, width], and documents together with a cache.

    `readers` names the settings whose parts look token ids up: vectors are refused for them.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"a model takes a tensor of tokens [B, T], not {type(tokens).__name__}: use torch.tensor(…).")
    expected = (width,) if tokens.is_floating_point() else ()
    if tokens.ndim < 2 or tokens.shape[2:] != expected:
        raise UserError(
            f"a model takes tokens [B, T], or their vectors [B, T, {width}], not a {tokens.dtype} tensor of shape "
            f"{tuple(tokens.shape)}{': tokens[None] is a batch of one sequence.' if tokens.ndim == 1 else '.'}"
        )
    if readers and tokens.is_floating_point():
        raise UserError(
            f"{' and '.join(readers)} {'reads' if len(readers) == 1 else 'read'} token ids, but the model was "
            "called with vectors: pass tokens [B, T]."
        )
    if segments is not None and cache is not None:
        raise UserError(
            "a cache continues one document per row, so segments cannot be used with it: give each document its "
            "own row, or leave the cache out."
        )


def for_rows(tokens: Tensor, rows: int) -> Tensor:
    """The tokens for each row of a cache; a single sequence is given to all of them."""
    if tokens.shape[0] not in (1, rows):
        raise UserError(
            f"the cache has {rows} {'row' if rows == 1 else 'rows'} and the tokens have {tokens.shape[0]}: "
            f"new_cache({tokens.shape[0]}, …) makes one for them."
        )
    return tokens if tokens.shape[0] == rows else tokens.expand(rows, *tokens.shape[1:])


def number_documents(segments: Tensor | None) -> Tensor | None:
    """[B, T]: the number of each token's document in its row. A document is a run of equal ids in segments [B, T]."""
    return None if segments is None else begins(segments, segments).cumsum(1)


class Reads(NamedTuple):
    """Separate inputs [B, T, C] of one attention for q (and the gate), k and v. Other sublayers read r."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor


Input = Tensor | Reads
"""The input of a sublayer."""


def one_read(h: Input) -> Tensor:
    """The single input of a sublayer that takes only one."""
    return h if isinstance(h, Tensor) else h.r


def map_reads(function: Callable[[Tensor], Tensor], h: Input) -> Input:
    """Apply the function to each read, once per distinct tensor."""
    if isinstance(h, Tensor):
        return function(h)
    results: list[Tensor] = []
    for i, read in enumerate(h):
        same = [results[j] for j in range(i) if h[j] is read]
        results.append(same[0] if same else function(read))
    return Reads(*results)


def flat_reads(h: Input) -> tuple[Tensor, ...]:
    """The distinct tensors of an input."""
    if isinstance(h, Tensor):
        return (h,)
    return tuple(read for i, read in enumerate(h) if all(h[j] is not read for j in range(i)))
