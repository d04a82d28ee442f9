"""Rotary positions: transformers' `rope_parameters` (`rope_scaling` before version 5) and Residua's tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from residua.config import positions as scalings
from residua.errors import UserError


def read_positions(config: dict[str, Any], default_theta: float) -> dict[str, Any]:
    """The keys `rope_theta` and `rope_scaling` of an attention table."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in found.values()):
        raise UserError("rope_parameters differ between layers, which this family does not have here.")
    theta = found.get("rope_theta", config.get("rope_theta", default_theta))
    kind = found.get("rope_type", found.get("type", "default"))
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0) and kind != "proportional":
        raise UserError(f"partial_rotary_factor = {share}: heads that turn in part are missing here.")
    if kind == "default":
        return {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in READERS:
        raise UserError(f"rope_type = {kind!r} is missing here: known are default, {', '.join(READERS)}.")
    try:
        return {"rope_theta": theta, "rope_scaling": READERS[kind](found, config)}
    except KeyError as error:
        raise UserError(f"rope_type = {kind!r} needs {error.args[0]!r}, which config.json does not give.") from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise UserError(f"the numbers of rope_type = {kind!r} make no sense.") from None


def write_positions(theta: float, scaling: scalings.RopeScaling | None) -> dict[str, Any]:
    """`rope_parameters`, and `rope_theta` and `rope_scaling` for versions of transformers before 5."""
    if scaling is None:
        plain = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_parameters": plain, "rope_scaling": None}
    written = WRITERS[type(scaling)](scaling)
    return {"rope_theta": theta, "rope_parameters": {**written, "rope_theta": theta}, "rope_scaling": written}


def _original(found: dict[str, Any], config: dict[str, Any]) -> int:
    """The length of the first training: transformers gives the key outside of the table precedence."""
    inside = found.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(config.get("original_max_position_embeddings") or inside)


def _factor(found: dict[str, Any], config: dict[str, Any]) -> float:
    given = found.get("factor")
    return float(config["max_position_embeddings"] / _original(found, config) if given is None else given)


def _read_linear(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "linear", "factor": found["factor"]}


def _read_dynamic(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "dynamic_ntk", "factor": found["factor"], "original_context": config["max_position_embeddings"]}


def _read_yarn(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if "factor" not in found:  # transformers asks for the key, which may be null
        raise KeyError("factor")
    factor, attention = _factor(found, config), found.get("attention_factor")

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if attention is None:
        above, below = found.get("mscale"), found.get("mscale_all_dim")
        attention = magnitude(above) / magnitude(below) if above and below else magnitude()
    return {
        "kind": "yarn",
        "factor": factor,
        "original_context": _original(found, config),
        "attention_factor": attention,
        "beta_fast": found.get("beta_fast") or 32.0,
        "beta_slow": found.get("beta_slow") or 1.0,
        "truncate": found.get("truncate", True),
    }


def _read_longrope(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    factor, original, attention = _factor(found, config), _original(found, config), found.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "kind": "longrope",
        "short": found["short_factor"],
        "long": found["long_factor"],
        "original_context": original,
        "attention_factor": attention,
    }


def _read_llama3(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": found["factor"],
        "original_context": _original(found, config),
        "low": found["low_freq_factor"],
        "high": found["high_freq_factor"],
    }


def _read_proportional(found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    share = found.get("partial_rotary_factor", 1.0)
    return {"kind": "proportional", "share": share, "factor": found.get("factor", 1.0)}


def _write_yarn(scaling: scalings.YarnRope) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "attention_factor": scaling.attention_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }


def _write_longrope(scaling: scalings.LongRope) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": list(scaling.short),
        "long_factor": list(scaling.long),
        "original_max_position_embeddings": scaling.original_context,
        "attention_factor": scaling.attention_factor,
    }


def _write_llama3(scaling: scalings.Llama3Rope) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
    }


READERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
}
WRITERS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    scalings.LinearRope: lambda s: {"rope_type": "linear", "factor": s.factor},
    scalings.DynamicRope: lambda s: {"rope_type": "dynamic", "factor": s.factor},
    scalings.YarnRope: _write_yarn,
    scalings.LongRope: _write_longrope,
    scalings.Llama3Rope: _write_llama3,
    scalings.ProportionalRope: lambda s: {
        "rope_type": "proportional",
        "partial_rotary_factor": s.share,
        "factor": s.factor,
    },
}
