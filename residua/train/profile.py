"""Traces of chosen steps (`train.profile`), which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from residua.files import unfinished, writing
from residua.train.timing import synchronize

FOLDER = "profile"


class Profiler:
    """Traces the given steps of this process into the run's folder: `profile/step-N-rank-R.json.gz`."""

    def __init__(
        self, run: Path, steps: Collection[int], rank: int, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self.run, self.steps, self.rank, self.device, self.tell = run, steps, rank, device, tell

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace the block if it is one of the chosen steps."""
        if step not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        synchronize(self.device)
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as trace:
            yield
            synchronize(self.device)
        path = self.run / FOLDER / f"step-{step}-rank-{self.rank}.json.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            temporary = unfinished(path)
            trace.export_chrome_trace(str(temporary))
            temporary.replace(path)
        self.tell(f"step {step} was traced: open {path} in ui.perfetto.dev")
