"""`residua export`: write a trained model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import Checkpoint, argument, option, say
from residua.errors import UserError

if TYPE_CHECKING:
    from typing import Literal

    from residua.export import Exported

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def export(
    run: Annotated[Path, argument("A run folder written by `residua train`.", metavar="RUN")],
    out: Annotated[Path, option("The folder to write; must be new or empty.")],
    checkpoint: Checkpoint = "last",
    precision: Annotated[
        str | None,
        option(
            "Type of the weights.",
            default="as stored: float32, or that of an imported model",
            metavar="float32|bfloat16",
        ),
    ] = None,
    layout: Annotated[
        str,
        option(
            "Residua's own layout with its code, or the model_type of a known family.",
            metavar="residua|llama|qwen3|...",
        ),
    ] = "residua",
    push: Annotated[
        str | None, option("Also upload it to this repository on the Hugging Face Hub.", metavar="ORG/NAME")
    ] = None,
    public: Annotated[bool, option("With --push: make a new repository public.", "--public")] = False,
    max_shard_size: Annotated[str, option("Largest size of a weights file.", metavar="SIZE")] = "5GB",
    license: Annotated[
        str | None, option("License of the weights, for the model card.", default="the original's")
    ] = None,
    base_model: Annotated[
        list[str] | None,
        option("Base model on the Hub, for the model card.", default="the original's", metavar="ORG/NAME"),
    ] = None,
    dataset: Annotated[
        list[str] | None, option("Dataset on the Hub, for the model card.", default="the run's", metavar="ORG/NAME")
    ] = None,
    language: Annotated[
        list[str] | None,
        option("Language of the text, for the model card.", default="the original's", metavar="en|de|..."),
    ] = None,
) -> None:
    """Write a trained model as a Hugging Face folder that transformers loads without Residua.

    \b
    residua export runs/tiny --out exported/tiny
    residua export runs/wiki --out exported/wiki --checkpoint best --precision bfloat16
    residua export runs/llama --out exported/llama --layout llama
    residua export runs/tiny --out exported/tiny --push me/tiny --license apache-2.0 --language en

    The folder has safetensors, the configuration, the tokenizer, a model card and modelling
    code: copies of the Residua files that this model needs. Before the folder appears under
    its name, the code is run and its outputs are compared with the model's. --layout writes
    a model of a family that transformers knows, without code. Without --precision, an
    imported model keeps its dtypes, and a model trained here is written in float32. --push
    creates a private repository if needed. Weights are copied one by one, so the model may
    be larger than memory; its code is then not tested.
    """
    if public and push is None:
        raise UserError("--public needs --push: name the repository with --push ORG/NAME.")
    from residua.export import export as write
    from residua.reading import counted
    from residua.report.terminal import open_console
    from residua.storage.card import Metadata

    console = open_console(log_width=None)
    with console.status("writing the folder and testing its code"):
        lists = (tuple(names or ()) for names in (license and [license], base_model, dataset, language))
        exported = write(
            run, out, cast("Literal['last', 'best']", checkpoint), precision, layout, push, public, max_shard_size,
            Metadata(*lists),
        )  # fmt: skip
    files = len(list(out.glob("*.py")))
    code = f"{counted(files, 'file')} of modelling code" if files else f"as a {layout} model"
    say(console, f"{out}: {exported.parameters:,} parameters in {exported.precision}, {code}.")
    say(console, _checked(exported, "Its own" if files else "transformers'"))
    if exported.address is not None:
        say(console, f"Pushed to {exported.address}.")
    console.print("Next, in any Python with transformers:", markup=False)
    trust = ", trust_remote_code=True" if files else ""
    say(console, f'    AutoModelForCausalLM.from_pretrained("{push or out}"{trust})')
    say(console, f"or here: residua generate {out} --prompt TEXT")


def _checked(exported: Exported, whose: str) -> str:
    if exported.difference is None:
        return f"The exported code was not tested: {exported.unchecked}."
    return f"{whose} code was run: logits differ from the model's by {exported.difference:.1e} of the largest."
