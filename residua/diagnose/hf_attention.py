"""An attention function for transformers' interface: ordinary attention, block by block, that keeps its sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from residua.diagnose.attention import AttentionSums, Scores, attend_and_sum

INTERFACE, DENSE_MASKS = "residua_diagnose", "residua_diagnose_dense_masks"
"""Two names of one function. Under the second, models without SDPA get the masks that they make for eager attention."""
_USED = {"s_aux", "sliding_window", "softcap", "is_causal", "position_bias", "indices"}
_NOT_SCORES = {"position_ids", "position_embeddings", "cache_position", "attention_mask"}
"""Tensors that models hand to every attention function and that change no score."""


@dataclass
class Watch:
    """What the attention function saw: its calls in order, the heads of each module, and arguments it does not know."""

    calls: list[tuple[int, AttentionSums | None]] = field(default_factory=list)
    heads: dict[int, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


_watch: Watch | None = None
_silent: tuple[int, int] | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key and value [B, H_kv, K, D]; returns [B, T, H, D].

    Sums are kept where each key is a token (K = T); compressed or cached keys are attended to and not counted.
    """
    sink = options.get("s_aux")
    causal = options.get("is_causal")
    how = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window") if attention_mask is None else None,
        mask=_chosen(attention_mask, options.get("indices"), key.shape[2]),
        softcap=options.get("softcap"),
        sink=getattr(module, "sinks", None) if sink is None else sink,
        bias=options.get("position_bias"),
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )
    y, sums = attend_and_sum(query, key, value, how)
    if _watch is not None:
        _watch.calls.append((id(module), sums if key.shape[2] == query.shape[2] else None))
        _watch.heads[id(module)] = query.shape[1]
        _watch.unknown |= {
            name for name, given in options.items() if isinstance(given, Tensor) and name not in _USED | _NOT_SCORES
        }
    if _silent is not None and _silent[0] == id(module):
        y = y.clone()
        y[:, _silent[1]] = 0
    return y.transpose(1, 2).contiguous(), None


def _chosen(mask: Tensor | None, indices: Tensor | None, keys: int) -> Tensor | None:
    """The mask without the keys that sparse attention did not choose; indices [B, T, top] of the chosen ones."""
    if indices is None:
        return mask
    kept = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    kept = kept.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return kept.tril()
    return mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, torch.finfo(mask.dtype).min)


@contextmanager
def watching() -> Iterator[Watch]:
    """Keep what the attention function sees inside the block."""
    global _watch
    _watch = Watch()
    try:
        yield _watch
    finally:
        _watch = None


@contextmanager
def without_head(module: nn.Module, head: int) -> Iterator[None]:
    """Inside the block one head of the module gives zero."""
    global _silent
    _silent = (id(module), head)
    try:
        yield
    finally:
        _silent = None
