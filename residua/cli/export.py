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
    run: Annotated[Path, argument("A run of `residua train`.", metavar="RUN")],
    out: Annotated[Path, option("The folder to write; it must not exist, or be empty.")],
    checkpoint: Checkpoint = "last",
    precision: Annotated[
        str | None,
        option("Of the weights.", default="as stored: float32, or an import's own", metavar="float32|bfloat16"),
    ] = None,
    layout: Annotated[
        str, option("Residua's own with its code, or a model_type.", metavar="residua|llama|qwen3|...")
    ] = "residua",
    push: Annotated[
        str | None, option("Also send it to this repository of the Hugging Face Hub.", metavar="ORG/NAME")
    ] = None,
    public: Annotated[bool, option("With --push: a new repository is for everybody.", "--public")] = False,
    max_shard_size: Annotated[str, option("Of a file with weights.", metavar="SIZE")] = "5GB",
    license: Annotated[str | None, option("For the model card: of the weights.", default="the original's")] = None,
    base_model: Annotated[
        list[str] | None, option("For the model card: of the Hub.", default="the original's", metavar="ORG/NAME")
    ] = None,
    dataset: Annotated[
        list[str] | None, option("For the model card: of the Hub.", default="the run's", metavar="ORG/NAME")
    ] = None,
    language: Annotated[
        list[str] | None, option("For the model card.", default="the original's", metavar="en|de|...")
    ] = None,
) -> None:
    """Write a trained model as a Hugging Face folder that transformers opens without Residua.

    \b
    residua export runs/tiny --out exported/tiny
    residua export runs/wiki --out exported/wiki --checkpoint best --precision bfloat16
    residua export runs/llama --out exported/llama --layout llama
    residua export runs/tiny --out exported/tiny --push me/tiny --license apache-2.0 --language en

    The folder holds safetensors, configuration, tokenizer, a model card and modelling
    code: copies of Residua's own files, those of the parts that this model has. The code
    is run and compared with the model before the folder gets its name. With --layout
    there is no code: the model is written as one of transformers' own, if it is one.
    Without --precision, an imported model keeps the dtypes that its weights are stored in,
    and a model that was trained here is written in float32.
    --push makes a private repository if there is none. Weights are copied one by one, so a
    model may be larger than the memory; its code is then not run.
    """
    if public and push is None:
        raise UserError("--public says who may see what is pushed: name the repository with --push ORG/NAME.")
    from residua.export import export as write
    from residua.reading import counted
    from residua.report.terminal import open_console
    from residua.storage.card import Metadata

    console = open_console(log_width=None)
    with console.status("writing the folder and running its code"):
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
        return f"Its code was not run: {exported.unchecked}."
    return f"{whose} code was run: logits differ from the model's by {exported.difference:.1e} of the largest."
