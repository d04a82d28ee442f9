"""Turn a run that several ranks saved into a run of one process: `python -m residua.distributed.convert RUN OUT`.

The other direction needs no conversion: any number of ranks can read the checkpoints of one process.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from residua.config.run import ParallelConfig
from residua.data.tokenizer import SETTINGS
from residua.files import sentence, write_atomically
from residua.model.size import build_if_it_fits
from residua.reading import inside
from residua.storage.checkpoint import checkpoints, model_tensors, save_checkpoint
from residua.storage.finite import require_finite
from residua.storage.load import restore
from residua.storage.run import Run, saved_config
from residua.train.optimizer import build_optimizer

COPIED = ("tokenizer.json", SETTINGS, "metrics.jsonl", "environment.json", "result.json")


def convert(run: Path, out: Path) -> Path:
    """Write the last checkpoint of a run to a new run folder, as model.safetensors and optimizer.safetensors."""
    found = checkpoints(run)
    if not found:
        raise ValueError(f"{run} holds no checkpoint: train it first.")
    config, last = saved_config(run), found[-1]
    model = build_if_it_fits(config.model, run)
    optimizer = build_optimizer(model, config.train.optimizer)
    restore(last.path, model, optimizer)
    require_finite(
        model_tensors(model) | optimizer.tensors(), last.path, f"move {last.path} elsewhere to convert another"
    )
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    new = Run.create(out, alone)
    try:
        for name in COPIED:
            if inside(run, name).exists():
                shutil.copy(run / name, out / name)
        write_atomically(out / "config.toml", alone.to_toml())
        return save_checkpoint(out, last.step, model, optimizer, last.state, config.train.keep)
    finally:
        new.close()


def main() -> None:
    """The command: two folders, RUN and OUT."""
    if len(sys.argv) != 3:
        sys.exit("residua: name the run and the new folder: python -m residua.distributed.convert RUN OUT")
    try:
        print(f"written to {convert(Path(sys.argv[1]), Path(sys.argv[2]))}")
    except (ValueError, OSError) as error:
        sys.exit(f"residua: {sentence(error) if isinstance(error, OSError) else error}")


if __name__ == "__main__":
    main()
