"""What all configurations share: frozen tables, TOML in and out, overrides, and one-sentence errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from residua import reading
from residua.config import elsewhere
from residua.errors import UserError


class ConfigError(UserError):
    """An invalid configuration; the message is one sentence for the user."""

    problem: tuple[ValidationError, type[BaseModel]] | None = None
    """What it explains, so that a table around this one can name its keys in full."""


PLUGINS = "RESIDUA_PLUGINS"
"""The environment variable that names a person's own modules (`residua.config.plugins`)."""


class Frozen(BaseModel):
    """A configuration table: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    takes_plugins: ClassVar[bool] = False
    """Whether plugins can add kinds to this one's."""
    training_only: ClassVar[tuple[str, ...]] = ()
    """Keys that decide where parameters start or how they are trained, not what the model computes from them."""

    @classmethod
    def alternatives(cls) -> list[type[Frozen]]:
        """The tables that can stand where this one is asked for."""
        return [cls]


def function_changes(before: Frozen, after: Frozen, prefix: str = "") -> list[str]:
    """The keys, such as `norm.rank`, in which two tables describe models that compute different functions."""
    if type(before) is not type(after):
        return [f"{prefix}kind"]
    changes: list[str] = []
    for key in type(before).model_fields:
        old, new = getattr(before, key), getattr(after, key)
        if old == new or key in before.training_only:
            continue
        tables = isinstance(old, Frozen) and isinstance(new, Frozen)
        changes += function_changes(old, new, f"{prefix}{key}.") if tables else [f"{prefix}{key}"]
    return changes


def number(value: object) -> object:
    """Refuse True, which Python counts as 1: `layers = true` does not mean one layer."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a truth value is not a number")
    return value


MOST = 2**31 - 1
Positive = Annotated[int, BeforeValidator(number), Field(ge=1, le=MOST)]
"""At least 1."""
Seed = Annotated[int, BeforeValidator(number), Field(ge=0, lt=2**63)]
"""What random generators take."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if isinstance(path, str) and "\n" in path and "=" in path:
        reading.refuse("the text of a TOML file stands where a path is expected", "write it to a file, and name that")
    return reading.read_toml(Path(path), "correct it or name another file")


@contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """Name the file, or a key of it, in the errors of a configuration that was read from it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def to_toml(data: dict[str, Any]) -> str:
    """Tables as TOML; tuples become arrays."""
    return tomli_w.dumps(_plain(data))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `changes`, table by table; a table whose `kind` changes is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def apply_overrides(data: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply `section.key=value` overrides in order; values are TOML, bare words are strings."""
    for change in changes:
        path, separator, text = change.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys) or len(keys) > reading.DEPTH:
            raise ConfigError(f"override {change!r} is not of the form section.key=value.")
        data = merge(data, _nested(data, keys, reading.parse_toml_value(text.strip())))
    return data


