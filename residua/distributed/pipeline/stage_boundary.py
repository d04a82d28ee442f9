"""Where a model is cut along depth: what must cross from one slice of sublayers to the next.

Every tensor that crosses has a name of its own. A tensor that does not change from then on keeps its name at all later
cuts (a finished block of Attention Residuals, an anchor, the embedding), which is how a rank knows that it has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from residua.config import choices
from residua.config.model import ModelConfig
from residua.model.attention import head_shape
from residua.model.topology import Topology, build_topology
from residua.model.topology.attnres import BlockAttnRes
from residua.model.topology.base import State
from residua.model.topology.dense import DenseFormer
from residua.model.topology.multigate import MultiGate

if TYPE_CHECKING:
    from collections.abc import Sequence

Items = dict[str, Tensor]
"""Tensors that cross a cut, by name, in the order they travel."""

EMBEDDING = "embedding"


class Cut:
    """Cuts of a topology whose state is new at every sublayer: the residual stream, streams of MGR and HC.

    `open` and `step` of the topology are used as they are; the input of the next sublayer travels with the state
    unless it is the state.
    """

    plain = True
    """Whether the state inside a slice is a value like any other: nothing but gradients comes back to it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """The embedding in; the first sublayer's input out, and a state that can be cut."""
        return self.topology.open(x)

    def after(self, k: int, y: Tensor, state: State) -> State:
        """The state behind sublayer k, without what is computed only for the next input."""
        return self.topology.step(k, y, state)[1]

    def close(self, k: int, y: Tensor, state: State) -> Items:
        """The end of a slice: the output y of its last sublayer k in, what crosses out."""
        h, state = self._end(k, y, state)
        items = {f"state.{k}.{i}": tensor for i, tensor in enumerate(self._plain(state))}
        return items if h is state[0] else {f"input.{k}": h, **items}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        """The begin of the next slice: the input of sublayer k+1, and the state."""
        state = tuple(tensor for name, tensor in items.items() if name.startswith("state."))
        return items.get(f"input.{k}", state[0]), state

    def embedding(self) -> str | None:
        """The name under which the embedding crosses anyway."""
        return None

    def _end(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        return self.topology.step(k, y, state)

    def _plain(self, state: State) -> State:
        return state


class MultiGateCut(Cut):
    """After the fill phase the streams alone are a state; what follows them is the fused operator's own."""

    plain = False
    topology: MultiGate

    def _end(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        return self.topology.step(k, y, state, ends=True)

    def _plain(self, state: State) -> State:
        return state[:1] if state[0].dim() == 4 else state


class AttnResCut(Cut):
    """Attention Residuals: the sources cross, and the read over them is the next slice's.

    Inside a slice the state is the plain list of sources too: handles of the deferred backward cannot travel.
    """

    plain = False
    topology: BlockAttnRes

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def after(self, k: int, y: Tensor, state: State) -> State:
        return self.topology.sources(k, y, state)

    def close(self, k: int, y: Tensor, state: State) -> Items:
        sources = self.after(k, y, state)
        return {f"source.{number}": v for number, v in zip(self._numbers(k), sources, strict=True)}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        sources = tuple(items[f"source.{number}"] for number in self._numbers(k))
        h: Tensor = self.topology.reads[k](sources)
        return h, sources

    def embedding(self) -> str | None:
        return "source.0"

    def _numbers(self, k: int) -> Sequence[int]:
        """What read k sees, numbered as in the deferred plan: a block has the number of its last output."""
        return self.topology.plan.sees[k]


class DenseCut(Cut):
    """DenseFormer: the running sum and the outputs of all layers so far, which stay what they are."""

    def close(self, k: int, y: Tensor, state: State) -> Items:
        _, (h, *outputs) = self.topology.step(k, y, state)
        return {f"input.{k}": h, **{f"output.{i}": tensor for i, tensor in enumerate(outputs)}}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        h = items[f"input.{k}"]
        return h, (h, *(items[f"output.{i}"] for i in range((k + 1) // 2 + 1)))

    def embedding(self) -> str | None:
        return "output.0"


CUTS: dict[type[Topology], type[Cut]] = {BlockAttnRes: AttnResCut, DenseFormer: DenseCut, MultiGate: MultiGateCut}


def build_cut(topology: Topology) -> Cut:
    """The way a topology is cut; one that is not in the table carries its whole state."""
    kind = next((cut for family, cut in CUTS.items() if isinstance(topology, family)), Cut)
    return kind(topology)


def _anchor_items(config: ModelConfig, k: int, shape: Sequence[int], dtype: torch.dtype) -> Items:
    """The anchors that exist behind sublayer k."""
    anchors = config.anchors
    if isinstance(anchors, choices.NoAnchors) or config.softmax is None:
        return {}
    written = -1 if isinstance(anchors, choices.ExoFormer) else 2 * config.softmax_layers[0]
    if k < written:
        return {}
    pathways = ("v",) if isinstance(anchors, choices.ResFormer) else anchors.pathways
    heads = head_shape(config.softmax, config.width)
    sizes = [(*shape[:-1], heads.heads[s], heads.head_dim) for s in pathways]
    return {f"anchor.{i}": torch.empty(size, dtype=dtype) for i, size in enumerate(sizes)}


def recomputes_anchors(config: ModelConfig, how: str) -> bool:
    """Whether slices make ExoFormer's anchors from the embedding instead of receiving them.

    The embedding is one width per token, and none where it crosses anyway; the anchors are up to four.
    """
    if not isinstance(config.anchors, choices.ExoFormer) or config.softmax is None:
        return False
    heads = head_shape(config.softmax, config.width)
    fewer = sum(heads.rows(s) for s in config.anchors.pathways) > config.width
    return {"auto": fewer, "send": False, "recompute": True}[how]


def crossing(
    config: ModelConfig, ends: Sequence[int], shape: Sequence[int], dtype: torch.dtype, anchors: str
) -> list[Items]:
    """What crosses behind each sublayer of `ends`, without memory: `shape` is [B, T, C]."""
    found: list[Items] = []
    with FakeTensorMode(), torch.no_grad():
        cut = build_cut(build_topology(config.topology, config.sublayers, config.width))
        x = torch.empty(*shape, dtype=dtype)
        _, state = cut.begin(x)
        y = torch.empty_like(x)
        for k in range(max(ends, default=-1) + 1):
            if k in ends:
                found.append(cut.close(k, y, state) | _anchors_at(config, cut, k, x, anchors))
            state = cut.after(k, y, state)
    return [{name: _outline(item) for name, item in items.items()} for items in found]


def _outline(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _anchors_at(config: ModelConfig, cut: Cut, k: int, x: Tensor, how: str) -> Items:
    if not recomputes_anchors(config, how):
        return _anchor_items(config, k, x.shape, x.dtype)
    return {} if cut.embedding() is not None else {EMBEDDING: x}
