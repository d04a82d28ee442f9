"""A model whose weights stay in the files of its folder: exports of any size are written from it, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from residua.config.run import RunConfig
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.size import shapes
from residua.reading import inside
from residua.storage.checkpoint import SHARDS, elsewhere, model_tensors
from residua.storage.hugging_face import Source
from residua.storage.load import DAMAGED, choose_checkpoint, load, other_checkpoint
from residua.storage.tensors import WEIGHTS, describe, fitting, nonfinite, open_tensors, stored_shapes

Read = Callable[[str], Tensor]
"""Gives a weight by its name."""


@dataclass(frozen=True)
class StoredModel:
    """`model` may be on the meta device: `read` gives one of its weights, `load` the model with all of them.

    `dtypes` are those of the files by name, as far as they differ from the model's.
    """

    model: Decoder
    read: Read
    load: Callable[[], Decoder]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def in_memory(model: Decoder) -> StoredModel:
    """A model that is open already."""
    return StoredModel(model, model_tensors(model).__getitem__, lambda: model)


def open_stored(folder: Path, which: Literal["last", "best"] = "last") -> StoredModel:
    """The model of a run, of an export or of a family's folder; tensors that lack or do not fit are refused.

    Runs that were trained here hold float32, imported ones what their source holds. A weight is checked when it is
    read: one that is not finite is refused.
    """
    if (folder / "config.toml").exists():
        checkpoint = choose_checkpoint(folder, which)
        model = shapes(RunConfig.from_toml(inside(folder, "config.toml")).model)
        is_sharded = (checkpoint.path / SHARDS).is_dir()
        read, dtypes = (_several_ranks if is_sharded else _one_process)(checkpoint.path, model)
        read = partial(_finite, read, checkpoint.path, lambda: other_checkpoint(folder, checkpoint))
    else:
        source = Source(folder)
        model = shapes(source.config)
        rules = {rule.ours: rule for rule in source.rules}
        dtypes = {name: source.dtype(rule) for name, rule in rules.items()}
        read = partial(_finite, lambda name: source.parameter(rules[name]), folder, lambda: DAMAGED)
    return StoredModel(model, read, lambda: load(folder, which), dtypes)


def _finite(read: Read, place: Path, advice: Callable[[], str], name: str) -> Tensor:
    tensors = {name: read(name)}
    if broken := nonfinite(tensors):
        raise UserError(f"{place}: {describe(tensors, broken)}: {advice()}.")
    return tensors[name]


def _one_process(path: Path, model: Decoder) -> tuple[Read, dict[str, torch.dtype]]:
    file, hint = inside(path, WEIGHTS), partial(elsewhere, path)
    held = stored_shapes(file, hint)
    expected = model_tensors(model)
    for name, tensor in expected.items():
        fitting(file, name, held.get(name), tensor, "it was written by another configuration than config.toml")
    if surplus := sorted(held.keys() - expected.keys()):
        raise UserError(f"{file} holds tensor {surplus[0]!r}, which the model of config.toml does not have.")

    def read(name: str) -> Tensor:
        with open_tensors(file, hint) as content:
            tensor: Tensor = content.get_tensor(name)
        return tensor

    return read, {name: tensor.dtype for name, tensor in held.items()}


def _several_ranks(path: Path, model: Decoder) -> tuple[Read, dict[str, torch.dtype]]:
    from residua.storage.sharded import fill, require_shards  # torch.distributed.checkpoint takes seconds to import

    expected = model_tensors(model)
    require_shards(path, expected)

    def read(name: str) -> Tensor:
        tensor = torch.empty(expected[name].shape, dtype=expected[name].dtype)
        fill(path, {name: tensor})
        return tensor

    return read, {}
