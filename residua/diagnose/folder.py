"""Open a model folder for diagnosis: a run, an exported one, or a local Hugging Face model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from residua.diagnose.hf_size import check_counts, check_length, choose_dtype, stored
from residua.diagnose.huggingface import PROBE_LENGTH, HuggingFaceSubject
from residua.diagnose.native import NativeSubject
from residua.diagnose.observe import Subject
from residua.errors import UserError
from residua.reading import check_links, read_json
from residua.storage.hugging_face import AGAIN, is_export
from residua.storage.load import load
from residua.storage.tensors import require_finite, weight_files


def open_subject(path: Path, device: torch.device) -> Subject:
    """The model in a folder, on the device and ready for diagnosis; its weights must be finite."""
    check_folder(path)
    if (path / "config.toml").exists() or is_export(path):
        return _run(path, device)
    return _hugging_face(path, device)


def check_folder(path: Path) -> None:
    """Refuse a folder without a model or without a tokenizer, or with an endless config.json. No model is opened."""
    if not path.exists():
        raise UserError(f"{path} does not exist: name a run folder or a local Hugging Face model folder.")
    if not is_model_folder(path):
        raise UserError(
            f"{path} is not a model folder: it has neither config.toml (a run of `residua train`) nor config.json "
            "(a Hugging Face model)."
        )
    if not any((path / name).exists() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(f"{path} has no tokenizer: put the model's tokenizer.json there.")
    check_length(path)


def is_model_folder(path: Path) -> bool:
    """Whether a folder is a run's or a model's own."""
    return any((path / name).exists() for name in ("config.toml", "config.json"))


def _run(path: Path, device: torch.device) -> NativeSubject:
    return NativeSubject(load(path).to(device).eval(), path.name)


def _hugging_face(path: Path, device: torch.device) -> HuggingFaceSubject:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise UserError(f"{path} is a Hugging Face model: install transformers to open it (residua[hf]).") from None
    config = _check_files(path)
    held = stored(weight_files(path, AGAIN))
    check_counts(config, path / "config.json", held)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        asked = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        dtype: Any = choose_dtype(path, asked, held, device)
        opened: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=dtype, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
        model, loaded = opened
        model.to(device)
        with torch.no_grad():  # with numbers that do not fit each other, a model fails only when it runs
            model(input_ids=torch.zeros(1, PROBE_LENGTH, dtype=torch.int64, device=device), use_cache=False)
    except UserError:
        raise
    except Exception as error:  # configuration, weights or architecture: transformers raises many kinds
        if "auto_map" in config:
            raise UserError(
                f"{path} needs Python code of its own (auto_map in its config.json), and Residua runs no code from a "
                "model folder: diagnose a model that transformers knows by itself."
            ) from None
        raise UserError(f"{path} cannot be opened as a causal language model: {first_sentences(error)}") from None
    _require_all(path, model, loaded)
    require_finite(dict(model.named_parameters()), path, "nothing could be measured, so use another copy of the model")
    return HuggingFaceSubject(model, path.name, unused=sorted(loaded["unexpected_keys"]))


def _require_all(path: Path, model: Any, loaded: dict[str, Any]) -> None:
    """Refuse missing tensors and other shapes: transformers would fill them with random numbers.

    Tied heads are not missing, nor is what a model computes for itself and does not save.
    """
    advice = "diagnose a folder with all weights of a causal language model"
    for name, found, expected in loaded["mismatched_keys"]:
        shapes = f"shape {list(found)} where {type(model).__name__} has {list(expected)}"
        raise UserError(f"{path} holds {name!r} with {shapes}: {advice}.")
    lacking = [name for name in model.state_dict() if name in loaded["missing_keys"]]
    if lacking:
        more = f", the first of {len(lacking)} such tensors" if len(lacking) > 1 else ""
        raise UserError(f"{path} lacks tensor {lacking[0]!r} of {type(model).__name__}{more}: {advice}.")


def _check_files(path: Path) -> dict[str, Any]:
    """The content of config.json.

    Refuses missing or damaged files, and names and links that lead out of the folder: transformers would follow them.
    """
    check_links(path)
    config = read_json(path / "config.json", dict[str, Any], AGAIN, lenient=True)
    if (path / "adapter_config.json").exists():
        raise UserError(f"{path} is an adapter, which names a model elsewhere: merge the two, diagnose the result.")
    return config


def first_sentences(error: Exception, most: int = 240) -> str:
    """What a library said, on one line: its first sentence, and those after it that end within `most` characters."""
    first, *more = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()) or type(error).__name__)
    for sentence in more:
        if len(first) + len(sentence) >= most:
            break
        first = f"{first} {sentence}"
    return first
