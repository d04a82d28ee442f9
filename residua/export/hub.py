"""Sending an exported folder to the Hugging Face Hub."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from residua.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def require_hub(repository: str) -> None:
    """Refuse a push that cannot succeed, before anything is written."""
    if find_spec("huggingface_hub") is None:
        raise UserError("--push needs huggingface_hub: install residua[hf].")
    import huggingface_hub

    if not NAME.fullmatch(repository):
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
