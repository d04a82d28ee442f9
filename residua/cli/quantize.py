"""`residua quantize`: quantize a model to FP8 or NVFP4 and measure the cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import Device, Threads, argument, option, say, use_threads

if TYPE_CHECKING:
    from residua.quantize.run import Device as DeviceName

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def quantize(
    model: Annotated[Path, argument("A folder written by `residua train` or `residua export`.", metavar="RUN")],
    out: Annotated[Path, option("Folder for the quantized model; must be new or empty.")],
    scheme: Annotated[
        str, option("W8A8 in E4M3 or W4A4 in NVFP4.", metavar="fp8|fp8-row|fp8-group|nvfp4|nvfp4-static")
    ] = "fp8",
    smooth: Annotated[
        float | None,
        option("Apply SmoothQuant with this exponent from 0 to 1; 0.5 is usual.", default="off", metavar="α"),
    ] = None,
    inside: Annotated[bool, option("Also smooth inside sublayers, not only after norms.", "--inside")] = False,
    exempt: Annotated[
        list[str] | None,
        option("Leave these modules in high precision, for example sublayers.1.* or *.out.", metavar="PATTERN"),
    ] = None,
    engine: Annotated[
        Path | None,
        option(
            "Also write a folder for serving engines, if the model has the layout of Qwen3, Llama, Qwen2 or Mistral."
        ),
    ] = None,
    data: Annotated[
        Path | None, option("Prepared text for calibration and evaluation.", default="the run's own")
    ] = None,
    calibration: Annotated[int, option("Sequences that calibrate SmoothQuant and static scales.", min=1)] = 4096,
    tokens: Annotated[int | None, option("Most validation tokens to evaluate on.", default="the run's", min=1)] = None,
    probes: Annotated[int, option("Measure the gain from exempting each of the N worst modules.", min=0)] = 3,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Quantize a model to FP8 or NVFP4, and measure how much loss it costs and which tensors cause it.

    \b
    residua quantize runs/tiny --scheme fp8 --out runs/tiny-fp8
    residua quantize runs/tiny --scheme nvfp4 --smooth 0.5 --out runs/tiny-nvfp4
    residua quantize runs/tiny --scheme nvfp4 --exempt "sublayers.1.*" --out runs/tiny-mixed
    residua quantize runs/plain --scheme nvfp4-static --out runs/plain-fp4 --engine served/plain

    With --engine, tensors that are not quantized are rounded to the dtype of that folder (bfloat16 for NVFP4, float32
    for FP8) before the loss is measured.

    Writes results.json, report.html and a checkpoint for residua.load and engines that read compressed-tensors.
    """
    import residua.quantize.run as work
    from residua.quantize.result import sentences
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
        say(console, sentence)
    say(console, f"\nReport: {(out / work.REPORT).resolve()}")
    if engine is not None:
        say(console, f"For serving engines: {engine}")
        if scheme == "nvfp4":
            say(
                console,
                "Serving engines scale the inputs per module instead of per token: --scheme nvfp4-static "
                "measures the loss that they will have.",
            )
    say(console, f"Next: residua eval {out}, or residua.load({str(out)!r}); numbers are in {out / work.RESULTS}")
