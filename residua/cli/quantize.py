"""`residua quantize`: quantize a model to FP8 or NVFP4 and measure the cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import DEVICES, Device, Threads, require_choice, use_threads

if TYPE_CHECKING:
    from residua.quantize.run import Device as DeviceName

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder made by `residua export`.")],
    out: Annotated[Path, typer.Option(help="The quantized model's folder; must be new or empty.")],
    scheme: Annotated[
        str, typer.Option(metavar="fp8|fp8-row|fp8-group|nvfp4|nvfp4-static", help="W8A8 in E4M3 or W4A4 in NVFP4.")
    ] = "fp8",
    smooth: Annotated[
        float | None,
        typer.Option(metavar="α", show_default="off", help="SmoothQuant with this exponent, 0 to 1; 0.5 is usual."),
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Also smooth inside sublayers, not only after norms.")
    ] = False,
    exempt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            show_default=False,
            help="Leave modules in high precision, as in sublayers.1.* or *.out.",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="Also write a folder for serving engines, if the model is a Qwen3, Llama, Qwen2 or Mistral by shape.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(show_default="the run's own", help="Prepared text to calibrate and evaluate on."),
    ] = None,
    calibration: Annotated[int, typer.Option(min=1, help="Sequences for SmoothQuant and static scales.")] = 4096,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default="the run's", help="Evaluate on at most this many validation tokens."),
    ] = None,
    probes: Annotated[
        int, typer.Option(min=0, help="Measure the gain from exempting each of this many worst modules.")
    ] = 3,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Quantize a model to FP8 or NVFP4, and measure the loss it costs and which tensors cause it.

    \b
    residua quantize runs/tiny --scheme fp8 --out runs/tiny-fp8
    residua quantize runs/tiny --scheme nvfp4 --smooth 0.5 --out runs/tiny-nvfp4
    residua quantize runs/tiny --scheme nvfp4 --exempt "sublayers.1.*" --out runs/tiny-mixed
    residua quantize runs/plain --scheme nvfp4-static --out runs/plain-fp4 --engine served/plain

    With --engine, what is not quantized is rounded to the dtype of that folder (bfloat16 for NVFP4, float32 for FP8)
    before the loss is measured.

    Writes a checkpoint for residua.load and for engines that read compressed-tensors, results.json and report.html.
    """
    require_choice("--device", device, DEVICES)
    import residua.quantize.run as work
    from residua.quantize.sentences import sentences
    from residua.report.terminal import ProgressBars, open_console

    use_threads(threads)
    console = open_console(log_width=None)
    with ProgressBars(console) as bars:
        result = work.quantize(
            model, out, scheme=scheme, alpha=smooth, inside=inside, exempt=exempt or (), engine=engine, data=data,
            calibration=calibration, tokens=tokens, probes=probes, device=cast("DeviceName", device),
            progress=bars.stages(),
        )  # fmt: skip
    for sentence in sentences(result):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"\nReport: {(out / work.REPORT).resolve()}", soft_wrap=True, markup=False)
    if engine is not None:
        console.print(f"For serving engines: {engine}", soft_wrap=True, markup=False)
        if scheme == "nvfp4":
            console.print(
                "Engines round the inputs with one scale per module instead of one per token: --scheme nvfp4-static "
                "measures the loss that they serve.",
                soft_wrap=True,
            )
    console.print(f"Next: residua eval {out}, or residua.load({str(out)!r}); numbers are in {out / work.RESULTS}",
                  soft_wrap=True, markup=False)  # fmt: skip
