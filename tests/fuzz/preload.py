"""Imports the modules of the commands once, before cases are forked."""

import gc
import importlib
import io
import pkgutil
from contextlib import redirect_stdout

import pytest
import torch
import torch.utils.tensorboard

import residua
from tests.trained import residua as run_command

LATER = ("residua.ops.", "residua.bench.", "residua.integrations.")
HEAVY = (
    "residua.convert.", "residua.diagnose", "residua.distributed.", "residua.evaluate.harness", "residua.export",
    "residua.quantize", "residua.reproduce", "residua.watch",
)  # fmt: skip
"""Modules that the quick cases do not need, and their imports: transformers, lm-eval, torch's compiler."""


def preload(*, full: bool) -> None:
    """Import the modules of Residua; what is imported stays shared with the forked processes."""
    torch.set_num_threads(1)
    for found in pkgutil.walk_packages(residua.__path__, "residua."):
        if not found.name.startswith(LATER if full else LATER + HEAVY):
            importlib.import_module(found.name)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        run_command(patch, "presets", "tiny")  # imports more, and looks for installed plugins
    gc.freeze()
