"""Ranks of torchtitan for tests, forked from a process that has imported it: the import takes six seconds.

Reads jobs from standard input, one JSON object a line, and answers each with the exit codes of its ranks.
"""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.forked import become


def main() -> None:
    """Serve until the input ends."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    train = import_module("torchtitan.train")
    import_module("residua.integrations.torchtitan.config_registry")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(train, json.loads(line))), flush=True)


def _run(train: Any, job: dict[str, Any]) -> list[int]:
    """Run a job to its end. When a rank fails, the others are killed, as torchrun does."""
    started = {_fork(train, job, rank): rank for rank in range(job["ranks"])}
    codes: dict[int, int] = {}
    while len(codes) < len(started):
        process, status = os.wait()
        codes[started[process]] = os.waitstatus_to_exitcode(status)
        if codes[started[process]] and len(codes) < len(started):
            for other, rank in started.items():
                if rank not in codes:
                    os.kill(other, signal.SIGKILL)
    return [codes[rank] for rank in range(job["ranks"])]


def _fork(train: Any, job: dict[str, Any], rank: int) -> int:
    process = os.fork()
    if process:
        return process
    out = Path(job["out"])
    os.dup2(os.open(out / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    sys.argv = ["torchtitan.train", *job["arguments"]]
    become(lambda: _train(train, job, rank))


def _train(train: Any, job: dict[str, Any], rank: int) -> None:
    """`python -m torchtitan.train`, without its two seconds of sleep; keeps the losses with all their digits."""
    trainer = import_module("torchtitan.trainer")
    trainer.time = SimpleNamespace(perf_counter=trainer.time.perf_counter, sleep=lambda _: None)
    lines: list[list[float]] = []

    def log(self: Any, step: int, loss: float, worst: float, norm: float, extra_metrics: Any = None) -> None:
        lines.append([step, loss, norm])
        if job.get("die") == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)

    import_module("torchtitan.components.metrics").MetricsProcessor.log = log
    train.main()
    (Path(job["out"]) / f"losses-{rank}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main()
