"""A corpus: parts that hold documents, and the rule that holds documents out for validation."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

from residua.data.parts import Part, parts_of
from residua.data.problems import MAX_SEARCHED_BYTES, Problem, Problems
from residua.data.readers import MAX_DOCUMENT_BYTES, DataError, Sourced, cut, text_of

TRAIN, VALIDATION = "train", "validation"
HOLDOUT = 0.01
MIN_HELD_OUT_BYTES = 32_768
"""Bytes of text that are held out at least when no share is given, but at most a tenth of the text."""
# Of more documents than this, chosen by their hash, the held-out ones are close enough to their share of the text.
_MAX_FEW_DOCUMENTS, _MAX_FEW_BYTES = 1000, 256_000_000
_MIN_PIECE_BYTES = 1024
_MAX_MEMORY_BYTES = 1 << 25
"""Bytes of the first documents that are kept in memory; more go to a temporary file."""


class Document(NamedTuple):
    """A text, its length in UTF-8 bytes, its split, the bytes of the corpus read so far, and its source or nothing."""

    text: str
    bytes: int
    split: str
    position: int
    source: str = ""


Hashed = tuple[float | None, Document]
"""A document and its hash in [0, 1); None if its part decides its split."""


@dataclass(frozen=True)
class Corpus:
    """Parts read in order.

    `holdout` is the share of the text held out for validation, and `least` how many bytes at least (but at most a tenth
    of the text). Documents are chosen by a hash of their text. Reading ends after the document that reaches `limit`
    bytes of text; validation parts do not count. `left_out` are files of folders that are not read because of their
    suffix, `links` those that are links to somewhere else. `skip_bad` leaves out faulty lines and files.
    """

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    holdout: float = 0.0
    limit: int | None = None
    least: int = 0
    left_out: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    skip_bad: bool = False

    @property
    def size(self) -> int | None:
        """The final value of `Document.position`; None if a stream makes it unknown."""
        return self.limit or _sum(part.size for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over name, size, version and split of every part, what is held out or skipped, and the limit."""
        identity = [(part.name, part.size, part.version, part.split) for part in self.parts]
        rule = (self.holdout, self.limit, "by size", self.least) if self.holdout else (self.holdout, self.limit)
        skipped = ("skip bad",) if self.skip_bad else ()
        return hashlib.sha256(repr((identity, *rule, *skipped)).encode()).hexdigest()

    def documents(self, problems: Problems | None = None) -> Iterator[Document]:
        """All documents that are not blank, each with its split; counts skipped lines and files in `problems`.

        A document is held out if its hash is below the share. With few documents, this may give less than half or more
        than twice the share of the text. Then whole documents are held out in the order of their hashes as long as they
        fit. If that is less than half of the share, the end of the next one is added.
        """
        hashed = self._hashed(problems)
        if not self.holdout:
            yield from self._by_hash(hashed)
            return
        with _Beginning(hashed) as first:
            following = next(hashed, None)
            if following is None and first and not self._is_even(first):
                yield from self._by_size(first)
            else:
                yield from self._by_hash(chain(first, [] if following is None else [following], hashed))

    def _few_training_texts(self) -> Iterator[str] | None:
        """The training texts if they are chosen by size."""
        if not self.holdout or self.size is None:
            return None
        hashed = self._hashed()
        with _Beginning(hashed) as first:
            if next(hashed, None) is not None or not first or self._is_even(first):
                return None
        return (document.text for document in self.documents() if document.split == TRAIN)

    def _wanted(self, total: int) -> float:
        """Bytes to hold out of so many."""
        return max(self.holdout * total, min(self.least, total / 10))

    def _is_even(self, first: _Beginning) -> bool:
        """Whether the hash alone holds out half to twice the share."""
        sizes = [(entry.hashed < self.holdout, entry.bytes) for entry in first.entries if entry.hashed is not None]
        wanted = self._wanted(sum(size for _, size in sizes))
        return wanted / 2 <= sum(size for chosen, size in sizes if chosen) <= wanted * 2

    def _by_size(self, first: _Beginning) -> Iterator[Document]:
        """Few documents, in their order; one of them may be divided, and all its copies alike.

        Repeated texts are chosen last, because all copies of one can be far more than the share. If there are only
        copies of one text, too short to divide, the first of them is held out.
        """
        open_ones = [entry for entry in first.entries if entry.hashed is not None]
        wanted = self._wanted(sum(entry.bytes for entry in open_ones))
        copies = Counter(entry.text for entry in open_ones)  # equal texts stay together
        validation_texts: set[bytes] = set()
        divided, size = b"", 0
        for entry in sorted(open_ones, key=lambda entry: (copies[entry.text], entry.hashed)):
            if entry.text in validation_texts:
                continue
            if size + entry.bytes * copies[entry.text] > wanted:
                divided = entry.text if size < wanted / 2 else b""
                break
            validation_texts.add(entry.text)
            size += entry.bytes * copies[entry.text]
        share = (wanted - size) / max(1, copies[divided])
        only_copies = len(copies) == 1 and copies[divided] > 1 and not _can_divide(open_ones[0].bytes, share)
        splits = _first_held_out()
        for entry, (hashed, document) in zip(first.entries, first, strict=True):
            if hashed is None:
                yield document
            elif only_copies:
                yield document._replace(split=next(splits))
            elif entry.text == divided:
                yield from _divide(document, share)
            else:
                yield document._replace(split=VALIDATION if entry.text in validation_texts else TRAIN)

    def _by_hash(self, documents: Iterable[Hashed]) -> Iterator[Document]:
        """The document with the lowest hash comes last, with its copies. If nothing was held out by then, they go to
        validation, or the first of them, if there are no other documents."""
        lowest, candidates, copies, others = 1.0, list[Document](), 0, False  # many copies, one text in memory
        split_of_lowest = VALIDATION if self.holdout else TRAIN
        for hashed, document in documents:
            others |= bool(candidates) and hashed != lowest
            if hashed is None or hashed > lowest:
                yield document
            elif hashed < self.holdout:
                split_of_lowest = TRAIN
                yield document._replace(split=VALIDATION)
            elif hashed < lowest:
                yield from (earlier for earlier in candidates for _ in range(copies))
                lowest, candidates, copies = hashed, [document], 1
            else:
                candidates, copies = [document], copies + 1
        same = repeat(split_of_lowest) if others or split_of_lowest == TRAIN else _first_held_out()
        for document in candidates:
            yield from (document._replace(split=split) for split in islice(same, copies))

    def _hashed(self, problems: Problems | None = None) -> Iterator[Hashed]:
        """The documents with their hashes. After a problem that may not be skipped, the others are looked for."""
        problems = Problems(self.skip_bad) if problems is None else problems
        before, train_bytes, searched = 0, 0, 0
        for part in self.parts:
            for item, position in part.read():
                if isinstance(item, Problem):
                    problems.add(item)
                    if part.size is None:
                        problems.refuse(more=True)
                    continue
                source = item.source if isinstance(item, Sourced) else ""
                for text, data in _valid_pieces(text_of(item)):
                    searched += len(data) if problems.refusing else 0
                    hashed = unit_hash(data) if part.split is None else None
                    train_bytes += len(data) if part.split != VALIDATION else 0
                    reached = before + position if self.limit is None else min(train_bytes, self.limit)
                    if not problems.refusing:
                        yield hashed, Document(text, len(data), part.split or TRAIN, reached, source)
                    elif searched > MAX_SEARCHED_BYTES:
                        problems.refuse(more=True)
                    if self.limit is not None and train_bytes >= self.limit:
                        problems.refuse()
                        return
            before += part.size or 0
        problems.refuse()

    def sample(self, limit: int) -> Iterator[str]:
        """About `limit` bytes of training text: the beginning of each part, in proportion to its size."""
        limit = min(limit, self.limit or limit)
        if (few := self._few_training_texts()) is not None:
            sampled_bytes = 0
            for text in few:
                if sampled_bytes < limit:
                    yield text
                sampled_bytes += len(text.encode())
            return
        total = _sum(part.size for part in self.parts)
        for part in self.parts:
            if part.split == VALIDATION:
                continue
            left = limit * part.size / total if part.size and total else limit
            for text, data in self._texts(part):
                if part.split is None and unit_hash(data) < self.holdout:
                    continue
                yield text
                left -= len(data)
                if left <= 0:
                    break

    def _texts(self, part: Part) -> Iterator[tuple[str, bytes]]:
        """The texts of a part and their UTF-8; at a problem that may not be skipped, refuses all of the corpus."""
        for item, _ in part.read():
            if not isinstance(item, Problem):
                yield from _valid_pieces(text_of(item), blank=True)
            elif not self.skip_bad:
                for _ in self._hashed():
                    pass


