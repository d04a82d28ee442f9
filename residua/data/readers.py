"""Read documents from files and streamed datasets.

Every reader yields `(text, position)`: one document, and the bytes of the source read so far, for a progress bar. A
record that names its source yields a `Sourced` text. An unusable line or file yields a `Problem`. At most
`MAX_LINE_CHARACTERS` are in memory at once, however large a file expands: compressed files are read as streams.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from residua.data.parquet_pages import largest_page
from residua.data.problems import Problem
from residua.reading import MIB, ReadError, counted, inside, parse_json, reason, shown

SOURCE = "source"
"""The field of a record that names the source of its text."""
MAX_SOURCE_CHARACTERS = 64


class Sourced(NamedTuple):
    """A text and the name of its source."""

    text: str
    source: str


Item = str | Sourced | Problem
Documents = Iterator[tuple[Item, int]]

SEPARATOR = "<|endoftext|>"
# Without this limit, a book in one file would be one document: nothing could be held out, and all of it loaded.
DOCUMENT_CHARACTERS = 65_536
MAX_DOCUMENT_BYTES = 4 << 20
"""UTF-8 bytes of the longest document that stays whole: encoding takes up to 200 times as much memory."""
MAX_LINE_CHARACTERS = 16 << 20
"""Characters of the longest JSON line. Its document may be shorter, since a character may be escaped as six."""
PIECE_CHARACTERS = MAX_DOCUMENT_BYTES + len(SEPARATOR)
"""Characters of a plain-text line to read at once."""

LINES_OF_JSON = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
PLAIN = (".txt", ".text", ".md", ".rst", ".py", ".tex", ".org", ".adoc")
# A `.json` file in a folder is usually a settings file; if the user names one, it is read as JSON lines.
FOUND_IN_FOLDERS = {*LINES_OF_JSON, *PARQUET, *PLAIN} - {".json"}
MAX_NAMED_SUFFIXES = 4
UNREADABLE = "restore it from a copy or remove it"
CORRECT = "correct or remove it"
MAX_PAGE_BYTES = 128 * MIB
"""The limit on a page of a parquet file, and on the values in a batch of rows."""
MAX_XZ_MEMORY = 256 * MIB
"""Memory that an .xz file may request: `xz -9` needs 65 MiB."""
READ_BYTES = 1 << 16


DataError = ReadError
"""A corpus, tokenizer or dataset cannot be used; the message says in one sentence why, and what to do."""


def missing(package: str, purpose: str) -> ReadError:
    """The error for an optional package that is not installed."""
    return ReadError(f"{purpose} needs the package {package}: pip install 'residua[data]'")


class _Xz(io.RawIOBase):
    """`lzma.LZMAFile` with a memory limit. Like it, this ignores non-xz bytes after the last stream."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.at_end = raw, False
        self.decoder = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = b""
        while not piece and not self.at_end:
            piece = self._following(len(buffer)) if self.decoder.eof else self._more(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def _more(self, size: int) -> bytes:
        data = self.raw.read(READ_BYTES) if self.decoder.needs_input else b""
        if self.decoder.needs_input and not data:
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        return self.decoder.decompress(data, size)

    def _following(self, size: int) -> bytes:
        """Return the beginning of the next stream; empty at the end of the file."""
        data = self.decoder.unused_data or self.raw.read(READ_BYTES)
        self.decoder = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)
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
    ".xz": lambda raw: io.BufferedReader(_Xz(raw), READ_BYTES),
    ".bz2": bz2.BZ2File,
    ".zst": _zst,
}


