"""Folders of large models for tests of memory, and the memory that a step takes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from residua.storage.tensors import Entry, write_tensors

STATUS = Path("/proc/self/status")


def write_llama(folder: Path, **sizes: int) -> int:
    """A Llama of zeros in bfloat16; returns the bytes of its weights."""
    from residua.convert.families import find_family

    folder.mkdir()
    keys = {"model_type": "llama", "max_position_embeddings": 64, "num_key_value_heads": 8} | sizes
    (folder / "config.json").write_text(json.dumps(keys))
    family = find_family("llama")
    rules = list(family.rules(family.read(keys), keys))
    entries = [Entry(name, torch.bfloat16, shape) for rule in rules for name, shape in rule.shapes()]
    tensors = (torch.zeros(*entry.shape, dtype=torch.bfloat16) for entry in entries)
    write_tensors(folder / "model.safetensors", entries, tensors)
    return sum(entry.bytes for entry in entries)


def peak(step: Callable[[], Any]) -> int:
    """The peak memory of a step in bytes, beyond that before it."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    step()
    return _memory("VmHWM") - before


def _memory(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the peak was set back."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
