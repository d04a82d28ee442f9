"""`residua export`: hand a trained model to the tools people already have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from typing import Literal

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of `residua train`.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist, or be empty.")],
    checkpoint: Annotated[str, typer.Option(metavar="last|best", help="Which checkpoint of the run.")] = "last",
    precision: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the weights.")] = "float32",
) -> None:
    """Write a trained model as a Hugging Face folder that transformers opens without Residua.

    \b
    residua export runs/tiny --out exported/tiny
    residua export runs/wiki --out exported/wiki --checkpoint best --precision bfloat16

    The folder holds safetensors, configuration, tokenizer and modelling code made
    from Residua's own source for exactly the parts this model uses. Its code is run
    and compared with the model before the folder gets its name.
    """
    if checkpoint not in ("last", "best"):
        raise ValueError(f"--checkpoint {checkpoint} does not exist: choose last or best.")
    from rich.console import Console

    from residua.export import export as write

    console = Console(highlight=False)
    with console.status("writing the folder and running its code"):
        made = write(run, out, cast("Literal['last', 'best']", checkpoint), precision)
    lines = len((out / "modeling_residua.py").read_text(encoding="utf-8").splitlines())
    console.print(
        f"{out}: {made.parameters:,} parameters in {precision}, {lines} lines of modelling code.", soft_wrap=True
    )
    console.print(_checked(made.difference), soft_wrap=True)
    console.print("Next, in any Python with transformers:", markup=False)
    console.print(
        f'    AutoModelForCausalLM.from_pretrained("{out}", trust_remote_code=True)', soft_wrap=True, markup=False
    )
    console.print(f"or here: residua generate {out} --prompt TEXT", soft_wrap=True, markup=False)


def _checked(difference: float | None) -> str:
    if difference is None:
        return "Its code was not run: install transformers (residua[hf]) to have it checked."
    return f"Its own code was run: logits differ from the model's by {difference:.1e} of the largest."
