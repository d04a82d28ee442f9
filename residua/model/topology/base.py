"""The depth protocol: all that a model knows of its topology is two verbs."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

State = tuple[Tensor, ...]
"""Tensors only: what compile, checkpointing and pipeline stages carry."""


class Topology(nn.Module):
    """How sublayers talk along depth. One per model; owns the parameters of its junctions.

    `open` and `step` are pure functions of their tensors and token-local: what happens at one position depends on
    that position alone, so decoding needs no depth cache.
    """

    output_gain = 1.0
    """Factor on the initial std of every sublayer's output projection."""

    @abstractmethod
    def open(self, x: Tensor) -> tuple[Tensor, State]:
        """The embedding [B, T, C] in; the first sublayer's input out, and the state."""

    @abstractmethod
    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """The output of sublayer k in; the input of sublayer k+1 (after the last: of the final norm) out."""
