"""Export to Hugging Face format: a folder that transformers opens without Residua, and that Residua reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from residua.errors import UserError
from residua.export.card import Trained, model_card
from residua.export.folder import write_folder
from residua.export.hub import push, require_hub
from residua.export.layout import write_layout
from residua.export.precision import Precision
from residua.files import refuse_used
from residua.storage.checkpoint import model_tensors
from residua.storage.companions import companions
from residua.storage.load import weight_dtypes
from residua.storage.opening import PRECISIONS, open_model

RESIDUA = "residua"

__all__ = ["Exported", "export", "write_folder"]


class Exported(NamedTuple):
    """What was written, and how far the logits of its own code are from the model's (None if it could not be run).

    `address` is where it was pushed to, `precision` the dtype that config.json names.
    """

    folder: Path
    parameters: int
    difference: float | None
    address: str | None = None
    precision: str = "float32"


def export(
    run: str | Path,
    out: str | Path,
    which: Literal["last", "best"] = "last",
    precision: str | None = None,
    layout: str = RESIDUA,
    push_to: str | None = None,
    public: bool = False,
) -> Exported:
    """Write the model of a run as a Hugging Face folder; `precision` is that of the weights in it.

    Without it, weights keep the dtypes that they have in `run`: float32 if it was trained here, else those of the
    model that was imported.
    `layout` is Residua's own, with its code, or a `model_type` of transformers that fits the model. `push_to` is a
    repository ORG/NAME of the Hugging Face Hub; one that is new is private unless `public`.
    """
    run, out = Path(run), Path(out)
    refuse_used(out)
    if push_to is not None:
        require_hub(push_to)
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision {precision} does not exist: choose {' or '.join(PRECISIONS)}.")
    if (run / "quantization.json").exists():
        raise UserError(f"{run} is quantized, and exports are not: export the run that it was made from.")
    model, tokenizer = open_model(run, which, as_trained=True)
    if precision is None:
        written = Precision.as_stored(weight_dtypes(run, which), model_tensors(model))
    else:
        written = Precision(PRECISIONS[precision])
    card = model_card(model, push_to or out.name, Trained(run, which), own_code=layout == RESIDUA)
    if layout == RESIDUA:
        difference = write_folder(model, tokenizer, out, written, kept=companions(run), card=card)
    else:
        difference = write_layout(model, tokenizer, run, out, layout, written, card)
    address = None if push_to is None else push(out, push_to, public=public)
    return Exported(out, sum(p.numel() for p in model.parameters()), difference, address, written.name)
