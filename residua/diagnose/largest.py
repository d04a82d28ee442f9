"""The largest single values of a tensor [B, T, C] over all batches, and where they stood."""

from __future__ import annotations

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
    """The three largest values seen so far, largest first."""

    def __init__(self) -> None:
        self.found: list[Activation] = []
        self.sequences = 0

    def add(self, size: Tensor, tokens: Tensor) -> None:
        """Add a batch: `size` [B, T, C], not negative, and its tokens [B, T]."""
        values, places = size.flatten().topk(min(LARGEST, size.numel()))
        length, width = size.shape[1:]
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            row, rest = divmod(place, length * width)
            position, dimension = divmod(rest, width)
            token = int(tokens[row, position])
            self.found.append(Activation(
                value=value, dimension=dimension, sequence=self.sequences + row, position=position, token=token
            ))  # fmt: skip
        self.found = sorted(self.found, key=lambda a: -a.value)[:LARGEST]
        self.sequences += tokens.shape[0]

    def facts(self, sample: Sample) -> list[Activation]:
        """The values, with their tokens as text."""
        return [a.model_copy(update={"text": sample.text_of(a.token)}) for a in self.found]
