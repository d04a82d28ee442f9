"""Write docs/reference/options.md and docs/reference/config.md from the code: `make reference`.

Options come from the commands themselves. Keys come from the tables of `residua.config` and `residua.study.config`: a
key's meaning is the docstring below it, or the sentences of its table's docstring that name it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from residua.cli.main import app
from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.study.config import StudyConfig

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
OPTIONS = """# Options of every command

Written by `make reference` from the commands. `residua VERB --help` shows the same with examples. `--traceback`
anywhere in a command shows where an error was raised.
"""
CONFIG = """# Every key of a configuration

Written by `make reference` from the code. A run's TOML file has the sections `[model]`, `[data]`, `[train]` and
`[parallel]`; on a command line a key is `section.key=value`, as in `train.steps=500`. Where a table has kinds, a bare
word chooses one: `model.topology=multi_gate`. [Plugins](../extend.md) add kinds.
"""
STUDY = """## A study's file

`residua compare FILE.toml` reads these keys at the top of the file.
"""
Table = type[BaseModel]


def options() -> str:
    """Every verb with its arguments and options."""
    return "\n".join([OPTIONS, *_verbs("residua", typer.main.get_command(app))]) + "\n"


def _verbs(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        for verb in command.list_commands(None):
            yield from _verbs(f"{name} {verb}", command.get_command(None, verb))
        return
    yield f"## {name}\n\n{_first_sentence(command.help)}\n"
    rows = [_option(parameter) for parameter in command.params if parameter.name != "help"]
    yield from _markdown(("option", "default", "meaning"), rows)


def _first_sentence(help: str | None) -> str:
    verb, _, _ = (help or "").partition("\n\n")
    return " ".join(verb.split())


def _option(parameter: Any) -> tuple[str, str, str]:
    is_option = parameter.param_type_name == "option"
    takes = "" if getattr(parameter, "is_flag", False) else parameter.metavar or _placeholder(parameter)
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts) * is_option)
    default = parameter.show_default
    if not isinstance(default, str):
        plain = parameter.default
        default = "required" if parameter.required else "" if plain in (None, False, True, ()) else f"`{plain}`"
    several = " Can be given several times." * (is_option and bool(parameter.multiple))
    return " ".join(filter(None, (names, f"`{takes}`" * bool(takes)))), default, f"{parameter.help or ''}{several}"


def _placeholder(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    annotation = next(iter(get_args(annotation)), annotation)
    return {int: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")


def config() -> str:
    """Every table of a run and of a study."""
    _shown.clear()
    lines = [CONFIG]
    for section, field in RunConfig.model_fields.items():
        lines += _section(section, field.annotation, 2)
    lines += [STUDY, *_keys(StudyConfig, "", 3)]
    return "\n".join(lines) + "\n"


def _section(path: str, annotation: Any, depth: int) -> list[str]:
    """A table, or the kinds of one, with the tables below it."""
    tables = list(_tables(annotation))
    for table in tables:
        _shown.setdefault(table, path)
    head = f"{'#' * depth} `{path}`\n"
    if len(tables) == 1 and "kind" not in tables[0].model_fields:
        return [head, *_keys(tables[0], path, depth)]
    plain = [table for table in tables if set(table.model_fields) == {"kind"}]
    lines = [head, *_markdown(("kind", ""), [(f"`{_kind(table)}`", _about(table)[0]) for table in plain])]
    inner: list[str] = []
    for table in (table for table in tables if table not in plain):
        of_kind, below = _rows(table, path, depth)
        lines += [f"**`{_kind(table)}`**: {_about(table)[0]}\n", *of_kind]
        inner += below
    return [*lines, *inner]


def _keys(table: Table, path: str, depth: int) -> list[str]:
    rows, inner = _rows(table, path, depth)
    return [f"{_about(table)[0]}\n", *rows, *inner]


def _rows(table: Table, path: str, depth: int) -> tuple[list[str], list[str]]:
    """The keys of a table, and the sections of tables that they hold and that have none yet."""
    meanings = _about(table)[1]
    inner: list[str] = []
    rows = []
    for key, field in table.model_fields.items():
        if key == "kind":
            continue
        tables = list(_tables(field.annotation))
        if not tables:
            kind = _type(field.annotation, field.metadata)
            rows.append((f"`{key}`", kind, _default(field), meanings.get(key, "")))
            continue
        full = f"{path}.{key}" if path else key
        known = {_shown.get(each) for each in tables}
        if known == {None}:
            inner += _section(full, field.annotation, min(depth + 1, 4))
            known = {full}
        (place,) = known
        which = f": {', '.join(f'`{_kind(each)}`' for each in tables)}" if place not in (full, None) else ""
        rows.append((f"`{key}`", "table", _default(field), f"[{place}](#{_anchor(str(place))}){which}"))
    return _markdown(("key", "type", "default", "meaning"), rows), inner


_shown: dict[Table, str] = {}
"""The section that each table has."""


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", path.lower())


def _tables(annotation: Any) -> Iterator[Table]:
    """The tables that an annotation allows."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        # a plugin may have been loaded before, by another test
        yield from (each for each in annotation.alternatives() if each.__module__.startswith("residua."))
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _tables(part)
    elif get_origin(annotation) is Annotated:
        yield from _tables(get_args(annotation)[0])


