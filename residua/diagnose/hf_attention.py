"""An attention function for transformers' interface: ordinary attention, block by block, that keeps its sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from residua.diagnose.attention import AttentionSums, Scores, attend_and_sum

INTERFACE = "residua_diagnose"


@dataclass
class _Watch:
    """What the attention function does besides attention: keep sums and head counts by module id, silence one head."""

    sums: dict[int, AttentionSums] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    silent: tuple[int, int] | None = None
    keep: bool = False


_watch = _Watch()


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
    """transformers' attention function: query [B, H, T, D], key and value [B, H_kv, T, D]; returns [B, T, H, D]."""
    sink = options.get("s_aux")
    how = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window") if attention_mask is None else None,
        mask=attention_mask,
        softcap=options.get("softcap"),
        sink=getattr(module, "sinks", None) if sink is None else sink,
    )
    y, sums = attend_and_sum(query, key, value, how)
    if _watch.keep:
        _watch.sums[id(module)] = sums
        _watch.heads[id(module)] = query.shape[1]
    if _watch.silent is not None and _watch.silent[0] == id(module):
        y = y.clone()
        y[:, _watch.silent[1]] = 0
    return y.transpose(1, 2).contiguous(), None


@contextmanager
def watching() -> Iterator[_Watch]:
    """Keep the attention sums of all modules that run inside the block."""
    _watch.sums, _watch.heads, _watch.keep = {}, {}, True
    try:
        yield _Watch(_watch.sums, _watch.heads)
    finally:
        _watch.sums, _watch.heads, _watch.keep = {}, {}, False


@contextmanager
def without_head(module: nn.Module, head: int) -> Iterator[None]:
    """Inside the block one head of the module gives zero."""
    _watch.silent = (id(module), head)
    try:
        yield
    finally:
        _watch.silent = None
