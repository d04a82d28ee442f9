"""`residua quantize`: a model in FP8 or NVFP4, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from residua.quantize.run import Device

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder made by `residua export`.")],
    out: Annotated[Path, typer.Option(help="The quantized model's folder; must be new or empty.")],
    scheme: Annotated[
        str, typer.Option(metavar="fp8|fp8-row|fp8-group|nvfp4", help="W8A8 in E4M3 or W4A4 in NVFP4.")
    ] = "fp8",
    smooth: Annotated[
        float | None,
        typer.Option(metavar="α", show_default="off", help="SmoothQuant with this exponent, 0 to 1; 0.5 is usual."),
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="SmoothQuant also inside sublayers, not out of norms only.")
    ] = False,
    exempt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            show_default=False,
            help="Leave modules in high precision: sublayers.1.*, *.out.",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Also write this folder as Qwen3 for engines, if it has that shape."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(show_default="the run's own", help="Prepared text to calibrate and judge on."),
    ] = None,
    calibration: Annotated[int, typer.Option(min=1, help="Sequences that SmoothQuant calibrates on.")] = 4096,
    tokens: Annotated[
        int | None, typer.Option(min=1, show_default="the run's", help="Validation tokens to judge on, at most.")
    ] = None,
    probes: Annotated[
        int, typer.Option(min=0, help="For how many of the worst modules to measure what exempting it gains.")
    ] = 3,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, show_default="PyTorch's choice", help="CPU threads.")] = None,
) -> None:
    """What do W8A8 and W4A4 cost this model, and which tensors are to blame?

    \b
    residua quantize runs/tiny --scheme fp8 --out runs/tiny-fp8
    residua quantize runs/tiny --scheme nvfp4 --smooth 0.5 --out runs/tiny-nvfp4
    residua quantize runs/tiny --scheme nvfp4 --exempt "sublayers.1.*" --out runs/tiny-mixed

    Writes a checkpoint that residua.load and engines with compressed-tensors read, results.json and report.html.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device} does not exist: choose auto, cpu or cuda.")
    from rich.console import Console

    import residua.quantize.run as work
    from residua.quantize.sentences import sentences
    from residua.report.terminal import ProgressBars

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    console = Console(highlight=False)
    with ProgressBars(console) as bars:
        result = work.quantize(
            model, out, scheme=scheme, alpha=smooth, inside=inside, exempt=exempt or (), engine=engine, data=data,
            calibration=calibration, tokens=tokens, probes=probes, device=cast("Device", device),
            progress=bars.stages(),
        )  # fmt: skip
    for sentence in sentences(result):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"\nReport: {(out / work.REPORT).resolve()}", soft_wrap=True, markup=False)
    if engine is not None:
        console.print(f"For serving engines, in Qwen3's names: {engine}", soft_wrap=True, markup=False)
    console.print(f"Next: residua eval {out}, or residua.load({str(out)!r}); numbers are in {out / work.RESULTS}",
                  soft_wrap=True, markup=False)  # fmt: skip
