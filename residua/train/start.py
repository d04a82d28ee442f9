"""The model that a run begins with: a new one, or one that starts as another (`train.start`, docs/retrofit.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.tokenizer import Tokenizer
from residua.model.decoder import Decoder, build, build_parts
from residua.model.kept import Kept
from residua.model.retrofit import retrofit
from residua.model.size import shapes_only
from residua.reading import inside
from residua.storage.load import load, stored_config


def starting_model(config: RunConfig) -> Decoder:
    """The model of a run before its first step, on the CPU."""
    model = build(config.model)
    if config.train.start is not None:
        with _explained(config.train.start):
            retrofit(model, load(config.train.start))
    return model


def starting_parts(config: RunConfig, *, resumed: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The same weights part by part, for ranks that keep a share of each; whole if the run starts as another.

    `resumed`: the weights will be read from a checkpoint, so large tensors are not drawn and hold anything.
    """
    if resumed:
        with shapes_only(["normal_"]):
            yield from build_parts(config.model)
    elif config.train.start is None:
        yield from build_parts(config.model)
    else:
        yield "", starting_model(config)


def what_is_kept(model: ModelConfig, old: ModelConfig) -> dict[str, Kept]:
    """What a retrofit keeps, by part, and under `model` for the whole; computed without memory."""
    with torch.device("meta"), shapes_only():
        return retrofit(build(model), build(old))


def start_lines(config: RunConfig) -> Iterator[str]:
    """What to print about a run's start."""
    if config.train.start is None:
        return
    with _explained(config.train.start):
        kept = what_is_kept(config.model, stored_config(Path(config.train.start)))
    whole = kept.pop("model")
    why = ", ".join(f"{part}: {how.words}" for part, how in kept.items())
    yield f"weights of {config.train.start}; what it computes is kept {whole.words}" + (f" ({why})" if why else "")


def check_tokenizer(config: RunConfig, dataset: Dataset) -> None:
    """Refuse text that was cut into other tokens than the model to start from knows."""
    if config.train.start is None:
        return
    folder = Path(config.train.start)
    if not inside(folder, "tokenizer.json").is_file():
        return
    if Tokenizer.load(folder).hash != dataset.tokenizer_hash:
        raise ConfigError(
            f"{dataset.path} was prepared with another tokenizer than {folder} has: prepare it with "
            f"--tokenizer {folder / 'tokenizer.json'}."
        )


@contextmanager
def _explained(start: str) -> Iterator[None]:
    """Let refusals name the run to start from."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the run cannot start from {start}: {error}") from None
