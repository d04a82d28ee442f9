"""The embedded corpus: Python's standard library, which every machine has.

Module sources, and the reference prose of `help()` (`pydoc_data.topics`); about 10 MB. Each file and each topic
belongs to train or validation as a whole, by a hash of its path.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from residua.data.corpus import TRAIN, VALIDATION, Corpus, unit_hash
from residua.data.dataset import FORMAT_VERSION, Dataset
from residua.data.parts import Part
from residua.data.pipeline import prepare, resolve_tokenizer, tokenizer_identity
from residua.data.readers import DataError, Documents
from residua.reading import reason

HOLDOUT = 0.08
# Tests, installed packages, tables of code points, and parts that some distributions omit.
EXCLUDED = {
    "__phello__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


def standard_library() -> Corpus:
    """The standard library of the running Python as a corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = [*_modules(root), *_topics()]
    if not parts:
        raise DataError(f"no sources of the Python standard library are under {root}: name a SOURCE of your own")
    return Corpus((f"python-{platform.python_version()}",), tuple(parts))


def _modules(root: Path) -> Iterator[Part]:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in EXCLUDED and not name.startswith((".", "config-")))
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                name = path.relative_to(root).as_posix()
                yield Part(name, path.stat().st_size, partial(_module, path), _split(name))


def _topics() -> Iterator[Part]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return
    for topic, text in sorted(topics.items()):
        name, size = f"topics/{topic}", len(text.encode())
        yield Part(name, size, partial(iter, [(text, size)]), _split(name))


def _split(name: str) -> str:
    return VALIDATION if unit_hash(name.encode()) < HOLDOUT else TRAIN


def _module(path: Path) -> Documents:
    try:
        with tokenize.open(path) as file:  # obeys the encoding that a module declares
            yield file.read(), path.stat().st_size
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error


def cache_folder() -> Path:
    """The folder for prepared corpora: `$RESIDUA_CACHE`, else `residua` in the user's cache folder."""
    if chosen := os.environ.get("RESIDUA_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "residua"


def embedded(tokenizer: str = "bpe:1024", *, progress: bool = False) -> Dataset:
    """Open the standard library as a dataset, prepared on first use (seconds) and cached in `cache_folder()`.

    `tokenizer` is as for `--tokenizer`: `bytes`, `bpe:N`, or a tokenizer's path. The folder's name depends on the
    sources and the tokenizer. Two processes may prepare it at the same time; both get the same dataset.
    """
    corpus, ready = standard_library(), resolve_tokenizer(tokenizer)
    key = json.dumps([FORMAT_VERSION, corpus.fingerprint, tokenizer_identity(ready)])
    name = f"{corpus.names[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    path = cache_folder() / "datasets" / name
    try:
        return prepare(corpus, path, ready, progress=progress)
    except ValueError as error:
        if not path.exists():
            raise
        problem = str(error).rstrip(".")
        raise DataError(f"{problem}; this is the cached corpus: delete {path} to rebuild it") from error
