"""The text that the model of a folder is measured on, in its own tokens."""

from __future__ import annotations

import shlex
from pathlib import Path

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.dataset import TOKENIZER
from residua.data.source import find_data
from residua.data.tokenizer import SOURCE
from residua.errors import UserError
from residua.reading import inside
from residua.storage.load import own_tokenizer
from residua.storage.opening import has_tokenizer, open_tokenizer


def open_text(folder: Path, model: ModelConfig, data: Path | None) -> tuple[Dataset, RunConfig]:
    """The text of a run, or the prepared text `data`, and the run's configuration with it.

    An imported run has no text of its own: the embedded corpus is cut into its tokens. Text in other tokens than those
    of the folder's tokenizer is refused, and so is an export without `data`, which does not name its text.
    """
    recorded, tokenizer = inside(folder, "config.toml"), inside(folder, TOKENIZER)
    if data is None and not recorded.exists():
        raise UserError(f"{folder} does not record its training text: name prepared text with --data.")
    if data is None and inside(folder, SOURCE).is_dir():
        open_tokenizer(folder)  # refuses a folder without one
    config = RunConfig.from_toml(recorded) if recorded.exists() else RunConfig(model=model)
    own = own_tokenizer(folder)
    changes = ({} if own is None else {"tokenizer": str(own)}) | ({} if data is None else {"path": str(data)})
    config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    dataset = find_data(config) if data is None else Dataset.open(data)
    named = shlex.quote(str(tokenizer))
    known = open_tokenizer(folder).hash if has_tokenizer(folder) else dataset.tokenizer_hash
    if dataset.tokenizer_hash != known:
        text = "the embedded corpus" if config.data.path is None else dataset.path
        raise ConfigError(
            f"{text} is in other tokens than those that the model in {folder} knows: name text with --data that was "
            f"prepared with --tokenizer {named}."
        )
    dataset.require_known(model.vocab_size, f"name text without it with --data, prepared with --tokenizer {named}")
    return dataset, config
