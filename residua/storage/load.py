"""Loading a model from any folder that Residua writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn

from residua.config.run import RunConfig
from residua.model.decoder import Decoder, build
from residua.reading import inside
from residua.storage.checkpoint import SHARDS, OptimizerState, best, checkpoints, read_checkpoint
from residua.storage.exported import load_folder
from residua.storage.formats import find_reader
from residua.storage.imported import is_family, load_family


def load(folder: str | Path, which: Literal["last", "best"] = "last") -> Decoder:
    """The trained model of a run folder, on the CPU: its last checkpoint or the best one on the validation set.

    A folder made by `residua export` holds one model; one made by `residua quantize` gives a model that computes in
    that precision. A folder of transformers, of a family that Residua knows (docs/import.md), is opened as it is.
    Nothing in a folder is executed.
    """
    folder = Path(folder)
    read = find_reader(folder)
    if read is not None:
        return read(folder)
    if is_family(folder):
        return load_family(folder)
    if (folder / "config.json").exists() and not (folder / "config.toml").exists():
        return load_folder(folder)
    return load_run(folder, which)


def load_run(run: Path, which: Literal["last", "best"] = "last") -> Decoder:
    """The model of a run folder, on the CPU."""
    found = checkpoints(run)
    chosen = best(found) if which == "best" else next(reversed(found), None)
    if chosen is None:
        raise ValueError(f"{run} holds no {which} checkpoint: train it first.")
    model = build(RunConfig.from_toml(inside(run, "config.toml")).model)
    restore(chosen.path, model)
    return model


def restore(path: Path, model: nn.Module, optimizer: OptimizerState | None = None) -> None:
    """Copy a checkpoint of one process or of several ranks into a model and, to continue training, its optimizer."""
    if (path / SHARDS).is_dir():
        from residua.storage.sharded import load_shards  # torch.distributed.checkpoint takes seconds to import

        load_shards(path, model, optimizer)
    else:
        read_checkpoint(path, model, optimizer)
