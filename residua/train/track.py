"""Experiment trackers: TensorBoard if it is installed, Weights & Biases on request. metrics.jsonl is always written."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.files import write_atomically
from residua.reading import read_text


class Sink(Protocol):
    """Takes the records of a run: the metrics file, the display, a tracker."""

    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files under `RUN/tensorboard`; hides steps after `start` that an interrupted session wrote."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=start + 1)  # type: ignore[no-untyped-call]

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run named after the folder, continued when the run is resumed."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        import wandb

        identity = folder / "wandb-id"
        if not identity.exists():
            write_atomically(identity, secrets.token_hex(8))
        self._run = wandb.init(
            project="residua",
            name=folder.name,
            id=read_text(identity, "remove it to start another run there"),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(),
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record as `kind/name`; tables are left out."""
    return {
        f"{record['kind']}/{key}": value
        for key, value in record.items()
        if key not in ("kind", "step") and isinstance(value, int | float)
    }


def open_trackers(config: RunConfig, folder: Path, start: int) -> list[Sink]:
    """The trackers this run writes to."""
    trackers: list[Sink] = []
    with suppress(ImportError):  # TensorBoard is a convenience, metrics.jsonl is the record
        trackers.append(TensorBoard(folder, start))
    if config.train.track == "wandb":
        trackers.append(WandB(folder, config))
    return trackers


def check_trackers(config: RunConfig) -> None:
    """Refuse, before training, a tracker that is configured but not installed."""
    if config.train.track != "wandb":
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise ConfigError(
            "train.track = 'wandb' needs the wandb package: pip install wandb, or leave train.track out."
        ) from None
