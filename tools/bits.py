"""Train eight small models for 20 steps each on the CPU, and print or compare the losses of every step.

    python tools/bits.py > before.json          # at one commit
    python tools/bits.py before.json            # at another, on the same machine: names the first step that differs

A change that should not alter numerics keeps every bit. Other processors and other builds of PyTorch round otherwise.
`tools/bits.json` has the losses at f72edf1 on an x86-64 CPU (AVX-512) with torch 2.13.0, one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from residua.config.run import RunConfig
from residua.report.plain import PlainConsole
from residua.storage.run import read_metrics
from residua.train.trainer import train

SMALL = [
    "train.steps=20", "train.schedule.warmup=4", "train.log_every=1", "train.validate_every=10", "train.save_every=20",
    "train.micro_batch=2", "train.device=cpu", "train.telemetry=off", "data.validation_tokens=16", "data.sequence=64",
]  # fmt: skip
RUNS = {
    "prenorm": ("tiny", []),
    "block_attnres": ("tiny-block", []),
    "full_attnres": ("tiny-full", []),
    "mgr": ("tiny-mgr", []),
    "exoformer": ("tiny-exo", []),
    "gatednorm": ("tiny-gatednorm", []),
    "mhc with value residuals": ("tiny", ["model.topology=mhc", "model.anchors=resformer"]),
    "linear attention and experts": ("tiny-hybrid-moe", []),
}


def losses(preset: str, changes: list[str]) -> dict[str, list[float]]:
    """Training and validation losses of one run."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.find(preset).override([*SMALL, *changes])
        train(config, Path(folder) / "run", console=PlainConsole(quiet=True))
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    return {kind: [row["loss"] for row in rows if row["kind"] == kind] for kind in ("train", "validation")}


def main() -> None:
    """Print the losses of all runs, or compare them with a file."""
    torch.set_num_threads(1)
    now = {name: losses(*run) for name, run in RUNS.items()}
    if len(sys.argv) == 1:
        print(json.dumps(now, indent=1))
        return
    before = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    changed = {
        f"{name}, {kind} {step}": pair
        for name, curves in before.items()
        for kind, curve in curves.items()
        for step, pair in enumerate(zip(curve, now[name][kind], strict=True), 1)
        if pair[0] != pair[1]
    }
    for place, (old, new) in list(changed.items())[:8]:
        print(f"{place}: {old!r} before, {new!r} now")
    sys.exit(f"{len(changed)} losses differ" if changed else None)


if __name__ == "__main__":
    main()