class _Entry(NamedTuple):
    """A document of the first ones: its hash in [0, 1) or None, a digest of its text, and the rest of it."""

    hashed: float | None
    text: bytes
    bytes: int
    split: str
    position: int
    source: str


class _Beginning:
    """The first documents, as many as are few, with their texts in a file where they are long."""

    def __init__(self, documents: Iterator[Hashed]) -> None:
        self.entries: list[_Entry] = []
        self.file = tempfile.SpooledTemporaryFile(_MAX_MEMORY_BYTES)  # noqa: SIM115 (closed on exit)
        size = 0
        for hashed, (text, length, split, position, source) in documents:
            data = text.encode()
            self.file.write(data)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            self.entries.append(_Entry(hashed, digest, length, split, position, source))
            size += length
            if len(self.entries) == _MAX_FEW_DOCUMENTS or size >= _MAX_FEW_BYTES:
                break

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __iter__(self) -> Iterator[Hashed]:
        self.file.seek(0)
        for hashed, _, length, split, position, source in self.entries:
            yield hashed, Document(self.file.read(length).decode(), length, split, position, source)

    def __enter__(self) -> _Beginning:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _divide(document: Document, piece_bytes: float) -> Iterator[Document]:
    """The document with its last `piece_bytes` (1 KiB at least) in validation, cut where a line or a word begins.

    One that is not twice as long goes there as a whole.
    """
    text, piece_bytes = document.text, max(piece_bytes, _MIN_PIECE_BYTES)
    if not _can_divide(document.bytes, piece_bytes):
        yield document._replace(split=VALIDATION)
        return
    at = len(text) - max(1, round(len(text) * piece_bytes / document.bytes))
    ends = (end for end in (text.find("\n", at - 1), text.find(" ", at - 1)) if 0 <= end < (at + len(text)) // 2)
    at = next(ends, at - 1) + 1
    for part, split in ((text[:at], TRAIN), (text[at:], VALIDATION)):
        yield document._replace(text=part, bytes=len(part.encode()), split=split)


def _can_divide(size: int, piece_bytes: float) -> bool:
    return size >= 2 * max(piece_bytes, _MIN_PIECE_BYTES)


def _first_held_out() -> Iterator[str]:
    return chain([VALIDATION], repeat(TRAIN))


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)


