"""Find validation documents that are also in the training text: verbatim, or up to case and punctuation.

Whole documents are compared by hash, using 24 bytes each in a temporary file. A text inside a longer one is not found.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from residua.reading import ReadError, counted

DROP, KEEP, REFUSE = "drop", "keep", "refuse"
RULES = (DROP, KEEP, REFUSE)
EXACT, NEAR, BYTES = range(3)
BLOCK_DOCUMENTS = 1 << 20
"""Documents of a split to compare at once."""
_ASCII_SIGNS = bytes(code for code in range(128) if not chr(code).isalnum())
_OTHER_SIGNS = re.compile(r"\W+")


def letters_and_digits(text: str) -> bytes:
    """Remove case, white space and punctuation from a text; return UTF-8."""
    data = text.casefold().encode().translate(None, _ASCII_SIGNS)
    return data if data.isascii() else _OTHER_SIGNS.sub("", data.decode()).encode()


class Fingerprints:
    """For each document of a split: a hash of its text, a hash of its letters and digits, and its length in bytes."""

    def __init__(self, folder: Path) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed with the split)

    def add(self, text: str, size: int) -> None:
        """Append a document; without letters or digits, it is compared by its text."""
        exact = _hash(text.encode())
        near = _hash(plain) if (plain := letters_and_digits(text)) else exact
        self.file.write(exact + near + size.to_bytes(8, "little"))

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield uint64 [documents, 3] with columns `EXACT`, `NEAR` and `BYTES`."""
        self.file.seek(0)
        while data := self.file.read(BLOCK_DOCUMENTS * 24):
            at = self.file.tell()
            yield np.frombuffer(data, "<u8").reshape(-1, 3)
            self.file.seek(at)  # the same file may be read in an inner loop


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


class Overlap(NamedTuple):
    """Counts of validation documents with an exact copy or only a near copy, and of training documents that are
    copies."""

    exact: int
    near: int
    copies: int


def trained_copies(train: Fingerprints, validation: Fingerprints) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of training documents, with a mask of those that are in the validation text."""
    for train_block in train.blocks():
        copied = np.zeros(len(train_block), bool)
        for validation_block in validation.blocks():
            copied |= np.isin(train_block[:, NEAR], validation_block[:, NEAR])
        yield train_block, copied


def find_overlap(train: Fingerprints, validation: Fingerprints) -> Overlap:
    """Count the documents that two splits share."""
    exact = near = 0
    for validation_block in validation.blocks():
        same = np.zeros((len(validation_block), 2), bool)
        for train_block in train.blocks():
            for column in (EXACT, NEAR):
                same[:, column] |= np.isin(validation_block[:, column], train_block[:, column])
        exact += int(same[:, EXACT].sum())
        near += int((same[:, NEAR] & ~same[:, EXACT]).sum())
    copies = sum(int(mask.sum()) for _, mask in trained_copies(train, validation)) if exact or near else 0
    return Overlap(exact, near, copies)


def refuse_overlap(overlap: Overlap, documents: int) -> None:
    """Refuse splits that share documents."""
    if overlap.copies:
        raise ReadError(
            f"{_shared(overlap, documents)}: remove them from the training text with --overlap drop, or keep "
            "them with --overlap keep."
        )


def overlap_notice(about: dict[str, Any] | None, documents: int) -> str:
    """A notice about the `overlap` entry of dataset.json; `documents` is the number of validation documents."""
    if about is None:
        return (
            "this was prepared by an older Residua, which did not check whether validation text is in the training text"
        )
    overlap = Overlap(about["exact"], about["near"], about["copies"])
    if not overlap.copies:
        return "no validation document is in the training text"
    shared = _shared(overlap, documents)
    if about["rule"] == KEEP:
        return f"{shared} and were kept: the validation loss is not that of unseen text (--overlap drop removes them)"
    verb = "was" if overlap.copies == 1 else "were"
    dropped = f"{counted(overlap.copies, 'training document')} {verb} dropped from training"
    return f"{shared}; {dropped} (--overlap keep keeps them)"


def _shared(overlap: Overlap, documents: int) -> str:
    total = overlap.exact + overlap.near
    subject = f"{total:,} of {counted(documents, 'validation document')} {'is' if total == 1 else 'are'}"
    return (
        f"{subject} in the training text "
        f"({overlap.exact:,} verbatim, {overlap.near:,} up to case, punctuation and white space)"
    )
