"""Export to Hugging Face format: a folder that transformers opens without Residua, and that Residua reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from residua.export.folder import write_folder
from residua.export.layout import write_layout
from residua.files import refuse_used
from residua.reading import inside
from residua.storage.imported import SOURCE
from residua.storage.opening import PRECISIONS, open_model

RESIDUA = "residua"

__all__ = ["Exported", "export", "write_folder"]


class Exported(NamedTuple):
    """What was written, and how far the logits of its own code are from the model's (None if it could not be run)."""

    folder: Path
    parameters: int
    difference: float | None


def export(
    run: str | Path,
    out: str | Path,
    which: Literal["last", "best"] = "last",
    precision: str = "float32",
    layout: str = RESIDUA,
) -> Exported:
    """Write the model of a run as a Hugging Face folder; `precision` is that of the weights in it.

    `layout` is Residua's own, with its code, or a `model_type` of transformers that fits the model.
    """
    run, out = Path(run), Path(out)
    refuse_used(out)
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision} does not exist: choose {' or '.join(PRECISIONS)}.")
    if (run / "quantization.json").exists():
        raise ValueError(f"{run} is quantized, and exports are not: export the run that it was made from.")
    model, tokenizer = open_model(run, which, as_trained=True)
    dtype = PRECISIONS[precision]
    if layout == RESIDUA:
        template = inside(run, f"{SOURCE}/chat_template.jinja")
        difference = write_folder(model, tokenizer, out, dtype, chat_template=template if template.is_file() else None)
    else:
        difference = write_layout(model, tokenizer, run, out, layout, dtype)
    return Exported(out, sum(p.numel() for p in model.parameters()), difference)
