"""A corpus: parts that contain documents, and the rule that holds out documents for validation."""

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
"""The least text to hold out, in bytes, if no share is given; never more than a tenth of the text."""
# With more documents than this, holding out by hash alone comes close enough to the share of the text.
_MAX_FEW_DOCUMENTS, _MAX_FEW_BYTES = 1000, 256_000_000
_MIN_PIECE_BYTES = 1024
_MAX_MEMORY_BYTES = 1 << 25
"""Bytes of the first documents to keep in memory; the rest goes to a temporary file."""


class Document(NamedTuple):
    """A text, its length in UTF-8 bytes, its split, the bytes of the corpus read so far, and its source, if known."""

    text: str
    bytes: int
    split: str
    position: int
    source: str = ""


Hashed = tuple[float | None, Document]
"""A document and its hash in [0, 1); the hash is None if the document's part sets the split."""


@dataclass(frozen=True)
class Corpus:
    """Parts read in order.

    `holdout` is the share of the text held out for validation, and `least` its minimum in bytes (but at most a tenth of
    the text). A hash of their text selects documents. Reading ends after the document that reaches `limit` bytes of
    text; validation parts do not count. `left_out` lists files in folders that are ignored because of their suffix,
    `links` those that are links out of the folder. `skip_bad` skips faulty lines and files.
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
        """SHA-256 over name, size, version and split of each part, the rules for holding out and skipping, and the
        limit."""
        identity = [(part.name, part.size, part.version, part.split) for part in self.parts]
        rule = (self.holdout, self.limit, "by size", self.least) if self.holdout else (self.holdout, self.limit)
        skipped = ("skip bad",) if self.skip_bad else ()
        return hashlib.sha256(repr((identity, *rule, *skipped)).encode()).hexdigest()

    def documents(self, problems: Problems | None = None) -> Iterator[Document]:
        """Yield all documents that are not blank, each with its split; count skipped lines and files in `problems`.

        A document is held out if its hash is below the share. With few documents, this may hold out less than half or
        more than twice the share of the text. In that case we hold out whole documents in hash order while they fit. If
        that is less than half of the share, we add the end of the next one.
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
        """The training texts if documents are held out by size, else None."""
        if not self.holdout or self.size is None:
            return None
        hashed = self._hashed()
        with _Beginning(hashed) as first:
            if next(hashed, None) is not None or not first or self._is_even(first):
                return None
        return (document.text for document in self.documents() if document.split == TRAIN)

    def _wanted(self, total: int) -> float:
        """The number of bytes to hold out of `total`."""
        return max(self.holdout * total, min(self.least, total / 10))

    def _is_even(self, first: _Beginning) -> bool:
        """Return whether the hash alone holds out between half and twice the share."""
        sizes = [(entry.hashed < self.holdout, entry.bytes) for entry in first.entries if entry.hashed is not None]
        wanted = self._wanted(sum(size for _, size in sizes))
        return wanted / 2 <= sum(size for chosen, size in sizes if chosen) <= wanted * 2

    def _by_size(self, first: _Beginning) -> Iterator[Document]:
        """Split few documents, keeping their order; one of them may be divided, along with all its copies.

        Repeated texts are chosen last, because all copies of one can far exceed the share. If all documents are copies
        of one text that is too short to divide, the first is held out.
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
        """Split documents by hash, with the lowest-hash document and its copies last. If nothing else was held out, all
        of them go to validation, or only the first if there are no other documents."""
        lowest, candidates, copies, others = 1.0, list[Document](), 0, False  # copies are counted, not stored
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
        """Yield documents with their hashes. After a problem that may not be skipped, only search for further
        problems."""
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
        """Yield about `limit` bytes of training text: the beginning of each part, in proportion to its size."""
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
        """Yield the texts of a part and their UTF-8; a problem that may not be skipped refuses the whole corpus."""
        for item, _ in part.read():
            if not isinstance(item, Problem):
                yield from _valid_pieces(text_of(item), blank=True)
            elif not self.skip_bad:
                for _ in self._hashed():
                    pass


class _Entry(NamedTuple):
    """One of the first documents without its text: its hash in [0, 1) or None, and a digest of the text."""

    hashed: float | None
    text: bytes
    bytes: int
    document: Document


class _Beginning:
    """The first documents, up to the limit for "few"; their texts go to a file if they are large."""

    def __init__(self, documents: Iterator[Hashed]) -> None:
        self.entries: list[_Entry] = []
        self.file = tempfile.SpooledTemporaryFile(_MAX_MEMORY_BYTES)  # noqa: SIM115 (closed on exit)
        size = 0
        for hashed, document in documents:
            data = document.text.encode()
            self.file.write(data)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            self.entries.append(_Entry(hashed, digest, document.bytes, document._replace(text="")))
            size += document.bytes
            if len(self.entries) == _MAX_FEW_DOCUMENTS or size >= _MAX_FEW_BYTES:
                break

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __iter__(self) -> Iterator[Hashed]:
        self.file.seek(0)
        for hashed, _, size, document in self.entries:
            yield hashed, document._replace(text=self.file.read(size).decode())

    def __enter__(self) -> _Beginning:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _divide(document: Document, piece_bytes: float) -> Iterator[Document]:
    """Put the last `piece_bytes` of a document (at least 1 KiB) into validation, cut where a line or word begins.

    A document less than twice as long goes into validation as a whole.
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
    """Yield the text and its UTF-8, in pieces if it exceeds the longest document; with `blank`, also blank texts."""
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
    """Open a corpus of files, folders or Hugging Face dataset names (`org/name` or `org/name:config`).

    With `validation` (a source like the others), nothing is held out of `sources`. Otherwise the share `holdout` of the
    text is held out, in documents selected by hash, so that equal texts are always in the same split. The default is 1
    %, but at least 32 KiB, or a tenth of a small text. Reading stops after the document that reaches `limit` bytes of
    text, to use the first part of a large corpus. With `skip_bad`, faulty lines and files are skipped and counted;
    otherwise, one error names all of them.
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
    else:  # Validation comes first, so that a limit cannot end reading before it.
        held_out = list(parts_of([str(validation)], field, VALIDATION, left_out, links))
        parts = [*held_out, *parts_of(names, field, TRAIN, left_out, links)]
        holdout, least = 0.0, 0
    read = {part.name for part in parts}  # a file given by name is read, whatever its suffix
    unread, outside = (tuple(path for path in paths if str(path.resolve()) not in read) for paths in (left_out, links))
    return Corpus(names, tuple(parts), holdout, limit, least, unread, outside, skip_bad)
