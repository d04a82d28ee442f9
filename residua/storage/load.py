"""Loading a model from any folder that Residua writes."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from torch import nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.data.tokenizer import SOURCE
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits
from residua.reading import inside, toml_string
from residua.storage.checkpoint import (
    SHARDS,
    Checkpoint,
    OptimizerState,
    best,
    checkpoints,
    model_tensors,
    read_checkpoint,
)
from residua.storage.formats import find_reader
from residua.storage.hugging_face import Source, is_export, is_family, load_family, load_folder
from residua.storage.tensors import WEIGHTS, describe, holds_only_numbers, nonfinite

DAMAGED = "the folder is damaged, make it again"


def load(folder: str | Path, which: Literal["last", "best"] = "last", *, allow_nonfinite: bool = False) -> Decoder:
    """The trained model of a run folder, on the CPU: its last checkpoint or the best one on the validation set.

    A folder made by `residua export` holds one model; one made by `residua quantize` gives a model that computes in
    that precision. A folder of transformers, of a family that Residua knows (docs/import.md), is opened as it is.
    Nothing in a folder is executed. Weights that are NaN or infinite are refused, unless `allow_nonfinite`.
    """
    folder = Path(folder)
    read = find_reader(folder)
    chosen: Checkpoint | None = None
    if read is not None:
        model = read(folder)
    elif is_family(folder):
        model = load_family(folder)
    elif (folder / "config.json").exists() and not (folder / "config.toml").exists():
        model = load_folder(folder)
    else:
        chosen = choose_checkpoint(folder, which)
        model = build_if_it_fits(RunConfig.from_toml(inside(folder, "config.toml")).model, folder)
        restore(chosen.path, model)
    tensors = {} if allow_nonfinite else model_tensors(model)
    if broken := nonfinite(tensors):
        advice = DAMAGED if chosen is None else other_checkpoint(folder, chosen)
        raise UserError(f"{chosen.path if chosen else folder}: {describe(tensors, broken)}: {advice}.")
    return model


def stored_config(folder: Path) -> ModelConfig:
    """The configuration of the model that `load` returns, without its weights: of a run, an export, or transformers'
    folder."""
    if is_family(folder) or is_export(folder):
        return Source(folder).config
    if not inside(folder, "config.toml").is_file():
        raise UserError(f"{folder} is neither a run, an export nor a model of a known family: name one of them.")
    return RunConfig.from_toml(inside(folder, "config.toml")).model


def start_changes(run: Path) -> tuple[str, list[str]]:
    """For runs that begin with the weights of another: its config.toml, and the changes that make them do so.

    For an imported run, which has no text of its own, the embedded corpus is cut into its tokens.
    """
    at = run.resolve()
    if not inside(at, "config.toml").is_file():
        if is_family(at) or is_export(at):
            raise UserError(f"{run} is not a run: convert it with residua import {run} --out RUN, and name RUN.")
        raise UserError(f"{run} is not a run: name one, or convert a Hugging Face model with residua import.")
    config = RunConfig.from_toml(at / "config.toml")
    changes = [f"train.start={toml_string(at)}", f"model.vocab_size={config.model.vocab_size}"]
    if (tokenizer := own_tokenizer(at)) is not None:
        changes.append(f"data.tokenizer={toml_string(tokenizer)}")
    return str(at / "config.toml"), changes


def weights_fingerprint(folder: str | Path) -> str | None:
    """Identifies the weights that `load` would read, wherever the folder is: their files' bytes.

    None if they are not there. A process reads unchanged files once.
    """
    with suppress(ValueError, OSError):
        files = _weight_files(Path(folder))
        return _digest(*((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)) if files else None
    return None


def _weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a run's last checkpoint, or of a folder that holds one model."""
    if not (folder / "config.toml").exists() or find_reader(folder) is not None:
        return sorted(folder.glob("*.safetensors"))
    checkpoint = choose_checkpoint(folder, "last").path
    shards = checkpoint / SHARDS
    return sorted(shards.glob("*.safetensors")) if shards.is_dir() else [inside(checkpoint, WEIGHTS)]


@cache
def _digest(*files: tuple[Path, int, int]) -> str:
    """Of files by path, size and time of their last change."""
    whole = hashlib.sha256()
    for path, _, _ in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def own_tokenizer(run: Path) -> Path | None:
    """The tokenizer of an imported run, or of one that began with its weights, if it has one."""
    tokenizer = inside(run, "tokenizer.json")
    return tokenizer if inside(run, SOURCE).is_dir() and tokenizer.is_file() else None


def choose_checkpoint(run: Path, which: Literal["last", "best"]) -> Checkpoint:
    """The last checkpoint of a run or its best; refuses a run without one."""
    if which not in ("last", "best"):
        raise UserError(f"there is no checkpoint {which!r}: choose 'last' or 'best'.")
    candidates = checkpoints(run)
    chosen = best(candidates) if which == "best" else next(reversed(candidates), None)
    if chosen is None:
        scored = " with a validation loss" * (which == "best")
        raise UserError(f"{run} holds no checkpoint{scored}: train it first.")
    return chosen


def restore(path: Path, model: nn.Module, optimizer: OptimizerState | None = None) -> None:
    """Copy a checkpoint of one process or of several ranks into a model and, to continue training, its optimizer."""
    if (path / SHARDS).is_dir():
        from residua.storage.sharded import load_shards  # torch.distributed.checkpoint takes seconds to import

        load_shards(path, model, optimizer)
    else:
        read_checkpoint(path, model, optimizer)


def other_checkpoint(run: Path, broken: Checkpoint) -> str:
    """How to go on without a checkpoint that is not finite."""
    others = [c.path for c in checkpoints(run) if c != broken and holds_only_numbers(c.path)]
    if not others:
        return "no other checkpoint of this run is finite"
    return f"move {broken.path} elsewhere to use {others[-1]}, which is finite"