def unit_hash(data: bytes) -> float:
    """Hash `data` to a number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def _valid_pieces(text: str, blank: bool = False) -> Iterator[tuple[str, bytes]]:
    """The text and its UTF-8, in pieces where it is longer than a document may be; `blank`: also blank texts."""
    if not blank and not text.strip():
        return
    try:
        data = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        data = text.encode()
    if len(data) <= MAX_DOCUMENT_BYTES:
        yield text, data
        return
    del data
    for piece in cut(text):
        if blank or piece.strip():
            yield piece, piece.encode()


def open_corpus(
    sources: Sequence[str | Path],
    *,
    field: str = "text",
    validation: str | Path | None = None,
    holdout: float | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
) -> Corpus:
    """The corpus of files, folders or Hugging Face dataset names (`org/name` or `org/name:config`).

    With `validation` (a source like the others) nothing is held out of `sources`; otherwise the share `holdout`
    of the text is, in documents chosen by a hash: equal texts always land on the same side. Without a share it is 1 %,
    but 32 KiB at least, or a tenth of a small text. Reading stops after the document that reaches `limit` bytes
    of text, for a first part of a large corpus. With `skip_bad`, faulty lines and files are left out and counted;
    without, one error names all of them.
    """
    least = MIN_HELD_OUT_BYTES if holdout is None else 0
    holdout = HOLDOUT if holdout is None else holdout
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}: the fraction held out for validation must be at least 0 and below 1")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}: at least 1 byte of text must be read")
    names = tuple(str(source) for source in sources)
    left_out: list[Path] = []
    links: list[Path] = []
    if validation is None:
        parts = list(parts_of(names, field, None, left_out, links))
    else:  # First, so that a limit cannot end the reading before the validation text.
        held_out = list(parts_of([str(validation)], field, VALIDATION, left_out, links))
        parts = [*held_out, *parts_of(names, field, TRAIN, left_out, links)]
        holdout, least = 0.0, 0
    read = {part.name for part in parts}  # a file of any suffix is, if it is named
    unread, outside = (tuple(path for path in paths if str(path.resolve()) not in read) for paths in (left_out, links))
    return Corpus(names, tuple(parts), holdout, limit, least, unread, outside, skip_bad)
