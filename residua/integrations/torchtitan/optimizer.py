"""Residua's optimizer and learning-rate schedules in torchtitan's containers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from residua.config.schedule import Cosine, LinearDecay, WarmUp
from residua.config.settings import ConfigError
from residua.distributed.experts import expert_matrices
from residua.distributed.optimizer import RankedOptimizer
from residua.integrations.torchtitan.muon import DividedOptimizer
from residua.integrations.torchtitan.run import parse_run
from residua.train.optimizer import build_optimizer


class ResiduaOptimizers(OptimizersContainer):
    """Muon and AdamW as `train.optimizer` says, one optimizer for all parameters of this rank.

    Its state has the names that it has in a run's checkpoints, so any mesh can read it.
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
        """Begin a step."""
        super().zero_grad(set_to_none)
        if self.model.copies is not None:
            self.model.copies.begin()

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, as checkpoints hold it."""
        return {key: self.model.placed(key.rpartition("/")[0], t) for key, t in self.optimizer.tensors().items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take the step counts; torch.distributed.checkpoint has written to the other tensors in place."""
        self.optimizer.set_steps(state_dict)


class ResiduaSchedule(LRSchedulersContainer):
    """`train.schedule`, with torchtitan's names of its settings."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """torchtitan's settings; `schedule_fields` gives them the run's values."""

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> LRSchedulersContainer:
            steps = self.total_steps or training_steps
            schedule = schedule_of(self)
            return ResiduaSchedule(optimizers, lambda step: schedule.factor(min(step, steps - 1), steps))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a step, and set its rates: they are no part of the optimizer's state here."""
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
