"""Caches for decoding: one static buffer per sequence mixer; rows in a batch may differ in length.

Rows are padded on the right, so a token's slot is its position. A token overwrites any padding in its slot before a
query sees it, so the causal mask suffices. Depth needs no cache, since every topology is token-local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from residua.errors import UserError
from residua.model.sdpa import attend_cached


class Now(NamedTuple):
    """The positions of one call's tokens and the slots they see.

    positions: [B, T]. visible: [B, 1, T, slots], True where a query may look; None while the cache is empty and a token
    sees only earlier ones of its own call. until: [B], the last slot that a single token sees; None for several tokens.
    real: [B, T], False for padding; None if there is none. ends: [B], the number of real tokens in each row.
    """

    positions: Tensor
    visible: Tensor | None
    until: Tensor | None
    real: Tensor | None
    ends: Tensor | None


class SublayerCache(Protocol):
    """The cache in a sublayer's context while decoding; each mixer has its own kind."""

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the cache."""
        ...


class KeyValueCache:
    """Keys and values [B, capacity, H_kv, D] of softmax attention as they enter the product: mixed, normed, rotated.

    Latent attention stores its latents in place of keys, and the part that all heads share in place of values, with
    `value_dim` elements.
    """

    def __init__(
        self, batch: int, capacity: int, heads: int, head_dim: int, like: Tensor, value_dim: int | None = None
    ) -> None:
        self.stored: tuple[str, ...] = ("k", "v")
        widths = head_dim, head_dim if value_dim is None else value_dim
        self.keys, self.values = (like.new_zeros(batch, capacity, heads, width) for width in widths)
        self._rows = torch.arange(batch, device=like.device)[:, None]

    def tensors(self) -> Iterator[Tensor]:
        yield from (buffer for name, buffer in (("k", self.keys), ("v", self.values)) if name in self.stored)

    def first(self, length: int) -> tuple[Tensor, Tensor]:
        """The key and value slots [B, length, H_kv, D] of each row's first tokens."""
        return self.keys[:, :length], self.values[:, :length]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, now: Now, **scoring: Any) -> Tensor:
        """Store k, v and attend from q [B, T, H, D] to everything stored; `scoring` is for `attend_cached`."""
        return attend_cached(q, *self.extend(k, v, now), now, **scoring)

    def extend(self, k: Tensor, v: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        """Write k, v [B, T, H_kv, D] into their slots; returns the keys and values that queries may see."""
        first = now.visible is None and now.until is None  # the first tokens of every row
        for name, buffer, new in (("k", self.keys, k), ("v", self.values, v)):
            if name not in self.stored:
                continue
            if first:
                buffer[:, : k.shape[1]].copy_(new)
            else:
                buffer.index_put_((self._rows, now.positions), new.to(buffer.dtype))
        if first:
            return k, v
        slots = self.keys.shape[1] if now.visible is None else now.visible.shape[-1]
        return self.keys[:, :slots], self.values[:, :slots]


class BorrowedCache(KeyValueCache):
    """The cache of a layer that takes the keys or values of an earlier one, and uses that layer's slots for them.

    The earlier layer stores a call's tokens before this one attends to them.
    """

    def __init__(self, lender: KeyValueCache, taken: Sequence[str]) -> None:
        self.keys = lender.keys if "k" in taken else torch.zeros_like(lender.keys)
        self.values = lender.values if "v" in taken else torch.zeros_like(lender.values)
        self.stored, self._rows = tuple(name for name in "kv" if name not in taken), lender._rows


class RecurrentCache:
    """The state of a recurrent mixer: tensors [B, …] of fixed size, zero before the first token."""

    def __init__(self, *shapes: tuple[int, ...], like: Sequence[Tensor]) -> None:
        self.state = tuple(t.new_zeros(shape) for shape, t in zip(shapes, like, strict=True))

    def tensors(self) -> Iterator[Tensor]:
        yield from self.state

    def keep(self, state: Sequence[Tensor]) -> None:
        """Store the state after this call in place: a captured graph reads it at the same address."""
        for mine, new in zip(self.state, state, strict=True):
            mine.copy_(new)


class Cache:
    """The caches of one batch of sequences, one entry per sublayer, and how many tokens of each row they hold.

    lengths: [B]. reach: an upper bound on the lengths, stored on the host so that nothing waits for the device. With
    `static` every call attends to all slots, so that each decoding step has the same shapes.
    """

    def __init__(self, sublayers: Sequence[SublayerCache | None], batch: int, capacity: int, device: torch.device):
        self.sublayers = sublayers
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reach = 0
        self.static = False

    def now(self, length: int, counts: Tensor | None = None) -> Now:
        """The positions of the next `length` tokens of each row; in row b the first counts[b] are real."""
        if not self.static and self.reach + length > self.capacity:
            raise UserError(
                f"the cache has room for {self.capacity} tokens, but {self.reach} + {length} are needed: build a "
                "larger one."
            )
        steps = torch.arange(length, device=self.lengths.device)
        positions = self.lengths[:, None] + steps
        real = None if counts is None else steps < counts[:, None]
        if self.reach == 0 and not self.static:
            return Now(positions, None, None, real, counts)
        until = positions[:, 0] if length == 1 else None
        if length == 1 and positions.is_cuda:
            return Now(positions, None, until, real, counts)
        slots = self.capacity if self.static else self.reach + length
        visible = torch.arange(slots, device=positions.device) <= positions[:, None, :, None]
        return Now(positions, visible, until, real, counts)

    def advance(self, length: int, counts: Tensor | None = None) -> None:
        """Count the tokens of the call that has just ended."""
        self.lengths.add_(length if counts is None else counts)
        if not self.static:
            self.reach += length

    def clear(self) -> None:
        """Empty the cache for reuse."""
        torch._foreach_zero_([*self.tensors()])  # in few launches
        self.lengths.zero_()
        self.reach, self.static = 0, False

    def recurrent(self) -> Iterator[Tensor]:
        """The buffers that every token rewrites; in other caches each token writes its slot once."""
        for part in self.sublayers:
            if isinstance(part, RecurrentCache):
                yield from part.tensors()

    def tensors(self) -> Iterator[Tensor]:
        """Every buffer, without the lengths."""
        for part in self.sublayers:
            if part is not None:
                yield from part.tensors()
