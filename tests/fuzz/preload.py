"""Imports what the commands need, once, before cases are forked."""

import gc
import importlib
import os
import pkgutil

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.utils.tensorboard

import residua

torch.set_num_threads(1)
for found in pkgutil.walk_packages(residua.__path__, "residua."):
    if not found.name.startswith(("residua.ops.", "residua.bench.")):
        importlib.import_module(found.name)
gc.freeze()  # the pages of what is imported stay shared with the forked processes
