"""Residua: the depth axis of Transformers.

import residua
config = residua.ModelConfig.preset("tiny").override(["topology=full_attnres"])
model = residua.build(config)
loss = model.loss(tokens, targets)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from residua.storage.formats import register_format
from residua.version import __version__ as __version__

if TYPE_CHECKING:
    from pathlib import Path

    from residua import ops as ops
    from residua.config import choices as choices
    from residua.config.model import ModelConfig as ModelConfig
    from residua.model.builders import build as build
    from residua.model.builders import build_topology as build_topology
    from residua.model.decoder import Decoder as Decoder
    from residua.storage.load import load as load

# Names resolve when first used: `import residua` must stay instant, and most commands do not need torch.
_HOMES = {
    "ModelConfig": ("residua.config.model", "ModelConfig"),
    "Decoder": ("residua.model.decoder", "Decoder"),
    "build": ("residua.model.builders", "build"),
    "build_topology": ("residua.model.builders", "build_topology"),
    "choices": ("residua.config.choices", None),
    "load": ("residua.storage.load", "load"),
    "ops": ("residua.ops", None),
}

__all__ = ["Decoder", "ModelConfig", "build", "build_topology", "choices", "load", "ops"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'residua' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    home = import_module(module)
    value = home if attribute is None else getattr(home, attribute)
    globals()[name] = value
    return value


def _load_quantized(folder: Path) -> Decoder:
    from residua.quantize.store import load_quantized

    return load_quantized(folder, allow_nonfinite=True)  # `load` checks the model of any folder


register_format("quantization.json", _load_quantized)
