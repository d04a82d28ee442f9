"""Converts torchtitan checkpoints from and to run folders: `python -m residua.integrations.torchtitan.convert FROM TO`.

A torchtitan dump folder (`--dump_folder`) becomes a run, which every `residua` command opens and `residua train
--resume` continues. A run becomes a dump folder, which torchtitan continues on any mesh. torchtitan is not needed.

torch.distributed.checkpoint describes its files in a pickle. Unpickling is limited to the classes that such a
description needs, and only tensors are read.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from residua.config.run import RunConfig
from residua.distributed.convert import TOKENIZER, copy_files, main, new_run, read_finite, require_checkpoints
from residua.errors import UserError
from residua.files import atomic_folder, write_atomically
from residua.integrations.torchtitan.checkpoint import SIZE, pack, unpack
from residua.model.size import build_if_it_fits
from residua.reading import ReadError, inside, reason
from residua.storage.checkpoint import FOLDER, STATE, Checkpoint, model_tensors
from residua.storage.run import saved_config
from residua.storage.shard_files import quietly, require_held
from residua.storage.tensors import require_finite, save_tensors
from residua.train.optimizer import HybridOptimizer, build_optimizer
from residua.train.state import random_states

DUMP = "checkpoint"
"""The checkpoint folder inside torchtitan's dump folder."""
OPTIMIZER = "optimizer."
PLACE, LOAD = "dataloader.place", "train_state.expert_load"
_HINT = "restore it from a copy"


