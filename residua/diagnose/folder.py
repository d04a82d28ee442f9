"""Open a model folder for diagnosis: a run, an exported run, or a local Hugging Face model.

transformers builds whatever config.json asks for, and initialises missing tensors with random numbers. So we first
build the model on PyTorch's meta device, which allocates no memory. We stop as soon as it has more parts than the
folder's files could fill.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from residua import machine
from residua.diagnose.huggingface import PROBE_LENGTH, HuggingFaceSubject
from residua.diagnose.native import NativeSubject
from residua.diagnose.observe import Subject
from residua.errors import UserError
from residua.reading import MIB, check_links, read_json, refuse, require_file
from residua.storage.hugging_face import AGAIN, is_export
from residua.storage.load import load
from residua.storage.tensors import DTYPES, open_tensors, require_finite, weight_files


def open_subject(path: Path, device: torch.device) -> Subject:
    """Open the model in a folder on the device, ready for diagnosis; its weights must be finite."""
    check_folder(path)
    if (path / "config.toml").exists() or is_export(path):
        return _run(path, device)
    return _hugging_face(path, device)


def check_folder(path: Path) -> None:
    """Refuse a folder without a model or tokenizer, or with an oversized config.json. This opens no model."""
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
    """Return whether a folder holds a run or a model."""
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
    weights = stored(weight_files(path, AGAIN))
    check_counts(config, path / "config.json", weights)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        settings = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        dtype: Any = choose_dtype(path, settings, weights, device)
        opened: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=dtype, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
        model, loaded = opened
        model.to(device)
        with torch.no_grad():  # inconsistent sizes in a configuration only fail when the model runs
            model(input_ids=torch.zeros(1, PROBE_LENGTH, dtype=torch.int64, device=device), use_cache=False)
    except UserError:
        raise
    except Exception as error:  # configuration, weights or architecture: transformers raises many kinds
        if "auto_map" in config:
            raise UserError(
                f"{path} needs its own Python code (auto_map in its config.json), but Residua runs no code "
                "from a model folder: diagnose a model that transformers supports without such code."
            ) from None
        raise UserError(f"{path} cannot be opened as a causal language model: {first_sentences(error)}") from None
    _require_all(path, model, loaded)
    require_finite(dict(model.named_parameters()), path, "nothing can be measured, so use another copy of the model")
    return HuggingFaceSubject(model, path.name, unused=sorted(loaded["unexpected_keys"]))


def _require_all(path: Path, model: Any, loaded: dict[str, Any]) -> None:
    """Refuse missing or wrongly shaped tensors: transformers would fill them with random numbers.

    Tied heads do not count as missing, nor do buffers that a model computes and does not save.
    """
    advice = "diagnose a folder with all weights of a causal language model"
    for name, shape, expected in loaded["mismatched_keys"]:
        shapes = f"shape {list(shape)} where {type(model).__name__} has {list(expected)}"
        raise UserError(f"{path} holds {name!r} with {shapes}: {advice}.")
    lacking = [name for name in model.state_dict() if name in loaded["missing_keys"]]
    if lacking:
        more = f", the first of {len(lacking)} such tensors" if len(lacking) > 1 else ""
        raise UserError(f"{path} lacks tensor {lacking[0]!r} of {type(model).__name__}{more}: {advice}.")


def _check_files(path: Path) -> dict[str, Any]:
    """Return the content of config.json.

    Refuses missing or damaged files, and paths and links that lead out of the folder: transformers would follow them.
    """
    check_links(path)
    config = read_json(path / "config.json", dict[str, Any], AGAIN, lenient=True)
    if (path / "adapter_config.json").exists():
        raise UserError(f"{path} is an adapter for a model elsewhere: merge the two and diagnose the result.")
    return config


def first_sentences(error: Exception, most: int = 240) -> str:
    """Return a library's message on one line: its first sentence, and others that fit in `most` characters."""
    first, *more = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()) or type(error).__name__)
    for sentence in more:
        if len(first) + len(sentence) >= most:
            break
        first = f"{first} {sentence}"
    return first


LONGEST_CONFIG = 16 * MIB
"""Real configurations have a few KiB."""
COUNTS = ("layer", "depth", "blocks")
"""Keys that contain one of these words are numbers of layers: transformers builds lists of that length."""
SPARE_TENSORS, SPARE_MODULES, SPARE_PARAMETERS = 1_000, 10_000, 1_000_000
"""Tolerance on top of a small multiple of the files' contents; a model that lacks tensors is refused later."""
MOST_TENSORS = 200_000
MAX_WEIGHTS_SHARE = 0.8
"""The share of free memory that float32 weights may take; the rest is for states and sums."""
QUARTER = 4
"""Packed weights have at least two bits, so a byte holds at most this many."""


