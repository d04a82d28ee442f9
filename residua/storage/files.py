"""Files that are either whole or absent, whenever the power fails."""

from __future__ import annotations

import os
from pathlib import Path

UNFINISHED = ".unfinished-"


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file as a whole, or leave the old one as it was."""
    temporary = path.with_name(f"{UNFINISHED}{path.name}")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
