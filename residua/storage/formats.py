"""Folder formats that packages above storage add to `load`, so that storage need not import them.

`residua/__init__.py` registers them. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

Reader = Callable[[Path], "Decoder"]
_READERS: dict[str, Reader] = {}


def register_format(mark: str, read: Reader) -> None:
    """Let `load` open every folder that holds a file called `mark` with `read`."""
    _READERS[mark] = read


def find_reader(folder: Path) -> Reader | None:
    """What reads a folder of a registered format; None for any other folder."""
    return next((read for mark, read in _READERS.items() if (folder / mark).exists()), None)
