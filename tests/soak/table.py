"""The soak's result as Markdown."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence

import torch

from residua.train.environment import code_commit
from tests.soak.faults import FAULTS, MOMENTS
from tests.soak.runs import KINDS, STEPS
from tests.soak.soak import Injected, Soak

BEGAN = time.monotonic()


def page(soak: Soak, command: str) -> str:
    """Kinds of checkpoint × faults, and kinds × moments: injected, and in the last columns survived and lost."""
    found = soak.injected
    lost, untidy = sum(bool(f.lost) for f in found), sum(bool(f.untidy) for f in found)
    commands = sum(f.command for f in found)
    lines = [
        "# Training under faults",
        "",
        f"Made by `{command} --out docs/results/soak.md` at commit {(code_commit() or 'unknown')[:10]}, PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}, on a CPU, in {(time.monotonic() - BEGAN) / 60:.0f} "
        "minutes.",
        "",
        f"{len(found)} faults were injected into {soak.runs} runs of {STEPS} steps, in {soak.sessions} starts; {lost} "
        f"lost anything, {untidy} left a traceback or a file. {commands} of them hit processes that "
        "`python -m residua.cli.main` or torchrun had started, "
        "the others hit ranks forked from a process that had PyTorch imported. A full disk is "
        f"{soak.disk.title}.",
        "",
        "A fault is survived if the processes end in bounded time without a traceback, the last checkpoint is still "
        "there, a run that was told to stop (SIGTERM) is saved at its last step, and the run, resumed after every "
        "fault, ends with the weights, optimizer state, data position, random state and metrics of an undisturbed run, "
        "bit for bit, without temporary files and without stray processes. After a vanished shard the next start must "
        "be refused in one sentence and change nothing; then the shard comes back. A run that lost nothing but left a "
        "traceback or a temporary file counts as untidy.",
        "",
        *_table(found, [f.name for f in FAULTS], lambda f: f.fault.name),
        "",
        "When they came:",
        "",
        *_table(found, MOMENTS, lambda f: "save" if f.in_save else "steps" if f.moment == "save" else f.moment),
        "",
        "Moments are random: `save` counts faults that found a checkpoint half written.",
        "",
    ]
    return "\n".join(lines)


def _table(found: list[Injected], columns: Sequence[str], column: Callable[[Injected], str]) -> list[str]:
    rows = ["| checkpoint | " + " | ".join(columns) + " | injected | survived | untidy | lost |"]
    rows.append("|---" * (len(columns) + 5) + "|")
    for name in (*(kind.name for kind in KINDS), "all"):
        mine = [f for f in found if name in (f.kind.name, "all")]
        counts = [sum(column(f) == title for f in mine) for title in columns]
        ends = [not f.wrong for f in mine], [bool(f.untidy and not f.lost) for f in mine], [bool(f.lost) for f in mine]
        rows.append(f"| {name} | " + " | ".join(map(str, (*counts, len(mine), *map(sum, ends)))) + " |")
    return rows
