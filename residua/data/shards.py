"""A shard: a memory-mapped file of token ids, with a header that we check before reading anything else.

    bytes 0..127   header, little-endian: magic (8 bytes), version u32, bytes per token u32, tokens u64,
                   documents u64, largest token id u64, SHA-256 of the tokenizer (32 bytes), CRC-32 of all these
                   u32, zeros
    then           the token ids, u16 or u32; each document ends with the end-of-text token
    then           zeros up to a multiple of 8, and the first token of each document, u64 each, ascending from 0

A document never spans two shards.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import zlib
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from residua.data.readers import DataError
from residua.reading import counted, require_file

MAGIC = b"RESIDUA\0"
VERSION = 1
HEADER_BYTES = 128
FIELDS = struct.Struct("<8sIIQQQ32s")
CHECKSUM = struct.Struct("<I")
DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
START = np.dtype("<u8")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype that holds every id of a vocabulary."""
    return DTYPES[2] if vocab_size <= 1 << 16 else DTYPES[4]


def _table_offset(tokens: int, itemsize: int) -> int:
    return HEADER_BYTES + (tokens * itemsize + 7) // 8 * 8


class ShardWriter:
    """Writes documents in sequence. The header is written last, so an unfinished shard cannot be opened."""

    def __init__(self, path: Path, dtype: np.dtype, tokenizer_hash: str) -> None:
        self.path, self.dtype, self.tokenizer_hash = path, dtype, tokenizer_hash
        self.tokens = 0
        self.largest = 0
        self.documents = 0
        self.starts = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 (in a file: there may be 50 million)
        self.file = path.open("wb")
        self.file.write(bytes(HEADER_BYTES))

    def add(self, ids: np.ndarray) -> None:
        """Append one document, including its end-of-text token."""
        self.starts.write(self.tokens.to_bytes(START.itemsize, "little"))
        self.documents += 1
        self.file.write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(ids)
        self.largest = max(self.largest, int(ids.max()))

    def finish(self) -> None:
        """Write the document table and the header, and flush them to disk."""
        table = _table_offset(self.tokens, self.dtype.itemsize)
        self.file.write(bytes(table - self.file.tell()))
        self.starts.seek(0)
        shutil.copyfileobj(self.starts, self.file)
        self.file.seek(0)
        fields = FIELDS.pack(
            MAGIC,
            VERSION,
            self.dtype.itemsize,
            self.tokens,
            self.documents,
            self.largest,
            bytes.fromhex(self.tokenizer_hash),
        )
        self.file.write(fields + CHECKSUM.pack(zlib.crc32(fields)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.close()

    def close(self) -> None:
        """Close the files; on a full disk even this may fail."""
        for file in (self.starts, self.file):
            with suppress(OSError):
                file.close()


class Shard:
    """An open shard: `ids` [tokens] and `starts` [documents], both memory-mapped and never fully loaded."""

    def __init__(self, path: Path) -> None:
        size = require_file(path, "prepare the dataset again, or restore the shard from a copy")
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
        except OSError as error:
            raise DataError(f"cannot open the shard {path}: {error.strerror}") from error
        itemsize, self.tokens, self.documents, self.largest, self.tokenizer_hash = _parse(path, header)
        table = _table_offset(self.tokens, itemsize)
        expected = table + self.documents * START.itemsize
        if size != expected:
            what = "is truncated" if size < expected else "is longer than its header says"
            raise DataError(f"shard {path} {what}: {size} bytes instead of {expected}; prepare the dataset again")
        self.path = path
        self.dtype = DTYPES[itemsize]
        # plain arrays: operations on np.memmap itself take twice as long
        self.ids = np.asarray(np.memmap(path, self.dtype, "r", HEADER_BYTES, (self.tokens,)))
        self.starts = np.asarray(np.memmap(path, START, "r", table, (self.documents,)))

    def read(self, low: int, high: int) -> np.ndarray:
        """Return ids `low` to `high`, mapped; refuse ids above `largest`, the largest that was written."""
        ids = self.ids[low:high]
        if int(ids.max()) > self.largest:
            at = int(np.argmax(ids > self.largest))
            raise DataError(
                f"shard {self.path} holds id {ids[at]} at token {low + at}, but the largest id in its header is "
                f"{self.largest}: the file is damaged, prepare the dataset again or restore it from a copy"
            )
        return ids

    def documents_between(self, low: int, high: int) -> np.ndarray:
        """Return the positions from `low` to `high` at which a document begins, int64, ascending."""
        return self._ascending[slice(*np.searchsorted(self._ascending, [low, high]))].astype(np.int64)

    @cached_property
    def _ascending(self) -> np.ndarray:
        """`starts`, checked on first use."""
        starts = self.starts
        if starts[0] != 0 or starts[-1] >= self.tokens or not (starts[:-1] < starts[1:]).all():
            raise DataError(
                f"the table of documents at the end of shard {self.path} is damaged: "
                "prepare the dataset again or restore the file from a copy"
            )
        return starts


def _parse(path: Path, header: bytes) -> tuple[int, int, int, int, str]:
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a Residua shard: it does not begin with {MAGIC!r}")
    if len(header) < HEADER_BYTES:
        raise DataError(f"shard {path} is truncated inside its header; prepare the dataset again")
    _, version, itemsize, tokens, documents, largest, tokenizer = FIELDS.unpack_from(header)
    if version != VERSION:
        raise DataError(f"shard {path} has format version {version}, this Residua reads {VERSION}: prepare it again")
    if CHECKSUM.unpack_from(header, FIELDS.size)[0] != zlib.crc32(header[: FIELDS.size]):
        raise DataError(f"the header of shard {path} is damaged (its checksum differs); prepare the dataset again")
    if itemsize not in DTYPES or not tokens or not documents:
        raise DataError(
            f"shard {path} claims {counted(tokens, 'token')} of {itemsize} bytes in {counted(documents, 'document')}"
        )
    return itemsize, tokens, documents, largest, tokenizer.hex()