def _nested(data: Any, keys: list[str], value: Any) -> dict[str, Any]:
    """{a: {b: value}} for keys a.b; a bare word for a table with a `kind` sets that kind."""
    current = data.get(keys[0]) if isinstance(data, dict) else None
    if len(keys) > 1:
        return {keys[0]: _nested(current, keys[1:], value)}
    if isinstance(current, dict) and "kind" in current and isinstance(value, str):
        return {keys[0]: {"kind": value}}
    return {keys[0]: value}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def refusal(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The error to raise for what pydantic found."""
    made = ConfigError(explain(error, model))
    made.problem = (error, model)
    found = (fault.get("ctx", {}).get("error") for fault in error.errors())
    error.__cause__ = next((cause for cause in found if isinstance(cause, Exception)), None)  # pydantic drops it
    return made


def explain(error: ValidationError, model: type[BaseModel], within: str = "") -> str:
    """A problem that pydantic found as one sentence: the field, the value, the nearest valid choice.

    It is the first one, but a missing key comes last: an unknown one may be that key, misspelt.
    `within` is the table that holds this one, as in "model": a person typed `model.norm.kind`, not `norm.kind`.
    """
    fault = min(error.errors(), key=lambda fault: fault["type"] == "missing")
    path = _field_path(fault["loc"], model)
    field = reading.brief(".".join([within] * bool(within) + path)) or "configuration"
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError) and cause.problem is not None:
        return explain(*cause.problem, within=field)
    value = reading.brief(repr(fault["input"]))
    rule = _RULES.get(fault["type"], _any_fault)
    return rule(fault, field, path, value, model, within)


def _unknown_key(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    table = _table_at(fault["loc"][:-1], model)
    known = list(table.model_fields) if table else []
    here = elsewhere.called_here(field, known)
    advice = f"did you mean {here!r}?" if here else suggest(path[-1], known, likeness=0.7)
    return f"{field} = {value} is not a known key: {advice}"


def _unknown_kind(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    known = [word.strip(" '") for word in fault["ctx"]["expected_tags"].split(",")]
    tag, family = fault["ctx"]["tag"], _annotation_at(fault["loc"], model)
    nor = f", and no module that {PLUGINS} names adds it" if getattr(family, "takes_plugins", False) else ""
    return f"{field}.kind = {reading.brief(repr(tag))} does not exist{nor}: {suggest(tag, known)}"


def _missing_kind(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    known = [t.model_fields["kind"].default for t in _members(_annotation_at(fault["loc"], model))]
    return f"{field} has no kind: {suggest('', known)}"


def _wrong_word(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    known = [w.strip(" '") for part in fault["ctx"]["expected"].split(" or ") for w in part.split(",")]
    return f"{field} = {value} is not a choice: {suggest(str(fault['input']), known)}"


def _missing(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    return f"{field} is missing: give it a value."


_KEY = r"(?<![\w./\\'-])"  # not in the path of a file such as 'my/model.py'


def _our_sentence(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    """Our own message, with its keys extended to their full path if the table is nested."""
    sentence = str(fault["ctx"]["error"])
    if len(path) >= 2:
        sentence = re.sub(rf"{_KEY}{re.escape(path[0])}\.", f"{'.'.join(path)}.", sentence)
    if within:
        sentence = re.sub(rf"{_KEY}({'|'.join(model.model_fields)})(?=\.[a-z]| = )", rf"{within}.\1", sentence)
    return sentence


def _not_a_table(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    return f"{field} = {value} should be a table of keys."


def _not_a_list(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    return f"{field} = {value} should be a list."


def _any_fault(fault: Any, field: str, path: list[str], value: str, model: type[BaseModel], within: str) -> str:
    reason = fault["msg"][0].lower() + fault["msg"][1:]
    bound = next((fault["ctx"][key] for key in ("ge", "gt", "le", "lt") if key in fault.get("ctx", {})), None)
    if isinstance(bound, int):  # pydantic rounds a large one
        reason = f"{reason.rpartition(' ')[0]} {bound}"
    return f"{field} = {value} is refused: {reason}."


_RULES = {
    "extra_forbidden": _unknown_key,
    "union_tag_invalid": _unknown_kind,
    "union_tag_not_found": _missing_kind,
    "literal_error": _wrong_word,
    "missing": _missing,
    "value_error": _our_sentence,
    "model_type": _not_a_table,
    "model_attributes_type": _not_a_table,
    "dict_type": _not_a_table,
    "tuple_type": _not_a_list,
}


def suggest(word: str, known: Iterable[str], listed_by: str = "", likeness: float = 0.5) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them, or what lists them."""
    known = list(known)
    near = get_close_matches(word, known, n=1, cutoff=likeness)
    if near:
        return f"did you mean {near[0]!r}?"
    if listed_by:
        return f"`{listed_by}` lists them."
    return f"choose one of {', '.join(repr(k) for k in known)}." if known else "remove it."


def _field_path(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """The keys as the user wrote them, without the union tags that pydantic adds."""
    path: list[str] = []
    annotation: Any = model
    for part in loc:
        tags = {t.model_fields["kind"].default: t for t in _members(annotation) if "kind" in t.model_fields}
        if part in tags and len(_members(annotation)) > 1:
            annotation = tags[part]
            continue
        path.append(str(part))
        tables = _members(annotation)
        field = tables[0].model_fields.get(str(part)) if len(tables) == 1 else None
        annotation = field.annotation if field else None
    return path


def _annotation_at(loc: tuple[int | str, ...], model: type[BaseModel]) -> Any:
    annotation: Any = model
    for part in loc:
        tables = _members(annotation)
        tags = {t.model_fields["kind"].default: t for t in tables if "kind" in t.model_fields}
        if part in tags and len(tables) > 1:
            annotation = tags[part]
        else:
            field = tables[0].model_fields.get(str(part)) if tables else None
            annotation = field.annotation if field else None
    return annotation


def _table_at(loc: tuple[int | str, ...], model: type[BaseModel]) -> type[BaseModel] | None:
    tables = _members(_annotation_at(loc, model))
    return tables[0] if len(tables) == 1 else None


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The tables that an annotation allows: itself, or the members of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [*annotation.alternatives()] if issubclass(annotation, Frozen) else [annotation]
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return [t for arg in get_args(annotation) for t in _members(arg)]
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return []
