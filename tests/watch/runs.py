"""Run folders as `residua train` writes them, made without training."""

import json
import math
import os
from pathlib import Path

STEP = 4096
"""Tokens of a step."""
EVIL = "<img src=x onerror=alert(1)>"
"""A name or a message that must be escaped."""


def lines(upto: int, start: int = 1, *, gain: float = 0.0, every: int = 10, experts: bool = False) -> str:
    """The lines of metrics.jsonl from step `start` to `upto`; a `gain` lowers the loss."""
    made = []
    for step in range(start, upto + 1):
        if step != 1 and step % every:
            continue
        loss = 2.6 + 7.0 * math.exp(-step / 90) + 2.0 / step**0.5 - gain * (1 - math.exp(-step / 200))
        noise = 0.12 * math.sin(step * 12.9898 + 100 * gain) * math.exp(-step / 600)
        record = {
            "kind": "train", "step": step, "loss": round(loss + noise, 6), "smoothed": round(loss, 6), "z": 0.001,
            "lr": 0.02 * min(1, step / 50), "grad_norm": round(0.4 + 2 / step**0.5 + abs(noise), 6),
            "tokens": step * STEP, "seconds": round(step * 0.031 * (1 + gain), 3),
            "tokens_per_second": round(STEP / 0.031 / (1 + gain) * (1 + 0.05 * noise), 1),
            "mfu": 0.41, "memory_gib": 11.2 + 9 * gain,
        }  # fmt: skip
        made.append(record)
        if experts:
            load = {"heaviest": 1 + 20 / (step + 20), "lightest": step / (step + 30)}
            made.append({"kind": "experts", "step": step, **load})
        if step % (5 * every) == 0:
            bits = loss / math.log(2) / 3.6
            made.append({
                "kind": "validation", "step": step, "loss": round(loss + 0.03, 6), "bits_per_byte": round(bits, 6),
                "tokens": 65536, "seconds": record["seconds"],
            })  # fmt: skip
    return "".join(json.dumps(record) + "\n" for record in made)


def write_run(folder: Path, upto: int, steps: int = 1000, *, finished: bool = False, **settings: object) -> Path:
    """A run that got as far as `upto`."""
    (folder / "checkpoints" / "step-100").mkdir(parents=True)
    (folder / "config.toml").write_text(f"[train]\nsteps = {steps}\n")
    session = {"started": "2026-03-01T08:00:00+00:00", "from_step": 0, "changes": {}}
    (folder / "environment.json").write_text(json.dumps({"gpu": "NVIDIA H200", "sessions": [session]}))
    (folder / "metrics.jsonl").write_text(lines(upto, **settings))  # type: ignore[arg-type]
    if finished:
        write_result(folder, steps)
    return folder


def write_result(folder: Path, steps: int) -> None:
    """A result of a run with so many steps."""
    (folder / "result.json").write_text(json.dumps({"steps": steps}))


def write_study(folder: Path, variants: dict[str, float], seeds: int = 2, upto: int = 600) -> Path:
    """A study under way: the first seed is done, the second has begun, the last variant's second run has not."""
    names = [(variant, seed) for seed in range(seeds) for variant in variants]
    (folder / "configs").mkdir(parents=True)
    (folder / "logs").mkdir()
    for number, (variant, seed) in enumerate(names):
        config = folder / "configs" / f"{variant}-seed{seed}.toml"
        config.write_text("")
        os.utime(config, (number, number))
        if number < len(names) - 1:
            done = seed == 0
            place = folder / "runs" / f"{variant}-seed{seed}"
            write_run(place, 1000 if done else upto - 40 * number, finished=done, gain=variants[variant] + 0.01 * seed)
    (folder / "logs" / "first.log").write_text("step 10  validation loss 3.1\n\x1b[31mnot a colour\n")
    return folder


def write_crashed(folder: Path, upto: int, words: str) -> Path:
    """A run that an error ended."""
    run = write_run(folder, upto)
    about = json.loads((run / "environment.json").read_text())
    about["sessions"][-1]["failed"] = words
    (run / "environment.json").write_text(json.dumps(about))
    return run


def write_many(folder: Path) -> Path:
    """24 runs: four have crashed, two are under way, the others are finished."""
    for number in range(24):
        place, gain = folder / f"width-{64 * (number + 1)}-anchors", 0.02 * number
        if number % 6 == 4:
            write_crashed(
                place, 100 + 130 * (number // 6), f"RuntimeError: mat1 and mat2 differ in layer {number}: {EVIL}"
            )
        else:
            write_run(place, 400 if number in (3, 7) else 1000, finished=number not in (3, 7), gain=gain)
    return folder
