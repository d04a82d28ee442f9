"""Opening a model folder for use: the model, ready to run, and its tokenizer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.dataset import TOKENIZER
from residua.data.source import find_data
from residua.data.tokenizer import SOURCE, Tokenizer
from residua.errors import UserError
from residua.machine import require_memory
from residua.model.attention import fold_mixing
from residua.model.projection import declared_matrices
from residua.reading import inside
from residua.storage.load import load, own_tokenizer

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_model(folder: str | Path, which: Literal["last", "best"] = "last") -> tuple[Decoder, Tokenizer]:
    """The model of a folder, on the CPU and ready to run, and its tokenizer."""
    tokenizer = open_tokenizer(folder)
    model = load(folder, which)
    tokenizer.require_model(model.config.vocab_size, Path(folder))
    return ready(model), tokenizer


def ready(model: Decoder) -> Decoder:
    """Prepare a model for inference, in place: fold static λ2 into weights. Call it before `place` rounds them."""
    fold_mixing(model)
    return model.eval()


def require_model(path: Path) -> None:
    """Refuse a path that is not a folder, and a folder without a model. Fast, because it opens no file."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name a run of `residua train` or a folder of `residua export`.")
    if not any((path / name).exists() for name in ("config.toml", "config.json")):
        raise UserError(f"{path} holds no model: name a run of `residua train` or a folder of `residua export`.")


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model folder; refuses a folder without a model or a tokenizer."""
    path = Path(folder)
    require_model(path)
    if not has_tokenizer(path):
        raise UserError(f"{path} has no tokenizer: put the tokenizer.json of its data there.")
    return Tokenizer.load(path)


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer."""
    return any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))


def place(model: Decoder, device: torch.device, precision: str = "auto") -> Decoder:
    """Move a model to a device and convert its matrices; `auto` is bfloat16 on a GPU and float32 on a CPU.

    Gains, biases and queries stay in float32: they are small, and the operators expect float32.
    """
    if precision not in (*PRECISIONS, "auto"):
        raise UserError(f"precision {precision} does not exist: choose auto, {' or '.join(PRECISIONS)}.")
    dtype = PRECISIONS.get(precision, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if device.type == "cuda":
        weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        require_memory("the model needs", weights, "choose --device cpu, or end other programs on the GPU", device)
    model = model.to(device)
    for module in model.modules():
        names = [*declared_matrices(module)]
        if module in (model.embed, model.unembed):
            names.append("weight")
        for name in names:
            weight = getattr(module, name)
            weight.data = weight.data.to(dtype)
    return model


def open_text(folder: Path, model: ModelConfig, data: Path | None) -> tuple[Dataset, RunConfig]:
    """The text of a run, or the prepared text `data`, and the run's configuration with it.

    An imported run has no text, so its tokenizer is applied to the embedded corpus. Text that was prepared with another
    tokenizer is refused, and so is an export without `data`, because an export does not name its text.
    """
    recorded, tokenizer = inside(folder, "config.toml"), inside(folder, TOKENIZER)
    if data is None and not recorded.exists():
        raise UserError(f"{folder} does not record its training text: name prepared text with --data.")
    if data is None and inside(folder, SOURCE).is_dir():
        open_tokenizer(folder)  # refuses a folder without one
    config = RunConfig.from_toml(recorded) if recorded.exists() else RunConfig(model=model)
    path = own_tokenizer(folder)
    changes = ({} if path is None else {"tokenizer": str(path)}) | ({} if data is None else {"path": str(data)})
    config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    dataset = find_data(config) if data is None else Dataset.open(data)
    named = shlex.quote(str(tokenizer))
    known = open_tokenizer(folder).hash if has_tokenizer(folder) else dataset.tokenizer_hash
    if dataset.tokenizer_hash != known:
        text = "the embedded corpus" if config.data.path is None else dataset.path
        raise ConfigError(
            f"{text} was tokenized differently from the model in {folder}: name text with --data that was "
            f"prepared with --tokenizer {named}."
        )
    dataset.require_known(model.vocab_size, f"name text without it with --data, prepared with --tokenizer {named}")
    return dataset, config
