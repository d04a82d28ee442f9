"""Parts of a model from plain tables, as they stand in another library's configuration file.

Not part of `topology`, whose code `residua export` copies into folders that do without `residua.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from residua.config import choices
from residua.config.settings import ConfigError, explain
from residua.model import topology


def build_topology(config: choices.TopologyChoice | Mapping[str, Any], sublayers: int, width: int) -> topology.Topology:
    """The topology a configuration describes, for a model of `sublayers` sublayers.

    A table is a configuration too: {"kind": "multi_gate", "streams": 4} is choices.MultiGate(streams=4).
    """
    choice = config if isinstance(config, choices.TopologyChoice) else _chosen(dict(config))
    return topology.build_topology(choice, sublayers, width)


def _chosen(table: dict[str, Any]) -> choices.TopologyChoice:
    try:
        return choices.TopologyChoice.choose(table)
    except ValidationError as error:
        raise ConfigError(explain(error, choices.TopologyChoice)) from None
