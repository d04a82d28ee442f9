"""Open the text of a run and check it against the model before anything is written."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from residua.config.run import DataConfig, RunConfig
from residua.config.settings import ConfigError, read_toml
from residua.data import Dataset, embedded
from residua.data.dataset import DESCRIPTION, TOKENIZER
from residua.data.pipeline import BPE, resolve_tokenizer, size_of
from residua.data.tokenizer import padded_vocabulary
from residua.reading import inside


def open_data(config: RunConfig) -> Dataset:
    """Open the dataset of a training run; refuse one with tokens that the model does not know."""
    dataset = find_data(config)
    check_vocabulary(config, dataset)
    return dataset


def check_vocabulary(config: RunConfig, dataset: Dataset) -> None:
    """Refuse text with tokens that the model does not know.

    A new model has all ids of the tokenizer. An initial model may lack some, if they do not occur in the text.
    """
    known, start = config.model.vocab_size, config.train.start
    if start is None and dataset.vocab_size > known:
        raise ConfigError(
            f"model.vocab_size = {known} is smaller than the {dataset.vocab_size} token ids of {dataset.path}: "
            f"set model.vocab_size={dataset.vocab_size} or more, or leave it out."
        )
    dataset.require_known(known, f"prepare text without it with --tokenizer {shlex.quote(f'{start}/{TOKENIZER}')}")


def find_data(config: RunConfig, *, progress: bool = True) -> Dataset:
    """Open the dataset that a configuration names, or prepare it from the embedded corpus, showing `progress`."""
    if config.data.path is not None:
        return _prepared(Path(config.data.path))
    if config.train.start is not None and config.data.tokenizer.startswith(BPE):
        start = Path(config.train.start)  # an import may lack its tokenizer; a BPE trained here would not fit
        if start.is_dir() and not inside(start, TOKENIZER).is_file():
            raise ConfigError(
                f"{start} has no {TOKENIZER}, so the embedded corpus cannot be tokenized for its model: give --data "
                "a folder prepared with the model's own tokenizer."
            )
    return embedded(config.data.tokenizer, progress=progress)


def vocabulary(data: DataConfig) -> int:
    """The vocabulary size of a model for this text: the number of token ids, padded. This does not prepare the text.

    The embedded corpus has enough text for a BPE of any usual size.
    """
    if data.path is not None:
        return padded_vocabulary(_prepared(Path(data.path)).vocab_size)
    ready = resolve_tokenizer(data.tokenizer)
    return padded_vocabulary(size_of(ready) if isinstance(ready, str) else ready.vocab_size)


def names_vocabulary(source: str, changes: Sequence[str]) -> bool:
    """Return whether a run's file, or a change to it, sets the model's vocabulary; else the text determines it."""
    overridden = any(change.replace(" ", "").startswith("model.vocab_size=") for change in changes)
    return overridden or (source.endswith(".toml") and "vocab_size" in read_toml(source).get("model", {}))


def _prepared(path: Path) -> Dataset:
    """Open the dataset that a configuration names; it may have been moved since."""
    if not (path / DESCRIPTION).exists():
        missing = "does not exist" if path.is_absolute() else f"does not exist in {Path.cwd()}"
        problem = f"is not a prepared dataset (it has no {DESCRIPTION})" if path.exists() else missing
        raise ConfigError(
            f"{path} {problem}: if it was moved, give --data DIR; otherwise make one with residua data prepare."
        )
    return Dataset.open(path)
