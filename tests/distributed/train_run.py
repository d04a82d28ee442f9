"""A rank of a whole run for the tests: `train` as the command calls it, with a death on request."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from residua.config.run import RunConfig
from residua.distributed import heartbeat as pulse
from residua.distributed.heartbeat import Pulse
from residua.distributed.speaker import refuse
from residua.train.health import TrainingStopped
from residua.train.trainer import Trainer, train


def hold_save(name: str, gate: str) -> None:
    """The checkpoint of that name is not written before there is a file called `gate`."""
    write = HuggingFaceStorageWriter.write_data

    def held(writer: Any, *arguments: Any) -> Any:
        while name in str(writer.path) and not Path(gate).exists():
            time.sleep(0.02)
        return write(writer, *arguments)

    HuggingFaceStorageWriter.write_data = held


def hesitate(seconds: float) -> None:
    """Rank 0 takes its time between finding out why the run cannot be and saying so."""
    fail = Pulse.fail

    def late(pulse: Pulse, reason: str) -> None:
        time.sleep(seconds * (pulse.rank == 0))
        fail(pulse, reason)

    Pulse.fail = late  # type: ignore[method-assign]


def main(spec: Path) -> None:
    """`spec`: the configuration file, folder, changes, whether to resume; who dies when, and what waits, in tests."""
    torch.set_num_threads(1)
    asked = json.loads(spec.read_text())
    if "holds" in asked:
        hold_save(*asked["holds"])
    hesitate(asked.get("hesitates", 0))
    pulse.BEAT = asked.get("beat", 1.0)
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
    except ValueError as error:
        refuse(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