def _kind(table: Table) -> str:
    return str(table.model_fields["kind"].default)


def _about(table: Table) -> tuple[str, dict[str, str]]:
    """What a table is, and its keys' meanings, also those that it inherits."""
    meanings: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if issubclass(owner, Frozen) and owner is not Frozen and "__doc__" in vars(owner):
            meanings |= _sentences(owner, set(table.model_fields) - {"kind"})[1] | _below(owner)
    return _sentences(table, set(table.model_fields) - {"kind"})[0], meanings


@cache
def _documented(table: Table) -> list[str]:
    return re.split(r"(?<=[.])\s+(?=[^a-z(]|[a-z_]+: )", " ".join((table.__doc__ or "").split()))


def _sentences(table: Table, keys: set[str]) -> tuple[str, dict[str, str]]:
    """A docstring divided: sentences about the table, and those about keys, each in full at the first key it names."""
    first, *others = _documented(table)
    about, meanings = [first], dict[str, str]()
    for sentence in others:
        named = sorted((place, key) for key in keys if (place := _place(sentence, key)) is not None)
        if not named:
            about.append(sentence)
        for index, (_, key) in enumerate(named):
            words = sentence if index == 0 else f"See `{named[0][1]}`."
            words = re.sub(rf"^`?{key}`?: (.)", lambda start: start[1].upper(), words)
            if index == 0 or key not in meanings:
                meanings[key] = f"{meanings[key]} {words}" if key in meanings and index == 0 else words
    for key in keys - set(meanings):
        if _place(first, key) is not None:
            meanings[key] = "See above."
    return " ".join(about), meanings


def _place(sentence: str, key: str) -> int | None:
    """Where a sentence names a key."""
    found = re.search(rf"`{key}(?:`| = )|^{key}: ", sentence)
    return found and found.start()


@cache
def _below(table: Table) -> dict[str, str]:
    """Docstrings that stand below the keys of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for key, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(key.target, ast.Name)
            found[key.target.id] = " ".join(str(text.value.value).split())
    return found


NUMBERS = {int: "integer", float: "number", str: "text", bool: "yes or no", Any: "anything"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type in words, with its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], [*metadata, *_flat(parts[1:])])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_type(part, metadata) for part in parts if part is not NoneType)
    if origin is tuple:
        many = parts[1:] == (...,)
        return f"list of {_type(parts[0], [])}" if many else f"{len(parts)} × {_type(parts[0], [])}"
    if origin is dict:
        return f"table of {_type(parts[1], [])}"
    bounds = [f"{sign} {_number(getattr(each, name))}" for each in metadata for name, sign in BOUNDS.items()
              if getattr(each, name, None) is not None and getattr(each, name) < 2**30]  # fmt: skip
    return " ".join([NUMBERS.get(annotation, "table"), ", ".join(bounds)]).strip()


def _flat(metadata: Any) -> list[Any]:
    return [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]


def _number(value: float) -> str:
    return f"{value:,g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, BaseModel):
        return f"`{value.kind}`" if hasattr(value, "kind") else ""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(repr, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def made() -> dict[Path, str]:
    """Both pages with their content."""
    return {FOLDER / "options.md": options(), FOLDER / "config.md": config()}


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
