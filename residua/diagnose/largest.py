"""The largest single values of a tensor [B, T, C] over all batches, and where they stood."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.text import Sample

LARGEST = 3


class Activation(Frozen):
    """One of the largest |h|, and where it stood. `text` is the token as text; empty in older files."""

    value: float
    dimension: int
    sequence: int
    position: int
    token: int
    text: str = ""


class Largest:
    """The three largest values of all batches; they stay on their device until `facts`."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        """[3, 3] each: values, places among all values so far, tokens."""
        self.sequences = 0
        self.length = self.width = 1

    def add(self, size: Tensor, tokens: Tensor) -> None:
        """Add a batch: `size` [B, T, C], not negative, and its tokens [B, T]."""
        values, places = size.flatten().topk(min(LARGEST, size.numel()))
        assert not self.batches or (self.length, self.width) == size.shape[1:], "batches have one shape"
        self.length, self.width = size.shape[1:]
        shown = tokens.flatten().to(size.device)[places // self.width]
        before = self.sequences * self.length * self.width
        self.batches.append(torch.stack([part.double() for part in (values, places + before, shown)]))
        self.sequences += tokens.shape[0]

    def facts(self, sample: Sample) -> list[Activation]:
        """The values, largest first, with their tokens as text."""
        found = sorted(torch.cat(self.batches, 1).T.tolist(), key=lambda one: -one[0])
        return [self._activation(value, int(place), int(token), sample) for value, place, token in found[:LARGEST]]

    def _activation(self, value: float, place: int, token: int, sample: Sample) -> Activation:
        sequence, rest = divmod(place, self.length * self.width)
        position, dimension = divmod(rest, self.width)
        return Activation(
            value=value, dimension=dimension, sequence=sequence, position=position, token=token,
            text=sample.text_of(token),
        )  # fmt: skip
