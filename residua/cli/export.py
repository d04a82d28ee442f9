"""`residua export`: write a trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import CHECKPOINTS, Checkpoint, require_choice
from residua.errors import UserError

if TYPE_CHECKING:
    from typing import Literal

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of `residua train`.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist, or be empty.")],
    checkpoint: Checkpoint = "last",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16",
            show_default="as stored: float32, or an import's own",
            help="Of the weights.",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(metavar="residua|llama|qwen3|...", help="Residua's own with its code, or a model_type.")
    ] = "residua",
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Also send it to this repository of the Hugging Face Hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is for everybody.")] = False,
) -> None:
    """Write a trained model as a Hugging Face folder that transformers opens without Residua.

    \b
    residua export runs/tiny --out exported/tiny
    residua export runs/wiki --out exported/wiki --checkpoint best --precision bfloat16
    residua export runs/llama --out exported/llama --layout llama
    residua export runs/tiny --out exported/tiny --push me/tiny

    The folder holds safetensors, configuration, tokenizer, a model card and modelling
    code: copies of Residua's own files, those of the parts that this model has. The code
    is run and compared with the model before the folder gets its name. With --layout
    there is no code: the model is written as one of transformers' own, if it is one.
    Without --precision, an imported model keeps the dtypes that its weights are stored in,
    and a model that was trained here is written in float32.
    --push makes a private repository if there is none.
    """
    if public and push is None:
        raise UserError("--public says who may see what is pushed: name the repository with --push ORG/NAME.")
    require_choice("--checkpoint", checkpoint, CHECKPOINTS)
    from residua.export import export as write
    from residua.reading import counted
    from residua.report.terminal import open_console

    console = open_console(log_width=None)
    with console.status("writing the folder and running its code"):
        made = write(run, out, cast("Literal['last', 'best']", checkpoint), precision, layout, push, public)
    files = len(list(out.glob("*.py")))
    code = f"{counted(files, 'file')} of modelling code" if files else f"as a {layout} model"
    console.print(f"{out}: {made.parameters:,} parameters in {made.precision}, {code}.", soft_wrap=True)
    console.print(_checked(made.difference, "Its own" if files else "transformers'"), soft_wrap=True)
    if made.address is not None:
        console.print(f"Pushed to {made.address}.", soft_wrap=True, markup=False)
    console.print("Next, in any Python with transformers:", markup=False)
    trust = ", trust_remote_code=True" if files else ""
    console.print(f'    AutoModelForCausalLM.from_pretrained("{out}"{trust})', soft_wrap=True, markup=False)
    console.print(f"or here: residua generate {out} --prompt TEXT", soft_wrap=True, markup=False)


def _checked(difference: float | None, whose: str) -> str:
    if difference is None:
        return "Its code was not run: install transformers (residua[hf]) to check it."
    return f"{whose} code was run: logits differ from the model's by {difference:.1e} of the largest."
