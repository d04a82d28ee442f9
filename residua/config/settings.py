"""The base of all configurations: frozen tables, TOML in and out, overrides, and one-sentence errors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from residua import reading
from residua.errors import UserError


class ConfigError(UserError):
    """An invalid configuration; the message is one sentence for the user."""

    problem: tuple[ValidationError, type[BaseModel]] | None = None
    """The original error, so that an enclosing table can report full key names."""


PLUGINS = "RESIDUA_PLUGINS"
"""The environment variable that names plugin modules (`residua.config.plugins`)."""


class Frozen(BaseModel):
    """A configuration table: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    takes_plugins: ClassVar[bool] = False
    """Whether plugins can add kinds."""
    training_only: ClassVar[tuple[str, ...]] = ()
    """Keys that affect initialization or training, but not what the model computes from its parameters."""

    @classmethod
    def alternatives(cls) -> list[type[Frozen]]:
        """The tables allowed in place of this one."""
        return [cls]

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        """Refuse True, which Python counts as 1 (`layers = true` is not one layer), and what float32 makes infinite."""
        if not isinstance(data, dict):
            return data
        known = {key: _number_types(cls, key) for key in data if key in cls.model_fields}
        return data | {key: _as_number(data[key], types) for key, types in known.items() if types}


class WholeConfig(Frozen):
    """The outermost table of a configuration, which turns pydantic errors into one sentence."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise refusal(error, type(self)) from None

    def to_toml(self) -> str:
        """The whole configuration as TOML; reading it back gives an equal one."""
        return to_toml(self.model_dump(exclude_none=True))


def function_changes(before: Frozen, after: Frozen, prefix: str = "") -> list[str]:
    """The keys, such as `norm.rank`, that make the models of two tables compute different functions."""
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


class _Refused:
    """True or False where a number is expected: no number to pydantic, and shown as it was given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class _TooLarge(_Refused, float):
    """A number that float32 makes infinite, refused as infinity is."""

    def __new__(cls, value: object) -> Self:
        return super().__new__(cls, math.inf)


def _as_number(value: Any, types: set[type]) -> Any:
    """The value as pydantic is to see it."""
    if isinstance(value, list | tuple):
        return [_as_number(entry, types) for entry in value]
    if isinstance(value, bool):
        return _Refused(value)
    return _TooLarge(value) if float in types and isinstance(value, float | int) and abs(value) > MAX_FLOAT32 else value


@cache
def _number_types(table: type[Frozen], key: str) -> set[type]:
    """The numbers that a key, or its list, takes: int, float, both or neither. Empty if it takes true or false."""
    types = set(_plain_types(table.model_fields[key].annotation))
    return set() if bool in types else types & {int, float}


def _plain_types(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from _plain_types(part)


MAX_FLOAT32 = 3.4028234663852886e38
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""At least 1."""
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""0 or more."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""The seeds that random generators take."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if isinstance(path, str) and "\n" in path and "=" in path:
        reading.refuse("expected a path, got the text of a TOML file", "write it to a file and give its path")
    return reading.read_toml(Path(path), "correct it or name another file")


@contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """Name the file, or a key in it, in errors of a configuration read from it."""
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


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: `attention.heads` → 8."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def apply_overrides(data: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply `section.key=value` overrides in order; values are TOML, bare words are strings."""
    for change in changes:
        path, separator, text = change.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys) or len(keys) > reading.MAX_NESTING:
            raise ConfigError(f"override {change!r} is not of the form section.key=value.")
        data = merge(data, _nested(data, keys, reading.parse_toml_value(text.strip())))
    return data


def override_key(change: str) -> str:
    """`train.steps` of `train.steps = 500`."""
    return change.partition("=")[0].strip()


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
    """The error to raise for an error of pydantic."""
    refused = ConfigError(explain(error, model))
    refused.problem = (error, model)
    causes = (fault.get("ctx", {}).get("error") for fault in error.errors())
    error.__cause__ = next((cause for cause in causes if isinstance(cause, Exception)), None)  # pydantic drops it
    return refused


