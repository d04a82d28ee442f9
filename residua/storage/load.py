"""Loads a model from any folder that Residua writes, all at once or one weight at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.data.tokenizer import SOURCE
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits, shapes
from residua.reading import inside, toml_string
from residua.storage.checkpoint import (
    SHARDS,
    Checkpoint,
    OptimizerState,
    best,
    checkpoints,
    elsewhere,
    model_tensors,
    read_checkpoint,
    require_same,
)
from residua.storage.formats import find_reader
from residua.storage.hugging_face import Source, is_export, is_family, load_family, load_folder
from residua.storage.tensors import (
    WEIGHTS,
    describe,
    holds_only_numbers,
    nonfinite,
    open_tensors,
    stored_shapes,
)

DAMAGED = "the folder is damaged, so write it again"


def load(folder: str | Path, which: Literal["last", "best"] = "last", *, allow_nonfinite: bool = False) -> Decoder:
    """The trained model of a run folder, on the CPU: its last checkpoint, or the best one on the validation set.

    A folder written by `residua export` holds one model; one written by `residua quantize` gives a model that computes
    in that precision. A transformers folder of a family that Residua knows (docs/reference/families.md) is opened
    directly. Nothing in a folder is executed. Weights that are NaN or infinite are refused, unless `allow_nonfinite` is
    set.
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
    """The configuration of the model that `load` returns, read without its weights."""
    if is_family(folder) or is_export(folder):
        return Source(folder).config
    if not inside(folder, "config.toml").is_file():
        raise UserError(
            f"{folder} is not a run, an export or a Hugging Face model of a supported family: name one of these."
        )
    return RunConfig.from_toml(inside(folder, "config.toml")).model


def start_changes(run: Path) -> tuple[str, list[str]]:
    """For a new run that starts from the weights of `run`: the config.toml of `run`, and the changes to it.

    An imported run has no text, so its tokenizer is applied to the embedded corpus.
    """
    at = run.resolve()
    if not inside(at, "config.toml").is_file():
        if is_family(at) or is_export(at):
            raise UserError(f"{run} is not a run: convert it with residua import {run} --out RUN, then name RUN.")
        raise UserError(f"{run} is not a run: name one, or convert a Hugging Face model with residua import.")
    config = RunConfig.from_toml(at / "config.toml")
    changes = [f"train.start={toml_string(at)}", f"model.vocab_size={config.model.vocab_size}"]
    if (tokenizer := own_tokenizer(at)) is not None:
        changes.append(f"data.tokenizer={toml_string(tokenizer)}")
    return str(at / "config.toml"), changes


def weights_fingerprint(folder: str | Path) -> str | None:
    """A hash of the weight files that `load` would read; it does not depend on where the folder is.

    None if there are none. Each process reads unchanged files only once.
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
    """The hash of some files. Size and modification time are part of the cache key."""
    whole = hashlib.sha256()
    for path, _, _ in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def own_tokenizer(run: Path) -> Path | None:
    """The tokenizer of an imported run, or of a run that started from its weights; None if it has none."""
    tokenizer = inside(run, "tokenizer.json")
    return tokenizer if inside(run, SOURCE).is_dir() and tokenizer.is_file() else None


def choose_checkpoint(run: Path, which: Literal["last", "best"]) -> Checkpoint:
    """The last or the best checkpoint of a run; refuses a run without one."""
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
        from residua.storage.shard_files import load_shards  # torch.distributed.checkpoint takes seconds to import

        load_shards(path, model, optimizer)
    else:
        read_checkpoint(path, model, optimizer)


def other_checkpoint(run: Path, broken: Checkpoint) -> str:
    """A clause for an error message: how to continue without a checkpoint that is not finite."""
    others = [c.path for c in checkpoints(run) if c != broken and holds_only_numbers(c.path)]
    if not others:
        return "no other checkpoint of this run is finite"
    return f"move {broken.path} elsewhere to use {others[-1]}, which is finite"


Read = Callable[[str], Tensor]
"""Returns a weight by name."""


@dataclass(frozen=True)
class StoredModel:
    """`model` may be on the meta device: `read` returns one of its weights, `load` the model with all of them.

    `dtypes` maps names to the dtypes in the files, where these differ from the model's.
    """

    model: Decoder
    read: Read
    load: Callable[[], Decoder]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def in_memory(model: Decoder) -> StoredModel:
    """A model that is already in memory."""
    return StoredModel(model, model_tensors(model).__getitem__, lambda: model)


def open_stored(folder: Path, which: Literal["last", "best"] = "last") -> StoredModel:
    """The model of a run, of an export or of a family's folder; missing or misshapen tensors are refused.

    Runs trained with Residua hold float32; imported runs hold the dtype of their source. Each weight is checked when
    it is read, and refused if it is not finite.
    """
    if (folder / "config.toml").exists():
        checkpoint = choose_checkpoint(folder, which)
        model = shapes(RunConfig.from_toml(inside(folder, "config.toml")).model)
        is_sharded = (checkpoint.path / SHARDS).is_dir()
        read, dtypes = (_several_ranks if is_sharded else _one_process)(checkpoint.path, model)
        read = partial(_finite, read, checkpoint.path, lambda: other_checkpoint(folder, checkpoint))
    else:
        source = Source(folder)
        model = shapes(source.config)
        rules = {rule.ours: rule for rule in source.rules}
        dtypes = {name: source.dtype(rule) for name, rule in rules.items()}
        read = partial(_finite, lambda name: source.parameter(rules[name]), folder, lambda: DAMAGED)
    return StoredModel(model, read, lambda: load(folder, which), dtypes)


def _finite(read: Read, place: Path, advice: Callable[[], str], name: str) -> Tensor:
    tensors = {name: read(name)}
    if broken := nonfinite(tensors):
        raise UserError(f"{place}: {describe(tensors, broken)}: {advice()}.")
    return tensors[name]


def _one_process(path: Path, model: Decoder) -> tuple[Read, dict[str, torch.dtype]]:
    file, hint = inside(path, WEIGHTS), partial(elsewhere, path)
    held = stored_shapes(file, hint)
    require_same(file, held, model_tensors(model))

    def read(name: str) -> Tensor:
        with open_tensors(file, hint) as content:
            tensor: Tensor = content.get_tensor(name)
        return tensor

    return read, {name: tensor.dtype for name, tensor in held.items()}


def _several_ranks(path: Path, model: Decoder) -> tuple[Read, dict[str, torch.dtype]]:
    from residua.storage.shard_files import fill, require_shards  # torch.distributed.checkpoint takes seconds to import

    expected = model_tensors(model)
    require_shards(path, expected)

    def read(name: str) -> Tensor:
        tensor = torch.empty(expected[name].shape, dtype=expected[name].dtype)
        fill(path, {name: tensor})
        return tensor

    return read, {}
