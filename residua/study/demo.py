"""The study that comes with Residua: four tiny models on the embedded corpus, no network, no GPU."""

from __future__ import annotations

from pathlib import Path


def demo_file() -> Path:
    """The study file of `residua compare --demo`."""
    return Path(__file__).with_name("demo.toml")
