"""Reading files that may be damaged or foreign: every JSON, JSONL and TOML file that a command reads is read here.

A file is refused with one sentence (`ReadError`) that names the file, the line or key, what was expected and how to go
on; the caller knows the last part and gives it as `hint`. A `Shape` lists the keys of a file and their types.
`inside` refuses names that lead out of a folder.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from residua.errors import UserError

T = TypeVar("T")

MIB = 2**20
MAX_DOCUMENT_BYTES = 256 * MIB
"""The longest document that is read as a whole: tokenizers have tens of MiB, everything else far less."""
MAX_LOG_BYTES = 4096 * MIB
"""The longest file of lines."""
MAX_NAME_LETTERS = 1024
"""The longest name of a file inside a folder, with its subfolders."""
MAX_NESTING = 64
"""The deepest nesting of tables and lists."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number from 0 on that other libraries can hold."""


Hint = str | Callable[[], str]
"""How to go on, as the end of a sentence; a function where finding out takes time."""


class ReadError(UserError):
    """A file cannot be used; the message is one sentence for a person."""


class Shape(BaseModel):
    """The contents of a file. Types are strict (`true` and `"3"` are not numbers), other keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class OpenShape(Shape):
    """A shape that keeps the keys it does not name."""

    model_config = ConfigDict(extra="allow")


def read_json(path: Path, shape: type[T], hint: Hint, *, lenient: bool = False) -> T:
    """The content of a JSON file, checked; `lenient` as in `parse_json`."""
    return check(parse_json(read_text(path, hint), path, hint, lenient=lenient), shape, path, hint)


def read_json_lines(path: Path, hint: Hint) -> Iterator[tuple[str, Any]]:
    """The records of a file with one JSON value per line; an incomplete last line (after a crash) is skipped."""
    data = _read_bytes(path, hint, MAX_LOG_BYTES)
    lines = _decode(data[: data.rfind(b"\n") + 1], path, hint).split("\n")
    return json_lines(lines, path, hint)


def json_lines(lines: Iterable[str], path: Path, hint: Hint, *, lenient: bool = False) -> Iterator[tuple[str, Any]]:
    """Where it is (`FILE, line 3`) and what it holds, for every line that is not blank; the caller checks its shape."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line.strip(), where, hint, lenient=lenient)


def read_toml(path: Path, hint: Hint) -> dict[str, Any]:
    """The tables of a TOML file."""
    text = read_text(path, hint, empty=True)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        refuse(f"{path} is nested too deeply", hint)
    except ValueError as error:  # also a number with too many digits
        refuse(f"{path} is not valid TOML ({reason(error)})", hint)
    _check_sane(tables, path, hint)
    return tables


def parse_toml_value(text: str) -> Any:
    """The value that `text` is in TOML, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def toml_string(text: str | Path) -> str:
    """A text as a quoted TOML string: a path such as 2024 must not become a number, and one may hold any character."""
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_json(text: str, where: Path | str, hint: Hint, *, lenient: bool = False) -> Any:
    """The value of a JSON text; `where` names it in errors.

    Refuses repeated keys and numbers beyond 64 bits, unless `lenient`: texts of strangers may have them in parts that
    nobody reads.
    """
    try:
        content = json.loads(text, object_pairs_hook=None if lenient else _unique)
    except RecursionError:
        refuse(f"{where} is nested too deeply", hint)
    except ValueError as error:
        refuse(f"{where} is not valid JSON ({reason(error)})", hint)
    _check_sane(content, where, hint, lenient=lenient)
    return content


def check(content: Any, shape: type[T], where: Path | str, hint: Hint) -> T:
    """`content` as a `shape`, which may be any type that pydantic knows."""
    kind: Any = shape
    try:
        checked: T = _adapter(kind).validate_python(content)
        return checked
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    key = _key(fault["loc"])
    if fault["type"] == "missing":
        refuse(f"{where} has no key {key}", hint)
    subject = f"{where}: {key} is" if key else f"{where} holds"
    refuse(f"{subject} {shown(fault['input'])}, expected {expected(fault)}", hint)


def read_text(path: Path, hint: Hint, *, limit: int = MAX_DOCUMENT_BYTES, empty: bool = False) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Refuses an empty one unless `empty` allows it."""
    data = _read_bytes(path, hint, limit)
    if not data and not empty:
        refuse(f"{path} is empty", hint)
    return _decode(data, path, hint)


def _read_bytes(path: Path, hint: Hint, limit: int) -> bytes:
    if require_file(path, hint) > limit:
        refuse(f"{path} is longer than {limit // MIB} MiB, which is too long for this kind of file", hint)
    try:
        return path.read_bytes()
    except OSError as error:
        refuse(f"{path} cannot be read ({reason(error)})", hint)


