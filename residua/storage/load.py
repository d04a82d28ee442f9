"""A model from any folder that Residua writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


def load(folder: str | Path, which: Literal["last", "best"] = "last") -> Decoder:
    """The trained model of a run folder, on the CPU: its last checkpoint or the best one on the validation set.

    A folder made by `residua export` holds one model; one made by `residua quantize` gives a model that computes in
    that precision. Nothing in a folder is executed.
    """
    folder = Path(folder)
    if (folder / "quantization.json").exists():
        from residua.quantize.store import load_quantized

        return load_quantized(folder)
    if (folder / "config.json").exists() and not (folder / "config.toml").exists():
        from residua.storage.exported import load_folder

        return load_folder(folder)
    from residua.storage.checkpoint import load_model

    return load_model(folder, which)
