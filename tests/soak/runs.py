"""The runs that faults are injected into: one for every kind of checkpoint, and how two of them are compared."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from residua.config.run import RunConfig
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from tests.trained import SMALL, prepare_words

STEPS, SAVE_EVERY = 18, 3
MEASURED = ("seconds", "tokens_per_second", "memory_gib", "mfu", "took")
"""Fields of metrics.jsonl that depend on the clock and the machine."""


@dataclass(frozen=True)
class Kind:
    """How many processes train a run, and how it is divided among them."""

    name: str
    ranks: int
    changes: tuple[str, ...] = ()


MIXTURE = ("model.ffn.kind=moe", "model.ffn.experts=4", "model.ffn.top_k=2", "model.ffn.hidden=16")
KINDS = (
    Kind("one process", 1),
    Kind("DDP", 2, ("parallel.data=2",)),
    Kind("FSDP2", 2, ("parallel.shard=2",)),
    Kind("pipeline", 2, ("parallel.pipeline=2",)),
    Kind("experts", 2, (*MIXTURE, "parallel.shard=2", "parallel.experts=2")),
)


def make_data(folder: Path) -> Path:
    """A few kilobytes of text in several shards."""
    return prepare_words(folder, words=60, holdout=0.05, shard_tokens=3000)


def write_config(path: Path, data: Path, kind: Kind) -> Path:
    """A run of a few short steps, each of them logged, with a checkpoint every three."""
    config = RunConfig(
        model=SMALL,
        data={"path": str(data), "validation_tokens": 128},
        train={
            "steps": STEPS, "micro_batch": 1, "accumulate": 2, "schedule": {"kind": "cosine", "warmup": 2},
            "device": "cpu", "log_every": 1, "validate_every": 5, "save_every": SAVE_EVERY,
        },
    )  # fmt: skip
    path.write_text(config.override(list(kind.changes)).to_toml())
    return path


def last_step(run: Path) -> int:
    """The step of the last finished checkpoint; 0 if there is none."""
    found = checkpoints(run)
    return found[-1].step if found else 0


def last_line(run: Path) -> int:
    """The last step in the metrics; 0 if there is none. Cheap, because it is called all the time."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(-min(4096, os.fstat(file.fileno()).st_size), os.SEEK_END)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def saves(run: Path) -> set[int]:
    """The checkpoints that are being written, or were when the run was killed, each known by its inode."""
    found = (run / "checkpoints").glob(".unfinished-step-*")
    return {number for path in found if (number := _inode(path)) is not None}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def metrics_file(run: Path) -> int | None:
    """A number that changes when a session is past its start: it then replaces metrics.jsonl by one cut to length."""
    return _inode(run / "metrics.jsonl")


def differences(run: Path, undisturbed: Path) -> list[str]:
    """Differences from the undisturbed run: tensors, data position, random state, metrics, names of files."""
    wrong = []
    one, other = checkpoints(run)[-1], checkpoints(undisturbed)[-1]
    if one.step != other.step:
        return [f"the last checkpoint is that of step {one.step}, not {other.step}"]
    files = [{p.relative_to(c.path): p for p in c.path.rglob("*.safetensors")} for c in (one, other)]
    if files[0].keys() != files[1].keys():
        wrong.append("the checkpoint has other files")
    for name in files[0].keys() & files[1].keys():
        tensors, others = load_file(files[0][name]), load_file(files[1][name])
        same = tensors.keys() == others.keys() and all(torch.equal(t, others[key]) for key, t in tensors.items())
        wrong += [] if same else [f"{name} has other tensors"]
    states = [{k: v for k, v in c.state.items() if k != "clock"} for c in (one, other)]
    wrong += [] if states[0] == states[1] else ["state.json differs"]
    wrong += [] if curves(run) == curves(undisturbed) else ["metrics.jsonl differs"]
    return wrong + [f"{name} is left over" for name in leftovers(run, undisturbed)]


def curves(run: Path) -> list[dict[str, Any]]:
    """The metrics without fields that depend on the clock and the machine, such as records of the times of ranks."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] != "ranks"]
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def leftovers(run: Path, undisturbed: Path) -> list[str]:
    """Files and folders that a run should not have.

    By design, one that restarted keeps its first metrics, and ranks that waited for a stopped one leave a record.
    """
    kept = ("metrics-lost-*.jsonl", "collectives-rank-*.json")
    names = {p.name for p in run.iterdir() if not any(map(p.match, kept))}
    names -= {p.name for p in undisturbed.iterdir()}
    temporary = {str(p.relative_to(run)) for p in run.rglob(".*") if p.name != ".lock"}
    partial = {str(p.relative_to(run)) for p in run.rglob("*.partial")}
    return sorted(names | temporary | partial)
