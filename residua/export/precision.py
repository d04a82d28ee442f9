"""The dtypes of an export's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from residua.convert.family import Rule


@dataclass(frozen=True)
class Precision:
    """`dtype` is that of config.json and of every weight that is not in `stored`, which names weights of ours."""

    dtype: torch.dtype = torch.float32
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def as_stored(cls, dtypes: Mapping[str, torch.dtype], tensors: Mapping[str, Tensor]) -> Precision:
        """The dtypes that weights have in their folder; float64 becomes float32, which models are opened in."""
        kept = {name: torch.float32 if dtype is torch.float64 else dtype for name, dtype in dtypes.items()}
        values: Counter[torch.dtype] = Counter()
        for name, tensor in tensors.items():
            values[kept.get(name, torch.float32)] += tensor.numel()
        ((main, _),) = values.most_common(1)
        return cls(main, kept)

    @property
    def name(self) -> str:
        """`bfloat16`, as config.json has it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounds(self) -> torch.dtype:
        """What weights are rounded to: nothing beyond the float32 of an open model if they stay as they are stored."""
        return torch.float32 if self.stored else self.dtype

    def of(self, name: str) -> torch.dtype:
        """The dtype of one of our weights."""
        return self.stored.get(name, self.dtype)

    def of_rule(self, rule: Rule, tensor: Tensor) -> torch.dtype:
        """The dtype of the tensors of another layout that one of our weights is written as.

        Where the values differ from ours (gains of a Gemma, less one), ours are in float32, whatever theirs were: they
        become `dtype` again if nothing is lost.
        """
        if rule.exact or rule.ours not in self.stored:
            return self.of(rule.ours)
        parts = [part.to(self.dtype) for part in rule.write(tensor).values()]
        return self.dtype if torch.equal(rule.read(parts), tensor) else torch.float32


FLOAT32 = Precision()
