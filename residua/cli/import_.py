"""`residua import`: convert a Hugging Face model, or an export, to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from residua.cli.options import argument, option, say

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def import_(
    folder: Annotated[Path, argument("A local Hugging Face model folder, or an export.", metavar="HF_FOLDER")],
    out: Annotated[Path, option("The run folder to write; must be new or empty.")],
) -> None:
    """Convert a Hugging Face model to a run: Llama, Mistral, Qwen, OLMo, Gemma, Mixtral and others.

    A folder written by `residua export` becomes a run again, even after training with other tools.

    \b
    residua import models/Qwen3-0.6B --out runs/qwen3
    residua diagnose runs/qwen3 --text book.txt
    residua export runs/qwen3 --out exported/qwen3 --layout qwen3

    Weights keep their precision and are copied tensor by tensor, so the import needs little
    more memory than the largest matrix. Tokenizer, chat template and generation settings are
    copied too. A model with a part that Residua cannot compute is refused, naming the part.
    """
    from residua.report.terminal import open_console
    from residua.storage.hugging_face import import_folder

    console = open_console(log_width=None)
    with console.status("copying weights"):
        imported = import_folder(folder, out)
    size = f"{imported.bytes / 2**30:.2f} GiB"
    say(console, f"{out}: {imported.parameters:,} parameters of a {imported.model_type} model, {size}.")
    if not imported.has_tokenizer:
        say(
            console,
            f"{folder} has no tokenizer.json: save one with AutoTokenizer of transformers and put it into {out}.",
        )
    say(console, f"Next: residua generate {out} --prompt TEXT")
    say(console, f"or:   residua diagnose {out}")
