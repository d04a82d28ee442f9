"""The run that a name stands for, and its way through torchtitan's configuration as text."""

from __future__ import annotations

import shlex
import tomllib

from residua.config.run import RunConfig
from residua.data.source import names_vocabulary, vocabulary


def find_run(name: str) -> RunConfig:
    """The run of `--config NAME`: a preset or a TOML file, followed by changes: "mini train.steps=50"."""
    source, *changes = shlex.split(name)
    config = RunConfig.find(source).override(changes)
    if names_vocabulary(source, changes):
        return config
    return config.override([f"model.vocab_size={vocabulary(config.data)}"])


def parse_run(text: str) -> RunConfig:
    """A run from what `RunConfig.to_toml` returned."""
    return RunConfig(**tomllib.loads(text))
