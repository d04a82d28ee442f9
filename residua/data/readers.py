"""Read documents from files and streamed datasets.

Every reader yields `(text, position)`: one document, and the bytes of the source read so far, for a progress bar.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from residua.reading import ReadError, counted, json_lines, reason, refuse, shown

Documents = Iterator[tuple[str, int]]

SEPARATOR = "<|endoftext|>"
# Without this limit, a book in one file would be one document: nothing to hold out, and all of it in memory.
DOCUMENT_CHARACTERS = 65_536

LINES_OF_JSON = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
PLAIN = (".txt", ".text", ".md", ".rst", ".py", ".tex", ".org", ".adoc")
# A `.json` in a folder is usually a settings file; one named by the user is read as JSON lines.
FOUND_IN_FOLDERS = {*LINES_OF_JSON, *PARQUET, *PLAIN} - {".json"}
NAMED_SUFFIXES = 4


DataError = ReadError
"""A corpus, tokenizer or dataset cannot be used; the message says why, and what to do, in one sentence."""


def split_suffix(path: Path) -> tuple[str, str]:
    """Format and compression of a file by its name: `a.jsonl.xz` is `(".jsonl", ".xz")`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in DECOMPRESSORS else ""
    return (suffixes[-1] if suffixes else ""), compression


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files below `folder`, sorted: those with a text suffix, and the others. Hidden ones are in neither list."""
    known: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            (known if split_suffix(path)[0] in FOUND_IN_FOLDERS else others).append(path)
    return known, others


def left_out_notice(files: Sequence[Path]) -> str | None:
    """What to say about files of folders that are not read because of their suffix; None if there are none."""
    if not files:
        return None
    suffixes = Counter("".join(split_suffix(path)) for path in files).most_common()
    named = ", ".join(suffix or "no suffix" for suffix, _ in suffixes[:NAMED_SUFFIXES])
    first = next(path for path in files if "".join(split_suffix(path)) == suffixes[0][0])
    pattern = f"{shlex.quote(str(first.parent))}/*{first.suffix and shlex.quote(first.suffix)}"
    return (
        f"{counted(len(files), 'file')} left out because of the suffix "
        f"({named}{', …' if len(suffixes) > NAMED_SUFFIXES else ''}): to read those that are text, name them, "
        f"as in residua data prepare {pattern}"
    )


def read_file(path: Path, field: str) -> Documents:
    """Documents of one file. The suffix decides the format; an unknown suffix means plain text."""
    kind, compression = split_suffix(path)
    try:
        if kind in PARQUET:
            yield from _parquet(path, field)
            return
        with path.open("rb") as raw:
            stream = DECOMPRESSORS[compression](raw) if compression else raw
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig")
            texts = _json_lines(lines, path, field) if kind in LINES_OF_JSON else plain_documents(lines)
            for text in texts:
                yield text, raw.tell()
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}): convert it or leave it out") from error
    except Exception as error:  # each codec has its own error classes; all of them mean a faulty file
        raise DataError(f"cannot read {path}: {reason(error)}") from error


def plain_documents(lines: Iterable[str]) -> Iterator[str]:
    """Cut plain text into documents.

    A document ends at `<|endoftext|>`. One longer than `DOCUMENT_CHARACTERS` ends at the next blank line, or after
    twice that length at the next line end.
    """
    held: list[str] = []
    size = 0
    for line in lines:
        *ended, rest = line.split(SEPARATOR)
        for end in ended:
            yield "".join([*held, end])
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        if size >= DOCUMENT_CHARACTERS and (not rest.strip() or size >= 2 * DOCUMENT_CHARACTERS):
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)


def _json_lines(lines: Iterable[str], path: Path, field: str) -> Iterator[str]:
    before = False
    for where, record in json_lines(lines, path, _one_per_line(field), lenient=True):
        yield _text_of(record, field, where, before)
        before = True


def _one_per_line(field: str) -> str:
    return f"write one object per line, such as {json.dumps({field: 'some text'}, ensure_ascii=False)}, and no list"


def _text_of(record: Any, field: str, where: str, before: bool = False) -> str:
    """The text of a record; empty for null, so that the document is dropped like a blank one.

    `before`: whether records before it have the field, so that this one is at fault if it has not.
    """
    if not isinstance(record, dict):
        refuse(f"{where} holds {shown(record)}, not an object", _one_per_line(field))
    if field not in record and (before or not record):
        refuse(f"{where} has no field {field!r}" + ", which the lines before it have" * before, "correct or remove it")
    if field not in record:
        raise _no_field(where, field, record)
    text = "" if record[field] is None else record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} holds {type(text).__name__}, not text")
    return text


def _no_field(where: str, field: str, present: Iterable[str]) -> DataError:
    return DataError(f"{where} has no field {field!r}: name one of {', '.join(present)} with --field")


def _parquet(path: Path, field: str) -> Documents:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing("pyarrow", f"reading {path}") from None
    file = parquet.ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise _no_field(str(path), field, file.schema_arrow.names)
    size, rows, seen = path.stat().st_size, max(1, file.metadata.num_rows), 0
    for batch in file.iter_batches(batch_size=256, columns=[field]):
        for text in batch.column(0).to_pylist():
            seen += 1
            yield _text_of({field: text}, field, f"{path}, row {seen}"), size * seen // rows


def read_hub(name: str, config: str | None, field: str) -> Documents:
    """Documents of the train split of a Hugging Face dataset, streamed."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise missing("datasets", f"{name!r} is no file or folder here; reading it from Hugging Face") from None
    try:
        with _quiet("huggingface_hub"):
            rows = load_dataset(name, config, split="train", streaming=True)
        for row in rows:
            yield _text_of(row, field, f"dataset {name!r}"), 0
    except DataError:
        raise
    except Exception as error:  # network, authentication, name, config: the library has dozens of classes
        raise DataError(
            f"there is no file or folder {name}, and it cannot be streamed as a Hugging Face dataset: {reason(error)}"
        ) from error


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Silence a library's warnings, such as a line for each retry."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def missing(package: str, purpose: str) -> DataError:
    """The error for an optional package that is not installed."""
    return DataError(f"{purpose} needs the package {package}: pip install 'residua[data]'")


def _zst(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise missing("zstandard", f"reading {raw.name}") from None
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)


DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _zst,
}
