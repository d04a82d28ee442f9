"""Adapts transformers' caches to the model: positions and masks of tokens, and storage of keys and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.errors import UserError
from residua.model.cache import Now
from residua.model.sdpa import attend_cached

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function in transformers' registry."""


class KeyValues:
    """The keys and values of one attention layer, in a transformers cache or, without a cache, of this call only.

    A host such as vLLM stores them itself: we call its attention as transformers' models do, with this object as the
    attention module. A layer that borrows keys or values from a lender layer stores only those that it does not borrow.
    """

    is_causal = True

    def __init__(
        self, cache: Any, layer: int, host: Attention | None, lender: int | None = None, taken: Sequence[str] = ()
    ) -> None:
        self.cache, self.layer_idx, self.host = cache, layer, host
        self.lender, self.taken = lender, taken

    def attend(self, q: Tensor, k: Tensor, v: Tensor, now: Now, **scoring: Any) -> Tensor:
        """Attend from q [B, T, H, D] to the cached keys and to k, v [B, T, H_kv, D], which are added to the cache."""
        if self.host is None:
            return attend_cached(q, *self.extend(k, v, now), now, **scoring)
        if any(each is not None for each in scoring.values()):  # hosts ignore them silently
            raise UserError(
                "this attn_implementation does not support learned sinks, windows or capped scores: use 'sdpa'."
            )
        self.num_key_value_groups = q.shape[2] // k.shape[2]
        heads = (t.transpose(1, 2) for t in (q, k, v))
        y, _ = self.host(self, *heads, None, scaling=q.shape[-1] ** -0.5)
        return y.reshape(q.shape)

    def extend(self, k: Tensor, v: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        """Add k, v; return as many slots as `now.visible` has (a static cache has more)."""
        if self.cache is None:
            return k, v
        assert now.visible is not None
        slots = now.visible.shape[-1]
        if "k" not in self.taken:
            values = v[..., :0] if "v" in self.taken else v
            k, v = self.cache.update(k.transpose(1, 2), values.transpose(1, 2), self.layer_idx)
        if self.lender is not None:
            lent = self.cache.layers[self.lender]
            k, v = lent.keys if "k" in self.taken else k, lent.values
        return k[:, :, :slots].transpose(1, 2), v[:, :, :slots].transpose(1, 2)


class Recurrent:
    """The state of one linear attention layer: its convolution's last inputs, and the delta rule's memory."""

    def __init__(self, cache: Any, layer: int, counts: bool) -> None:
        self.cache, self.layer, self.counts = cache, layer, counts

    @property
    def state(self) -> tuple[Tensor | None, Tensor | None]:
        if self.cache is None or not self.cache.has_previous_state(self.layer):
            return None, None
        layer_cache = self.cache.layers[self.layer]
        return layer_cache.conv_states[0].transpose(1, 2), layer_cache.recurrent_states[0]

    def keep(self, state: tuple[Tensor, Tensor]) -> None:
        if self.cache is not None:
            recent, memory = state
            self.cache.update_conv_state(recent.transpose(1, 2).contiguous(), self.layer)
            self.cache.update_recurrent_state(memory, self.layer)


class Past:
    """The decoder's cache: transformers' cache, if any, and the attention mask.

    Padding may be anywhere; a padding token sees itself, so that no softmax row is empty.
    """

    def __init__(
        self,
        cache: Any,
        layer_types: list[str],
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        host: Attention | None,
        borrowed: Mapping[int, tuple[int, Sequence[str]]],
    ) -> None:
        self.cache, self.tokens, self.mask, self.positions, self.host = cache, tokens, mask, positions, host
        if host is not None and (mask is not None or set(layer_types) != {"full_attention"}):
            raise UserError("this attn_implementation supports only softmax attention without padding: use 'sdpa'.")
        self.length = 0 if cache is None else int(cache.get_seq_length())
        layers = [
            KeyValues(cache, layer, host, *borrowed.get(layer, ()))
            if name == "full_attention"
            else Recurrent(cache, layer, name == "hybrid")
            for layer, name in enumerate(layer_types)
        ]
        self.sublayers = [part for layer in layers for part in (layer, None)]

    def now(self, length: int, counts: Tensor | None = None) -> Now:
        """Positions and visible slots of `length` new tokens, which follow the cached ones."""
        total = self.length + length
        slots = torch.arange(total, device=self.tokens.device)
        rows = slots[self.length :, None]
        if self.mask is None:
            positions = slots[None, self.length :].expand(self.tokens.shape[0], -1)
            visible = None if self.host else (slots <= rows)[None, None]
            return Now(self._given(positions), visible, None, None, None)
        mask = pad(self.mask[:, :total].bool(), (0, max(total - self.mask.shape[1], 0)), value=True)
        visible = (slots <= rows) & mask[:, None, None, :] | (slots == rows)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, self.length :]
        return Now(self._given(positions), visible, None, mask[:, self.length :], None)

    def _given(self, positions: Tensor) -> Tensor:
        return positions if self.positions is None else self.positions.expand_as(positions)

    def advance(self, length: int, counts: Tensor | None = None) -> None:
        """Count the tokens: if no layer stores keys, the cache counts keys of width 1."""
        first = self.sublayers[0]
        if self.cache is not None and isinstance(first, Recurrent) and first.counts:
            counted = torch.zeros(self.tokens.shape[0], 1, length, 1, device=self.tokens.device)
            self.cache.update(counted, counted, 0)
