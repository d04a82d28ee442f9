"""The processes that train a run together, as the trainer sees them. `World` is the usual case: one process.

Under torchrun the trainer is given `residua.distributed.world.Ranks` instead, which has the same methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset, Loader, validation_batches
from residua.data.loader import Batch
from residua.data.source import find_data
from residua.machine import choose_device
from residua.reading import counted
from residua.storage.checkpoint import model_tensors, save_checkpoint
from residua.storage.finite import nonfinite
from residua.storage.load import restore
from residua.storage.run import Run, failed_early
from residua.train.clock import Stages
from residua.train.start import starting_model
from residua.train.step import Step, build_step
from residua.train.summary import check_memory
from residua.train.throughput import reset_peak_memory

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

T = TypeVar("T")


class World:
    """One process: it leads, reads all the data and never waits for others."""

    leads = True
    rank, size = 0, 1
    batch_rank, batch_ranks = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        """Whether torchrun has started this job before."""
        self.stages = Stages()
        """What this process did before the first step of the current run, and for how long."""
        self.trained: Callable[[], None] = lambda: None
        """Called when a run is trained and validated: after that it needs the device only to look inside its model."""

    @classmethod
    def alone(cls, config: RunConfig) -> Self:
        """This process only; refused if the configuration asks for several."""
        check_processes(config)
        if config.parallel.ranks > 1:
            raise ConfigError(
                "parallel asks for several processes: pass `train` the world that "
                "residua.distributed.world.open_world(config) returns."
            )
        return cls(choose_device(config.train.device, "train.device"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass

    def open_run(self, folder: Path, config: RunConfig, *, resume: bool) -> Run:
        """Create or reopen the run's folder. A job that torchrun restarts resumes without --resume.

        A run that failed before its first checkpoint has nothing to resume: another may start in its folder.
        """
        if resume or (self.restarted and (folder / "config.toml").exists()):
            return Run.reopen(folder, config)
        return Run.start_again(folder, config) if failed_early(folder) else Run.create(folder, config)

    def open_data(self, config: RunConfig) -> Dataset:
        """The run's text."""
        return self.leader_first(lambda: find_data(config))

    def open_batches(self, config: RunConfig, dataset: Dataset) -> tuple[Loader, list[Batch]]:
        """The training batches of this process, in the order of `data.seed`, and the validation set."""
        data, segments = config.data, config.data.masking == "documents"
        shape = {"sequence": config.sequence, "batch": config.train.micro_batch}
        ranks = {"rank": self.batch_rank, "world": self.batch_ranks}
        loader = Loader(dataset.split("train"), seed=data.seed, segments=segments, **shape, **ranks)
        limit = data.validation_tokens
        validation = validation_batches(dataset.split("validation"), **shape, limit_tokens=limit, segments=segments)
        return loader, list(validation)

    def leader_first(self, work: Callable[[], T]) -> T:
        """Call `work` on the leader first, then on the others, which find the files it wrote."""
        return work()

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on the leader and return its result (plain data) on every process."""
        return work()

    def agree(self, signal_number: int | None, done: int) -> int | None:
        """After step `done`: the signal that any of the processes received, or None."""
        return signal_number

    def reset_peak_memory(self) -> None:
        """Measure the peak memory of a run from here on: a process may have trained another model before."""
        reset_peak_memory(self.device)

    def build_step(self, config: RunConfig) -> Step:
        check_memory(config, self.device)
        return build_step(starting_model(config), config.train, self.device)

    def save(self, run: Path, number: int, step: Step, state: Mapping[str, Any], keep: int) -> None:
        """Write checkpoint `number`, possibly in the background: it is complete after `settle`."""
        save_checkpoint(run, number, step.model, step.optimizer, state, keep)

    def settle(self) -> None:
        """Wait until the last checkpoint is on the disk."""

    def restore(self, path: Path, step: Step) -> None:
        restore(path, step.model, step.optimizer)

    def nonfinite(self, step: Step) -> list[str]:
        """The tensors of the model and its optimizer that are NaN or infinite on any process."""
        return nonfinite(model_tensors(step.model) | step.optimizer.tensors())

    def whole_model(self, step: Step) -> Decoder | None:
        """The model, if one process has all of it."""
        return step.model

    def rank_times(self, step: Step, done: int) -> dict[str, Any] | None:
        """How long the forward passes of each process took since the last call, up to step `done`; which are slow."""
        return None

    def command(self, config: RunConfig) -> str:
        """The command that starts such a run on these processes."""
        return config.parallel.command_on()

    def describe(self) -> str | None:
        """A line for the run's summary."""
        return None


def check_processes(config: RunConfig) -> None:
    """Refuse a run that asks for more or fewer processes than were started."""
    asked, started = config.parallel.ranks, int(os.environ.get("WORLD_SIZE", 1))
    if asked != started:
        sizes = " × ".join(f"{name} {getattr(config.parallel, name)}" for name in ("data", "shard", "pipeline"))
        were = "was" if started == 1 else "were"
        raise ConfigError(
            f"parallel asks for {counted(asked, 'process', 'processes')} ({sizes}) and {started} {were} started: use "
            f"torchrun --nproc-per-node {asked}, or change parallel.data, parallel.shard and parallel.pipeline."
        )
