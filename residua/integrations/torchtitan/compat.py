"""Stand-ins for what torchtitan 0.3.0 expects of a newer PyTorch, and of an accelerator on machines without one.

Also finds the run that a name stands for; torchtitan's configuration carries it as text.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from residua.config.run import RunConfig
from residua.data.source import names_vocabulary, vocabulary
from residua.machine import free_memory


def prepare() -> None:
    """Make the imported torchtitan run with this PyTorch and on this machine."""
    if not hasattr(dist, "set_timeout"):  # added after PyTorch 2.13
        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]
    if not torch.accelerator.is_available():
        _use_cpu()


def _use_cpu() -> None:
    """Train on the CPU with gloo; without an accelerator, torchtitan assumes a GPU.

    torchtitan's modules have imported the device by name, so it is replaced in each of them.
    """
    device: Any = SimpleNamespace(
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        get_device_name=lambda _=None: "cpu",
        get_device_properties=lambda _=None: SimpleNamespace(total_memory=free_memory() or 1),
        memory_stats=lambda _=None: {},
        reset_peak_memory_stats=lambda: None,
    )
    replaced = {"device_type": "cpu", "device_module": device, "get_local_device": lambda: torch.device("cpu")}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            for key, value in replaced.items():
                if key in vars(module):
                    setattr(module, key, value)


def find_run(name: str) -> RunConfig:
    """The run of `--config NAME`: a preset or a TOML file, followed by changes, as in "mini train.steps=50"."""
    source, *changes = shlex.split(name)
    config = RunConfig.find(source).override(changes)
    if names_vocabulary(source, changes):
        return config
    return config.override([f"model.vocab_size={vocabulary(config.data)}"])


def parse_run(text: str) -> RunConfig:
    """A run from what `RunConfig.to_toml` returned."""
    return RunConfig(**tomllib.loads(text))
