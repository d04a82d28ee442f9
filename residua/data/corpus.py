"""A corpus: parts that hold documents, and the rule that holds documents out for validation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from residua.data.readers import (
    FOUND_IN_FOLDERS,
    LINES_OF_JSON,
    DataError,
    Documents,
    files_in,
    read_file,
    read_hub,
    split_suffix,
)

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Part:
    """One file or one stream; `size` in bytes is None for a stream.

    `split` is the split of its documents; with None, a hash of each document decides.
    """

    name: str
    size: int | None
    read: Callable[[], Documents]
    split: str | None = None
    version: str = ""


class Document(NamedTuple):
    """A text, its length in UTF-8 bytes, its split, and the bytes of the corpus read so far."""

    text: str
    bytes: int
    split: str
    position: int


@dataclass(frozen=True)
class Corpus:
    """Parts read in order.

    `holdout` is the share of documents held out for validation, chosen by a hash of their text. Reading ends after the
    document that reaches `limit` bytes of text; validation parts do not count.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    holdout: float = 0.0
    limit: int | None = None

    @property
    def size(self) -> int | None:
        """The final value of `Document.position`; None if a stream makes it unknown."""
        return self.limit or _sum(part.size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over name, size, version and split of every part, the share held out and the limit."""
        identity = [(part.name, part.size, part.version, part.split) for part in self.parts]
        return hashlib.sha256(repr((identity, self.holdout, self.limit)).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """All documents that are not blank, each with its split.

        The document with the lowest hash comes last. If nothing was held out by then, it goes to validation, so that
        even a corpus of a few documents has a validation split.
        """
        lowest: tuple[float, Document] | None = None
        split_of_lowest = VALIDATION if self.holdout else TRAIN
        for hashed, document in self._hashed():
            if hashed is None:
                yield document
            elif hashed < self.holdout:
                split_of_lowest = TRAIN
                yield document._replace(split=VALIDATION)
            elif lowest is None or hashed < lowest[0]:
                if lowest is not None:
                    yield lowest[1]
                lowest = hashed, document
            else:
                yield document
        if lowest is not None:
            yield lowest[1]._replace(split=split_of_lowest)

    def _hashed(self) -> Iterator[tuple[float | None, Document]]:
        before, taken = 0, 0
        for part in self.parts:
            for text, position in part.read():
                if not text.strip():
                    continue
                text, data = _valid(text)
                hashed = unit_hash(data) if part.split is None else None
                taken += len(data) if part.split != VALIDATION else 0
                reached = before + position if self.limit is None else min(taken, self.limit)
                yield hashed, Document(text, len(data), part.split or TRAIN, reached)
                if self.limit is not None and taken >= self.limit:
                    return
            before += part.size or 0

    def sample(self, limit: int) -> Iterator[str]:
        """About `limit` bytes of training text: the beginning of each part, in proportion to its size."""
        limit = min(limit, self.limit or limit)
        total = _sum(part.size for part in self.parts)
        for part in self.parts:
            if part.split == VALIDATION:
                continue
            left = limit * part.size / total if part.size and total else limit
            for text, _ in part.read():
                text, data = _valid(text)
                if part.split is None and unit_hash(data) < self.holdout:
                    continue
                yield text
                left -= len(data)
                if left <= 0:
                    break


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)


def unit_hash(data: bytes) -> float:
    """Hash `data` to a number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def _valid(text: str) -> tuple[str, bytes]:
    """The text and its UTF-8. A lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD."""
    try:
        return text, text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text, text.encode()


def open_corpus(
    sources: Sequence[str | Path],
    *,
    field: str = "text",
    validation: str | Path | None = None,
    holdout: float = 0.01,
    limit: int | None = None,
) -> Corpus:
    """The corpus of files, folders or Hugging Face dataset names (`org/name` or `org/name:config`).

    With `validation` (a source like the others) nothing is held out of `sources`; otherwise the share `holdout`
    of the documents is, chosen by a hash of the text: equal texts always land on the same side. `limit` is the
    number of bytes of text to read, for a first part of a large corpus.
    """
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}: the share held out for validation must be at least 0 and below 1")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}: the bytes of text to read must be at least 1")
    names = tuple(str(source) for source in sources)
    if validation is None:
        return Corpus(names, tuple(_parts(names, field, None)), holdout, limit)
    # First, so that a limit cannot end the reading before the validation text.
    parts = [*_parts([str(validation)], field, VALIDATION), *_parts(names, field, TRAIN)]
    return Corpus(names, tuple(parts), limit=limit)


def _parts(names: Iterable[str], field: str, split: str | None) -> Iterator[Part]:
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = files_in(path)
            if not files:
                known = ", ".join(sorted(FOUND_IN_FOLDERS))
                raise DataError(f"the folder {name} holds no text: no file in it ends in one of {known}")
            yield from (_file_part(file, field, split) for file in files)
        elif path.exists():
            yield _file_part(path, field, split)
        else:
            yield _hub_part(name, field, split)


def _file_part(path: Path, field: str, split: str | None) -> Part:
    about = path.stat()
    return Part(
        str(path.resolve()), about.st_size, lambda: read_file(path, field), split, f"{about.st_mtime_ns}:{field}"
    )


def _hub_part(name: str, field: str, split: str | None) -> Part:
    parsed = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?", name)
    suffix, compression = split_suffix(Path(name))
    if parsed is None or name.startswith(".") or compression or suffix in {*FOUND_IN_FOLDERS, *LINES_OF_JSON}:
        raise DataError(f"there is no file or folder {name}")
    repository, config = parsed.groups()
    if config is None and Path(name).parent.is_dir():
        raise DataError(
            f"there is no file or folder {name} (for a dataset of Hugging Face, since the folder {Path(name).parent} "
            f"is here, write {name}:CONFIG)"
        )
    return Part(name, None, lambda: read_hub(repository, config, field), split, field)
