"""Export to Hugging Face format: a folder that transformers opens without Residua, and that Residua reads back."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from residua.errors import UserError
from residua.export.check import why_unchecked
from residua.export.folder import Precision, write_folder, write_layout
from residua.files import refuse_used
from residua.storage.card import OWN_CODE, PLAIN, Metadata, Trained, card_metadata, model_card
from residua.storage.checkpoint import model_tensors
from residua.storage.hugging_face import companions
from residua.storage.load import open_stored
from residua.storage.model_folder import PRECISIONS, open_tokenizer

RESIDUA = "residua"
SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]?)(i?)B", re.IGNORECASE)
SHARD = "5GB"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

__all__ = ["Exported", "export", "write_folder"]


class Exported(NamedTuple):
    """The result of an export, and how far the logits of its own code are from the model's.

    `difference` is None if the code was not run, for the reason in `unchecked`. `address` is the repository the folder
    was pushed to, `precision` the dtype in config.json.
    """

    folder: Path
    parameters: int
    difference: float | None
    address: str | None = None
    precision: str = "float32"
    unchecked: str | None = None


def export(
    run: str | Path,
    out: str | Path,
    which: Literal["last", "best"] = "last",
    precision: str | None = None,
    layout: str = RESIDUA,
    push_to: str | None = None,
    public: bool = False,
    max_shard_size: str = SHARD,
    metadata: Metadata | None = None,
) -> Exported:
    """Write the model of a run as a Hugging Face folder, with weights in `precision`.

    By default, weights keep their dtypes in `run`: float32 if it was trained here, else those of the imported model.
    `layout` is Residua's own, with its code, or a `model_type` of transformers that fits the model. `push_to` is a
    repository ORG/NAME of the Hugging Face Hub; a new one is private unless `public`. Weights are copied individually
    into files of `max_shard_size`. `metadata` goes into the card, ahead of the content of the model's own card.
    """
    run, out, shard = Path(run), Path(out), parse_size(max_shard_size)
    refuse_used(out)
    if push_to is not None:
        require_hub(push_to)
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision {precision} does not exist: choose {' or '.join(PRECISIONS)}.")
    if (run / "quantization.json").exists():
        raise UserError(f"{run} is quantized, but exports cannot be: export the run that it was made from.")
    metadata = card_metadata(run, (metadata or Metadata()).check())
    tokenizer = open_tokenizer(run)
    stored = open_stored(run, which)
    model = stored.model
    tokenizer.require_model(model.config.vocab_size, run)
    if precision is None:
        written = Precision.as_stored(stored.dtypes, model_tensors(model))
    else:
        written = Precision(PRECISIONS[precision])
    form = OWN_CODE if layout == RESIDUA else PLAIN
    card = model_card(model, push_to or out.name, Trained(run, which), form=form, metadata=metadata)
    unchecked = why_unchecked(model)
    check = unchecked is None
    if layout == RESIDUA:
        difference = write_folder(stored, tokenizer, out, written, check, companions(run), card, shard)
    else:
        difference = write_layout(stored, tokenizer, run, out, layout, written, card, check, shard)
    address = None if push_to is None else push(out, push_to, public=public)
    parameters = sum(p.numel() for p in model.parameters())
    return Exported(out, parameters, difference, address, written.name, unchecked)


def parse_size(text: str) -> int:
    """Parse `5GB` or `500 MiB` into bytes."""
    match, size = SIZE.fullmatch(text), 0
    if match is not None:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size < 1:
        raise UserError(f"--max-shard-size {text} is not a size: write 5GB or 500MB, for example.")
    return size


def require_hub(repository: str) -> None:
    """Refuse a push that cannot succeed, before anything is written."""
    if find_spec("huggingface_hub") is None:
        raise UserError("--push needs huggingface_hub: install residua[hf].")
    import huggingface_hub

    if not REPOSITORY.fullmatch(repository):
        raise UserError(
            f"--push {repository} is not a repository name: write ORG/NAME with letters, digits, -, _ or dots."
        )
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push {repository} needs a login at the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN."
        )


def push(folder: Path, repository: str, *, public: bool) -> str:
    """Upload a folder as one commit to a model repository, creating it if necessary; return its address."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by `residua export`")
    except OSError as error:  # the Hub refused the upload or was not reachable
        words = " ".join(str(error).split())
        raise UserError(
            f"{repository} was not uploaded ({words}): {folder} is complete, so upload it with `hf upload "
            f"{repository} {folder} .`."
        ) from None
    return str(address)
