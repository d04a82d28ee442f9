"""Tensors of safetensors files: the one place that opens them. They are checked before anything is copied from them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from residua.reading import MIB, Hint, ReadError, Shape, inside, read_json, reason, refuse, require_file
from residua.storage.finite import nonfinite
from residua.storage.formats import WEIGHTS as WEIGHTS

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The names of floating-point types in a file's header."""
LONGEST_HEADER = 32 * MIB
MOST_TENSORS = 100_000
"""Entries of a header; the largest published files have some ten thousand."""


class _Index(Shape):
    weight_map: dict[str, str]


def read_tensors(path: Path, hint: Hint) -> dict[str, Tensor]:
    """All tensors of a file."""
    with _opening(path, hint):
        return load_file(path)


@contextmanager
def open_tensors(path: Path, hint: Hint) -> Iterator[Any]:
    """A file whose tensors are read one by one: `keys`, `get_slice` and `get_tensor`."""
    with _opening(path, hint), safe_open(path, framework="pt") as content:
        yield content


def stored_dtypes(path: Path, hint: Hint) -> dict[str, torch.dtype]:
    """The dtypes of the floating-point tensors of a file, by name; reads its header only."""
    with open_tensors(path, hint) as content:
        kinds = {name: content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118  # it is no mapping
    return {name: DTYPES[kind] for name, kind in kinds.items() if kind in DTYPES}


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file; an error of the disk is an `OSError`, as for any other file."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        path.touch()
        mode = path.stat().st_mode  # safetensors replaces the file by one that only its owner can read
        save_file(copies, path, metadata)
        path.chmod(mode)
    except SafetensorError as error:
        raise as_os_error(error, path) from None


def as_os_error(error: Exception, path: Path) -> OSError:
    """The error of the system that safetensors, which is written in Rust, reports in words."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error), str(path))


def holds_only_numbers(folder: Path) -> bool:
    """Whether every safetensors file below a folder can be read and is finite. Loads one tensor at a time."""
    files = sorted(folder.rglob("*.safetensors"))
    try:
        for file in files:
            with open_tensors(file, "") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is not a dict)
                    if nonfinite({name: opened.get_tensor(name)}):
                        return False
    except ReadError:
        return False
    return bool(files)


def whole(folder: Path) -> bool:
    """Whether a folder holds safetensors files, each as long as its header says; reads headers only."""
    files = list(folder.rglob("*.safetensors"))
    try:
        for file in files:
            check_header(file, "")
    except ReadError:
        return False
    return bool(files)


def check_header(path: Path, hint: Hint) -> None:
    """Refuse a file whose header is damaged, or that is not as long as its header says."""
    with _opening(path, hint), safe_open(path, framework="pt"):
        pass


def weight_files(folder: Path, hint: Hint) -> list[Path]:
    """The files with a folder's tensors: model.safetensors, or the parts that its index lists, all inside it."""
    if not inside(folder, INDEX).exists():
        return [inside(folder, WEIGHTS)]
    parts = read_json(folder / INDEX, _Index, hint, lenient=True).weight_map.values()
    return [inside(folder, name) for name in sorted(set(parts))]


def fitting(where: Path, name: str, found: Tensor | None, expected: Tensor, hint: Hint) -> Tensor:
    """The tensor found for a name. Refuses a missing one, and one whose shape or kind of number is not the model's."""
    if found is None:
        refuse(f"{where} lacks tensor {name!r}", hint)
    if found.shape != expected.shape:
        shapes = f"shape {list(found.shape)} where the model has {list(expected.shape)}"
        refuse(f"{where} holds {name!r} with {shapes}", hint)
    if found.is_floating_point() != expected.is_floating_point():
        refuse(f"{where} holds {name!r} as {found.dtype} where the model has {expected.dtype}", hint)
    return found


@contextmanager
def _opening(path: Path, hint: Hint) -> Iterator[None]:
    require_file(path, hint)
    try:
        _check_size_of_header(path, hint)
        yield
    except ReadError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        refuse(f"{path} cannot be read ({reason(error)})", hint)


def _check_size_of_header(path: Path, hint: Hint) -> None:
    """Refuse a header that would take long to read, before a library does so."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if LONGEST_HEADER < size <= path.stat().st_size:
            refuse(f"{path} has a header of {size // MIB} MiB, and {LONGEST_HEADER // MIB} MiB are the most", hint)
        tensors = file.read(min(size, LONGEST_HEADER)).count(b'"data_offsets"')
    if tensors > MOST_TENSORS:
        refuse(f"{path} holds {tensors:,} tensors, and {MOST_TENSORS:,} are the most", hint)
