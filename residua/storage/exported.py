"""Reading a folder that `residua export` wrote: its configuration and its tensors. Its code is never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.model.decoder import Decoder, build
from residua.storage.checkpoint import model_tensors

HEAD = "lm_head.weight"


def exported_name(name: str) -> str:
    """A tensor's name in the folder: the head belongs to transformers' class, everything else to the decoder."""
    return HEAD if name == "unembed.weight" else f"model.decoder.{name}"


def is_export(folder: Path) -> bool:
    """Whether `residua export` wrote this folder."""
    path = folder / "config.json"
    if not path.is_file() or (folder / "config.toml").exists():
        return False
    return _read(path).get("model_type") == "residua"


def load_folder(folder: Path) -> Decoder:
    """The model of an exported folder, on the CPU."""
    path = folder / "config.json"
    content = _read(path)
    tables = content.get("residua")
    if not isinstance(tables, dict):
        raise ValueError(
            f"{path} describes a model of type {content.get('model_type')!r}: `residua export` did not write it."
        )
    try:
        model = build(ModelConfig(**tables))
    except ConfigError as error:
        raise ValueError(f"{path} holds an invalid configuration: {error}") from None
    saved = _tensors(folder)
    for name, tensor in model_tensors(model).items():
        found = saved.pop(exported_name(name), None)
        if found is None:
            raise ValueError(f"{folder} lacks tensor {exported_name(name)!r}, which its config.json asks for.")
        if found.shape != tensor.shape:
            raise ValueError(
                f"{folder} holds {exported_name(name)!r} with shape {list(found.shape)}, but its config.json asks for "
                f"{list(tensor.shape)}."
            )
        with torch.no_grad():
            tensor.copy_(found)
    if surplus := sorted(saved.keys() - {HEAD}):
        raise ValueError(f"{folder} holds tensor {surplus[0]!r}, which the model of its config.json does not have.")
    return model


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, from one file or from the parts that an index lists."""
    index = folder / "model.safetensors.index.json"
    parts = sorted(set(_read(index).get("weight_map", {}).values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        try:
            tensors |= load_file(folder / part)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / part} cannot be read: {error}.") from None
    return tensors


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object.")
    return content
