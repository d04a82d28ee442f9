"""Families of choices that a person can add to: topologies and norms (docs/extend.md)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, Union, get_args

from pydantic import Field, TypeAdapter

from residua.config.plugins import load_plugins
from residua.config.settings import Frozen
from residua.errors import UserError

_MEMBERS: dict[type[Family], dict[str, type[Family]]] = {}
_ADAPTERS: dict[type[Family], TypeAdapter[Any]] = {}


class Family(Frozen):
    """The root of a family: its direct subclasses collect members, each with a `kind` of its own."""

    takes_plugins: ClassVar[bool] = True

    kind: str

    @classmethod
    def join(cls, *choices: type[Family]) -> None:
        """Add choices to the family, by the default of their `kind`."""
        known = _MEMBERS.setdefault(cls, {})
        for choice in choices:
            field = choice.model_fields["kind"]
            kind = field.default
            if get_args(field.annotation) != (kind,):
                raise UserError(f'{choice.__name__} has no kind: give it `kind: Literal["name"] = "name"`.')
            other = known.get(kind)
            if other is not None and (other.__module__, other.__name__) != (choice.__module__, choice.__name__):
                raise UserError(
                    f"{choice.__module__}.{choice.__name__} has kind = {kind!r}, which {other.__module__}."
                    f"{other.__name__} already has: choose another."
                )
            known[kind] = choice
        _ADAPTERS.pop(cls, None)

    @classmethod
    def choose(cls, value: Any) -> Self:
        """Validate a table with a `kind`; one that is not known yet may come from a plugin."""
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in _MEMBERS[cls]:
            load_plugins()
        if cls not in _ADAPTERS:
            union: Any = Union[tuple(_MEMBERS[cls].values())]  # noqa: UP007  # made of a tuple
            tagged: Any = Annotated[union, Field(discriminator="kind")]
            _ADAPTERS[cls] = TypeAdapter(tagged)
        chosen: Self = _ADAPTERS[cls].validate_python(value)
        return chosen

    @classmethod
    def alternatives(cls) -> list[type[Frozen]]:
        return list(_MEMBERS[cls].values()) if cls in _MEMBERS else [cls]
