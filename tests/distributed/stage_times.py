"""Time per stage of a pipeline on gloo ranks: a model with the proportions of mgr-l, ten times as narrow.

`python -m tests.distributed.stage_times 4 8 16` prints the table of docs/lab/ranks.md; each rank is a process on this
machine. Times are CPU seconds of the training thread, forward and backward, without communication: other processes
disturb them little.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from residua.config.run import RunConfig
from residua.distributed.mesh import Mesh, Processes
from residua.distributed.pipeline.stage import Stage
from residua.distributed.world import build_ranked_step
from residua.train.start import starting_parts
from residua.train.timing import random_batches
from tests.distributed.launch import launch

MODULE = "tests.distributed.stage_times"
# width and context a tenth of 1280 and 1024, the vocabulary so that the head is worth as many layers
SMALL = ["model.width=128", "model.ffn.hidden=512", "model.attention.heads=2", "model.context=102",
         "model.vocab_size=5030", "train.micro_batch=4", "train.device=cpu"]  # fmt: skip


def timed(stages: list[int], preset: str = "mgr-l-prenorm", split: str = "work") -> dict[int, float]:
    """For each number of stages, the slowest stage's time over the mean, measured."""
    found = {}
    for count in stages:
        with tempfile.TemporaryDirectory() as folder:
            launch(count, MODULE, Path(folder), preset, split)
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        found[count] = max(seconds) / mean(seconds)
    return found


def main(out: Path, preset: str, split: str) -> None:
    """One rank: a step that warms up and one whose passes are timed."""
    torch.set_num_threads(1)
    processes = Processes.start(torch.device("cpu"), patience=60)
    count = dist.get_world_size()
    changes = [f"train.accumulate={count}", f"parallel.pipeline={count}", f"parallel.split={split}"]
    config = RunConfig.find(preset).override([*SMALL, *changes])
    step = build_ranked_step(starting_parts(config), config, Mesh(config.parallel, torch.device("cpu")))
    spent: defaultdict[int, float] = defaultdict(float)
    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(Stage, name, _timing(getattr(Stage, name), spent))
    batches = random_batches(config)
    step(batches)
    spent.clear()
    step(batches)
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, median(spent.values()))
    if dist.get_rank() == 0:
        (out / "seconds.json").write_text(json.dumps(gathered))
    processes.stop()


def _timing(method: Any, spent: dict[int, float]) -> Any:
    def timed(stage: Stage, number: int, *arguments: Any, **named: Any) -> Any:
        start = time.thread_time()
        made = method(stage, number, *arguments, **named)
        spent[number] += time.thread_time() - start
        return made

    return timed


if __name__ == "__main__":
    asked = [int(word) for word in sys.argv[1:]] or [4, 8, 16]
    by = {split: timed(asked, split=split) for split in ("work", "layers")}
    for count in asked:
        print(f"{count:3d} stages: {by['work'][count]:.3f} by work, {by['layers'][count]:.3f} by layers")
