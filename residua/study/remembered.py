"""A study's folder remembers the results file that it was extended by, so that the folder's name is enough to go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from residua.files import write_atomically
from residua.reading import ReadError, Shape, inside, read_json
from residua.study.plan import EXTENDED


class _Content(Shape):
    results: str


def remember_results(out: Path, results: Path | None) -> None:
    """Write into a study's folder where its results file is, seen from the folder; without one, forget an earlier."""
    if results is None:
        (out / EXTENDED).unlink(missing_ok=True)
        return
    content = {"results": os.path.relpath(results.resolve(), out.resolve())}
    write_atomically(out / EXTENDED, json.dumps(content) + "\n", parents=True)


def remembered_results(out: Path) -> Path | None:
    """The results file that the study of a folder was extended by, which may be gone; None if there was none."""
    try:
        written = read_json(inside(out, EXTENDED), _Content, "").results
    except ReadError:
        return None
    return Path(os.path.relpath(out.resolve() / written))