class _Names(pickle.Unpickler):
    """Unpickles only checkpoint descriptions: loading an arbitrary pickle can run any function."""

    ALLOWED = (
        (
            "torch.distributed.checkpoint.metadata",
            "Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING",
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", r"Size|(b?float|u?int|complex)\d+|bool|strided"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "(Pure)?PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if not any(module == known and re.fullmatch(names, name) for known, names in self.ALLOWED):
            raise ReadError(f"it refers to {module}.{name}, which is not part of a checkpoint")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads the tensors of a checkpoint without running code from its files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = inside(Path(self.path), ".metadata")
        try:
            with file.open("rb") as stream:
                metadata = _Names(stream).load()
            if not isinstance(metadata, Metadata):
                raise ReadError("it describes no checkpoint")
        except (OSError, ReadError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise ReadError(f"{file} cannot be read ({reason(error)}): {_HINT}.") from None
        for part in (metadata.storage_data or {}).values():
            inside(Path(self.path), str(part.relative_path))
        return metadata


def dump_checkpoints(dump: Path) -> list[Checkpoint]:
    """The finished checkpoints of a dump folder, oldest first: torchtitan writes `.metadata` last."""
    folders = [path for path in inside(dump, DUMP).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    finished = [path for path in folders if inside(dump, f"{DUMP}/{path.name}/.metadata").is_file()]
    return sorted((Checkpoint(path, int(path.name[5:])) for path in finished), key=lambda c: c.step)


def to_run(dump: Path, out: Path) -> Path:
    """Write the last checkpoint of a dump folder to a new run folder; a model-only checkpoint stays one."""
    folders = dump_checkpoints(dump)
    if not folders:
        raise UserError(f"{dump} holds no finished checkpoint of torchtitan: train it with --checkpoint.enable.")
    config, last = RunConfig.from_toml(inside(dump, "config.toml")), folders[-1]
    reader = _Reader(str(last.path))
    described = reader.read_metadata().state_dict_metadata
    model = build_if_it_fits(config.model, dump)
    optimizer = build_optimizer(model, config.train.optimizer)
    trained = any(name.startswith(OPTIMIZER) for name in described)
    wanted = dict(model_tensors(model))
    if trained:
        wanted |= {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.tensors().items()}
        wanted[PLACE] = torch.zeros(SIZE, dtype=torch.uint8)
    if LOAD in described:
        load: Any = described[LOAD]
        wanted[LOAD] = torch.zeros(load.size, dtype=torch.float64)
    _read(reader, last.path, described, wanted)
    require_finite(wanted, last.path, f"move {last.path} elsewhere to convert another")
    tensors = {"model": model_tensors(model)}
    if trained:
        optimizer.set_steps({name.removeprefix(OPTIMIZER): tensor for name, tensor in wanted.items()})
        tensors["optimizer"] = optimizer.tensors()
    with new_run(dump, out, config, TOKENIZER), atomic_folder(out / FOLDER / f"step-{last.step}") as folder:
        for name, content in tensors.items():
            save_tensors(content, folder / f"{name}.safetensors")
        (folder / STATE).write_text(json.dumps(_state(last.step, wanted), indent=1), encoding="utf-8")
    return out / FOLDER / f"step-{last.step}"


def _read(reader: _Reader, path: Path, described: Any, wanted: dict[str, Tensor]) -> None:
    require_held(path, described, wanted)
    try:
        with quietly():
            dcp.load({name: t.detach() for name, t in wanted.items()}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ReadError(f"{path} cannot be read ({reason(cause)}): {_HINT}.") from None


def _state(step: int, read: dict[str, Tensor]) -> dict[str, Any]:
    """The state for a resumed run; a model-only checkpoint has just its step."""
    state: dict[str, Any] = {"step": step, "validation_loss": None}
    if PLACE not in read:
        return state
    place = unpack(read[PLACE])
    load = read[LOAD].tolist() if LOAD in read else None
    layers = [] if load is None else [[0.0] * len(layer) for layer in load]
    return {
        **state,
        "tokenizer_hash": place["tokenizer_hash"],
        "loader": place,
        "totals": [0.0] * 4,
        "balance": None if load is None else {"load": load, "sums": [layers, 0.0, 0.0], "steps": 0},
        "clock": {"total": 0.0, "interval": 0.0},
        "watch": {"first_loss": None, "strikes": 0},
        "smoothed": 0.0,
        "lines": 0,
        "kept": [],
        "rng": random_states(torch.device("cpu")),
    }


def to_dump(run: Path, out: Path) -> Path:
    """Write the last checkpoint of a run to a new dump folder of torchtitan."""
    last = require_checkpoints(run)[-1]
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: name a new folder.")
    config = saved_config(run)
    model = build_if_it_fits(config.model, run)
    optimizer = build_optimizer(model, config.train.optimizer)
    read_finite(last, model, optimizer)
    final = out / DUMP / f"step-{last.step}"
    final.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "config.toml", config.to_toml())
    copy_files(run, out, TOKENIZER)
    with atomic_folder(final) as folder, quietly():
        dcp.save(_states(config, last, model, optimizer), checkpoint_id=str(folder), no_dist=True)
    return final


def _states(config: RunConfig, last: Checkpoint, model: Any, optimizer: HybridOptimizer) -> dict[str, Any]:
    """Everything that torchtitan's checkpointer expects, under its names."""
    state = last.state
    trained: dict[str, Any] = {"step": last.step, "ntokens_seen": last.step * config.tokens_per_step}
    if state["balance"] is not None:
        trained["expert_load"] = torch.tensor(state["balance"]["load"], dtype=torch.float64)
    return {
        **{name: tensor.detach() for name, tensor in model_tensors(model).items()},
        "optimizer": optimizer.tensors(),
        "lr_scheduler": {"last_epoch": last.step},
        "dataloader": {"place": pack(state["loader"])},
        "train_state": trained,
    }


def convert(source: Path, out: Path) -> Path:
    """Convert a dump folder to a run, or a run to a dump folder."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder: name a dump folder of torchtitan or a run.")
    return to_run(source, out) if inside(source, DUMP).is_dir() else to_dump(source, out)


if __name__ == "__main__":
    main(convert, "name two folders: python -m residua.integrations.torchtitan.convert FROM TO")