def explain(error: ValidationError, model: type[BaseModel], within: str = "") -> str:
    """A pydantic problem as one sentence: the field, the value and the nearest valid choice.

    It reports the first problem, and missing keys last, since an unknown key may be the missing one misspelt.
    `within` is the enclosing table, such as "model": the user typed `model.norm.kind`, not `norm.kind`.
    """
    fault: Any = min(error.errors(), key=lambda fault: fault["type"] == "missing")
    context, (path, tables) = fault.get("ctx", {}), _followed(fault["loc"], model)
    field = reading.brief(".".join([within] * bool(within) + path)) or "configuration"
    value = reading.brief(repr(fault["input"]))
    match fault["type"]:
        case "value_error":
            cause = context["error"]
            if isinstance(cause, ConfigError) and cause.problem is not None:
                return explain(*cause.problem, within=field)
            return _with_full_keys(str(cause), path, model, within)
        case "extra_forbidden":
            around = _followed(fault["loc"][:-1], model)[1]
            known = list(around[0].model_fields) if len(around) == 1 else []
            alias = key_for_alias(field, known)
            advice = f"did you mean {alias!r}?" if alias else suggest(path[-1], known, likeness=0.7)
            return f"{field} = {value} is not a known key: {advice}"
        case "union_tag_invalid":
            open_family = any(issubclass(table, Frozen) and table.takes_plugins for table in tables)
            nor = f", and no module named in {PLUGINS} adds it" if open_family else ""
            tag, known = context["tag"], _words(context["expected_tags"])
            return f"{field}.kind = {reading.brief(repr(tag))} does not exist{nor}: {suggest(tag, known)}"
        case "union_tag_not_found":
            return f"{field} has no kind: {suggest('', [table.model_fields['kind'].default for table in tables])}"
        case "literal_error":
            choices = _words(context["expected"].replace(" or ", ","))
            return f"{field} = {value} is not a choice: {suggest(str(fault['input']), choices)}"
        case "missing":
            return f"{field} is missing: give it a value."
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{field} = {value} should be a table of keys."
        case "tuple_type":
            return f"{field} = {value} should be a list."
        case _:
            return f"{field} = {value} is invalid: expected {reading.expected(fault)}."


def _words(text: str) -> list[str]:
    return [word.strip(" '") for word in text.split(",")]


def _with_full_keys(sentence: str, path: list[str], model: type[BaseModel], within: str) -> str:
    """One of our error sentences, with keys extended to their full paths if the table is nested."""
    key = r"(?<![\w./\\'-])"  # not in the path of a file such as 'my/model.py'
    if len(path) >= 2:
        sentence = re.sub(rf"{key}{re.escape(path[0])}\.", f"{'.'.join(path)}.", sentence)
    if within:
        sentence = re.sub(rf"{key}({'|'.join(model.model_fields)})(?=\.[a-z]| = |=\{{)", rf"{within}.\1", sentence)
    return sentence


def suggest(word: str, known: Iterable[str], listed_by: str = "", likeness: float = 0.5) -> str:
    """The end of a message about an unknown word: the nearest known word, all words, or the command that lists them."""
    known = list(known)
    near = get_close_matches(word, known, n=1, cutoff=likeness)
    if near:
        return f"did you mean {near[0]!r}?"
    if listed_by:
        return f"`{listed_by}` lists them."
    return f"choose one of {', '.join(repr(k) for k in known)}." if known else "remove it."


def _followed(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys as the user wrote them, without the union tags that pydantic adds, and the tables allowed there."""
    path: list[str] = []
    tables: list[type[BaseModel]] = _members(model)
    for part in loc:
        tags = {table.model_fields["kind"].default: table for table in tables if "kind" in table.model_fields}
        if part in tags and len(tables) > 1:
            tables = [tags[part]]
        else:
            path.append(str(part))
            field = tables[0].model_fields.get(str(part)) if tables else None
            tables = _members(field.annotation) if field else []
    return path, tables


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The tables that an annotation allows: itself, or the members of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [*annotation.alternatives()] if issubclass(annotation, Frozen) else [annotation]
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return [t for arg in get_args(annotation) for t in _members(arg)]
    if hasattr(annotation, "__metadata__"):
        return _members(get_args(annotation)[0])
    return []


KEY_ALIASES = {
    "model.layers": "depth n_layer n_layers num_layers num_hidden_layers",
    "model.width": "dim d_model n_embd hidden_size embed_dim model_dim",
    "model.context": "block_size max_seq_len max_position_embeddings context_length",
    "model.vocab_size": "vocab n_vocab",
    "model.attention.heads": "heads n_head n_heads num_heads num_attention_heads",
    "model.attention.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.ffn.hidden": "d_ff ffn_dim intermediate_size mlp_dim",
    "data.sequence": "seq seq_len seq_length sequence_length",
    "train.steps": "max_steps max_iters num_steps iterations",
    "train.micro_batch": "batch batch_size micro_batch_size local_batch_size per_device_train_batch_size",
    "train.accumulate": "grad_accum gradient_accumulation gradient_accumulation_steps",
    "train.optimizer.lr": "lr learning_rate max_lr",
    "train.optimizer.weight_decay": "weight_decay wd",
    "train.schedule.warmup": "warmup warmup_steps warmup_iters",
    "train.validate_every": "eval_every eval_interval eval_steps",
    "train.save_every": "checkpoint_every save_steps save_interval",
}  # fmt: skip
"""Names that other toolkits give to keys of a run, for advice about unknown keys."""
_BY_ALIAS = {word: key for key, words in KEY_ALIASES.items() for word in words.split()}
_SECTIONS = {key.partition(".")[0] for key in KEY_ALIASES}


def key_for_alias(key: str, known: Collection[str] = ()) -> str | None:
    """The key that an unknown key stands for.

    It is one of the `known` keys of the same table, or, for a key directly in a section such as `train.lr`, any.
    """
    section, _, rest = key.partition(".")
    ours = _BY_ALIAS.get(rest.rpartition(".")[2].lower()) if section in _SECTIONS else None
    last = (ours or "").rpartition(".")[2]
    return last if last in known else ours if "." not in rest else None
