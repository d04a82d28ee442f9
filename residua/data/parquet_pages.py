"""Read the sizes of a parquet file's pages from their headers: pyarrow decodes each page as a whole.

A page of a few bytes can expand to gigabytes, and a batch can repeat one dictionary value in every row. The sizes in
the file's footer may be wrong; pyarrow allocates those in the headers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

_HEADER_BYTES = (1 << 16, 1 << 24)
"""Enough bytes for most headers, and for any that pyarrow reads: some writers put whole values into the statistics."""
_UNCOMPRESSED, _COMPRESSED = 2, 3


def largest_page(path: Path, metadata: Any, field: str) -> int:
    """Decompressed bytes of the largest page of a column. `metadata` is pyarrow's metadata of the file."""
    largest = 0
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            columns = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
            for column in columns:
                if f"{column.path_in_schema}.".startswith(f"{field}."):
                    largest = max(largest, _largest_of(file, column))
    return largest


def _largest_of(file: BinaryIO, column: Any) -> int:
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    position, end, largest = start, start + column.total_compressed_size, 0
    while position < end:
        header = _header(file, position)
        largest = max(largest, header.sizes[_UNCOMPRESSED])
        position += header.length + header.sizes[_COMPRESSED]
    return largest


def _header(file: BinaryIO, position: int) -> PageHeader:
    usual, most = _HEADER_BYTES
    file.seek(position)
    data = file.read(usual)
    try:
        return PageHeader(data)
    except EOFError:
        return PageHeader(data + file.read(most - usual))


class PageHeader:
    """A page header in Thrift's compact protocol: the two page sizes, and the header's length."""

    def __init__(self, data: bytes) -> None:
        self._data, self.length = data, 0
        self.sizes: dict[int, int] = {}
        field = 0
        while kind := self._byte():
            field = field + (kind >> 4) if kind >> 4 else self._number()
            if field in (_UNCOMPRESSED, _COMPRESSED):
                self.sizes[field] = self._number()
            else:
                self._skip(kind & 15)
        if min(self.sizes.get(_UNCOMPRESSED, -1), self.sizes.get(_COMPRESSED, -1)) < 0:
            raise ValueError("a page without a size")

    def _byte(self) -> int:
        if self.length >= len(self._data):
            raise EOFError("a page header without an end")
        self.length += 1
        return self._data[self.length - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _number(self) -> int:
        """Read a zigzag-encoded integer."""
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, kind: int) -> None:
        match kind:
            case 1 | 2:  # true, false
                pass
            case 3:  # a byte
                self._byte()
            case 4 | 5 | 6:  # numbers
                self._unsigned()
            case 7:  # a double
                self.length += 8
            case 8:  # bytes
                count = self._unsigned()
                self.length += count
            case 12:  # a struct
                while inner := self._byte():
                    if not inner >> 4:
                        self._unsigned()
                    self._skip(inner & 15)
            case _:
                raise ValueError(f"a page header with a field of unknown type {kind}")
