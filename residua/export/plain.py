"""What stands in for the configuration where there is no pydantic: the modelling file of an export holds this class."""

from __future__ import annotations

from typing import Any


class Table:
    """A table of the configuration: its keys as attributes, tables in it likewise, lists as tuples."""

    def __init__(self, **keys: Any) -> None:
        for key, value in keys.items():
            setattr(self, key, self._plain(value))

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, dict):
            return TABLES.get(value.get("kind"), Table)(**value)
        return tuple(Table._plain(v) for v in value) if isinstance(value, list) else value


TABLES: dict[Any, type[Table]] = {}
"""The tables that know more than their keys, by kind."""
