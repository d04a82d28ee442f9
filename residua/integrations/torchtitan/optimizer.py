"""Residua's optimizer and learning-rate schedules in torchtitan's containers, and Muon on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from residua.config.schedule import Cosine, LinearDecay, WarmUp
from residua.config.settings import ConfigError
from residua.distributed.experts import expert_matrices
from residua.distributed.optimizer import (
    Matrices,
    Owners,
    RankedOptimizer,
    local_updates,
    remaining_updates,
    shared_updates,
    whole_matrices,
)
from residua.integrations.torchtitan.compat import parse_run
from residua.train.optimizer import Parts, Rows, Updates, build_optimizer

if TYPE_CHECKING:
    from residua.integrations.torchtitan.model import ResiduaModel


class ResiduaOptimizers(OptimizersContainer):
    """Muon and AdamW as `train.optimizer` says, one optimizer for all parameters of this rank.

    Its state has the same names as in a run's checkpoints, so any mesh can read it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The run, as TOML; change it with `train.optimizer.…` after the name of the run."""

        run: Annotated[str, tyro.conf.Suppress] = ""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups:
            raise ConfigError(
                "--optimizer.param_groups would replace Residua's optimizer: choose it with train.optimizer.kind=adamw "
                "after the name of the run."
            )
        self.model_parts = model_parts
        (model,) = model_parts
        self.model: Any = model
        grid: Any = self.model.grid
        kind: Any = partial(RankedOptimizer, mesh=grid, experts=expert_matrices(model, grid))
        if grid.tensor_ranks > 1:
            divided: Any = self.model
            kind = partial(DividedOptimizer, model=divided)
        self.optimizer = build_optimizer(self.model, parse_run(config.run).train.optimizer, kind)
        self.optimizers = [self.optimizer]
        self._post_init([p for group in self.optimizer.param_groups for p in group["params"]])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and refresh working copies at the start of a step."""
        super().zero_grad(set_to_none)
        if self.model.copies is not None:
            self.model.copies.begin()

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, as checkpoints hold it."""
        return {key: self.model.placed(key.rpartition("/")[0], t) for key, t in self.optimizer.tensors().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load the step counts; torch.distributed.checkpoint has written the other tensors in place."""
        self.optimizer.set_steps(state_dict)


class ResiduaSchedule(LRSchedulersContainer):
    """`train.schedule`, with torchtitan's names for its settings."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """torchtitan's settings; `schedule_fields` gives them the run's values."""

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> LRSchedulersContainer:
            steps = self.total_steps or training_steps
            schedule = schedule_of(self)
            return ResiduaSchedule(optimizers, lambda step: schedule.factor(min(step, steps - 1), steps))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a step and set its learning rates, which this optimizer's state does not include."""
        super().load_state_dict(state_dict)
        for scheduler in self.schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate


def schedule_fields(schedule: WarmUp) -> dict[str, Any]:
    """torchtitan's settings of a schedule."""
    shape = (
        {"decay_type": "linear", "decay_ratio": schedule.decay_share}
        if isinstance(schedule, LinearDecay)
        else {"decay_type": "cosine", "decay_ratio": None}
    )
    return {"warmup_steps": schedule.warmup, "min_lr_factor": schedule.floor, **shape}


def schedule_of(settings: Any) -> WarmUp:
    """The schedule that torchtitan's settings describe."""
    common = {"warmup": settings.warmup_steps, "floor": settings.min_lr_factor}
    if settings.decay_type == "linear":
        ratio = settings.decay_ratio
        return LinearDecay(**common, decay_share=1.0 if ratio is None else ratio)
    if settings.decay_type == "cosine" and settings.decay_ratio is None:
        return Cosine(**common)
    raise ConfigError(
        f"--lr_scheduler.decay_type {settings.decay_type} with decay_ratio {settings.decay_ratio}: Residua's schedules "
        "are linear with a decay_ratio, and cosine without one."
    )


class DividedOptimizer(RankedOptimizer):
    """The optimizer on ranks that divide matrices among them, with the same updates as on one process.

    A divided direction is first gathered from the ranks. If its rows are divided, row i of all ranks is put side by
    side: each part of a fused projection stays together, and the order of the rows in a part does not change how it is
    orthogonalised. Every tensor-parallel rank then does the same work and keeps its share.
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
        matrices = Matrices(shapes, joined, counts)
        updates = [local_updates([i for i in split if i in whole], matrices)]
        if sharded := [i for i in split if i not in whole]:
            updates.append(shared_updates(same, sharded, matrices))
        for rows_list, values, scale in chain.from_iterable(updates):
            pairs = zip(rows_list, values, strict=True)
            shares = [self._share(parameters[row.matrix], row, value) for row, value in pairs]
            yield [row for row, _ in shares], [value for _, value in shares], scale
        shards = config.shard * ranks
        everyone = Owners(config.data, shards, grid.data_rank, grid.tokens_rank, grid.data, grid.tokens)
        yield from remaining_updates(everyone, split, parameters, matrices)

    def _gathered(self, direction: Tensor) -> Tensor:
        """The direction of all ranks, [rows, ranks, columns]."""
        by_rank = [torch.empty_like(direction) for _ in range(self.grid.tensor_ranks)]
        dist.all_gather(by_rank, direction.contiguous(), group=self.grid.tensor)
        return torch.stack(by_rank, 1)

    def _share(self, parameter: Tensor, row: Rows, value: Tensor) -> tuple[Rows, Tensor]:
        """The part of an update that belongs to this rank."""
        ranks, rank = self.grid.tensor_ranks, self.grid.tensor_rank
        if self.dims[parameter] == 1:
            return row, value.chunk(ranks, 1)[rank]
        return Rows(row.matrix, row.start // ranks, row.stop // ranks), value.unflatten(0, (-1, ranks))[:, rank]

    def _check(self, rows: int, shards: int) -> None:
        if rows % shards:
            raise ConfigError(
                f"train.optimizer.kind = 'muon' on tensor-parallel ranks needs row counts divisible by "
                f"--parallelism.data_parallel_shard_degree {shards}, but a matrix has {rows}: use a divisor."
            )
