"""A rank of a whole run for the tests: `train` as the command calls it, with a death on request."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from residua.train.config import RunConfig
from residua.train.health import TrainingStopped
from residua.train.trainer import Trainer, train


def main(spec: Path) -> None:
    """`spec`: the configuration file, folder, changes, whether to resume, and who dies when at the first start."""
    torch.set_num_threads(1)
    asked = json.loads(spec.read_text())
    config = RunConfig.from_toml(asked["config"]).override(asked.get("changes", []))
    dying = asked.get("dies")
    if dying and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and os.environ["RANK"] == str(dying["rank"]):
        step = Trainer._train_step

        def last_step(trainer: Trainer) -> None:
            if trainer.done == dying["after"]:
                os.kill(os.getpid(), getattr(signal, dying.get("by", "SIGKILL")))
            step(trainer)

        Trainer._train_step = last_step  # type: ignore[method-assign]
    try:
        train(config, asked["out"], resume=asked.get("resume", False))
    except TrainingStopped as stop:
        print(f"residua: {stop}", file=sys.stderr, flush=True)
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
