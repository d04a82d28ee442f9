"""Imports what the commands need, once, before cases are forked."""

from __future__ import annotations

import gc
import importlib
import pkgutil

import torch
import torch.utils.tensorboard

import residua

LATER = ("residua.ops.", "residua.bench.")
HEAVY = ("residua.export.", "residua.evaluate.harness")
"""Modules that the quick cases do without: they import transformers and lm-eval."""


def preload(*, full: bool) -> None:
    """Import the modules of Residua; what is imported stays shared with the forked processes."""
    torch.set_num_threads(1)
    for found in pkgutil.walk_packages(residua.__path__, "residua."):
        if not found.name.startswith(LATER if full else LATER + HEAVY):
            importlib.import_module(found.name)
    gc.freeze()
