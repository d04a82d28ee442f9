"""The command line: one thin file per verb."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from residua.distributed.speaker import refuse

VERBS = {
    "train": ("residua.cli.train", "Pretrain a model on your text."),
    "compare": ("residua.cli.compare", "Does a depth architecture pay on your data, per step and per second?"),
    "generate": ("residua.cli.generate", "Let a trained model continue your text, or chat with it."),
    "eval": ("residua.cli.eval", "Score a model: perplexity, bits per byte, multiple-choice tasks, lm-eval."),
    "export": ("residua.cli.export", "Write a model as a Hugging Face folder that works without Residua."),
    "diagnose": ("residua.cli.diagnose", "See inside a model: sinks, massive activations, dead layers, depth routing."),
    "quantize": ("residua.cli.quantize", "What FP8 and NVFP4 cost a model, and a checkpoint in them."),
    "data": ("residua.cli.data", "Prepare text: tokenizers and shards."),
    "bench": ("residua.cli.bench", "Measure training steps and operators on this machine."),
    "presets": ("residua.cli.presets", "List the models that come with Residua, or print one."),
}


class LazyVerbs(TyperGroup):
    """Loads a verb's file when it is asked for: `residua --help` must not import torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        command = typer.main.get_command(import_module(VERBS[name][0]).app)
        command.name = name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=LazyVerbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Residua: the depth axis of Transformers. `residua VERB --help` shows examples.",
)


@app.callback()
def _residua() -> None:
    pass


def main() -> None:
    """Run a verb. A person's mistake ends as one sentence, not as a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
