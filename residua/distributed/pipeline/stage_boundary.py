"""What crosses the boundaries between pipeline stages: the topology's state (`Topology.boundary`) and the anchors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from residua.config.model import ModelConfig
from residua.model.attention import head_shape
from residua.model.topology import build_topology
from residua.model.topology.base import Boundary, Items

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residua.distributed.pipeline.deal import Share

EMBEDDING = "embedding"


def _anchor_items(config: ModelConfig, k: int, shape: Sequence[int], dtype: torch.dtype) -> Items:
    """The anchors that exist after sublayer k."""
    anchors = config.anchors
    if not anchors.mixed or config.softmax is None:
        return {}
    written = -1 if anchors.from_embedding else 2 * config.softmax_layers[0]
    if k < written:
        return {}
    heads = head_shape(config.softmax, config.width)
    sizes = [(*shape[:-1], heads.heads[s], heads.head_dim) for s in anchors.mixed]
    return {f"anchor.{i}": torch.empty(size, dtype=dtype) for i, size in enumerate(sizes)}


def recomputes_anchors(config: ModelConfig, how: str) -> bool:
    """Whether slices compute anchors from the embedding (ExoFormer's) instead of receiving them.

    The embedding costs one width per token, and nothing if it crosses anyway; the anchors cost up to four.
    """
    if not config.anchors.from_embedding or config.softmax is None:
        return False
    heads = head_shape(config.softmax, config.width)
    fewer = sum(heads.rows(s) for s in config.anchors.mixed) > config.width
    return {"auto": fewer, "send": False, "recompute": True}[how]


def crossing(
    config: ModelConfig, ends: Sequence[int], shape: Sequence[int], dtype: torch.dtype, anchors: str
) -> list[Items]:
    """What crosses after each sublayer of `ends`, as tensors without memory; `shape` is [B, T, C]."""
    found: list[Items] = []
    with FakeTensorMode(), torch.no_grad():
        boundary = build_topology(config.topology, config.sublayers, config.width).boundary()
        x = torch.empty(*shape, dtype=dtype)
        _, state = boundary.begin(x)
        y = torch.empty_like(x)
        for k in range(max(ends, default=-1) + 1):
            if k in ends:
                found.append(boundary.close(k, y, state) | _anchors_at(config, boundary, k, x, anchors))
            state = boundary.after(k, y, state)
    return [{name: _outline(item) for name, item in items.items()} for items in found]


def boundaries_of(
    config: ModelConfig,
    shares: Sequence[Share],
    shape: Sequence[int],
    dtype: torch.dtype,
    anchors: str,
    known: Mapping[int, Items] | None = None,
) -> list[Items]:
    """What crosses between the stages of a pipeline, as tensors without memory; `shape` is [B, T, C].

    `known` may hold what crosses after each sublayer.
    """
    ends = [share.sublayers.stop - 1 for share, after in pairwise(shares) if after.head.start == 0]
    items = crossing(config, ends, shape, dtype, anchors) if known is None else [known[end] for end in ends]
    return items + [head_items(share, shape, dtype) for share in shares[len(ends) : -1]]


HIDDEN, LSE, PICKED = "head.hidden", "head.lse", "head.picked"


def head_items(share: Share, shape: Sequence[int], dtype: torch.dtype) -> Items:
    """What crosses inside a head that is cut: its input, which stays the same, and two numbers per token."""
    numbers = torch.empty(*shape[:-1], dtype=torch.promote_types(dtype, torch.float32), device="meta")
    hidden = torch.empty(*shape, dtype=dtype, device="meta")
    return {HIDDEN: hidden, f"{LSE}.{share.head.stop}": numbers, f"{PICKED}.{share.head.stop}": numbers.clone()}


def _outline(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _anchors_at(config: ModelConfig, boundary: Boundary, k: int, x: Tensor, how: str) -> Items:
    if not recomputes_anchors(config, how):
        return _anchor_items(config, k, x.shape, x.dtype)
    return {} if boundary.embedding() is not None else {EMBEDDING: x}
