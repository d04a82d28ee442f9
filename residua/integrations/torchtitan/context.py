"""Context parallelism: every rank has some tokens of each sequence, at explicit positions.

Everything but attention acts token by token. Softmax attention gathers the keys and values of all ranks, puts them in
the order of their positions, and attends from the rank's own queries: so documents, windows and sinks work as on one
process, and the ranks may have any tokens, also torchtitan's balanced halves from both ends. torch's ring attention
passes keys round instead; it has no kernels for the CPU, for documents, windows or sinks.

The state of Gated DeltaNet runs along the sequence. Instead of waiting for each other, the ranks divide its heads: each
gathers all tokens, computes its heads from their first token to the last, and the sums over heads are scattered back.
Weights stay whole on every rank; each has the gradient of its heads, and FSDP2 adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, wait_tensor
from torch.func import functional_call

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.integrations.torchtitan.tensor import find_splits, gathered, narrow_heads, scattered
from residua.model.attend import attend
from residua.model.context import Anchors, Context
from residua.model.decoder import Decoder
from residua.model.rope import GROWING
from residua.model.size import shapes_only

FLAG = "--parallelism.context_parallel_degree"


class Across:
    """Attention from the tokens of this rank, at `positions` [T], to those of all ranks of a group."""

    def __init__(self, positions: Tensor, group: dist.ProcessGroup) -> None:
        self.positions, self.group = positions, group
        self.places = wait_tensor(all_gather_tensor(positions, 0, group))
        self.order = torch.argsort(self.places)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        k, v = self.in_order(k), self.in_order(v)
        return attend(q, k, v, positions=self.positions, **given)

    def in_order(self, x: Tensor) -> Tensor:
        """The tokens [B, T, …] of all ranks in the order of their positions."""
        return gathered(x, self.group).index_select(1, self.order)

    def back(self, y: Tensor) -> Tensor:
        """Of sums [B, T, …] in the order of positions, over all ranks, those for this rank's tokens."""
        return scattered(y.index_select(1, self.places), self.group)


class HeadsOfSequences:
    """In place of `forward` of a Gated DeltaNet: all tokens of the sequences, for this rank's share of the heads."""

    def __init__(self, body: Any, mixer: Any, rank: int, ranks: int) -> None:
        with torch.device("meta"), shapes_only():
            self.own = type(body)(narrow_heads(mixer, ranks), body.out.weight.shape[0], std=0.0, output_std=0.0)
        self.body, self.rank, self.ranks = body, rank, ranks
        self.splits = find_splits(self.own, body)

    def __call__(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        across = context.across
        assert isinstance(across, Across)
        weights = {name: self._share(name, weight) for name, weight in self.body.named_parameters()}
        y, anchors = functional_call(self.own, weights, (across.in_order(x), anchors, context))
        return across.back(y), anchors

    def _share(self, name: str, weight: Tensor) -> Tensor:
        """The rows or columns of this rank's heads."""
        split = self.splits.get(name)
        if split is None:
            return weight
        intervals = split.intervals(self.rank, self.ranks)
        return torch.cat([weight.narrow(split.dim, place, stop - begin) for begin, stop, place in intervals], split.dim)


def divide_states(model: Decoder, rank: int, ranks: int) -> None:
    """Let ranks that have different tokens divide the heads of linear attention."""
    for layer, sublayer in enumerate(list(model.sublayers)[::2]):
        body, mixer = sublayer.get_submodule("body"), model.config.attention.at(layer)
        if not mixer.attends:
            body.forward = HeadsOfSequences(body, mixer, rank, ranks)  # type: ignore[method-assign]


def refuse_mixers(model: ModelConfig, ranks: int) -> None:
    """Refuse models whose tokens need more of the others than keys and values."""
    for mixer in {mixer.kind: mixer for mixer in map(model.attention.at, range(model.layers))}.values():
        if not mixer.attends and mixer.head_counts():
            narrow_heads(mixer, ranks, FLAG)
        elif not mixer.attends:
            raise ConfigError(
                f"{FLAG} {ranks} divides sequences, along which the state of model.attention.kind = '{mixer.kind}' is "
                "passed on: use tensor_parallel_degree or data_parallel_shard_degree."
            )
        scaling = getattr(mixer, "rope_scaling", None)
        if scaling is not None and scaling.kind in GROWING:
            raise ConfigError(
                f"{FLAG} {ranks} divides sequences, whose length decides the angles of attention.rope_scaling = "
                f"'{scaling.kind}': use another scaling, or data_parallel_shard_degree."
            )
