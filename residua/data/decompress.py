"""Compressed files as streams of bytes that take little memory, whatever a file expands to."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from typing import IO, Any

from residua.reading import MIB, ReadError

DICTIONARY = 256 * MIB
"""Memory that an .xz file may ask for: `xz -9` needs 65 MiB."""
READ = 1 << 16


def missing(package: str, purpose: str) -> ReadError:
    """The error for an optional package that is not installed."""
    return ReadError(f"{purpose} needs the package {package}: pip install 'residua[data]'")


class _Xz(io.RawIOBase):
    """`lzma.LZMAFile` with a limit on memory. As there, bytes after the last stream that are not xz are ignored."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.at_end = raw, False
        self.decoder = lzma.LZMADecompressor(memlimit=DICTIONARY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = b""
        while not piece and not self.at_end:
            piece = self._following(len(buffer)) if self.decoder.eof else self._more(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def _more(self, size: int) -> bytes:
        data = self.raw.read(READ) if self.decoder.needs_input else b""
        if self.decoder.needs_input and not data:
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        return self.decoder.decompress(data, size)

    def _following(self, size: int) -> bytes:
        """The beginning of the next stream; nothing at the end of the file."""
        data = self.decoder.unused_data or self.raw.read(READ)
        self.decoder = lzma.LZMADecompressor(memlimit=DICTIONARY)
        try:
            self.at_end = not data
            return self.decoder.decompress(data, size)
        except lzma.LZMAError as error:
            if "limit" in str(error):
                raise
            self.at_end = True
            return b""


def _zst(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing("zstandard", f"reading {raw.name}") from None
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lambda raw: io.BufferedReader(_Xz(raw), READ),
    ".bz2": bz2.BZ2File,
    ".zst": _zst,
}
