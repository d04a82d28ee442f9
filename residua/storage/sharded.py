"""Checkpoints written by all ranks together, each its own part (torch.distributed.checkpoint).

`checkpoints/step-N/shards/` holds safetensors files, one per rank, that name the rows they have; `state.json` lies
beside it as in a checkpoint of one process. What was saved on some ranks is read on any others, on one process, or
from the files that one process wrote: the names are the same. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from residua.distributed.mesh import Mesh
from residua.distributed.optimizer import local
from residua.storage.checkpoint import FOLDER, SHARDS, damaged, model_tensors, prune, what_is_left
from residua.storage.files import publish, unfinished
from residua.train.health import TrainingStopped
from residua.train.optimizer import HybridOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from residua.train.step import Step


class Saver:
    """Saves without holding up training: tensors are copied to host memory, and written while the next steps run."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # its own group: the writing thread talks while the training thread does
        self.group = dist.new_group(backend="gloo")
        self._saving: Future[Any] | None = None

    def save(self, run: Path, number: int, step: Step, state: Mapping[str, Any], keep: int) -> None:
        """Begin to write `step-N`; it gets its name when all ranks have written."""
        self.settle()
        final = run / FOLDER / f"step-{number}"
        if self._everyone_has(final):
            return
        tensors = {**model_tensors(step.model), **step.optimizer.tensors()}
        self._refuse_nonfinite(tensors, run)
        temporary = unfinished(final)
        if self.mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / SHARDS).mkdir(parents=True)
            (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        dist.barrier(group=self.group)
        writer = HuggingFaceStorageWriter(str(temporary / SHARDS), save_distributed=True)
        with _quietly():
            saved = dcp.async_save({name: t.detach() for name, t in tensors.items()}, storage_writer=writer,
                                   process_group=self.group)  # fmt: skip
        self._saving = Future()
        cast("Future[Any]", saved).add_done_callback(partial(self._name, self._saving, temporary, final, keep))

    def _name(self, saving: Future[Any], temporary: Path, final: Path, keep: int, written: Future[Any]) -> None:
        """At once, in the writing thread: a checkpoint that is whole must be found, whatever happens next.

        On rank 0, which gathers what the others report, `written` is done when all have written.
        """
        try:
            written.result()
            if self.mesh.rank == 0:
                publish(temporary, final)
                prune(final.parents[1], keep)
            saving.set_result(None)
        except BaseException as error:
            saving.set_exception(
                TrainingStopped(
                    f"checkpoint {final} could not be written ({error}); {what_is_left(final.parents[1])}: "
                    "make room on the disk, then continue with --resume."
                )
            )

    def settle(self) -> None:
        """Wait for a save in progress."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            dist.barrier(group=self.group)

    def _everyone_has(self, final: Path) -> bool:
        found = torch.tensor(int(self.mesh.rank == 0 and final.exists()))
        dist.all_reduce(found, group=self.group)
        return bool(found)

    def _refuse_nonfinite(self, tensors: dict[str, Tensor], run: Path) -> None:
        """All ranks stop, wherever the broken tensor is."""
        broken = [name for name, t in tensors.items() if "/" not in name and not torch.isfinite(local(t)).all()]
        found: list[Any] = [None] * self.mesh.size
        dist.all_gather_object(found, broken[:1], group=self.group)
        names = [name for rank in found for name in rank]
        if names:
            raise TrainingStopped(f"{names[0]} is no longer finite and was not saved; {what_is_left(run)}.")


def load(path: Path, model: nn.Module, optimizer: HybridOptimizer | None = None) -> None:
    """Fill a model and an optimizer, whole or in pieces, from a checkpoint of any number of ranks."""
    expected = dict(model_tensors(model)) | (optimizer.tensors() if optimizer is not None else {})
    source = path / SHARDS if (path / SHARDS).is_dir() else path
    reader = HuggingFaceStorageReader(str(source))
    _check(source, reader, expected)
    wanted = {name: tensor.detach() for name, tensor in expected.items()}
    with _quietly():
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    if optimizer is not None:
        optimizer.set_steps(wanted)


def _check(source: Path, reader: HuggingFaceStorageReader, expected: dict[str, Tensor]) -> None:
    """Every tensor must be there, in its shape and whole: rows that no file has would silently stay as they were."""
    try:
        held = reader.read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise damaged(source, source.parent if source.name == SHARDS else source, error) from None
    blame = "it was written by another configuration than config.toml."
    for name, tensor in expected.items():
        if name not in held:
            raise ValueError(f"{source} lacks tensor {name!r}: {blame}")
        found = cast("TensorStorageMetadata", held[name])
        shape = list(found.size)
        if shape != list(tensor.shape):
            raise ValueError(
                f"{source} holds {name!r} with shape {shape} where the model has {list(tensor.shape)}: {blame}"
            )
        if sum(prod(chunk.sizes) for chunk in found.chunks) < tensor.numel():
            raise ValueError(f"{source} lacks rows of tensor {name!r}: a file that one of the ranks wrote is missing.")


@contextmanager
def _quietly() -> Any:
    """torch.distributed.checkpoint warns on every call that it works without a process group, or of its own age."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
