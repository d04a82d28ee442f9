"""`residua import`: make a run of a model that transformers trained or downloaded, or of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from residua.cli.options import argument, option, say

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def import_(
    folder: Annotated[Path, argument("A local Hugging Face model, or an export.", metavar="HF_FOLDER")],
    out: Annotated[Path, option("The run folder to write; it must not exist, or be empty.")],
) -> None:
    """Make a run of a Hugging Face model: Llama, Mistral, Qwen, OLMo, Gemma, Mixtral and others.

    A folder of `residua export` becomes a run again, also after other tools have trained it.

    \b
    residua import models/Qwen3-0.6B --out runs/qwen3
    residua diagnose runs/qwen3 --text book.txt
    residua export runs/qwen3 --out exported/qwen3 --layout qwen3

    Weights keep their precision and are copied tensor by tensor, so a model needs
    little more memory than its largest matrix. Tokenizer, chat template and
    generation settings come along. What Residua cannot compute is refused by name.
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
            console, f"{folder} has no tokenizer.json: save one with transformers' AutoTokenizer and put it into {out}."
        )
    say(console, f"Next: residua generate {out} --prompt TEXT")
    say(console, f"or:   residua diagnose {out}")
