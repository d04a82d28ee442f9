"""Measure every preset and write residua/config/presets/sizes.json, which `residua presets` reads: `make sizes`."""

from __future__ import annotations

import json

from residua.config import presets
from residua.config.model import ModelConfig
from residua.files import write_atomically
from residua.model.size import measure


def text() -> str:
    """What the file should hold: one line for each preset."""
    lines = []
    for name in presets.names():
        size = measure(ModelConfig.preset(name))
        counts = {key: getattr(size, key) for key in presets.Size.model_fields}
        lines.append(f" {json.dumps(name)}: {json.dumps(counts)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    write_atomically(presets.SIZES, text())
