"""The only module that opens safetensors files. It checks tensors before anything is copied from them."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from residua.errors import UserError
from residua.reading import MIB, Hint, ReadError, Shape, inside, read_json, reason, refuse, require_file
from residua.storage.formats import WEIGHTS as WEIGHTS

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point types by their name in a file's header."""
LONGEST_HEADER = 32 * MIB
MOST_TENSORS = 100_000
"""Maximum entries in a header; the largest published files have about ten thousand."""


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


def stored_shapes(path: Path, hint: Hint) -> dict[str, Tensor]:
    """The tensors of a file by name, on the meta device; reads its header only."""
    with open_tensors(path, hint) as content:
        slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # not a mapping
        about = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    unknown = torch.int8  # any type that no weight has will do
    return {
        name: torch.empty(shape, dtype=DTYPES.get(kind, unknown), device="meta")
        for name, (shape, kind) in about.items()
    }


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file; disk errors raise `OSError`, as for any other file."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        path.touch()
        mode = path.stat().st_mode  # safetensors replaces the file with one that only its owner can read
        save_file(copies, path, metadata)
        path.chmod(mode)
    except SafetensorError as error:
        raise as_os_error(error, path) from None


def as_os_error(error: Exception, path: Path) -> OSError:
    """The system error that safetensors, which is written in Rust, reports only as text."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code) if number else str(error), str(path))


def holds_only_numbers(folder: Path) -> bool:
    """Whether every safetensors file below a folder can be read and is finite. Loads one tensor at a time."""

    def is_finite(content: Any) -> bool:
        return not any(nonfinite({name: content.get_tensor(name)}) for name in content.keys())  # noqa: SIM118  # no dict

    return whole(folder, is_finite)


def whole(folder: Path, passes: Callable[[Any], bool] = lambda content: True) -> bool:
    """Whether a folder holds safetensors files, each as long as its header says, and all pass."""
    files = sorted(folder.rglob("*.safetensors"))
    return bool(files) and all(can_read(file, passes) for file in files)


def can_read(file: Path, passes: Callable[[Any], bool]) -> bool:
    """Whether a file's header is valid, the file is as long as it says, and its content passes."""
    try:
        with open_tensors(file, "") as content:
            return passes(content)
    except ReadError:
        return False


def weight_files(folder: Path, hint: Hint) -> list[Path]:
    """The files with a folder's tensors: model.safetensors, or the parts that its index lists, all inside it."""
    if not inside(folder, INDEX).exists():
        return [inside(folder, WEIGHTS)]
    parts = read_json(folder / INDEX, _Index, hint, lenient=True).weight_map.values()
    return [inside(folder, name) for name in sorted(set(parts))]


def fitting(where: Path, name: str, tensor: Tensor | None, expected: Tensor, hint: Hint) -> Tensor:
    """The tensor found for a name, unless it is missing or its shape or kind (floating point or not) is wrong."""
    if tensor is None:
        refuse(f"{where} lacks tensor {name!r}", hint)
    if tensor.shape != expected.shape:
        shapes = f"shape {list(tensor.shape)} where the model has {list(expected.shape)}"
        refuse(f"{where} holds {name!r} with {shapes}", hint)
    if tensor.is_floating_point() != expected.is_floating_point():
        refuse(f"{where} holds {name!r} as {tensor.dtype} where the model has {expected.dtype}", hint)
    return tensor


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
    """Refuse a header that would take long to parse, before a library tries to."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if LONGEST_HEADER < size <= path.stat().st_size:
            refuse(
                f"{path} has a header of {size // MIB} MiB, but at most {LONGEST_HEADER // MIB} MiB are supported", hint
            )
        tensors = file.read(min(size, LONGEST_HEADER)).count(b'"data_offsets"')
    if tensors > MOST_TENSORS:
        refuse(f"{path} holds {tensors:,} tensors, but at most {MOST_TENSORS:,} are supported", hint)


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or infinity.

    NaN and infinity both show in the minimum and maximum, which take one pass and no memory: 0.07 s for 100M parameters
    on one core, a sixth of the time of `isfinite`. Reads from the device once.
    """
    checked = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    verdicts = [torch.stack(torch.aminmax(_comparable(t))).isfinite().all() for t in checked.values()]
    by_device: dict[torch.device, list[int]] = {}
    for place, verdict in enumerate(verdicts):
        by_device.setdefault(verdict.device, []).append(place)
    good = {
        place: fine
        for places in by_device.values()
        for place, fine in zip(places, torch.stack([verdicts[p] for p in places]).tolist(), strict=True)
    }
    return [name for place, name in enumerate(checked) if not good[place]]


def _comparable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() == 1 else tensor  # PyTorch cannot compare 8-bit floats


def describe(tensors: Mapping[str, Tensor], broken: list[str]) -> str:
    """`weight X is not finite (3 of 16 values: 2 NaN, 1 infinite), the first of 2 such tensors of 40`."""
    values = _comparable(tensors[broken[0]].detach())
    counts = {"NaN": int(values.isnan().sum()), "infinite": int(values.isinf().sum())}
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    more = f", the first of {len(broken)} such tensors of {len(tensors)}" if len(broken) > 1 else ""
    return f"weight {broken[0]} is not finite ({sum(counts.values()):,} of {values.numel():,} values: {kinds}){more}"


def require_finite(tensors: Mapping[str, Tensor], source: str | Path, advice: str) -> None:
    """Refuse weights that are not finite; `advice` ends the error message."""
    broken = nonfinite(tensors)
    if broken:
        raise UserError(f"{source}: {describe(tensors, broken)}: {advice}.")


def overflowed(what: str, model: nn.Module) -> ValueError:
    """The error for a non-finite result of a model whose weights were finite when they were loaded."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    advice = "try --precision float32" if dtype != "float32" else "some weights are too large, use another checkpoint"
    return UserError(f"{what} is not finite although every weight is: activations overflow in {dtype}, {advice}.")


NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
FINITE = "use finite weights, or a wider type if they are finite"


class Entry(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], source: str | Path = "the model"
) -> None:
    """Write the tensors in the order of `entries`; each is converted to its dtype and released before the next.

    A tensor that is not finite in its dtype is refused; `source` says in the message where it came from.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert tuple(tensor.shape) == tuple(entry.shape), f"{entry.name} has shape {tuple(tensor.shape)}"
            flat = tensor.detach().cpu().to(entry.dtype).contiguous().view(-1)
            require_finite({entry.name: flat}, source, f"it was not written as {NAMES[entry.dtype]}; {FINITE}")
            if len(flat):
                file.write(flat.view(torch.uint8).numpy().data)


def write_shards(folder: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], limit: int) -> None:
    """Write model.safetensors or, if it would exceed `limit` bytes, several files and their index.

    A tensor larger than the limit gets its own file. As in `write_tensors`, one tensor is in memory at a time.
    """
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        room -= entry.bytes
        if room < 0 or not shards:
            shards.append([])
            room = limit - entry.bytes
        shards[-1].append(entry)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    rest = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, islice(rest, len(shard)))
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.bytes for entry in entries)}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
