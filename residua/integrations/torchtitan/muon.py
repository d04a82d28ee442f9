"""Muon on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from residua.config.settings import ConfigError
from residua.distributed.optimizer import Owners, RankedOptimizer, local_updates, shared_updates, whole_matrices
from residua.train.optimizer import Parts, Rows, Updates

if TYPE_CHECKING:
    from residua.integrations.torchtitan.model import ResiduaModel


class DividedOptimizer(RankedOptimizer):
    """The optimizer on ranks that divide matrices among them, with the updates of one process.

    A direction that the ranks divide is gathered from them first. If they divide its rows, those of one place on all
    ranks are put side by side: each part of a fused projection stays together, and the order of the rows in a part does
    not change how it is orthogonalised. Every tensor-parallel rank then does the same work and keeps its share.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], model: ResiduaModel) -> None:
        super().__init__(groups, model.grid)
        self.grid = model.grid
        named = model.named_parameters()
        self.dims: dict[Tensor, int] = {p: model.splits[name].dim for name, p in named if name in model.splits}

    def orthogonalise(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor], parts: Sequence[Parts]
    ) -> Iterator[Updates]:
        grid, config = self.grid, self.grid.config
        ranks = grid.tensor_ranks
        split = [i for i, p in enumerate(parameters) if p in self.dims]
        shapes = [p.shape for p in parameters]
        joined, counts = list(directions), list(parts)
        for i in split:
            rows, columns = shapes[i]
            if self.dims[parameters[i]] == 0:
                self._check(rows, config.shard)
                shapes[i], counts[i] = torch.Size((rows * ranks, columns)), tuple(n * ranks for n in parts[i])
            else:
                shapes[i] = torch.Size((rows, columns * ranks))
            joined[i] = self._gathered(directions[i]).reshape(-1, shapes[i][1])
        whole = whole_matrices(parameters, config.shard)
        same = Owners(config.data, config.shard, grid.data_rank, grid.shard_rank, grid.data, grid.shard)
        found = [local_updates([i for i in split if i in whole], joined, counts)]
        if sharded := [i for i in split if i not in whole]:
            found.append(shared_updates(same, sharded, shapes, joined, counts))
        for rows_list, values, scale in chain.from_iterable(found):
            pairs = zip(rows_list, values, strict=True)
            own = [self._share(parameters[row.matrix], row, value) for row, value in pairs]
            yield [row for row, _ in own], [value for _, value in own], scale
        alone = [i for i in whole_matrices(parameters, config.shard * ranks) if i not in split]
        yield from local_updates(alone, directions, parts)
        rest = [i for i in range(len(shapes)) if i not in split and i not in alone]
        if rest:
            shards = config.shard * ranks
            all_ranks = Owners(config.data, shards, grid.data_rank, grid.tokens_rank, grid.data, grid.tokens)
            yield from shared_updates(all_ranks, rest, shapes, directions, parts)

    def _gathered(self, direction: Tensor) -> Tensor:
        """[rows, ranks, columns]."""
        found = [torch.empty_like(direction) for _ in range(self.grid.tensor_ranks)]
        dist.all_gather(found, direction.contiguous(), group=self.grid.tensor)
        return torch.stack(found, 1)

    def _share(self, parameter: Tensor, row: Rows, value: Tensor) -> tuple[Rows, Tensor]:
        """The part of an update that belongs to this rank."""
        ranks, rank = self.grid.tensor_ranks, self.grid.tensor_rank
        if self.dims[parameter] == 1:
            return row, value.chunk(ranks, 1)[rank]
        return Rows(row.matrix, row.start // ranks, row.stop // ranks), value.unflatten(0, (-1, ranks))[:, rank]

    def _check(self, rows: int, shards: int) -> None:
        if rows % shards:
            raise ConfigError(
                f"train.optimizer.kind = 'muon' on tensor-parallel ranks needs rows that "
                f"--parallelism.data_parallel_shard_degree {shards} divides, and a matrix has {rows}: use a divisor."
            )
