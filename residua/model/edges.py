"""Where a per-channel factor can move in a model without changing what it computes (SmoothQuant).

An edge runs from whatever produces a vector to every linear map that reads it. Dividing channel j of the producer by
s_j and multiplying column j of all readers by s_j leaves the model as it was. Norms state how they divide
(`Norm.divide`), sublayers which maps read their input (`readers`) and which edges are inside them (`inner_edges`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residua.model.projection import BiasedProjection, Projection


def _first(x: Tensor, *rest: object) -> Tensor:
    return x


@dataclass(frozen=True)
class Edge:
    """A producer, by `divide(s)`, and its readers, matrices [R, C] whose columns are its channels.

    channel [C] names, for each input channel of the readers, the producer's channel it comes from: the identity, or
    fewer channels if several inputs share one (grouped key-value heads, a gain that all heads share). `look` finds the
    vector in the arguments of `probe`.
    """

    name: str
    readers: tuple[Tensor, ...]
    channel: Tensor
    divide: Callable[[Tensor], None]
    probe: nn.Module
    look: Callable[..., Tensor] = _first

    @torch.no_grad()
    def fold(self, factor: Tensor) -> None:
        """Divide the producer by `factor` [channels] and multiply the readers, in place."""
        self.divide(factor)
        columns = factor[self.channel.to(factor.device)]
        for reader in self.readers:
            reader.mul_(columns.to(reader.dtype))


@torch.no_grad()
def divide_rows(projection: Projection, first: int, count: int, by: Tensor) -> None:
    """Divide `count` outputs of a projection, from `first` on."""
    rows = slice(first, first + count)
    projection.weight[rows].div_(by[:, None])
    if isinstance(projection, BiasedProjection):
        projection.bias[rows].div_(by)


@torch.no_grad()
def divide_square(up: Tensor, by: Tensor) -> None:
    """Divide what relu² makes of a matrix's outputs: relu(x/√s)² = relu(x)²/s. √s is squared again: in float64."""
    up.copy_(up.double() / by.double().sqrt()[:, None])
