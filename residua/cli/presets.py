"""`residua presets`: the models that come with Residua."""

from __future__ import annotations

from typing import Annotated

import typer

_COLUMNS = (
    ("preset", "left"),
    ("parameters", "right"),
    ("for a token", "right"),
    ("FLOPs/token", "right"),
    ("what", "left"),
)
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset as TOML.")] = None,
    matching: Annotated[str, typer.Option(help="List only names that contain this.")] = "",
) -> None:
    """List the models that come with Residua, or print one as TOML.

    \b
    Examples:
      residua presets
      residua presets --matching mgr-s
      residua presets mgr-s-competitive4 > my-model.toml
    """
    show(name) if name else listing(matching)


def show(name: str) -> None:
    """Print a preset as TOML."""
    from residua.config import presets
    from residua.config.model import ModelConfig
    from residua.config.settings import to_toml

    data = presets.load(name)
    model = ModelConfig(**data.pop("model")).model_dump(exclude_none=True)
    print(to_toml({"summary": data.pop("summary"), "model": model} | data), end="")


def listing(matching: str) -> None:
    """Print a table of the presets whose names contain `matching`."""
    from rich.progress import track
    from rich.table import Table

    from residua.config import presets
    from residua.config.model import ModelConfig
    from residua.report.terminal import open_console

    chosen = [n for n in presets.names() if matching in n]
    if not chosen:
        raise ValueError(f"no preset's name contains {matching!r}: `residua presets` lists them all.")
    console = open_console(None, stderr=True)
    console.print(f"measuring {len(chosen)} preset{'s' * (len(chosen) != 1)}, a few seconds")
    from residua.model.size import measure  # imports torch: after the quick error and the message above

    table = Table(box=None, pad_edge=False)
    for heading, justify in _COLUMNS:
        table.add_column(heading, justify=justify, no_wrap=heading != "what")  # type: ignore[arg-type]
    for n in track(chosen, "measuring", console=console, transient=True):
        data = presets.load(n)
        size = measure(ModelConfig(**data["model"]))
        counts = (f"{count / 1e6:,.1f} M" for count in (size.parameters, size.parameters - size.idle))
        table.add_row(n, *counts, f"{size.flops_per_token / 1e9:.2f} G", data["summary"])
    open_console(log_width=140).print(table)
