"""Options that several commands share, and their checks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from residua.errors import UserError
from residua.files import refuse_blocked

CHECKPOINTS = ("last", "best")
DEVICES = ("auto", "cpu", "cuda")


def complete_preset(incomplete: str) -> list[str]:
    """The presets that begin so, for the shell's completion."""
    from residua.config import presets

    return [name for name in presets.names() if name.startswith(incomplete)]


Preset = Annotated[
    str, typer.Argument(metavar="PRESET", help="A preset's name or a run's TOML file.", autocompletion=complete_preset)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", show_default=False, help="Changes to the configuration."),
]
Checkpoint = Annotated[str, typer.Option(metavar="last|best", help="Which checkpoint of a run.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")]
Precision = Annotated[
    str, typer.Option(metavar="auto|float32|bfloat16", help="Of the weights; auto: bfloat16 on a GPU.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=4096, show_default="PyTorch's choice", help="CPU threads.")]


def complain(sentence: str) -> None:
    """Print on standard error why the command ends, on one line: a path in it may hold a newline."""
    from residua.report.failure import Failure, show

    show(Failure(sentence))


def check_file(out: Path | None) -> Path | None:
    """Refuse an --out that is a folder, or cannot be made, before anything is measured."""
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder: name the file to write.")
    if out is not None:
        refuse_blocked(out.parent)
    return out


def require_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise UserError(f"{option} {value} does not exist: choose {', '.join(choices[:-1])} or {choices[-1]}.")


def use_threads(threads: int | None) -> None:
    """Limit PyTorch to this many CPU threads, if a number was given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def command_line() -> str:
    """The command line, for the record: of absolute paths only the last part, which means something elsewhere."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["residua", *words])


def split_names(text: str) -> list[str]:
    """`a, b` as a list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_tune(text: str | None) -> dict[str, list[str]] | None:
    """`lr=0.5x,1x,2x` as the table `tune` of a study."""
    if text is None:
        return None
    key, _, multiples = text.partition("=")
    names = split_names(multiples)
    if key.strip() != "lr" or not names:
        raise UserError(f"--tune {text} is not a search of the learning rate: write it as lr=0.5x,1x,2x.")
    return {"lr": names}
