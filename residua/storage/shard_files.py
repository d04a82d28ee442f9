"""Checkpoints of several ranks: each rank writes its own part (torch.distributed.checkpoint).

`checkpoints/step-N/shards/` holds one safetensors file per rank, which lists the rows it holds; `state.json` is next to
the folder, as in a checkpoint of one process. Tensor names are the same in both kinds, so any number of ranks can read
either kind. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from residua.errors import UserError
from residua.files import WriteError, keeping, publish, unfinished, writing
from residua.reading import Count, Hint, Shape, check, check_links, parse_json
from residua.storage.checkpoint import (
    FOLDER,
    SHARDS,
    OptimizerState,
    damaged,
    elsewhere,
    model_tensors,
    not_saved,
    prune,
    require_counts,
    what_is_left,
)
from residua.storage.tensors import as_os_error, can_read, nonfinite, open_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult


ROWS = "DCP_SHARDING_INFO"
"""The header key under which torch.distributed.checkpoint lists the rows in a file."""


class Saver:
    """Saves while training continues: `save` copies tensors to host memory, a thread writes them during later steps.

    Every rank of the default process group has a `Saver` and calls the same methods in the same order.
    """

    def __init__(self) -> None:
        # A separate group, because the writing thread communicates at the same time as the training thread.
        self.group = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._saving: Future[Any] | None = None

    def save(
        self, run: Path, number: int, model: nn.Module, optimizer: OptimizerState, state: Mapping[str, Any], keep: int
    ) -> None:
        """Start writing `step-N`; rank 0 renames the folder when all ranks have written."""
        self.settle()
        final = run / FOLDER / f"step-{number}"
        known = torch.tensor(int(self.rank == 0 and final.exists()))
        dist.all_reduce(known, group=self.group)
        if known:
            return
        tensors = {**model_tensors(model), **optimizer.tensors()}
        if broken := self.nonfinite(tensors):
            raise not_saved(broken, run)
        temporary = unfinished(final)
        if self.rank == 0:
            with keeping(what_is_left(run)), writing(final, within=temporary):
                _begin(temporary, state)
        dist.barrier(group=self.group)
        writer = _Writer(str(temporary / SHARDS), save_distributed=True)
        with quietly():
            saved = dcp.async_save({name: t.detach() for name, t in tensors.items()}, storage_writer=writer,
                                   process_group=self.group)  # fmt: skip
        self._saving = Future()
        cast("Future[Any]", saved).add_done_callback(partial(self._name, self._saving, temporary, final, keep))

    def _name(self, saving: Future[Any], temporary: Path, final: Path, keep: int, written: Future[Any]) -> None:
        """Rename the folder from the writing thread, as soon as it is complete.

        On rank 0 `written` is done when all ranks have written, because rank 0 gathers their reports.
        """
        try:
            written.result()
            if self.rank == 0:
                publish(temporary, final)
                prune(final.parents[1], keep)
            saving.set_result(None)
        except BaseException as error:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            lost = isinstance(error, RuntimeError) and not isinstance(error.__cause__ or error.__context__, OSError)
            # another rank has died; the disk is fine
            saving.set_exception(
                error if lost else WriteError(final, _cause(error, final), what_is_left(final.parents[1]))
            )

    def settle(self) -> None:
        """Wait for a save in progress."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            dist.barrier(group=self.group)

    def nonfinite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The tensors that are not finite on any rank; every rank gets the same list."""
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, nonfinite({name: local(t) for name, t in tensors.items()}), group=self.group)
        return list(dict.fromkeys(name for rank in by_rank for name in rank))


class _Writer(HuggingFaceStorageWriter):
    """Writes the file of this rank; on rank 0, `finish` also checks that the files of all ranks are in its folder.

    A node that has lost the shared disk writes into a local folder, and nothing else would notice.
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for rank, written in enumerate(results):
            names_by_file: dict[str, set[str]] = {}
            for one in written:
                names_by_file.setdefault(one.storage_data.relative_path, set()).add(one.index.fqn)
            for name, tensors in names_by_file.items():
                if not _arrived(Path(self.path) / name, tensors):
                    reason = f"{name}, which rank {rank} wrote, is incomplete in the folder of rank 0, so the nodes "
                    raise OSError(errno.EIO, f"{reason}no longer share its disk")


def _arrived(file: Path, tensors: set[str]) -> bool:
    """Whether a file is complete and holds these tensors."""
    return can_read(file, lambda content: tensors <= set(content.keys()))


def _begin(temporary: Path, state: Mapping[str, Any]) -> None:
    """Make the folder that the ranks write into; leaves nothing behind if that fails."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        (temporary / SHARDS).mkdir(parents=True)
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _cause(error: BaseException, path: Path) -> OSError:
    """The error of the first rank that failed: PyTorch's own error lists the tracebacks of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        return cause
    words = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return as_os_error(UserError(words), path)


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that are on this rank; writing to them writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_shards(path: Path, model: nn.Module, optimizer: OptimizerState | None = None) -> None:
    """Fill a model and an optimizer, whole or sharded, from a checkpoint written by any number of ranks."""
    expected = dict(model_tensors(model)) | (optimizer.tensors() if optimizer is not None else {})
    wanted = {name: tensor.detach() for name, tensor in expected.items()}
    require_shards(path, expected)
    fill(path, wanted)
    if optimizer is not None:
        require_counts(_files(path), wanted, path)
        optimizer.set_steps(wanted)


def require_shards(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that cannot be read or lacks rows of these tensors."""
    source = _files(path)
    check_links(path)
    _check_rows(source, lambda: elsewhere(path))
    try:
        metadata = HuggingFaceStorageReader(str(source)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(source, path, error) from None
    require_held(source, metadata, expected)  # PyTorch would silently leave missing rows unchanged


def fill(path: Path, wanted: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, from a checkpoint that `require_shards` has accepted."""
    source = _files(path)
    try:
        with quietly():
            reader = HuggingFaceStorageReader(str(source))
            dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise damaged(source, path, UserError(_cause(error, source).strerror)) from None


def _files(path: Path) -> Path:
    """The folder that holds the files of a checkpoint, written by several ranks or by one process."""
    return path / SHARDS if (path / SHARDS).is_dir() else path


class _Rows(Shape):
    saved_offsets: list[Count]


def _check_rows(source: Path, hint: Hint) -> None:
    """Refuse files that cannot be read or whose list of rows is invalid."""
    for file in sorted(source.glob("*.safetensors")):
        with open_tensors(file, hint) as content:
            rows = (content.metadata() or {}).get(ROWS)
        if rows:
            where = f"{file}, {ROWS}"
            check(parse_json(rows, where, hint), dict[str, _Rows], where, hint)


def require_held(source: Path, metadata: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose metadata lacks tensors or rows of them, or gives them other shapes."""
    blame = "it was written with a different configuration than config.toml."
    for name, tensor in expected.items():
        stored = metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise UserError(f"{source} lacks tensor {name!r}: {blame}")
        shape = list(stored.size)
        if shape != list(tensor.shape):
            raise UserError(
                f"{source} holds {name!r} with shape {shape} where the model has {list(tensor.shape)}: {blame}"
            )
        if sum(prod(chunk.sizes) for chunk in stored.chunks) < tensor.numel():
            raise UserError(f"{source} lacks rows of tensor {name!r}: a file that one of the ranks wrote is missing.")


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings that torch.distributed.checkpoint prints on every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
