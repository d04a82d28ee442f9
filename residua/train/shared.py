"""Runs of one graph in one process: the second run starts at once, on the compiled code of the first.

Two runs have the same graph if they differ only in seeds, rates, schedule, length and how often they log and save. The
weights of the next run are built as in a process of its own and copied into the tensors that the compiled code and the
CUDA graphs use; optimizer, data order and random states start anew. So a run gives the same bits wherever it trains.
"""

from __future__ import annotations

import gc
import json

import torch

from residua.config.run import RunConfig, settings
from residua.data import Dataset
from residua.train.compile.graphs import WARM_UP
from residua.train.start import starting_model
from residua.train.step import Step, arithmetic
from residua.train.world import World

_FREE = (
    "data.seed", "train.seed", "train.steps", "train.optimizer.", "train.schedule.", "train.clip_norm",
    "train.log_every", "train.validate_every", "train.save_every", "train.keep",
    "train.divergence_", "train.telemetry", "train.track", "train.profile",
)  # fmt: skip
"""What runs of one graph may differ in: nothing that `train.step.Step` compiles."""


def graph_of(config: RunConfig) -> str:
    """Equal for runs that can share a step."""
    return json.dumps(settings(config, without=_FREE), sort_keys=True)


class SharedWorld(World):
    """One process that trains runs one after the other, on one step as long as they have the same graph."""

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
        """Only when a step is built: replays of its CUDA graphs allocate nothing, so its first run's peak holds."""

    def rehearse(self, config: RunConfig) -> None:
        """Build the step of a run and let it compile: on a few steps and a validation whose results are dropped."""
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
