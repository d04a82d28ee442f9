"""Export to Hugging Face format: a folder that transformers opens without Residua, and that Residua reads back."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from residua.errors import UserError
from residua.export.card import Trained, model_card
from residua.export.folder import Precision, write_folder, write_layout
from residua.files import refuse_used
from residua.storage.checkpoint import model_tensors
from residua.storage.hugging_face import companions
from residua.storage.load import weight_dtypes
from residua.storage.model_folder import PRECISIONS, open_model

RESIDUA = "residua"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

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
        difference = write_folder(model, tokenizer, out, written, extras=companions(run), card=card)
    else:
        difference = write_layout(model, tokenizer, run, out, layout, written, card)
    address = None if push_to is None else push(out, push_to, public=public)
    return Exported(out, sum(p.numel() for p in model.parameters()), difference, address, written.name)


def require_hub(repository: str) -> None:
    """Refuse a push that cannot succeed, before anything is written."""
    if find_spec("huggingface_hub") is None:
        raise UserError("--push needs huggingface_hub: install residua[hf].")
    import huggingface_hub

    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"--push {repository} names no repository: write ORG/NAME with letters, digits, -, _ or dots.")
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push {repository} needs a login at the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, repository: str, *, public: bool) -> str:
    """Upload a folder as one commit to a model repository, which is made if it is not there; returns its address."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by `residua export`")
    except OSError as error:  # refused by the Hub, or not reached
        words = " ".join(str(error).split())
        raise UserError(
            f"{repository} was not written ({words}): {folder} is complete, send it with "
            f"`hf upload {repository} {folder} .`."
        ) from None
    return str(address)
