"""A run that several ranks saved as a run of one process: `python -m residua.storage.convert RUN OUT`.

The other direction needs no conversion: any number of ranks reads the files of one process.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import residua
from residua.config.run import ParallelConfig
from residua.storage.checkpoint import checkpoints, restore, save_checkpoint
from residua.storage.run import Run, saved_config
from residua.train.optimizer import build_optimizer

COPIED = ("tokenizer.json", "metrics.jsonl", "environment.json", "result.json")


def convert(run: Path, out: Path) -> Path:
    """Write the last checkpoint of a run to a new run folder as model.safetensors and optimizer.safetensors."""
    found = checkpoints(run)
    if not found:
        raise ValueError(f"{run} holds no checkpoint: train it first.")
    config, last = saved_config(run), found[-1]
    model = residua.build(config.model)
    optimizer = build_optimizer(model, config.train.optimizer)
    restore(last.path, model, optimizer)
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    new = Run.create(out, alone)
    try:
        for name in COPIED:
            if (run / name).exists():
                shutil.copy(run / name, out / name)
        (out / "config.toml").write_text(alone.to_toml(), encoding="utf-8")
        return save_checkpoint(out, last.step, model, optimizer, last.state, config.train.keep)
    finally:
        new.close()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("residua: name the run and the new folder: python -m residua.storage.convert RUN OUT")
    try:
        print(f"written to {convert(Path(sys.argv[1]), Path(sys.argv[2]))}")
    except (ValueError, OSError) as error:
        sys.exit(f"residua: {error}")


if __name__ == "__main__":
    main()
