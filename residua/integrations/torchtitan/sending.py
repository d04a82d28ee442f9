"""Batches that travel to the GPU while it works: torchtitan copies each when it needs it, and waits for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sent(Tensor):
    """A tensor in host memory whose copy on the device is already on its way; `to` returns the copy."""

    copy: Tensor
    # results of operations are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor to a GPU; on a CPU there is nothing to do."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor
    return on_its_way(tensor, tensor.pin_memory().to(device, non_blocking=True))


def on_its_way(tensor: Tensor, copy: Tensor) -> Sent:
    """A tensor with its copy."""
    sent: Sent = tensor.as_subclass(Sent)
    sent.copy = copy
    return sent
