"""`residua presets`: the models that come with Residua."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import argument, complete_preset, option
from residua.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from residua.config.run import RunConfig

MIN_SUMMARY_WIDTH = 40  # minimum width of the text column

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def presets(
    name: Annotated[str | None, argument("Print this preset as TOML.", autocompletion=complete_preset)] = None,
    matching: Annotated[str, option("List only names that contain this text.")] = "",
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
    """Print a table of the presets whose names contain `matching`: size, recipe, and a description.

    This does not import torch: sizes come from a file, so that the list appears instantly.
    """
    from residua.config import presets
    from residua.config.run import RunConfig
    from residua.report.terminal import open_console

    chosen = [name for name in presets.names() if matching in name]
    if not chosen:
        raise UserError(f"no preset name contains {matching!r}: `residua presets` lists them all.")
    rows = []
    for name in chosen:
        size, run = presets.sizes()[name], RunConfig.find(name)
        rows.append(
            {
                "preset": name,
                "parameters": f"{size.parameters / 1e6:,.1f} M",
                "for a token": f"{(size.parameters - size.idle) / 1e6:,.1f} M",
                "FLOPs/token": f"{size.flops_per_token / 1e9:.2f} G",
                "layers × width": f"{run.model.layers} × {run.model.width}",
                "recipe": recipe(run),
                "what": presets.load(name)["summary"],
            }
        )
    print_table(open_console(log_width=220), rows)


def recipe(run: RunConfig) -> str:
    """Training tokens, steps and the optimizer in a few words: `10.5 G tokens in 20,000 steps, muon 0.01`."""
    train, tokens = run.train, run.tokens
    length = f"{tokens / 1e9:,.1f} G" if tokens >= 1e8 else f"{tokens / 1e6:.1f} M"
    return f"{length} tokens in {train.steps:,} steps, {train.optimizer.kind} {train.optimizer.lr:g}"


def print_table(console: Console, rows: list[dict[str, str]]) -> None:
    """Print the table, with fewer columns on a narrow terminal."""
    from rich.table import Table

    names = list(rows[0])
    for left_out in (("for a token", "FLOPs/token"), ("recipe", "layers × width")):
        widths = [max(len(name), *(len(row[name]) for row in rows)) + 1 for name in names if name != "what"]
        if sum(widths) + MIN_SUMMARY_WIDTH > console.width:
            names = [name for name in names if name not in left_out]
    table = Table(box=None, pad_edge=False)
    for name in names:
        left = name in ("preset", "recipe", "what")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "what")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)
