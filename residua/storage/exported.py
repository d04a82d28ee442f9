"""Reading a folder that `residua export` wrote: its configuration and its tensors. Its code is never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.convert.family import Family, Layout, Names, Rule
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits, shapes
from residua.reading import OpenShape, inside, read_json, shown
from residua.storage.checkpoint import model_tensors
from residua.storage.tensors import fitting, read_tensors, weight_files

AGAIN = "export or download the folder again"
HEAD = "lm_head.weight"


def exported_name(name: str) -> str:
    """A tensor's name in the folder: the head belongs to transformers' class, everything else to the decoder."""
    return HEAD if name == "unembed.weight" else f"model.decoder.{name}"


class _Keys(OpenShape):
    residua: dict[str, Any]


class _Whole(Layout):
    """Their tensor is our parameter, of any shape."""

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return ours


class Export(Family):
    """The folders of `residua export`, read as those of a family are: its tables and tensors are Residua's own."""

    model_type = "residua"
    architecture = "ResiduaForCausalLM"
    KEYS: ClassVar[type[OpenShape]] = _Keys
    TOP: ClassVar[Names] = {name: (exported_name(name),) for name in ("embed.weight", "unembed.weight")}

    def read(self, keys: Mapping[str, Any]) -> ModelConfig:
        config = ModelConfig(**keys["residua"])
        if config.head.kind == "tied" and keys.get("tie_word_embeddings") is False:  # untied after the export
            return ModelConfig(**keys["residua"] | {"head": {"kind": "untied"}})
        return config

    def rules(self, config: ModelConfig, keys: Mapping[str, Any]) -> Iterator[Rule]:
        for name, tensor in model_tensors(shapes(config)).items():
            yield Rule(name, tuple(tensor.shape), (exported_name(name),), (1,), layout=_Whole())


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
    if not isinstance(content.get("residua"), dict):
        raise UserError(
            f"{path} describes a model of type {shown(content.get('model_type'))}: neither `residua export` "
            "wrote it nor does `residua import` know this family (docs/import.md)."
        )
    try:
        config = Export().read(content)
        saved: dict[str, Tensor] = {}
        for file in weight_files(folder, AGAIN):
            saved |= read_tensors(file, AGAIN)
        embed, head = saved.get(exported_name("embed.weight")), saved.get(HEAD)
        if embed is not None and head is not None and not torch.equal(embed.float(), head.float()):
            config = Export().read(content | {"tie_word_embeddings": False})  # as `residua import` reads it
        model = build_if_it_fits(config, folder)
    except ConfigError as error:
        raise UserError(f"{path} holds an invalid configuration: {error}") from None
    for name, tensor in model_tensors(model).items():
        theirs = exported_name(name)
        with torch.no_grad():
            tensor.copy_(fitting(folder, theirs, saved.pop(theirs, None), tensor, f"its config.json differs, {AGAIN}"))
    if surplus := sorted(saved.keys() - {HEAD}):
        raise UserError(f"{folder} holds tensor {surplus[0]!r}, which the model of its config.json does not have.")
    return model


def _config(folder: Path, *, lenient: bool = False) -> dict[str, Any]:
    return read_json(inside(folder, "config.json"), dict[str, Any], AGAIN, lenient=lenient)
