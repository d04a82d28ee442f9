"""`residua diagnose`: see inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import DEVICES, Device, Threads, require_choice, use_threads

if TYPE_CHECKING:
    from residua.diagnose.api import Device as DeviceName
    from residua.diagnose.metrics.removal import Budget

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def diagnose(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...", help="Run folders, exported ones or Hugging Face model folders, side by side."
        ),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            show_default="the run's own validation text",
            help="What to show the models: a UTF-8 text file, or a folder made by `residua data prepare`.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text; one sequence at least.")] = 8192,
    length: Annotated[
        int | None, typer.Option(min=2, show_default="the context, 1024 at most", help="Tokens per sequence.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(show_default="the run's folder, or diagnosis/NAME", help="Where the report goes.")
    ] = None,
    ablations: Annotated[
        str, typer.Option(metavar="none|layers|all", help="What to remove: nothing, layers and sources, or heads too.")
    ] = "layers",
    ablation_tokens: Annotated[int, typer.Option(min=2, help="Tokens that ablations are measured on.")] = 4096,
    maps: Annotated[
        bool,
        typer.Option("--maps", show_default=False, help="Also draw tokens, dimensions and attention of every layer."),
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

    Without --text: the first run's validation text; for folders of Hugging Face, the
    embedded corpus. Writes diagnosis.json and report.html, and prints a summary in words.
    """
    require_choice("--ablations", ablations, ("none", "layers", "all"))
    require_choice("--device", device, DEVICES)
    folder = out or _default_folder(models)
    import residua.diagnose as work
    from residua.report.terminal import ProgressBars, open_console

    use_threads(threads)
    console = open_console(log_width=None)
    with ProgressBars(console) as bars:
        made = work.diagnose(
            models, folder, text=text, tokens=tokens, length=length, ablations=cast("Budget", ablations),
            ablation_tokens=ablation_tokens, maps=maps, device=cast("DeviceName", device), progress=bars.stages(),
        )  # fmt: skip
    for model in made.models:
        for line in model.summary:
            console.print(line, soft_wrap=True, markup=False)
        console.print()
    console.print(f"Report: {(folder / 'report.html').resolve()}", soft_wrap=True, markup=False)
    console.print(
        f"Next: open it in a browser; numbers are in {folder / 'diagnosis.json'}", soft_wrap=True, markup=False
    )


def _default_folder(models: list[Path]) -> Path:
    """The report of a single run goes into the run's folder, where `residua compare` finds it."""
    if len(models) == 1 and (models[0] / "config.toml").exists():
        return models[0]
    return Path("diagnosis") / "-".join(model.resolve().name for model in models)
