"""Turn a run that several ranks saved into a run of one process: `python -m residua.distributed.convert RUN OUT`.

The other direction needs no conversion: any number of ranks can read a checkpoint of one process.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from residua.config.run import ParallelConfig, RunConfig
from residua.data.tokenizer import SETTINGS
from residua.errors import UserError
from residua.files import write_atomically
from residua.model.size import build_if_it_fits
from residua.reading import inside
from residua.report.failure import ending
from residua.storage.checkpoint import Checkpoint, best, checkpoints, model_tensors, save_checkpoint
from residua.storage.hugging_face import keep_companions
from residua.storage.load import restore
from residua.storage.run import Run, saved_config
from residua.storage.tensors import require_finite
from residua.train.optimizer import HybridOptimizer, build_optimizer

TOKENIZER = ("tokenizer.json", SETTINGS)
COPIED = (*TOKENIZER, "metrics.jsonl", "environment.json", "result.json")


def convert(run: Path, out: Path) -> Path:
    """Write the last and the best checkpoint of a run to a new run folder, each as model.safetensors and
    optimizer.safetensors; returns the path of the last."""
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name a run folder.")
    saved = require_checkpoints(run)
    config, last = saved_config(run), saved[-1]
    model = build_if_it_fits(config.model, run)
    optimizer = build_optimizer(model, config.train.optimizer)
    winner = _other_best(saved, model, optimizer)
    read_finite(last, model, optimizer)  # before anything is written
    with new_run(run, out, config, COPIED):
        written = save_checkpoint(out, last.step, model, optimizer, last.state, len(saved))
        if winner is not None:
            read_finite(winner, model, optimizer)
            save_checkpoint(out, winner.step, model, optimizer, winner.state, len(saved))
        return written


def require_checkpoints(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first; refuses a run that has none."""
    saved = checkpoints(run)
    if not saved:
        raise UserError(f"{run} has no checkpoint: train it first.")
    return saved


@contextmanager
def new_run(source: Path, out: Path, config: RunConfig, names: Sequence[str]) -> Iterator[None]:
    """Make the folder of a one-process run with these files of another folder; the `with` block adds checkpoints."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    run = Run.create(out, alone, "name a new folder")
    try:
        copy_files(source, out, names)
        write_atomically(out / "config.toml", alone.to_toml())
        yield
    finally:
        run.close()


def copy_files(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copy these files of a model folder, and the companion files of an imported model."""
    for name in names:
        if inside(source, name).exists():
            shutil.copy(source / name, out / name)
    keep_companions(source, out)


def _other_best(saved: list[Checkpoint], model: nn.Module, optimizer: HybridOptimizer) -> Checkpoint | None:
    """The best checkpoint, if it is not the last; if it cannot be read, print why and return None."""
    try:
        winner = best(saved)
        if winner is None or winner == saved[-1]:
            return None
        read_finite(winner, model, optimizer)
    except UserError as problem:
        print(
            f"residua: only the last checkpoint is converted, since the best is not known: {problem}", file=sys.stderr
        )
        return None
    return winner


def read_finite(checkpoint: Checkpoint, model: nn.Module, optimizer: HybridOptimizer) -> None:
    """Restore a checkpoint; refuse it if a tensor is not finite."""
    restore(checkpoint.path, model, optimizer)
    tensors = model_tensors(model) | optimizer.tensors()
    require_finite(tensors, checkpoint.path, f"move {checkpoint.path} elsewhere to convert another")


USAGE = "name the run and the new folder: python -m residua.distributed.convert RUN OUT"


def main(convert: Callable[[Path, Path], Path] = convert, usage: str = USAGE) -> None:
    """The command: convert one folder to another; both are arguments."""
    if len(sys.argv) != 3:
        sys.exit(f"residua: {usage}")
    with ending():
        print(f"written to {convert(Path(sys.argv[1]), Path(sys.argv[2]))}")


if __name__ == "__main__":
    main()
