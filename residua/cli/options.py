"""Options that several commands share, and their checks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residua.errors import UserError
from residua.files import refuse_blocked

if TYPE_CHECKING:
    from rich.console import Console


def option(help: str, *names: str, default: str | bool = True, **settings: Any) -> Any:
    """An option of a command; `default` describes the default where the value itself does not."""
    return typer.Option(*names, help=help, show_default=default, **settings)


def argument(help: str, default: str | bool = True, **settings: Any) -> Any:
    """A positional argument of a command."""
    return typer.Argument(help=help, show_default=default, **settings)


def choice(help: str, name: str, *choices: str) -> Any:
    """An option that accepts only these values."""

    def check(value: str) -> str:
        require_choice(name, value, choices)
        return value

    return option(help, name, metavar="|".join(choices), callback=check)


def check_device(name: str) -> str:
    """Refuse an unknown device name before reading anything; `choose_device` checks whether the device is present."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device is {name!r}: choose auto, cpu or cuda.")
    return name


def complete_preset(incomplete: str) -> list[str]:
    """The presets that begin with this text, for shell completion."""
    from residua.config import presets

    return [name for name in presets.names() if name.startswith(incomplete)]


Preset = Annotated[
    str, argument("A preset's name or a run's TOML file.", metavar="PRESET", autocompletion=complete_preset)
]
Overrides = Annotated[
    list[str] | None, argument("Names of variants, and changes of keys.", metavar="[VARIANT | SECTION.KEY=VALUE ...]")
]
Checkpoint = Annotated[str, choice("Checkpoint of the run to use.", "--checkpoint", "last", "best")]
Device = Annotated[str, option("Device to compute on.", metavar="auto|cpu|cuda", callback=check_device)]
Precision = Annotated[str, option("Type of the weights; auto is bfloat16 on a GPU.", metavar="auto|float32|bfloat16")]
Data = Annotated[Path | None, option("A folder made by `residua data prepare`.", default="the embedded corpus")]
TaskDir = Annotated[Path | None, option("Local multiple-choice files, TASK.jsonl or .jsonl.xz.")]
Shots = Annotated[int | None, option("Worked examples before each question.", default="the task's own", min=0)]
Calibration = Annotated[int | None, option("Sequences used to calibrate SmoothQuant.", default="4096", min=1)]
Tune = Annotated[
    str | None,
    option(
        "Try these multiples of each variant's learning rate in short runs, and train with the best.",
        metavar="lr=0.5x,1x,...",
    ),
]
Threads = Annotated[int | None, option("CPU threads.", default="PyTorch's choice", min=1, max=4096)]


def say(console: Console, *lines: str) -> None:
    """Print lines unchanged: paths may contain markup, and must not be wrapped."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def complain(sentence: str) -> None:
    """Print the error on one line of standard error, even if a path contains a newline."""
    from residua.report.failure import Failure, show

    show(Failure(sentence))


def check_file(out: Path | None) -> Path | None:
    """Refuse an --out that is a folder or cannot be written, before anything is measured."""
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
    """Limit PyTorch to this many CPU threads, if given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def resumable_study() -> Iterator[None]:
    """Train a study inside the block; on a full disk or a signal, say what was saved and how to continue."""
    from residua.files import keeping
    from residua.study.train_runs import StudyInterrupted

    try:
        with keeping("trained runs are kept, and the same command resumes from them"):
            yield
    except StudyInterrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(130) from None


def command_line() -> str:
    """The command line for the record; absolute paths are cut to their last part."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["residua", *words])


def split_names(text: str | None) -> list[str]:
    """`a, b` as a list of names; empty without a text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def parse_tune(text: str | None) -> dict[str, list[str]] | None:
    """`lr=0.5x,1x,2x` as the table `tune` of a study."""
    if text is None:
        return None
    key, _, multiples = text.partition("=")
    names = split_names(multiples)
    if key.strip() != "lr" or not names:
        raise UserError(f"--tune {text} is not a list of learning rates: write it as lr=0.5x,1x,2x.")
    return {"lr": names}
