"""Names of a run's files, and folder formats that higher-level packages add to `load`.

`residua/__init__.py` registers the formats, so storage need not import them. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.toml", "environment.json", "metrics.jsonl", "result.json"
"""Files of a run's folder."""
WEIGHTS = "model.safetensors"
"""The weights of a checkpoint, or of a model without checkpoints."""

Reader = Callable[[Path], "Decoder"]
_READERS: dict[str, Reader] = {}


def register_format(mark: str, read: Reader) -> None:
    """Let `load` open every folder that holds a file called `mark` with `read`."""
    _READERS[mark] = read


def find_reader(folder: Path) -> Reader | None:
    """The reader for a folder of a registered format; None for any other folder."""
    return next((read for mark, read in _READERS.items() if (folder / mark).exists()), None)
