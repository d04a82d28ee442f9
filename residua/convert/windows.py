"""Windows: transformers' `sliding_window` and `layer_types`, and Residua's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from residua.config.model import ModelConfig
from residua.errors import UserError


def window_of(config: ModelConfig) -> int | None:
    """transformers' `sliding_window`."""
    return None if config.softmax is None else config.softmax.window


def layer_windows(keys: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """The keys of a window from transformers' `layer_types`."""
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise UserError(f"layer_types contains {sorted(unknown)[0]!r}, a kind of layer that is missing here.")
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if not sliding or keys.get("sliding_window") is None:
        return {}
    return {"window": keys["sliding_window"], **({} if len(sliding) == len(types) else {"window_layers": sliding})}


def layer_types(config: ModelConfig) -> list[str]:
    """transformers' `layer_types` of a model."""
    attention = config.softmax
    assert attention is not None
    windows = (attention.window_at(layer) for layer in range(config.layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


WINDOW_KEYS: dict[str, Callable[[ModelConfig], Any]] = {
    "sliding_window": window_of,
    "layer_types": layer_types,
    "use_sliding_window": lambda config: window_of(config) is not None,
}
"""Keys of windows, and how each is written."""
