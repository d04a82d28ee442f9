"""Checkpoints of one process: `checkpoints/step-N/` with model.safetensors, optimizer.safetensors and state.json.

A checkpoint is a folder written atomically: one called `step-N` is complete, even after a crash. Nothing is ever
unpickled. `shard_files.py` writes the checkpoints of several ranks, and shares the names, pruning and errors defined
here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from residua.errors import UserError
from residua.files import UNFINISHED, atomic_folder, keeping, unfinished, writing
from residua.reading import ReadError, Shape, inside, read_json, reason, refuse
from residua.storage.tensors import fitting, nonfinite, read_tensors, save_tensors, whole

T = TypeVar("T")

FOLDER = "checkpoints"
STATE = "state.json"
SHARDS = "shards"  # the subfolder of a checkpoint that several ranks wrote, see `shard_files.py`
_NAME = re.compile(r"step-(\d+)")


class TrainingStopped(RuntimeError):
    """The run cannot continue. Its message is one sentence for the user; the command exits with `exit_code`."""

    exit_code = 1


class OptimizerState(Protocol):
    """An optimizer as a checkpoint sees it: its whole state as named tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """The state by name. Writing to a tensor changes the state, except for step counts."""
        ...

    def load_tensors(self, saved: dict[str, Tensor]) -> None:
        """Replace the state with one that `tensors` returned earlier."""
        ...

    def set_steps(self, saved: Mapping[str, Tensor]) -> None:
        """Replace the step counts only."""
        ...


class _Scored(Shape):
    validation_loss: float | None


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> dict[str, Any]:
        """Step, data position, random states and the rest of what the trainer needs to resume."""
        return self.read(dict[str, Any])

    def read(self, shape: type[T]) -> T:
        """state.json, checked against `shape`."""
        return read_json(inside(self.path, STATE), shape, lambda: elsewhere(self.path))

    @property
    def validation_loss(self) -> float | None:
        """Loss on the validation set; None if the run was interrupted between validations."""
        return self.read(_Scored).validation_loss


def checkpoints(run: Path) -> list[Checkpoint]:
    """The finished checkpoints of a run, oldest first."""
    folder = inside(run, FOLDER)
    matches = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    for _, path in matches:
        inside(run, f"{FOLDER}/{path.name}")
    return sorted((Checkpoint(path, int(match[1])) for match, path in matches), key=lambda c: c.step)


def best(candidates: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the lowest validation loss; the earliest if several have it."""
    scored = [(loss, c) for c in candidates if (loss := c.validation_loss) is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizer: OptimizerState, state: Mapping[str, Any], keep: int
) -> Path:
    """Write `step-N` atomically, then delete all but the last `keep` checkpoints and the best."""
    final = run / FOLDER / f"step-{step}"
    if not final.exists():
        tensors = {"model": model_tensors(model), "optimizer": optimizer.tensors()}
        for part in tensors.values():
            if broken := nonfinite(part):
                raise not_saved(broken, run)
        with keeping(what_is_left(run)), atomic_folder(final) as folder:
            for name, content in tensors.items():
                save_tensors(content, folder / f"{name}.safetensors")
            (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    prune(run, keep)
    return final


def prune(run: Path, keep: int) -> None:
    """Remove leftovers of killed saves, and all checkpoints but the last `keep` and the best."""
    for leftover in (run / FOLDER).glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    candidates = checkpoints(run)
    if len(candidates) <= keep:
        return
    try:
        winner = best(candidates)
    except ReadError:  # the best one cannot be determined: keep all
        return
    for old in candidates[:-keep]:
        if old != winner:
            # Rename first: a kill during removal must not leave an incomplete `step-N`.
            doomed = unfinished(old.path)
            shutil.rmtree(doomed, ignore_errors=True)
            with writing(old.path, what_is_left(run)):
                old.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def what_is_left(run: Path) -> str:
    """A clause for an error message: the checkpoint to resume from."""
    survivors = checkpoints(run)
    return f"the last good checkpoint is {survivors[-1].path}" if survivors else "no checkpoint had been written yet"


def damaged(file: Path, checkpoint: Path, error: Exception) -> ValueError:
    """The error for a checkpoint that cannot be read; names one to resume from instead."""
    return ReadError(f"{file} cannot be read ({reason(error)}): {elsewhere(checkpoint)}.")


def elsewhere(checkpoint: Path) -> str:
    """A clause for an error message: how to continue if a checkpoint is damaged."""
    others = [c for c in checkpoints(checkpoint.parents[1]) if c.path != checkpoint and whole(c.path)]
    if not others:
        return "no other checkpoint is complete, so restore it from a copy or train again"
    return f"move {checkpoint} elsewhere to continue with {others[-1].path}, which is complete"


def not_saved(broken: list[str], run: Path) -> TrainingStopped:
    """The error for tensors that have become NaN or infinite."""
    what = broken[0] if len(broken) == 1 else f"{broken[0]} (the first of {len(broken)} tensors)"
    return TrainingStopped(f"{what} is no longer finite, so it was not saved; {what_is_left(run)}.")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor appears once."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


@torch.no_grad()
def read_checkpoint(path: Path, model: nn.Module, optimizer: OptimizerState | None = None) -> None:
    """Copy the tensors of a checkpoint that one process wrote into a model and, if given, its optimizer."""
    saved = _read_all(path / "model.safetensors", model_tensors(model))
    for name, tensor in model_tensors(model).items():
        tensor.copy_(saved[name])
    if optimizer is not None:
        optimizer.load_tensors(_read_all(path / "optimizer.safetensors", optimizer.tensors()))


def _read_all(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that holds exactly the expected names and shapes."""
    saved = read_tensors(inside(path.parent, path.name), lambda: elsewhere(path.parent))
    require_same(path, saved, expected)
    require_counts(path, saved, path.parent)
    return saved


def require_same(path: Path, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a file with other names or shapes than expected."""
    for name, tensor in expected.items():
        fitting(path, name, saved.get(name), tensor, "it was written with a different configuration than config.toml")
    if surplus := sorted(saved.keys() - expected.keys()):
        raise UserError(f"{path} holds tensor {surplus[0]!r}, which the model of config.toml does not have.")


def require_counts(source: Path, tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Refuse step counts of an optimizer that are below 0."""
    for name, tensor in tensors.items():
        if name.endswith("/steps") and int(tensor) < 0:
            refuse(f"{source}: {name} is {int(tensor)}, expected 0 or more", lambda: elsewhere(checkpoint))
