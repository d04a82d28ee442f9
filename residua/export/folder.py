"""A Hugging Face folder: written whole or not at all, and read back without running anything from it.

config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
configuration_residua.py  modeling_residua.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import residua
from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.data.tokenizer import Tokenizer
from residua.export.check import check_export
from residua.export.names import standard_names
from residua.export.source import configuration_source, modeling_source
from residua.model.decoder import Decoder
from residua.storage.checkpoint import model_tensors
from residua.storage.files import atomic_folder, refuse_used

PREFIX = "model.decoder."
HEAD = "lm_head.weight"
AUTO_MAP = {
    "AutoConfig": "configuration_residua.ResiduaConfig",
    "AutoModel": "modeling_residua.ResiduaModel",
    "AutoModelForCausalLM": "modeling_residua.ResiduaForCausalLM",
}


def write_folder(
    model: Decoder, tokenizer: Tokenizer, out: Path, dtype: torch.dtype = torch.float32, check: bool = True
) -> float | None:
    """Write an export; `out` must not exist, or be empty. Returns what `check_export` finds."""
    refuse_used(out)
    with atomic_folder(out) as folder:
        _fill(folder, model, tokenizer, dtype)
        return check_export(folder, model, dtype) if check else None


def _fill(folder: Path, model: Decoder, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    end = tokenizer.end_of_text
    special = {"eos_token_id": end, "pad_token_id": end}
    config: dict[str, Any] = {
        "architectures": ["ResiduaForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": "residua",
        "dtype": str(dtype).removeprefix("torch."),
        **standard_names(model.config),
        **special,
        "residua_version": residua.__version__,
        "residua": model.config.model_dump(mode="json"),
    }
    modeling = modeling_source(model.config)
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json({"do_sample": False, **special}),
        "tokenizer_config.json": _json(_tokenizer_config(tokenizer, model.config)),
        "configuration_residua.py": configuration_source(modeling),
        "modeling_residua.py": modeling,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer.save(folder / "tokenizer.json")
    tensors = {exported_name(n): t.detach().cpu().contiguous() for n, t in model_tensors(model).items()}
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors lets nobody else read what it writes
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def exported_name(name: str) -> str:
    """A tensor's name in the folder: the head is transformers' own, all else is the decoder's."""
    return HEAD if name == "unembed.weight" else f"{PREFIX}{name}"


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    end = tokenizer.backend.id_to_token(tokenizer.end_of_text)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        # as in training: the name of a special token inside a text is text
        "split_special_tokens": True,
    }


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def is_export(folder: Path) -> bool:
    """Whether a folder was written by `residua export`."""
    path = folder / "config.json"
    if not path.is_file() or (folder / "config.toml").exists():
        return False
    return _read(path).get("model_type") == "residua"


def load_folder(folder: Path) -> Decoder:
    """The model of an exported folder, on the CPU: its configuration and tensors are read, its code is not run."""
    path = folder / "config.json"
    content = _read(path)
    tables = content.get("residua")
    if not isinstance(tables, dict):
        raise ValueError(
            f"{path} is of a model of type {content.get('model_type')!r}, not of one that `residua export` wrote."
        )
    try:
        model = residua.build(ModelConfig(**tables))
    except ConfigError as error:
        raise ValueError(f"{path} holds a configuration that cannot be: {error}") from None
    saved = _tensors(folder)
    for name, tensor in model_tensors(model).items():
        found = saved.pop(exported_name(name), None)
        if found is None:
            raise ValueError(f"{folder} lacks tensor {exported_name(name)!r}, which its config.json asks for.")
        if found.shape != tensor.shape:
            raise ValueError(
                f"{folder} holds {exported_name(name)!r} with shape {list(found.shape)} where its config.json asks for "
                f"{list(tensor.shape)}."
            )
        with torch.no_grad():
            tensor.copy_(found)
    if surplus := sorted(saved.keys() - {HEAD}):
        raise ValueError(f"{folder} holds tensor {surplus[0]!r}, which the model of its config.json does not have.")
    return model


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors, of one file or of the parts that an index lists."""
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
