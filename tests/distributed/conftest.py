"""The small run of tests/train on several ranks, each a process; a file that they read lists their faults."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from residua.config.run import RunConfig
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from tests.distributed.launch import Started, launch, start
from tests.train.conftest import config as config
from tests.train.conftest import data as data

TRAIN = "tests.distributed.train_run"


def curve(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"}


@pytest.fixture(scope="module")
def recipe(config: RunConfig) -> RunConfig:
    shape = ["train.accumulate=4", "train.micro_batch=1", "train.schedule.warmup=1"]
    return config.override([*shape, "train.log_every=1", "train.telemetry=on"])


@dataclass
class Ranks:
    """Ranks that train the recipe in the folder `run`: to their end, or started and watched."""

    recipe: RunConfig
    run: Path
    started: list[Started] = field(default_factory=list)

    def spec(self, *changes: str, **asked: Any) -> Path:
        """The input of `train_run.main`: changes to the recipe, and faults."""
        folder = self.run.parent / "asked"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(self.recipe.to_toml())
        path = folder / f"spec-{len(list(folder.iterdir()))}.json"
        settings = {"config": str(folder / "config.toml"), "out": str(self.run), "changes": changes}
        path.write_text(json.dumps(settings | asked))
        return path

    def train(self, ranks: int, *changes: str, **asked: Any) -> None:
        launch(ranks, TRAIN, self.spec(*changes, **asked))

    def start(self, ranks: int, *changes: str, places: Any = None, per_node: int | None = None, **asked: Any) -> None:
        self.started = start(ranks, TRAIN, self.spec(*changes, **asked), places=places, per_node=per_node)

    def wait(self) -> list[str]:
        """The whole output of each rank."""
        return [rank.wait() for rank in self.started]

    @property
    def codes(self) -> list[int | None]:
        return [rank.process.exitcode for rank in self.started]

    def saved(self) -> list[int]:
        return [checkpoint.step for checkpoint in checkpoints(self.run)]

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_metrics(self.run / "metrics.jsonl") if record["kind"] == kind]

    def from_steps(self) -> list[int]:
        """The first step of each session."""
        sessions = json.loads((self.run / "environment.json").read_text())["sessions"]
        return [session["from_step"] for session in sessions]


@pytest.fixture
def ranks(recipe: RunConfig, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(recipe, tmp_path / "run")
    yield started
    for rank in started.started:
        rank.kill()
