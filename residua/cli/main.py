"""The command line: one thin file per verb."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from residua.cli.options import complain, option
from residua.cli.process import Terminated, end_tidily, quiet_libraries
from residua.errors import TRACEBACK, UserError
from residua.files import refuse_address
from residua.version import __version__

VERBS = {
    "train": ("residua.cli.train", "Pretrain a model on your text."),
    "watch": ("residua.cli.watch", "Watch runs and studies in a browser, on this machine only."),
    "compare": ("residua.cli.compare", "Does a depth architecture pay on your data, per step and per second?"),
    "reproduce": (
        "residua.cli.reproduce",
        "Reproduce a table or figure of a paper, with the paper's numbers next to yours.",
    ),
    "generate": ("residua.cli.generate", "Continue your text with a trained model, or chat with it."),
    "eval": ("residua.cli.eval", "Score a model: perplexity, bits per byte, multiple-choice tasks, lm-eval."),
    "import": ("residua.cli.import_", "Convert a Hugging Face model to a run: Llama, Qwen, OLMo, Gemma and others."),
    "export": ("residua.cli.export", "Write a model as a Hugging Face folder that works without Residua."),
    "diagnose": (
        "residua.cli.diagnose",
        "Look inside a model: sinks, massive activations, dead layers, depth routing.",
    ),
    "quantize": ("residua.cli.quantize", "Quantize a model to FP8 or NVFP4, and measure what it costs."),
    "data": ("residua.cli.data", "Prepare text for training: tokenizers and shards."),
    "bench": ("residua.cli.bench", "Measure training steps and operators on this machine."),
    "doctor": ("residua.cli.doctor", "Check this installation, and every kernel against its reference."),
    "presets": ("residua.cli.presets", "List the models that come with Residua, or print one."),
}


# Seconds for rank 0 to reach the same error: torchrun ends all ranks when the first one ends.
GRACE_SECONDS = 20.0
TRACEBACK_OPTION = "--traceback"
FREE_TEXT = ("--prompt", "--stop", "--matching")


class LazyVerbs(TyperGroup):
    """Imports a verb's module only when it is used, so that `residua --help` does not import torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        command = typer.main.get_command(import_module(VERBS[name][0]).app)
        command.name = name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from residua.config.settings import suggest

            raise UserError(f"there is no command {args[0]!r}: {suggest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=LazyVerbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Residua: the depth axis of Transformers. `residua VERB --help` shows examples.",
)


def _show_version(requested: bool) -> None:
    if requested:
        print(f"residua {__version__}")
        raise typer.Exit


@app.callback()
def _residua(
    version: Annotated[bool, option("Print the version.", "--version", callback=_show_version, is_eager=True)] = False,
    traceback: Annotated[
        bool,
        option(f"Show where an error was raised, anywhere in a command; same as {TRACEBACK}=1.", TRACEBACK_OPTION),
    ] = False,
) -> None:
    from residua.config.plugins import load_plugins  # `residua --help` does not need it

    load_plugins()


def main() -> None:
    """Run a verb. A user's mistake, a full disk or full memory ends in one sentence, anything else in a traceback."""
    # Libraries start processes too (Inductor's compilers, spawned workers): none may import from the working directory.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    end_tidily()
    quiet_libraries()
    try:
        arguments = take_traceback(sys.argv[1:])
        refuse_arguments(arguments)
        ending = app(arguments, prog_name="residua", standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except Terminated as stop:
        _flush_output()
        stop.die()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):
            fail(error)
        _leave_to_first_rank()  # the arguments are wrong
        _show_usage(error)
        sys.exit(2)
    finally:
        _flush_output()
    sys.exit(ending if isinstance(ending, int) else 0)


def take_traceback(arguments: Sequence[str]) -> list[str]:
    """Remove `--traceback` from the arguments, and set it for this process and its children."""
    switches = [
        place
        for place, (before, argument) in enumerate(pairwise(["", *arguments]))
        if argument == TRACEBACK_OPTION and before not in FREE_TEXT
    ]
    if switches:
        os.environ[TRACEBACK] = "1"
    return [argument for place, argument in enumerate(arguments) if place not in switches]


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that would silently mean another place.

    An empty argument, as in `--out "$UNSET"`, would be the working directory; an address, as in `--out s3://bucket/run`
    or `data.path=s3://bucket/text`, would be a folder below it.
    """
    for before, argument in pairwise(["", *arguments]):
        option, value = argument.split("=", 1) if argument.startswith("--") and "=" in argument else (before, argument)
        if option in FREE_TEXT:
            continue
        if not value:
            what = option if option.startswith("--") else "an argument"
            raise UserError(f"{what} is empty: give it a value or leave it out.")
        refuse_address(re.sub(r"^[\w.]+=", "", value))


def _flush_output() -> None:
    """Flush the output; drop it if its disk is full, where Python would end with a traceback."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def fail(error: Exception) -> NoReturn:
    """Print why the command fails and end the process: a mistake as one sentence, a bug with its traceback.

    Under torchrun, many ranks find the same mistake. Rank 0 prints it; the others wait until torchrun ends them. A rank
    that is still alive after GRACE_SECONDS found an error that rank 0 did not, such as a missing GPU or file. The first
    such rank of each machine prints it. Every rank prints a bug immediately.
    """
    try:
        from residua.report.failure import describe, show  # a command that succeeds does not need it

        failure = describe(error)
    except MemoryError:  # not enough memory even to import it
        os.write(2, b"residua: this machine ran out of memory: end other programs.\n")
        sys.exit(2)
    if not failure.bug:
        _leave_to_first_rank()
    show(failure)
    sys.exit(1 if failure.bug else 2)


def _show_usage(error: Any) -> None:
    """Print what is wrong with the arguments and where to look; for a group without a verb, show its help."""
    message = error.format_message()
    if "\n" in message:
        error.show()
        return
    path = error.ctx.command_path if error.ctx else "residua"
    complain(f"{message[0].lower()}{message[1:].rstrip('.')}: `{path} --help` shows all options, with examples.")


def _leave_to_first_rank() -> None:
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(GRACE_SECONDS + int(os.environ.get("LOCAL_RANK", 0)))


if __name__ == "__main__":
    main()