@dataclass(frozen=True)
class Stored:
    """The contents of a folder's safetensors files."""

    tensors: int
    elements: int
    bytes: int
    dtype: torch.dtype
    """The dtype of most elements."""

    @property
    def most_tensors(self) -> int:
        """The most tensors that can be filled from the files, however a family splits them."""
        return min(4 * self.tensors + SPARE_TENSORS, MOST_TENSORS)


def stored(files: list[Path]) -> Stored:
    """Read the headers of safetensors files."""
    tensors, elements = 0, Counter[str]()
    for file in files:
        with open_tensors(file, AGAIN) as content:
            for name in content.keys():  # noqa: SIM118 (it is not a dict)
                part = content.get_slice(name)
                tensors += 1
                elements[part.get_dtype()] += torch.Size(part.get_shape()).numel()
    floats = [(count, DTYPES[kind]) for kind, count in elements.items() if kind in DTYPES]
    dtype = max(floats, key=lambda one: one[0], default=(0, torch.float32))[1]
    return Stored(tensors, elements.total(), sum(file.stat().st_size for file in files), dtype)


def check_length(folder: Path) -> None:
    """Refuse configurations that are too long to be real, before they are parsed."""
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists() and require_file(path, AGAIN) > LONGEST_CONFIG:
            refuse(f"{path} is longer than {LONGEST_CONFIG // MIB} MiB, too long for a configuration", AGAIN)


def check_counts(config: Mapping[str, Any], file: Path, weights: Stored) -> None:
    """Refuse configurations, nested ones included, with more layers than the files hold tensors for."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value, file, weights)
        counts = "per_layer" not in key and any(word in key for word in COUNTS)
        if counts and isinstance(value, int) and value > weights.most_tensors:
            refuse(f"{file} asks for {value:,} layers ({key}), but the files have {weights.tensors:,} tensors", AGAIN)


def choose_dtype(folder: Path, config: Any, weights: Stored, device: torch.device) -> torch.dtype | str:
    """Choose the precision to load a model in. Refuses models that do not fit into memory or that the files cannot
    fill.

    `config` is transformers' object. On a CPU, weights become float32, which rounds less and is faster there, if they
    fit into memory that way. Otherwise, and on a GPU, they keep their stored precision. Quantized ones are left to
    transformers ("auto").
    """
    parameters, buffers = _count(folder, config, weights)
    advice = "end other programs, or use a machine with more memory"
    what = f"{folder}: the model of its config.json has {parameters:,} parameters and needs"
    if getattr(config, "quantization_config", None) is not None:
        machine.require_memory(what, max(weights.bytes, parameters // QUARTER), advice)
        return "auto"
    if parameters > 2 * weights.elements + SPARE_PARAMETERS:
        file = folder / "config.json"
        refuse(f"{file} asks for {parameters:,} parameters, but the files have {weights.elements:,}", AGAIN)
    free = machine.free_memory()
    if device.type == "cpu" and (free is None or 4 * parameters + buffers <= MAX_WEIGHTS_SHARE * free):
        return torch.float32
    dtype: torch.dtype = config.dtype or weights.dtype
    for place in dict.fromkeys((torch.device("cpu"), device)):
        machine.require_memory(what, dtype.itemsize * parameters + buffers, advice, place)
    return dtype


def _count(folder: Path, config: Any, weights: Stored) -> tuple[int, int]:
    """Count parameters, shared ones once, and the bytes of buffers."""
    from transformers import AutoModelForCausalLM

    with _bounded(folder, weights), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


@contextmanager
def _bounded(folder: Path, weights: Stored) -> Iterator[None]:
    """Inside the block, stop building modules when there are more than the files could fill."""
    parts: Counter[str] = Counter()

    def count(kind: str, most: int) -> None:
        parts[kind] += 1
        if parts[kind] > most:
            raise UserError(
                f"{folder / 'config.json'} asks for more than {most:,} {kind}, and the folder's files hold "
                f"{weights.tensors:,} tensors: {AGAIN}."
            )

    def parameter(module: nn.Module, name: str, value: Tensor | None) -> None:
        count("tensors", weights.most_tensors)

    def submodule(module: nn.Module, name: str, value: nn.Module | None) -> None:
        count("modules", 4 * weights.most_tensors + SPARE_MODULES)

    with (
        register_module_parameter_registration_hook(parameter),
        register_module_module_registration_hook(submodule),
    ):
        yield
