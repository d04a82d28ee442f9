"""What a Hugging Face folder holds beside weights and tokenizer: the chat template, the tokenizer's and generation
settings.

An imported run keeps them in `source/`, and so does every run that begins with its weights. Exports give them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residua.data.tokenizer import SOURCE
from residua.files import write_atomically
from residua.reading import inside, read_json, read_text
from residua.storage.imported import KEPT

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
END_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def companions(folder: Path) -> dict[str, Path]:
    """These files of a model folder by name: of a run those in `source/`, of any other folder its own."""
    place = f"{SOURCE}/" if inside(folder, "config.toml").exists() or inside(folder, SOURCE).is_dir() else ""
    files = {name: inside(folder, place + name) for name in KEPT}
    return {name: path for name, path in files.items() if path.is_file()}


def keep_companions(start: Path, folder: Path) -> None:
    """Copy those of a model to the `source/` of a run or dump folder, so that its exports have them too."""
    for name, found in companions(start).items():
        target = folder / SOURCE / name
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            write_atomically(target, read_text(found, "import the model again"))


def read_companion(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """The content of one of them; empty if it is not there."""
    hint = "import or download the model again"
    return read_json(files[name], dict[str, Any], hint, lenient=True) if name in files else {}


def end_ids(files: Mapping[str, Path]) -> dict[str, Any]:
    """The ids that begin, end and pad a text, as config.json has them: one id, or several that end it."""
    keys = read_companion(files, CONFIG)
    return {name: keys[name] for name in END_TOKENS if keys.get(name) is not None}


def stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text by the generation settings of a folder; a chat model may have several."""
    ids = read_companion(companions(folder), GENERATION).get("eos_token_id")
    return frozenset(number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int)
