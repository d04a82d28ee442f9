"""Reading a folder that `residua export` wrote: its configuration and its tensors. Its code is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits
from residua.reading import inside, read_json, shown
from residua.storage.checkpoint import model_tensors
from residua.storage.tensors import fitting, read_tensors, weight_files

AGAIN = "export or download the folder again"
HEAD = "lm_head.weight"


def exported_name(name: str) -> str:
    """A tensor's name in the folder: the head belongs to transformers' class, everything else to the decoder."""
    return HEAD if name == "unembed.weight" else f"model.decoder.{name}"


def is_export(folder: Path) -> bool:
    """Whether `residua export` wrote this folder."""
    path = folder / "config.json"
    if not path.is_file() or (folder / "config.toml").exists():
        return False
    return _config(folder, lenient=True).get("model_type") == "residua"


def load_folder(folder: Path) -> Decoder:
    """The model of an exported folder, on the CPU."""
    path = folder / "config.json"
    content = _config(folder)
    tables = content.get("residua")
    if not isinstance(tables, dict):
        raise ValueError(
            f"{path} describes a model of type {shown(content.get('model_type'))}: neither `residua export` "
            "wrote it nor does `residua import` know this family (docs/import.md)."
        )
    try:
        model = build_if_it_fits(ModelConfig(**tables), folder)
    except ConfigError as error:
        raise ValueError(f"{path} holds an invalid configuration: {error}") from None
    saved: dict[str, Tensor] = {}
    for file in weight_files(folder, AGAIN):
        saved |= read_tensors(file, AGAIN)
    for name, tensor in model_tensors(model).items():
        theirs = exported_name(name)
        with torch.no_grad():
            tensor.copy_(fitting(folder, theirs, saved.pop(theirs, None), tensor, f"its config.json differs, {AGAIN}"))
    if surplus := sorted(saved.keys() - {HEAD}):
        raise ValueError(f"{folder} holds tensor {surplus[0]!r}, which the model of its config.json does not have.")
    return model


def _config(folder: Path, *, lenient: bool = False) -> dict[str, Any]:
    return read_json(inside(folder, "config.json"), dict[str, Any], AGAIN, lenient=lenient)
