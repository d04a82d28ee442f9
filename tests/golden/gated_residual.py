"""Gated Residual as Qwen4-Exp in transformers writes it, for one token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.golden.arithmetic import rms, sigmoid, silu


class Read(NamedTuple):
    """hc_norm, input_mix_weight_down, input_mix_weight_up and block_inject_weight of one reader."""

    gain: Tensor
    down: Tensor
    up: Tensor
    inject: Tensor | None


def gated_residual(x: Tensor, y: list[Tensor], reads: list[Read]) -> list[Tensor]:
    n = len(reads[0].gain)
    streams = [x] * n
    inputs = []
    for read, output in zip(reads, [*y, None], strict=True):
        normed = [g * rms(s) for g, s in zip(read.gain, streams, strict=True)]
        row = torch.cat(normed)
        mix = sigmoid(read.up @ silu(read.down @ row / n))
        inputs.append(sum(m * s for m, s in zip(mix.chunk(n), normed, strict=True)) / n)
        if output is not None:
            inject = 2 * sigmoid(read.inject @ row / n)
            streams = [s + inject[i] * output for i, s in enumerate(streams)]
    return inputs
