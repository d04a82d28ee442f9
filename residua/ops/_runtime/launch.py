"""What launching kernels has in common: operators that `torch.compile` does not look into, sizes and alignment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("residua", "FRAGMENT")

listeners: list[Callable[[str, str, tuple[Any, ...], dict[str, Any]], None]] = []
"""Told of each operator that is traced: module and name, arguments and settings, tensors without memory."""


def operator(schema: str, outputs: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register `residua::schema`, opaque to `torch.compile` and outside of autograd; `outputs` makes empty results.

    Defined on the library itself, not by `custom_op`: at two hundred calls a step, its wrappers cost more than kernels.
    """
    name = schema.split("(")[0]

    def register(run: Callable[..., Any]) -> Any:
        def traced(*args: Any, **settings: Any) -> Any:
            for listener in listeners:
                listener(run.__module__, name, args, settings)
            return outputs(*args, **settings)

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"residua::{name}", traced, lib=_LIBRARY)
        return getattr(torch.ops.residua, name).default

    return register


def extent(v: Tensor) -> tuple[int, int]:
    """Width and tokens."""
    return v.shape[-1], math.prod(v.shape[:-1])


def aligned(x: Tensor) -> Tensor:
    """Contiguous at a 16-byte address: kernels are compiled for that alone."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def on(x: Tensor) -> Any:
    return torch.cuda.device_of(x)


def power(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def divided(n: int, size: int) -> int:
    return -(-n // size)
