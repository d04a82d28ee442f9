"""The processes that train a run together, as the trainer sees them. `World` is the usual case: one process.

Under torchrun the trainer gets `residua.distributed.world.Ranks` instead, which has the same methods.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError
from residua.data import Dataset, Loader, validation_batches
from residua.data.loader import Batch
from residua.data.source import find_data
from residua.machine import choose_device
from residua.reading import counted
from residua.storage.checkpoint import model_tensors, save_checkpoint
from residua.storage.load import restore
from residua.storage.run import Run, failed_early
from residua.storage.tensors import nonfinite
from residua.train.compile.cuda_graphs import WARM_UP
from residua.train.start import starting_model
from residua.train.step import Step, arithmetic, build_step
from residua.train.summary import check_memory
from residua.train.timing import Stages, reset_peak_memory

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
        """The seconds of this process's stages before the first step of the current run."""
        self.trained: Callable[[], None] = lambda: None
        """Called when a run is trained and validated; afterwards only the inspection of its model needs the device."""

    @classmethod
    def alone(cls, config: RunConfig) -> Self:
        """This process alone; refuses a configuration for several processes."""
        check_processes(config)
        if config.parallel.ranks > 1:
            raise ConfigError(
                "parallel asks for several processes: pass the result of "
                "residua.distributed.world.open_world(config) to `train`."
            )
        return cls(choose_device(config.train.device, "train.device"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass

    def open_run(self, folder: Path, config: RunConfig, *, resume: bool) -> Run:
        """Create or reopen the run's folder. A job that torchrun restarts resumes without --resume.

        A run that failed before its first checkpoint has nothing to resume, so another may start in its folder.
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
        loader = Loader(dataset.split("train"), seed=data.seed, segments=segments, limit=data.limit, **shape, **ranks)
        limit = data.validation_tokens
        validation = validation_batches(dataset.split("validation"), **shape, limit_tokens=limit, segments=segments)
        return loader, list(validation)

    def leader_first(self, work: Callable[[], T]) -> T:
        """Call `work` on the leader first, then on the others, which find the files that the leader wrote."""
        return work()

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on the leader and return its result (plain data) on every process."""
        return work()

    def agree(self, signal_number: int | None, done: int) -> int | None:
        """The signal that any process has received by the end of step `done`, or None."""
        return signal_number

    def reset_peak_memory(self) -> None:
        """Reset the peak memory, because this process may have trained another model before."""
        reset_peak_memory(self.device)

    def build_step(self, config: RunConfig) -> Step:
        check_memory(config, self.device)
        return build_step(starting_model(config), config.train, self.device)

    def save(self, run: Path, number: int, step: Step, state: Mapping[str, Any], keep: int) -> None:
        """Write checkpoint `number`, possibly in the background; it is complete after `settle`."""
        save_checkpoint(run, number, step.model, step.optimizer, state, keep)

    def settle(self) -> None:
        """Wait until the last checkpoint is on disk."""

    def restore(self, path: Path, step: Step) -> None:
        restore(path, step.model, step.optimizer)

    def nonfinite(self, step: Step) -> list[str]:
        """The names of model and optimizer tensors that are NaN or infinite on any process."""
        return nonfinite(model_tensors(step.model) | step.optimizer.tensors())

    def whole_model(self, step: Step) -> Decoder | None:
        """The model, if one process has all of it."""
        return step.model

    def rank_times(self, step: Step, done: int) -> dict[str, Any] | None:
        """The time of each process's forward passes since the last call, up to step `done`, and which are slow."""
        return None

    def command(self, config: RunConfig) -> str:
        """The command that starts a run with this configuration on these processes."""
        return config.parallel.command_on()

    def describe(self) -> str | None:
        """A line for the run's summary, or None."""
        return None


def check_processes(config: RunConfig) -> None:
    """Refuse a run that needs more or fewer processes than were started."""
    needed, started = config.parallel.ranks, int(os.environ.get("WORLD_SIZE", 1))
    if needed != started:
        sizes = " × ".join(f"{name} {getattr(config.parallel, name)}" for name in ("data", "shard", "pipeline"))
        were = "was" if started == 1 else "were"
        raise ConfigError(
            f"parallel asks for {counted(needed, 'process', 'processes')} ({sizes}), but {started} {were} started: use "
            f"torchrun --nproc-per-node {needed}, or change parallel.data, parallel.shard and parallel.pipeline."
        )


_FREE = (
    "data.seed", "train.seed", "train.steps", "train.optimizer.", "train.schedule.", "train.clip_norm",
    "train.log_every", "train.validate_every", "train.save_every", "train.keep",
    "train.divergence_", "train.telemetry", "train.track", "train.profile",
)  # fmt: skip
"""Settings in which runs with the same graph may differ, because `train.step.Step` does not compile them."""


def graph_of(config: RunConfig) -> str:
    """A key that is equal for runs that can share a step."""
    return json.dumps(settings(config, without=_FREE), sort_keys=True)


class SharedWorld(World):
    """One process that trains runs sequentially, and reuses one step as long as they have the same graph.

    Two runs have the same graph if they differ only in seeds, rates, schedule, length and how often they log and save.
    The second starts at once: its weights are built as in a separate process and copied into the tensors that the
    compiled code and the CUDA graphs use; optimizer, data order and random states are reset. So a run gives the same
    bits wherever it trains.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._step: Step | None = None
        self._graph = ""
        self._texts: dict[str, Dataset] = {}

    def open_data(self, config: RunConfig) -> Dataset:
        key = config.data.path or config.data.tokenizer
        if key not in self._texts:
            self._texts[key] = super().open_data(config)
        return self._texts[key]

    def build_step(self, config: RunConfig) -> Step:
        if self._step is not None and self._graph == graph_of(config):
            self._step.restart(starting_model(config), config.train)
            return self._step
        self.forget()
        super().reset_peak_memory()
        self._step, self._graph = super().build_step(config), graph_of(config)
        return self._step

    def reset_peak_memory(self) -> None:
        """Reset only when a step is built: CUDA graph replays allocate nothing, so its first run's peak stays valid."""

    def rehearse(self, config: RunConfig) -> None:
        """Build the step of a run and compile it in a few steps and a validation, whose results are dropped."""
        with self.stages.measure("data"):
            dataset = self.open_data(config)
        with self.stages.measure("build"):
            step = self.build_step(config)
        if not step.compiled:
            return
        with self.stages.measure("compile"), arithmetic(config.train):
            loader, validation = self.open_batches(config, dataset)
            try:
                for _ in range(WARM_UP + 1):
                    step([next(loader) for _ in range(config.train.accumulate)])
                step.evaluate(validation)
                step.totals()  # waits for the device
            finally:
                loader.close()

    def forget(self) -> None:
        """Free the step and its memory."""
        self._step = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
