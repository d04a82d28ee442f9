"""The initial model of a run: a new one, or one that starts from other weights (`train.start`, docs/retrofit.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.model.builders import check_plugins
from residua.model.decoder import Decoder, build, build_parts
from residua.model.equivalence import InitFidelity
from residua.model.retrofit import retrofit
from residua.model.size import shapes_only
from residua.reading import inside
from residua.storage.formats import find_reader
from residua.storage.load import load, stored_config
from residua.storage.run import read_metrics


def starting_model(config: RunConfig) -> Decoder:
    """The model of a run before its first step, on the CPU."""
    model = build(config.model)
    if config.train.start is not None:
        with _explained(config.train.start):
            retrofit(model, load(config.train.start))
    return model


def starting_parts(config: RunConfig, *, resumed: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The same weights part by part, for ranks that keep a share of each; whole if the run starts from another model.

    `resumed`: a checkpoint will replace the weights, so large tensors are left uninitialized.
    """
    if resumed:
        with shapes_only(["normal_"]):
            yield from build_parts(config.model)
    elif config.train.start is None:
        yield from build_parts(config.model)
    else:
        yield "", starting_model(config)


def what_is_kept(model: ModelConfig, old: ModelConfig) -> dict[str, InitFidelity]:
    """The fidelity of a retrofit by part, and for the whole under `model`; computed on the meta device."""
    with torch.device("meta"), shapes_only():
        return retrofit(build(model), build(old))


def start_lines(config: RunConfig) -> Iterator[str]:
    """The lines to print about a run's start."""
    if config.train.start is None:
        return
    with _explained(config.train.start):
        parts = what_is_kept(config.model, stored_config(Path(config.train.start)))
    whole = parts.pop("model")
    why = ", ".join(f"{part}: {how.words}" for part, how in parts.items())
    how = "is not kept" if whole is InitFidelity.NOT else f"is kept {whole.words}"
    if whole is not InitFidelity.NOT and find_reader(Path(config.train.start)) is not None:
        how += ", except for quantization: weights stay rounded, activations are no longer rounded"
    yield f"weights from {config.train.start}; the function of the model {how}" + (f" ({why})" if why else "")
    ended, peak = _last_rate(Path(config.train.start)), config.train.optimizer.lr
    if ended is not None and ended < peak:
        yield (
            f"its learning rate ended at {ended:g} and rises to {peak:g} again, which can lose more than new text "
            "gains: a lower train.optimizer.lr preserves more of what it learned"
        )
    if config.model.ffn.constant_weight:
        yield "with model.ffn.top_k = 1, its routers get gradients only from train.balance, not from the loss"


def _last_rate(folder: Path) -> float | None:
    """A run's final learning rate; None for an imported model, or if its metrics cannot be read."""
    with suppress(UserError):
        rates = [row["lr"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
        return rates[-1] if rates else None
    return None


def check_model(config: RunConfig) -> None:
    """Refuse a model that would train with wrong results: a router that cannot learn, a plugin that breaks a rule.

    Such a router is accepted with initial weights (`train.start`), because it is already trained.
    """
    check_plugins(config.model)
    if config.train.start is None and config.model.ffn.constant_weight:
        raise ConfigError(
            "model.ffn.top_k = 1 gives the chosen expert a constant weight, so the router learns nothing: use "
            "model.ffn.top_k = 2 or model.ffn.normalize = false."
        )


def check_tokenizer(config: RunConfig, dataset: Dataset) -> None:
    """Refuse text that was tokenized differently from the initial model's."""
    if config.train.start is None:
        return
    folder = Path(config.train.start)
    if not inside(folder, "tokenizer.json").is_file():
        return
    if Tokenizer.load(folder).hash != dataset.tokenizer_hash:
        raise ConfigError(
            f"{dataset.path} was prepared with a different tokenizer than {folder}: prepare it with "
            f"--tokenizer {folder / 'tokenizer.json'}."
        )


@contextmanager
def _explained(start: str) -> Iterator[None]:
    """Make refusals name the run with the initial weights."""
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError(f"the run cannot start from {start}: {error}") from None
