"""Converts positions and windows between transformers' keys and Residua's tables.

transformers stores rotary positions in `rope_parameters` (`rope_scaling` before version 5), windows in
`sliding_window` and `layer_types`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from residua.config import positions as scalings
from residua.config.model import ModelConfig
from residua.errors import UserError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
NAMES = {
    "original_context": "original_max_position_embeddings",
    "short": "short_factor",
    "long": "long_factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "share": "partial_rotary_factor",
}
"""Our keys of a scaling → transformers' names, where these differ."""


def read_positions(config: dict[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of an attention table; `partial` if a part of each head may stay unrotated."""
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in stored.values()):
        raise UserError("rope_parameters differ between layers, which is not supported for this family.")
    theta = stored.get("rope_theta", config["rope_theta"])
    kind = stored.get("rope_type", stored.get("type", "default"))
    share = stored.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0) and kind != "proportional":
        if not partial or kind != "default":
            raise UserError(f"partial_rotary_factor = {share} with rope_type = {kind!r} is not supported.")
        return {"rope_theta": theta, "rope_scaling": {"kind": "partial", "share": share}}
    if kind == "default":
        return {"rope_theta": theta}
    if not isinstance(kind, str) or kind not in READERS:
        raise UserError(f"rope_type = {kind!r} is not supported: known are default, {', '.join(READERS)}.")
    try:
        return {"rope_theta": theta, "rope_scaling": READERS[kind](stored, config)}
    except KeyError as error:
        raise UserError(f"rope_type = {kind!r} needs {error.args[0]!r}, which config.json lacks.") from None
    except (TypeError, ValueError, ZeroDivisionError):
        raise UserError(f"the numbers of rope_type = {kind!r} are inconsistent.") from None


def write_positions(theta: float, scaling: scalings.RopeScaling | None) -> dict[str, Any]:
    """The table `rope_parameters`, the form that transformers has written since version 5."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    numbers = scaling.model_dump(mode="json", exclude={"kind"})
    if isinstance(scaling, scalings.DynamicRope):  # transformers uses max_position_embeddings
        del numbers["original_context"]
    kind = {"dynamic_ntk": "dynamic", "partial": "default"}.get(scaling.kind, scaling.kind)
    return {"rope_type": kind, **{NAMES.get(key, key): value for key, value in numbers.items()}, "rope_theta": theta}


def read_layered_positions(keys: dict[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """The keys of an attention table, where `rope_parameters` differ between layers with and without a window."""
    by_layer = {FULL: {}, SLIDING: {}} | (keys.get("rope_parameters") or {})
    plain = {key: value for key, value in keys.items() if key not in ("rope_parameters", "rope_scaling")}
    full = (by_layer[FULL] or {}) | (keys.get("rope_scaling") or {})
    local_theta = keys.get("rope_local_base_freq", keys["rope_theta"])
    local = read_positions(plain | {"rope_parameters": by_layer[SLIDING], "rope_theta": local_theta})
    if "rope_scaling" in local:
        raise UserError("rope_parameters scale the layers with a window, which is not supported.")
    positions = read_positions(plain | {"rope_parameters": full}, partial=partial)
    if positions == local and "rope_local_base_freq" not in keys:
        return positions
    return positions | {"local_rope_theta": local["rope_theta"]}


def _original(stored: dict[str, Any], config: dict[str, Any]) -> int:
    """The original training length; like transformers, prefers the key outside the table."""
    inside = stored.get("original_max_position_embeddings", config["max_position_embeddings"])
    return int(config.get("original_max_position_embeddings") or inside)


def _factor(stored: dict[str, Any], config: dict[str, Any]) -> float:
    factor = stored.get("factor")
    return float(config["max_position_embeddings"] / _original(stored, config) if factor is None else factor)


def _read_yarn(stored: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if "factor" not in stored:  # transformers requires the key, which may be null
        raise KeyError("factor")
    factor, attention = _factor(stored, config), stored.get("attention_factor")

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if attention is None:
        above, below = stored.get("mscale"), stored.get("mscale_all_dim")
        attention = magnitude(above) / magnitude(below) if above and below else magnitude()
    return {
        "kind": "yarn",
        "factor": factor,
        "original_context": _original(stored, config),
        "attention_factor": attention,
        "beta_fast": stored.get("beta_fast") or 32.0,
        "beta_slow": stored.get("beta_slow") or 1.0,
        "truncate": stored.get("truncate", True),
    }


def _read_longrope(stored: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    factor, original, attention = _factor(stored, config), _original(stored, config), stored.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "kind": "longrope",
        "short": stored["short_factor"],
        "long": stored["long_factor"],
        "original_context": original,
        "attention_factor": attention,
    }


READERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "linear": lambda found, config: {"kind": "linear", "factor": found["factor"]},
    "dynamic": lambda found, config: {
        "kind": "dynamic_ntk",
        "factor": found["factor"],
        "original_context": config["max_position_embeddings"],
    },
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": lambda found, config: {
        "kind": "llama3",
        "factor": found["factor"],
        "original_context": _original(found, config),
        "low": found["low_freq_factor"],
        "high": found["high_freq_factor"],
    },
    "proportional": lambda found, config: {
        "kind": "proportional",
        "share": found.get("partial_rotary_factor", 1.0),
        "factor": found.get("factor", 1.0),
    },
}


def write_windows(config: ModelConfig, other: str) -> dict[str, Any]:
    """transformers' keys of windows; `layer_types` calls layers that are not "full_attention" `other`."""
    softmax = config.softmax
    types = []
    for layer, mixer in enumerate(config.mixers):
        slides = softmax is not None and softmax.window_at(layer) is not None
        types.append(other if (not mixer.attends if other == LINEAR else slides) else FULL)
    window = None if softmax is None else softmax.window
    return {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": types}
