"""`residua diagnose`: see inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import Device, Threads, argument, choice, option, say, use_threads

if TYPE_CHECKING:
    from residua.diagnose.api import Device as DeviceName
    from residua.diagnose.metrics.removal import Budget

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def diagnose(
    models: Annotated[
        list[Path],
        argument("Folders to compare: runs, exports or Hugging Face models.", metavar="MODEL..."),
    ],
    text: Annotated[
        Path | None,
        option(
            "Text to run the models on: a UTF-8 file, or a folder made by `residua data prepare`.",
            default="the run's own validation text",
        ),
    ] = None,
    tokens: Annotated[int, option("How many tokens of the text to use; at least one sequence.", min=2)] = 8192,
    length: Annotated[int | None, option("Tokens per sequence.", default="the context, at most 1024", min=2)] = None,
    out: Annotated[Path | None, option("Folder for the report.", default="the run's folder, or diagnosis/NAME")] = None,
    ablations: Annotated[
        str,
        choice("What to ablate: nothing, layers and sources, or also heads.", "--ablations", "none", "layers", "all"),
    ] = "layers",
    ablation_tokens: Annotated[int, option("Tokens on which ablations are measured.", min=2)] = 4096,
    maps: Annotated[
        bool, option("Also draw maps of tokens, dimensions and attention for every layer.", "--maps", default=False)
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Look inside a model: sinks, massive activations, dead layers, depth routing.

    \b
    residua diagnose runs/tiny
    residua diagnose runs/prenorm runs/mgr --out diagnosis
    residua diagnose runs/wiki --text data/other
    residua diagnose models/Qwen3-0.6B --text book.txt --tokens 65536 --length 2048
    residua diagnose runs/tiny --ablations all
    residua diagnose runs/tiny --maps

    Without --text, the text is the first run's validation text, or the embedded
    corpus for Hugging Face folders. Writes diagnosis.json and report.html, and
    prints a summary.
    """
    folder = out or _default_folder(models)
    import residua.diagnose as work
    from residua.report.terminal import ProgressBars, open_console

    use_threads(threads)
    console = open_console(log_width=None)
    with ProgressBars(console) as bars:
        diagnosis = work.diagnose(
            models, folder, text=text, tokens=tokens, length=length, ablations=cast("Budget", ablations),
            ablation_tokens=ablation_tokens, maps=maps, device=cast("DeviceName", device), progress=bars.stages(),
        )  # fmt: skip
    for model in diagnosis.models:
        for line in model.summary:
            say(console, line)
        console.print()
    say(console, f"Report: {(folder / 'report.html').resolve()}")
    say(console, f"Next: open it in a browser; numbers are in {folder / 'diagnosis.json'}")


def _default_folder(models: list[Path]) -> Path:
    """The report on a single run goes into its folder, where `residua compare` finds it."""
    if len(models) == 1 and (models[0] / "config.toml").exists():
        return models[0]
    return Path("diagnosis") / "-".join(model.resolve().name for model in models)
