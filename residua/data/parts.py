"""The parts of a corpus: files, files in folders, and streamed datasets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from residua.data.readers import (
    FOUND_IN_FOLDERS,
    LINES_OF_JSON,
    DataError,
    Documents,
    files_in,
    links_notice,
    read_file,
    read_hub,
    split_suffix,
)


@dataclass(frozen=True)
class Part:
    """One file or one stream; `size` in bytes is None for a stream.

    `split` is the split of its documents; with None, each document's hash decides.
    """

    name: str
    size: int | None
    read: Callable[[], Documents]
    split: str | None = None
    version: str = ""


def parts_of(
    names: Iterable[str], field: str, split: str | None, left_out: list[Path], links: list[Path]
) -> Iterator[Part]:
    """Yield the parts of sources; files in folders that are not read are added to `left_out` and `links`."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            files, others, outside = files_in(path)
            if not files:
                known = ", ".join(sorted(FOUND_IN_FOLDERS))
                notice = links_notice(outside) or f"no file in it ends in {known}; to read other files, name them"
                raise DataError(f"the folder {name} holds no text: {notice}")
            left_out += others
            links += outside
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
            f"there is no file or folder {name} (there is a local folder {Path(name).parent}: for a Hugging Face "
            f"dataset write {name}:CONFIG)"
        )
    return Part(name, None, lambda: read_hub(repository, config, field), split, field)
