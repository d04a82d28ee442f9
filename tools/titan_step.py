"""Time torchtitan's step of a run on one GPU: `python tools/titan_step.py "mgr-s-prenorm train.micro_batch=32"`.

The same model, micro-batches of random tokens and number of steps as `residua bench step`, whose figure it stands
beside (docs/torchtitan.md). Needs torchtitan; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import cycle

import torch


def main() -> None:
    """Read the command line and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a preset or TOML file, with changes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    arguments = parser.parse_args()
    address = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({key: os.environ.get(key, value) for key, value in address.items()})
    print(json.dumps(measure(arguments.name, arguments.steps, arguments.warmup)))


def measure(name: str, steps: int, warmup: int) -> dict[str, object]:
    """Seconds of torchtitan's step, from the first micro-batch to the updated weights."""
    import torchtitan.train  # noqa: F401 (as its command does, before the registry)

    from residua.integrations.torchtitan.compat import parse_run
    from residua.integrations.torchtitan.config_registry import trainer_config
    from residua.train.timing import Sample, random_batches, time_each

    config = trainer_config(name)
    config.checkpoint.enable = False
    config.dump_folder = tempfile.mkdtemp()
    trainer = config.build()
    trainer.metrics_processor.should_log = lambda step: False  # reading the loss waits for the device
    run, device = parse_run(config.run), trainer.device
    batches = cycle([({"input": b.tokens}, b.targets) for b in random_batches(run)])

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    for _ in range(warmup):
        step()
    sample = Sample.of(time_each(step, steps, device))
    trainer.close()
    torch.distributed.destroy_process_group()
    return {
        "name": name,
        "first_step_s": round(first, 2),
        "step_ms": round(sample.median * 1e3, 2),
        "p10_ms": round(sample.p10 * 1e3, 2),
        "p90_ms": round(sample.p90 * 1e3, 2),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


if __name__ == "__main__":
    main()