def split_suffix(path: Path) -> tuple[str, str]:
    """Return format and compression of a file by its name: `a.jsonl.xz` gives `(".jsonl", ".xz")`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in DECOMPRESSORS else ""
    return (suffixes[-1] if suffixes else ""), compression


class Folder(NamedTuple):
    """The files below a folder, sorted: `texts` by suffix, `others`, and `outside`, links that lead out of it."""

    texts: list[Path]
    others: list[Path]
    outside: list[Path]


def files_in(folder: Path) -> Folder:
    """List the files below `folder`, except hidden ones."""
    files = Folder([], [], [])
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if path.is_symlink() and _leads_out(folder, name):
            files.outside.append(path)
        else:
            (files.texts if split_suffix(path)[0] in FOUND_IN_FOLDERS else files.others).append(path)
    return files


def _leads_out(folder: Path, name: Path) -> bool:
    try:
        inside(folder, str(name))
    except ReadError:
        return True
    return False


def links_notice(links: Sequence[Path]) -> str | None:
    """A notice about links that we do not follow because they lead out of a folder; None if there are none."""
    if not links:
        return None
    verb = "it leads" if len(links) == 1 else "they lead"
    first = f"{links[0]} to {links[0].resolve()}"
    return (
        f"{counted(len(links), 'link')} skipped because {verb} out of the folder ({first}): to read such a "
        "file, name it"
    )


def left_out_notice(files: Sequence[Path]) -> str | None:
    """A notice about files in folders that we do not read because of their suffix; None if there are none."""
    if not files:
        return None
    suffixes = Counter("".join(split_suffix(path)) for path in files).most_common()
    named = ", ".join(suffix or "no suffix" for suffix, _ in suffixes[:MAX_NAMED_SUFFIXES])
    first = next(path for path in files if "".join(split_suffix(path)) == suffixes[0][0])
    pattern = f"{shlex.quote(str(first.parent))}/*{first.suffix and shlex.quote(first.suffix)}"
    return (
        f"{counted(len(files), 'file')} skipped because of the suffix "
        f"({named}{', …' if len(suffixes) > MAX_NAMED_SUFFIXES else ''}): to read text files among them, "
        f"name them, as in residua data prepare {pattern}"
    )


def read_file(path: Path, field: str) -> Documents:
    """Yield the documents of one file. The suffix sets the format; an unknown suffix means plain text."""
    used = 0
    try:
        for item, position in _parquet(path, field) if split_suffix(path)[0] in PARQUET else _text_file(path, field):
            used += not isinstance(item, Problem) and bool(text_of(item).strip())
            yield item, position
    except (DataError, MemoryError):
        raise
    except UnicodeDecodeError as error:
        hint = "convert it or remove it"
        yield Problem("file", "not UTF-8 text", f"{path} is not UTF-8 text ({error.reason})", hint, used), 0
    except Exception as error:  # each codec has its own error classes; all mean a faulty file
        yield Problem("file", "unreadable", f"cannot read {path} ({reason(error)})", UNREADABLE, used), 0


def text_of(item: str | Sourced) -> str:
    """The text of a document."""
    return item.text if isinstance(item, Sourced) else item


def _text_file(path: Path, field: str) -> Documents:
    kind, compression = split_suffix(path)
    with path.open("rb") as raw:
        stream = DECOMPRESSORS[compression](raw) if compression else raw
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        texts = _json_lines(text, path, field) if kind in LINES_OF_JSON else plain_documents(plain_lines(text))
        for item in texts:
            yield item, raw.tell()


def plain_lines(text: io.TextIOBase) -> Iterator[str]:
    """Yield the lines of a text; lines longer than `PIECE_CHARACTERS` are split, but never inside a separator."""
    begun = ""
    while line := text.readline(PIECE_CHARACTERS):
        line, begun = begun + line, ""
        if _goes_on(line) and (at := line.rfind(SEPARATOR[0], 1 - len(SEPARATOR))) >= 0:
            line, begun = line[:at], line[at:]
        yield line
    if begun:
        yield begun


def _goes_on(line: str) -> bool:
    """Return whether this is part of a longer line that continues."""
    return len(line) > MAX_DOCUMENT_BYTES and not line.endswith("\n")


def plain_documents(lines: Iterable[str]) -> Iterator[str]:
    """Split plain text into documents.

    A document ends at `<|endoftext|>`. After `DOCUMENT_CHARACTERS`, it ends at the next blank line; after twice that,
    at the next line end. `cut` splits lines longer than `MAX_DOCUMENT_BYTES`.
    """
    pending: list[str] = []
    size, long = 0, False
    for line in lines:
        *ended, rest = line.split(SEPARATOR)
        for end in ended:
            yield "".join([*pending, end])
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        was_long, long = long, _goes_on(line)
        if was_long or long:
            *pieces, rest = cut("".join(pending))
            yield from pieces
            pending, size = [rest], len(rest)
        elif size >= DOCUMENT_CHARACTERS and (not rest.strip() or size >= 2 * DOCUMENT_CHARACTERS):
            yield "".join(pending)
            pending, size = [], 0
    yield "".join(pending)


def cut(text: str) -> Iterator[str]:
    """Split a long text into pieces of up to twice `DOCUMENT_CHARACTERS`, each starting at a line or else at a word."""
    low, most = 0, 2 * DOCUMENT_CHARACTERS
    while len(text) - low > most:
        half, high = low + DOCUMENT_CHARACTERS, low + most
        borders = (text.rfind(sign, half, high) for sign in "\n ")
        end = next((border + 1 for border in borders if border >= 0), high)
        yield text[low:end]
        low = end
    yield text[low:]


def _json_lines(lines: io.TextIOBase, path: Path, field: str) -> Iterator[Item]:
    number, before = 0, False
    while line := lines.readline(MAX_LINE_CHARACTERS):
        number += 1
        where = f"{path}, line {number}"
        if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
            long = f"longer than {MAX_LINE_CHARACTERS >> 20} million characters"
            yield Problem("line", long, f"{where} is {long}", "split it into several documents")
            while line and not line.endswith("\n"):
                line = lines.readline(MAX_LINE_CHARACTERS)
        elif line := line.strip():
            item = _parsed(line, field, where, before)
            before |= not isinstance(item, Problem)
            yield item


def _parsed(line: str, field: str, where: str, before: bool) -> Item:
    hint = _one_per_line(field)
    try:
        record = parse_json(line, where, hint, lenient=True)
    except ReadError as error:
        return Problem("line", "not valid JSON", str(error).removesuffix(f": {hint}."), hint)
    return _text_of(record, field, where, before)


def _one_per_line(field: str) -> str:
    return f"write one object per line, such as {json.dumps({field: 'some text'}, ensure_ascii=False)}, not a list"


def _text_of(record: Any, field: str, where: str, before: bool = False, unit: str = "line") -> Item:
    """Return the text of a record; null gives an empty text, so that the document is dropped like a blank one.

    `before`: whether earlier records have the field, so that a record without it is faulty.
    """
    if not isinstance(record, dict):
        return Problem(unit, "not an object", f"{where} holds {shown(record)}, not an object", _one_per_line(field))
    if field not in record:
        clause = f"{where} has no field {field!r}" + ", which earlier lines have" * before
        hint = _other_field(record) if record and not before else CORRECT
        return Problem(unit, f"without the field {field!r}", clause, hint)
    text = "" if record[field] is None else record[field]
    if not isinstance(text, str):
        clause = f"{where}: field {field!r} holds {type(text).__name__}, not text"
        return Problem(unit, f"whose field {field!r} is not text", clause, CORRECT)
    source = record.get(SOURCE)
    if field == SOURCE or not isinstance(source, str) or not source.isprintable():
        return text
    return Sourced(text, source) if 0 < len(source) <= MAX_SOURCE_CHARACTERS else text


def _other_field(names: Collection[str]) -> str:
    listed = ", ".join(names)
    return f"name one of {listed} with --field" if len(names) > 1 else f"name it with --field {listed}"


def _parquet(path: Path, field: str) -> Documents:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing("pyarrow", f"reading {path}") from None
    file = parquet.ParquetFile(path, buffer_size=1 << 20)
    if field not in (names := file.schema_arrow.names):
        hint = _other_field(names)
        yield Problem("file", f"without the field {field!r}", f"{path} has no field {field!r}", hint), 0
        return
    page = largest_page(path, file.metadata, field)
    if page > MAX_PAGE_BYTES:
        problem = f"{path} has a page of {page:,} bytes, but at most {MAX_PAGE_BYTES:,} are supported"
        yield Problem("file", "with too large a page", problem, "write it with smaller pages"), 0
        return
    size, rows, row = path.stat().st_size, max(1, file.metadata.num_rows), 0
    # no value is larger than a page, but every row of a batch may hold a value from the same page
    batches = file.iter_batches(batch_size=min(256, max(1, MAX_PAGE_BYTES // max(1, page))), columns=[field])
    for batch in batches:
        for text in batch.column(0):
            row += 1
            where = f"{path}, row {row}"
            yield _text_of({field: text.as_py()}, field, where, unit="row"), size * row // rows


def read_hub(name: str, config: str | None, field: str) -> Documents:
    """Stream the documents of the train split of a Hugging Face dataset."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise missing("datasets", f"{name!r} is not a local file or folder; reading it from Hugging Face") from None
    try:
        with _quiet("huggingface_hub"):
            rows = load_dataset(name, config, split="train", streaming=True)
        for row in rows:
            yield _text_of(row, field, f"dataset {name!r}", unit="row"), 0
    except DataError:
        raise
    except Exception as error:  # network, authentication, name, config: the library has dozens of classes
        raise DataError(
            f"there is no file or folder {name}, and it cannot be streamed as a Hugging Face dataset: {reason(error)}"
        ) from error


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Silence a library's warnings, such as one line per retry."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
