"""Context parallelism: every rank has some tokens of each sequence, at explicit positions.

Everything but attention acts token by token. Softmax attention gathers the keys and values of all ranks, puts them in
the order of their positions, and attends from the rank's own queries: so documents, windows and sinks work as on one
process, and the ranks may have any tokens, also torchtitan's balanced halves from both ends. torch's ring attention
passes keys round instead; it has no kernels for the CPU, for documents, windows or sinks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, wait_tensor

from residua.config import choices
from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.integrations.torchtitan.tensor import gathered
from residua.model.attend import attend
from residua.model.rope import GROWING

FLAG = "--parallelism.context_parallel_degree"


class Across:
    """Attention from the tokens of this rank, at `positions` [T], to those of all ranks of a group."""

    def __init__(self, positions: Tensor, group: dist.ProcessGroup) -> None:
        self.positions, self.group = positions, group
        self.order = torch.argsort(wait_tensor(all_gather_tensor(positions, 0, group)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        k, v = (gathered(x, self.group).index_select(1, self.order) for x in (k, v))
        return attend(q, k, v, positions=self.positions, **given)


def refuse_mixers(model: ModelConfig, ranks: int) -> None:
    """Refuse models whose tokens need more of the others than keys and values."""
    mixers = {type(mixer): mixer for mixer in map(model.attention.at, range(model.layers))}
    for kind, mixer in mixers.items():
        if kind not in (choices.SoftmaxAttention, choices.LatentAttention):
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
