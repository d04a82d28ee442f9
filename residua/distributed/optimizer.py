"""Muon on several ranks: every matrix is orthogonalised once, on one rank, its owner.

Momentum and AdamW are elementwise: each rank updates the rows it has. Orthogonalisation needs a whole matrix and runs
in turns. In each turn every rank owns one or a few matrices: it receives their rows from the other shards
(all-to-all), orthogonalises them, and sends each shard its rows of the update. Meanwhile the rows of the next turn are
already being sent. If the model is replicated, each copy handles a part of the matrices and broadcasts the result to
the other copies. Directions and updates are sent in the dtype they are computed in, bf16 on a GPU, so the result equals
that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from residua.distributed.mesh import Mesh
from residua.distributed.shard import rows_of
from residua.storage.shard_files import local
from residua.train.optimizer import HybridOptimizer, Parts, Rows, Updates, orthogonal_updates, working_dtype

# Elements that an owner orthogonalises per turn: enough to fill a GPU, few enough that turns overlap.
TURN_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Owners:
    """The ranks that share the work on some matrices, which exist in `copies`, each divided by rows into `shards`.

    `copy` and `shard` give the place of this rank. `data` is the group of ranks that have the same rows, `rows` the
    group of ranks with the other rows of this copy.
    """

    copies: int
    shards: int
    copy: int
    shard: int
    data: dist.ProcessGroup
    rows: dist.ProcessGroup


class RankedOptimizer(HybridOptimizer):
    """The optimizer of one process, applied to the rows of this rank, with the same updates.

    Divided experts (`experts.py`) are orthogonalised by the ranks that have them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], mesh: Mesh, experts: Iterable[Tensor] = ()) -> None:
        super().__init__(groups)
        self.mesh, self.experts = mesh, set(experts)

    def here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [local(tensor) for tensor in tensors]

    def orthogonalise(
        self, parameters: Sequence[Tensor], directions: Sequence[Tensor], parts: Sequence[Parts]
    ) -> Iterator[Updates]:
        mesh, config = self.mesh, self.mesh.config
        shapes, parts = [p.shape for p in parameters], list(parts)
        matrices = Matrices(shapes, directions, parts)
        divided = [i for i, p in enumerate(parameters) if p in self.experts]
        for i in divided:
            shapes[i] = torch.Size((shapes[i][0] // config.experts, *shapes[i][1:]))
            count = len(parts[i]) // config.experts
            parts[i] = parts[i][mesh.expert_rank * count : (mesh.expert_rank + 1) * count]
        if divided:
            slices = config.slices
            same = Owners(config.data, slices, mesh.data_rank, mesh.shard_rank % slices, mesh.data, mesh.slices)
            yield from shared_updates(same, divided, matrices)
        everyone = Owners(config.data, config.shard, mesh.data_rank, mesh.shard_rank, mesh.data, mesh.shard)
        yield from remaining_updates(everyone, divided, parameters, matrices)


class Matrices(NamedTuple):
    """Matrices to orthogonalise: their full shapes, this rank's rows of their directions, and their parts."""

    shapes: Sequence[torch.Size]
    directions: Sequence[Tensor]
    parts: Sequence[Parts]


def whole_matrices(parameters: Sequence[Tensor], shards: int) -> list[int]:
    """Indices of matrices that every rank has whole although others are sharded: those that pipeline stages share."""
    return [i for i, parameter in enumerate(parameters) if shards > 1 and not isinstance(parameter, DTensor)]


def local_updates(chosen: Sequence[int], matrices: Matrices) -> Iterator[Updates]:
    """Updates of whole matrices; every rank computes the same ones."""
    directions, parts = [matrices.directions[i] for i in chosen], [matrices.parts[i] for i in chosen]
    for rows, values, scale in orthogonal_updates(directions, parts):
        yield [row._replace(matrix=chosen[row.matrix]) for row in rows], values, scale


def remaining_updates(
    owners: Owners, done: Sequence[int], parameters: Sequence[Tensor], matrices: Matrices
) -> Iterator[Updates]:
    """Updates of all matrices except those in `done`; all owners must call it together."""
    alone = [i for i in whole_matrices(parameters, owners.shards) if i not in done]
    yield from local_updates(alone, matrices)
    rest = [i for i in range(len(parameters)) if i not in done and i not in alone]
    if rest:
        yield from shared_updates(owners, rest, matrices)


def shared_updates(owners: Owners, chosen: Sequence[int], matrices: Matrices) -> Iterator[Updates]:
    """Updates for this rank's rows of the chosen matrices; all owners must call it together."""
    if owners.copies * owners.shards == 1:
        yield from local_updates(chosen, matrices)
        return
    turns = _turns({i: matrices.shapes[i] for i in chosen}, owners.copies, owners.shards)
    waiting: _Turn | None = None
    coming = _Turn(owners, turns[0], matrices)
    for following in [*turns[1:], None]:
        turn = coming
        if following is not None:
            coming = _Turn(owners, following, matrices)
        turn.compute()
        if waiting is not None:
            yield from waiting.updates()
        waiting = turn
    assert waiting is not None
    yield from waiting.updates()


@dataclass(frozen=True)
class _Task:
    """The number of a matrix, and its owner: a shard of a copy of the model."""

    matrix: int
    copy: int
    shard: int


def _turns(shapes: Mapping[int, torch.Size], copies: int, shards: int) -> list[list[_Task]]:
    """Assign matrices to owners, the most expensive first, so that the owners of a turn have equal work."""
    owners = copies * shards
    order = sorted(shapes, key=lambda i: (-prod(shapes[i]) * min(shapes[i][-2:]), i))
    turns: list[list[_Task]] = []
    room = 0
    for place in range(0, len(order), owners):
        dealt = order[place : place + owners]
        size = prod(shapes[dealt[0]])
        if room < size:
            turns.append([])
            room = max(TURN_ELEMENTS, size)
        room -= size
        turns[-1] += [_Task(matrix, owner // shards, owner % shards) for owner, matrix in enumerate(dealt)]
    return turns


class _Turn:
    """One turn: the constructor sends rows to owners, `compute` orthogonalises them, `updates` receives the results."""

    def __init__(self, owners: Owners, tasks: list[_Task], matrices: Matrices) -> None:
        self.owners, (self.shapes, self.directions, self.parts) = owners, matrices
        self.dtype = working_dtype(self.directions[0])
        self.copies = [[t for t in tasks if t.copy == copy] for copy in range(owners.copies)]
        mine = self.copies[owners.copy]
        self.owned = [t.matrix for t in mine if t.shard == owners.shard]
        # sent: to each shard, our rows of the matrices it owns; received: from each shard, its rows of ours
        self.to_owners = [[t.matrix for t in mine if t.shard == shard] for shard in range(owners.shards)]
        self.out_sizes = [sum(self._size(m, owners.shard) for m in ms) for ms in self.to_owners]
        self.in_sizes = [sum(self._size(m, shard) for m in self.owned) for shard in range(owners.shards)]
        sent = self._flat([self.directions[m] for matrices in self.to_owners for m in matrices])
        self.received, self.work = self._exchange(sent, self.out_sizes, self.in_sizes)

    def compute(self) -> None:
        """Orthogonalise the matrices that this rank owns and start sending the results back."""
        _wait(self.work)
        whole = [torch.empty(self.shapes[m], dtype=self.dtype, device=self.received.device) for m in self.owned]
        self._copy_rows(dict(zip(self.owned, whole, strict=True)), self.received, write=False)
        updates = [torch.empty_like(direction) for direction in whole]
        for rows, values, _ in orthogonal_updates(whole, [self.parts[m] for m in self.owned]):
            torch._foreach_copy_([updates[i][start:stop] for i, start, stop in rows], values)
        sent = torch.empty_like(self.received)
        self._copy_rows(dict(zip(self.owned, updates, strict=True)), sent, write=True)
        self.received, self.work = self._exchange(sent, self.in_sizes, self.out_sizes)
        self.spread = self._spread()

    def updates(self) -> Iterator[Updates]:
        """The updates for this rank's rows of every matrix of the turn."""
        by_scale: dict[float, tuple[list[Rows], list[Tensor]]] = {}
        for tasks, (buffer, work) in zip(self.copies, self.spread, strict=True):
            _wait(work)
            place = 0
            for matrix in [t.matrix for shard in range(self.owners.shards) for t in tasks if t.shard == shard]:
                size = self._size(matrix, self.owners.shard)
                update = buffer[place : place + size].view(self.directions[matrix].shape)
                place += size
                for rows, values, scale in self._pieces(matrix, update.to(self.directions[matrix].dtype)):
                    chosen = by_scale.setdefault(scale, ([], []))
                    chosen[0].append(rows)
                    chosen[1].append(values)
        for scale, (rows_list, values_list) in by_scale.items():
            yield rows_list, values_list, scale

    def _spread(self) -> list[tuple[Tensor, dist.Work | None]]:
        """The results of every copy of the model, broadcast by the rank of that copy that has the same rows."""
        if self.owners.copies == 1:
            return [(self.received, self.work)]
        _wait(self.work)
        buffers = []
        for copy, tasks in enumerate(self.copies):
            size = sum(self._size(t.matrix, self.owners.shard) for t in tasks)
            is_local = copy == self.owners.copy
            buffer = self.received if is_local else torch.empty(size, dtype=self.dtype, device=self.received.device)
            work = dist.broadcast(buffer, group=self.owners.data, group_src=copy, async_op=True) if size else None
            buffers.append((buffer, work))
        return buffers

    def _pieces(self, matrix: int, update: Tensor) -> Iterator[tuple[Rows, Tensor, float]]:
        """For each part of a matrix: its rows on this rank, their update, and its factor on the learning rate."""
        columns = self.shapes[matrix][-1]
        start, end = rows_of(self.shapes[matrix][0], self.owners.shards, self.owners.shard)
        for stop, count in zip(accumulate(self.parts[matrix]), self.parts[matrix], strict=True):
            low, high = max(start, stop - count), min(end, stop)
            if low < high:
                here = Rows(matrix, low - start, high - start)
                yield here, update[here.start : here.stop], max(1.0, count / columns) ** 0.5

    def _copy_rows(self, matrices: dict[int, Tensor], buffer: Tensor, *, write: bool) -> None:
        """Copy between whole matrices and a buffer that holds each shard's rows of all matrices, in order of shards."""
        place = 0
        for shard in range(self.owners.shards):
            for matrix, values in matrices.items():
                start, end = rows_of(self.shapes[matrix][0], self.owners.shards, shard)
                size = self._size(matrix, shard)
                rows, flat = values[start:end], buffer[place : place + size]
                flat.copy_(rows.flatten()) if write else rows.copy_(flat.view(rows.shape))
                place += size

    def _size(self, matrix: int, shard: int) -> int:
        shape = self.shapes[matrix]
        start, end = rows_of(shape[0], self.owners.shards, shard)
        return (end - start) * prod(shape[1:])

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=self.dtype, device=self.directions[0].device)
        return torch.cat([t.to(self.dtype).flatten() for t in tensors])

    def _exchange(self, sent: Tensor, sizes_out: list[int], sizes_in: list[int]) -> tuple[Tensor, dist.Work | None]:
        if self.owners.shards == 1:
            return sent, None
        received = sent.new_empty(sum(sizes_in))
        work = dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.owners.rows, async_op=True)
        return received, work


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
