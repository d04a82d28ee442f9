"""A corpus: parts that hold documents, and the rule that holds documents out for validation."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
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
HOLDOUT = 0.01
LEAST_HELD_OUT = 32_768
"""Bytes of text that are held out at least when no share is given, but at most a tenth of the text."""
# Of more documents than this, chosen by their hash, the held-out ones are close enough to their share of the text.
_FEW_DOCUMENTS, _FEW_BYTES = 1000, 256_000_000
_LEAST_PIECE = 1024


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


Hashed = tuple[float | None, Document]
"""A document and its hash in [0, 1); None if its part decides its split."""


@dataclass(frozen=True)
class Corpus:
    """Parts read in order.

    `holdout` is the share of the text held out for validation, and `least` how many bytes at least (but at most a tenth
    of the text). Documents are chosen by a hash of their text. Reading ends after the document that reaches `limit`
    bytes of text; validation parts do not count. `left_out` are files of folders that are not read because of their
    suffix.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    holdout: float = 0.0
    limit: int | None = None
    least: int = 0
    left_out: tuple[Path, ...] = ()

    @property
    def size(self) -> int | None:
        """The final value of `Document.position`; None if a stream makes it unknown."""
        return self.limit or _sum(part.size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over name, size, version and split of every part, what is held out and the limit."""
        identity = [(part.name, part.size, part.version, part.split) for part in self.parts]
        rule = (self.holdout, self.limit, "by size", self.least) if self.holdout else (self.holdout, self.limit)
        return hashlib.sha256(repr((identity, *rule)).encode()).hexdigest()

    @property
    def twice(self) -> str | None:
        """A file or stream that is both training and validation text."""
        held_out = {part.name for part in self.parts if part.split == VALIDATION}
        return next((part.name for part in self.parts if part.split != VALIDATION and part.name in held_out), None)

    def documents(self) -> Iterator[Document]:
        """All documents that are not blank, each with its split.

        A document is held out if its hash is below the share. If the documents are few and this gives less than half or
        more than twice the share of the text, whole documents in order of their hash are held out as long as they fit,
        and if that is less than half of it, the end of the next one.
        """
        hashed = self._hashed()
        first = _beginning(hashed) if self.holdout else []
        following = next(hashed, None)
        if following is None and first and not self._is_even(first):
            yield from self._by_size(first)
        else:
            yield from self._by_hash(chain(first, [] if following is None else [following], hashed))

    def _few_training_texts(self) -> list[str] | None:
        """The training texts if they are chosen by size."""
        if not self.holdout or self.size is None:
            return None
        hashed = self._hashed()
        first = _beginning(hashed)
        if next(hashed, None) is not None or not first or self._is_even(first):
            return None
        return [document.text for document in self._by_size(first) if document.split == TRAIN]

    def _wanted(self, total: int) -> float:
        """Bytes to hold out of so many."""
        return max(self.holdout * total, min(self.least, total / 10))

    def _is_even(self, documents: Sequence[Hashed]) -> bool:
        """Whether the hash alone holds out half to twice the share."""
        sizes = [(hashed < self.holdout, document.bytes) for hashed, document in documents if hashed is not None]
        held, wanted = sum(size for chosen, size in sizes if chosen), self._wanted(sum(size for _, size in sizes))
        return wanted / 2 <= held <= wanted * 2

    def _by_size(self, documents: Sequence[Hashed]) -> Iterator[Document]:
        """Few documents, in their order; one of them may be divided, and all its copies alike.

        Repeated texts are chosen last, because all copies of one can be far more than the share. If there are only
        copies of one text, too short to divide, the first of them is held out.
        """
        open_ones = [(hashed, document) for hashed, document in documents if hashed is not None]
        wanted = self._wanted(sum(document.bytes for _, document in open_ones))
        copies = Counter(document.text for _, document in open_ones)  # equal texts stay together
        held: set[str] = set()
        divided, size = "", 0
        for _, document in sorted(open_ones, key=lambda pair: (copies[pair[1].text], pair[0])):
            if document.text in held:
                continue
            if size + document.bytes * copies[document.text] > wanted:
                divided = document.text if size < wanted / 2 else ""
                break
            held.add(document.text)
            size += document.bytes * copies[document.text]
        share = (wanted - size) / max(1, copies[divided])
        only_copies = len(copies) == 1 and copies[divided] > 1 and not _can_divide(open_ones[0][1], share)
        splits = _first_held_out()
        for hashed, document in documents:
            if hashed is None:
                yield document
            elif only_copies:
                yield document._replace(split=next(splits))
            elif document.text == divided:
                yield from _divide(document, share)
            else:
                yield document._replace(split=VALIDATION if document.text in held else TRAIN)

    def _by_hash(self, documents: Iterable[Hashed]) -> Iterator[Document]:
        """The document with the lowest hash comes last, with its copies. If nothing was held out by then, they go to
        validation, or the first of them, if there are no other documents."""
        lowest, copies, others = 1.0, list[Document](), False
        split_of_lowest = VALIDATION if self.holdout else TRAIN
        for hashed, document in documents:
            others |= bool(copies) and hashed != lowest
            if hashed is None or hashed > lowest:
                yield document
            elif hashed < self.holdout:
                split_of_lowest = TRAIN
                yield document._replace(split=VALIDATION)
            elif hashed < lowest:
                yield from copies
                lowest, copies = hashed, [document]
            else:
                copies.append(copies[0]._replace(position=document.position))  # many copies, one text in memory
        same = repeat(split_of_lowest) if others or split_of_lowest == TRAIN else _first_held_out()
        yield from (document._replace(split=split) for document, split in zip(copies, same, strict=False))

    def _hashed(self) -> Iterator[Hashed]:
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
        if (few := self._few_training_texts()) is not None:
            before = accumulate((len(text.encode()) for text in few), initial=0)
            yield from (text for text, taken in zip(few, before, strict=False) if taken < limit)
            return
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


def _beginning(documents: Iterator[Hashed]) -> list[Hashed]:
    """The first documents, as many as are few."""
    first: list[Hashed] = []
    size = 0
    for hashed, document in documents:
        first.append((hashed, document))
        size += document.bytes
        if len(first) == _FEW_DOCUMENTS or size >= _FEW_BYTES:
            break
    return first


def _divide(document: Document, held: float) -> Iterator[Document]:
    """The document with its last `held` bytes (1 KiB at least) in validation, cut where a line or a word begins.

    One that is not twice as long goes there as a whole.
    """
    text, held = document.text, max(held, _LEAST_PIECE)
    if not _can_divide(document, held):
        yield document._replace(split=VALIDATION)
        return
    at = len(text) - max(1, round(len(text) * held / document.bytes))
    ends = (end for end in (text.find("\n", at - 1), text.find(" ", at - 1)) if 0 <= end < (at + len(text)) // 2)
    at = next(ends, at - 1) + 1
    for part, split in ((text[:at], TRAIN), (text[at:], VALIDATION)):
        yield document._replace(text=part, bytes=len(part.encode()), split=split)


def _can_divide(document: Document, held: float) -> bool:
    return document.bytes >= 2 * max(held, _LEAST_PIECE)


def _first_held_out() -> Iterator[str]:
    return chain([VALIDATION], repeat(TRAIN))


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
    holdout: float | None = None,
    limit: int | None = None,
) -> Corpus:
    """The corpus of files, folders or Hugging Face dataset names (`org/name` or `org/name:config`).

    With `validation` (a source like the others) nothing is held out of `sources`; otherwise the share `holdout`
    of the text is, in documents chosen by a hash: equal texts always land on the same side. Without a share it is 1 %,
    but 32 KiB at least, or a tenth of a small text. Reading stops after the document that reaches `limit` bytes
    of text, for a first part of a large corpus.
    """
    least = LEAST_HELD_OUT if holdout is None else 0
    holdout = HOLDOUT if holdout is None else holdout
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}: the share held out for validation must be at least 0 and below 1")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}: the bytes of text to read must be at least 1")
    names = tuple(str(source) for source in sources)
    left_out: list[Path] = []
    if validation is None:
        parts = list(_parts(names, field, None, left_out))
    else:  # First, so that a limit cannot end the reading before the validation text.
        held_out = list(_parts([str(validation)], field, VALIDATION, left_out))
        parts = [*held_out, *_parts(names, field, TRAIN, left_out)]
        holdout, least = 0.0, 0
    read = {part.name for part in parts}  # a file of any suffix is, if it is named
    return Corpus(
        names, tuple(parts), holdout, limit, least, tuple(path for path in left_out if str(path.resolve()) not in read)
    )


def _parts(names: Iterable[str], field: str, split: str | None, left_out: list[Path]) -> Iterator[Part]:
    """The parts of sources; adds to `left_out` the files of folders that are not read."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            files, others = files_in(path)
            if not files:
                known = ", ".join(sorted(FOUND_IN_FOLDERS))
                raise DataError(
                    f"the folder {name} holds no text: no file in it ends in one of {known}; to read others, name them"
                )
            left_out += others
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
