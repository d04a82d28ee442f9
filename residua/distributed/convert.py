"""Turn a run that several ranks saved into a run of one process: `python -m residua.distributed.convert RUN OUT`.

The other direction needs no conversion: any number of ranks can read the checkpoints of one process.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from torch import nn

from residua.config.run import ParallelConfig
from residua.data.tokenizer import SETTINGS
from residua.errors import UserError
from residua.files import write_atomically
from residua.model.size import build_if_it_fits
from residua.reading import inside
from residua.report.failure import ending
from residua.storage.checkpoint import Checkpoint, best, checkpoints, model_tensors, save_checkpoint
from residua.storage.finite import require_finite
from residua.storage.load import restore
from residua.storage.run import Run, saved_config
from residua.train.optimizer import HybridOptimizer, build_optimizer

COPIED = ("tokenizer.json", SETTINGS, "metrics.jsonl", "environment.json", "result.json")


def convert(run: Path, out: Path) -> Path:
    """Write the last checkpoint of a run, and the best, to a new run folder, each as model.safetensors and
    optimizer.safetensors. Returns the last."""
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name a run.")
    found = checkpoints(run)
    if not found:
        raise UserError(f"{run} holds no checkpoint: train it first.")
    config = saved_config(run)
    model = build_if_it_fits(config.model, run)
    optimizer = build_optimizer(model, config.train.optimizer)
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    last = found[-1]
    winner = _other_best(found, model, optimizer)
    _read(last, model, optimizer)  # before anything is written
    new = Run.create(out, alone, "name a new folder")
    try:
        for name in COPIED:
            if inside(run, name).exists():
                shutil.copy(run / name, out / name)
        new.keep_companions(run)
        write_atomically(out / "config.toml", alone.to_toml())
        written = save_checkpoint(out, last.step, model, optimizer, last.state, len(found))
        if winner is not None:
            _read(winner, model, optimizer)
            save_checkpoint(out, winner.step, model, optimizer, winner.state, len(found))
        return written
    finally:
        new.close()


def _other_best(found: list[Checkpoint], model: nn.Module, optimizer: HybridOptimizer) -> Checkpoint | None:
    """The best checkpoint, if it is not the last and can be read; tells if it cannot."""
    try:
        winner = best(found)
        if winner is None or winner == found[-1]:
            return None
        _read(winner, model, optimizer)
    except UserError as problem:
        print(
            f"residua: only the last checkpoint is converted, since the best is not known: {problem}", file=sys.stderr
        )
        return None
    return winner


def _read(checkpoint: Checkpoint, model: nn.Module, optimizer: HybridOptimizer) -> None:
    restore(checkpoint.path, model, optimizer)
    tensors = model_tensors(model) | optimizer.tensors()
    require_finite(tensors, checkpoint.path, f"move {checkpoint.path} elsewhere to convert another")


def main() -> None:
    """The command: two folders, RUN and OUT."""
    if len(sys.argv) != 3:
        sys.exit("residua: name the run and the new folder: python -m residua.distributed.convert RUN OUT")
    with ending():
        print(f"written to {convert(Path(sys.argv[1]), Path(sys.argv[2]))}")


if __name__ == "__main__":
    main()
