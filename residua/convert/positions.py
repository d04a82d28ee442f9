"""Converts positions and windows between transformers' keys and Residua's tables.

transformers stores rotary positions in `rope_parameters` (`rope_scaling` before version 5), windows in
`sliding_window` and `layer_types`.
"""

from __future__ import annotations

import math
from typing import Any

from residua.config import positions as scalings
from residua.config.model import ModelConfig
from residua.config.settings import Frozen
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
        return {"rope_theta": theta, "rope_scaling": _read_scaling(kind, stored, config)}
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


READERS: dict[str, tuple[type[Frozen], tuple[str, ...]]] = {
    "linear": (scalings.LinearRope, ("factor",)),
    "dynamic": (scalings.DynamicRope, ("factor",)),
    "yarn": (scalings.YarnRope, ("factor",)),
    "longrope": (scalings.LongRope, ("short_factor", "long_factor")),
    "llama3": (scalings.Llama3Rope, ("factor", "low_freq_factor", "high_freq_factor")),
    "proportional": (scalings.ProportionalRope, ()),
}
"""`rope_type` → our table, and the keys that transformers requires."""


def _read_scaling(kind: str, stored: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Our table of a scaling, with the numbers that transformers derives where they are null or missing."""
    table, required = READERS[kind]
    if lacking := [key for key in required if key not in stored]:
        raise KeyError(lacking[0])
    theirs = {key: NAMES.get(key, key) for key in table.model_fields}
    nullable = ("attention_factor", "beta_fast", "beta_slow")
    filled = {name for name, value in stored.items() if value or name not in nullable}  # 0 also means the default
    given = {key: stored[name] for key, name in theirs.items() if name in filled}
    derived, original = {"share": 1.0}, config["max_position_embeddings"]
    if kind != "dynamic" and "original_context" in theirs:  # like transformers, prefers the key outside the table
        inside = stored.get("original_max_position_embeddings", original)
        original = int(config.get("original_max_position_embeddings") or inside)
    if kind in ("yarn", "longrope"):
        factor = stored.get("factor")
        factor = float(config["max_position_embeddings"] / original if factor is None else factor)
        given["factor"], derived["attention_factor"] = factor, _attention_factor(kind, factor, original, stored)
    given |= {"kind": table.model_fields["kind"].default, "original_context": original}
    return {key: value for key, value in (derived | given).items() if key in theirs}


def _attention_factor(kind: str, factor: float, original: int, stored: dict[str, Any]) -> float:
    """The factor on cos and sin."""

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = stored.get("mscale"), stored.get("mscale_all_dim")
    return magnitude(above) / magnitude(below) if above and below else magnitude()


def write_windows(config: ModelConfig, other: str) -> dict[str, Any]:
    """transformers' keys of windows; `layer_types` calls layers that are not "full_attention" `other`."""
    softmax = config.softmax
    types = []
    for layer, mixer in enumerate(config.mixers):
        slides = softmax is not None and softmax.window_at(layer) is not None
        types.append(other if (not mixer.attends if other == LINEAR else slides) else FULL)
    window = None if softmax is None else softmax.window
    return {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": types}
