"""The size of the model that a Hugging Face folder's config.json asks for, counted before any memory is taken.

transformers builds whatever a config.json names, and fills what the files lack with random numbers. So the model is
built once without memory (on PyTorch's meta device), and the building ends as soon as there are more parts than the
folder's files could fill.
"""

from __future__ import annotations

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
from residua.errors import UserError
from residua.reading import MIB, refuse, require_file
from residua.storage.hugging_face import AGAIN
from residua.storage.tensors import DTYPES, open_tensors

LONGEST_CONFIG = 16 * MIB
"""Real ones have some KiB."""
COUNTS = ("layer", "depth", "blocks")
"""Keys with one of these words in their name are numbers of layers: transformers makes lists of that length."""
SPARE_TENSORS, SPARE_MODULES, SPARE_PARAMETERS = 1_000, 10_000, 1_000_000
"""What a model may have in addition to a few times what its files hold; a model that lacks tensors is refused later."""
MOST_TENSORS = 200_000
ROOM = 0.8
"""The share of free memory that weights may take in float32; the rest is for states and sums."""
QUARTER = 4
"""Packed weights have two bits or more: at least a quarter of a byte each."""


@dataclass(frozen=True)
class Stored:
    """What a folder's safetensors files hold."""

    tensors: int
    elements: int
    bytes: int
    dtype: torch.dtype
    """Of most elements."""

    @property
    def most_tensors(self) -> int:
        """More tensors than this cannot be filled from the files, however a family splits them."""
        return min(4 * self.tensors + SPARE_TENSORS, MOST_TENSORS)


def stored(files: list[Path]) -> Stored:
    """Read the headers of the files."""
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
    """Refuse configurations that are too long to be real, before anybody reads them."""
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists() and require_file(path, AGAIN) > LONGEST_CONFIG:
            refuse(f"{path} is longer than {LONGEST_CONFIG // MIB} MiB, too long for a configuration", AGAIN)


def check_counts(config: Mapping[str, Any], file: Path, held: Stored) -> None:
    """Refuse more layers than the files hold tensors for; tables in tables too."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value, file, held)
        elif isinstance(value, int) and value > held.most_tensors and any(word in key for word in COUNTS):
            refuse(
                f"{file} asks for {value:,} layers ({key}), and the folder's files hold {held.tensors:,} tensors", AGAIN
            )


def choose_dtype(folder: Path, config: Any, held: Stored, device: torch.device) -> torch.dtype | str:
    """The precision to load a model in. Refuses one that does not fit into memory, or that the files cannot fill.

    `config` is transformers' own. On a CPU weights become float32, which rounds less and is faster there, unless only
    their own precision fits into memory; on a GPU they keep it. Quantized ones are left to transformers ("auto").
    """
    parameters, buffers = _count(folder, config, held)
    advice = "end other programs, or use a machine with more memory"
    what = f"{folder}: the model of its config.json has {parameters:,} parameters and needs"
    if getattr(config, "quantization_config", None) is not None:
        machine.require_memory(what, max(held.bytes, parameters // QUARTER), advice)
        return "auto"
    if parameters > 2 * held.elements + SPARE_PARAMETERS:
        refuse(
            f"{folder / 'config.json'} asks for {parameters:,} parameters, and the files hold {held.elements:,}", AGAIN
        )
    free = machine.free_memory()
    if device.type == "cpu" and (free is None or 4 * parameters + buffers <= ROOM * free):
        return torch.float32
    own: torch.dtype = config.dtype or held.dtype
    for place in dict.fromkeys((torch.device("cpu"), device)):
        machine.require_memory(what, own.itemsize * parameters + buffers, advice, place)
    return own


def _count(folder: Path, config: Any, held: Stored) -> tuple[int, int]:
    """Parameters, shared ones once, and the bytes of buffers."""
    from transformers import AutoModelForCausalLM

    with _bounded(folder, held), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


@contextmanager
def _bounded(folder: Path, held: Stored) -> Iterator[None]:
    """Inside the block, modules are built only up to what the files could fill."""
    parts: Counter[str] = Counter()

    def count(kind: str, most: int) -> None:
        parts[kind] += 1
        if parts[kind] > most:
            raise UserError(
                f"{folder / 'config.json'} asks for more than {most:,} {kind}, and the folder's files hold "
                f"{held.tensors:,} tensors: {AGAIN}."
            )

    def parameter(module: nn.Module, name: str, value: Tensor | None) -> None:
        count("tensors", held.most_tensors)

    def submodule(module: nn.Module, name: str, value: nn.Module | None) -> None:
        count("modules", 4 * held.most_tensors + SPARE_MODULES)

    hooks = [
        register_module_parameter_registration_hook(parameter),
        register_module_module_registration_hook(submodule),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