def _decode(data: bytes, path: Path, hint: Hint) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        refuse(f"{path}, line {line} is not UTF-8 text ({error.reason})", hint)


def require_file(path: Path, hint: Hint) -> int:
    """The size of a file. Refuses a missing one, a folder, and a device or a pipe, which might never end."""
    try:
        about = path.stat()
    except FileNotFoundError:
        refuse(f"{path} does not exist", hint)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        refuse(f"{path} cannot be read ({reason(error)})", hint)
    if not stat.S_ISREG(about.st_mode):
        refuse(f"{path} is {'a folder' if stat.S_ISDIR(about.st_mode) else 'a device or a pipe'}, not a file", hint)
    return about.st_size


def inside(folder: Path, name: str) -> Path:
    """The file or folder `name` in `folder`; refuses a name or link that leads out of it.

    A folder of another person could otherwise show or overwrite any file of this machine. In the cache of Hugging Face,
    files of `models--ORG--NAME/snapshots/REVISION` are links into `models--ORG--NAME/blobs`: those are followed, and in
    `datasets--ORG--NAME` too.
    """
    pure = PurePosixPath(name)
    path = folder / name
    if len(name) > MAX_NAME_LETTERS:
        raise ReadError(f"{folder} refers to {shown(name)}, a name of {len(name)} characters: choose a shorter one.")
    if not pure.parts or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise ReadError(
            f"{folder} refers to {shown(name)}, which is not a file inside it: put the file into the folder and "
            "give its path without a leading / or .."
        )
    try:
        home, target = folder.resolve(), Path(os.path.realpath(path))
    except (OSError, RuntimeError) as error:
        raise ReadError(f"{path} cannot be followed ({reason(error)}): replace it with the file itself.") from None
    if not target.is_relative_to(home) and target.parent != _blobs(home):
        raise ReadError(f"{path} is a link to a file outside its folder: replace it with a copy of {target}.")
    return path


def check_links(folder: Path) -> None:
    """Refuse a folder that holds a link to somewhere outside; for folders that another library reads."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            inside(folder, str(path.relative_to(folder)))


def _blobs(home: Path) -> Path | None:
    """Where the files of a folder in Hugging Face's cache are; None for any other folder."""
    repository = home.parent.parent
    cached = home.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return repository / "blobs" if cached else None


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise UserError(f"it has the key {shown(twice)} twice")
    return table


def _check_sane(content: Any, where: Path | str, hint: Hint, *, lenient: bool = False) -> None:
    """Refuse deep nesting and, unless `lenient`, numbers beyond 64 bits: other libraries cannot hold them."""
    level: list[Any] = [content]
    for _ in range(MAX_NESTING):
        for value in level:
            if not lenient and isinstance(value, int) and not -(2**63) <= value < 2**64:
                refuse(f"{where} holds the number {shown(value)}, which does not fit in 64 bits", hint)
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    refuse(f"{where} is nested too deeply", hint)


def _key(loc: tuple[int | str, ...]) -> str:
    """`splits.train.shards[0]`."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{_plain(part)}" for part in loc)
    return words.removeprefix(".")


def _plain(key: str) -> str:
    return key if key.isidentifier() and len(key) < 60 else shown(key)


def expected(fault: Any) -> str:
    """The value that pydantic expected instead of the one it refused, in words."""
    words = _WORDS.get(fault["type"])
    if words is not None:
        return words.format(**fault.get("ctx", {}))
    message = str(fault["msg"]).removeprefix("Input should be ")
    return message[0].lower() + message[1:]


_WORDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite float32 number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "nothing",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "too_short": "{min_length} or more items",
    "too_long": "{max_length} items or fewer",
}


def shown(value: Any) -> str:
    """A value in a few words; a long table or list is only named."""
    if isinstance(value, dict | list):
        size = len(value)
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {counted(size, 'entry', 'entries')}"
    if value is None:
        return "null"
    return brief("a very long number" if isinstance(value, int) and abs(value) > 10**40 else repr(value), 60)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2,000 steps`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def brief(words: str, limit: int = 300) -> str:
    """The beginning of a text that is too long for a sentence."""
    return words if len(words) <= limit else f"{words[: limit - 3]}..."


def reason(error: BaseException) -> str:
    """An error of another library in a few words: its first line, or its class where it says nothing."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"{line}column {error.colno}: {error.msg[0].lower()}{error.msg[1:]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "int_max_str_digits" in str(error):
        return "it contains a number with thousands of digits"
    return brief(next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip("."))


def refuse(problem: str, hint: Hint) -> NoReturn:
    """Raise a `ReadError`: the problem, and how to go on."""
    words = hint if isinstance(hint, str) else hint()
    raise ReadError(f"{problem}: {words.rstrip('.')}.") from None
