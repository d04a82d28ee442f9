"""Changes of parameters that preserve a model's function, or report how closely they do.

A part that starts as another (`begin_as`, for `retrofit`) reports how well it preserves the function (`InitFidelity`).

An edge runs from the producer of a vector to every linear map that reads it (SmoothQuant). Dividing channel j of the
producer by s_j and multiplying column j of all readers by s_j leaves the function unchanged. Norms define how they
divide (`Norm.divide`); sublayers list the maps that read their input (`readers`) and their `inner_edges`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from residua.errors import UserError
from residua.model.context import Input
from residua.model.projection import BiasedProjection, Projection


class InitFidelity(IntEnum):
    """From best to worst, so that the worst of several parts is their maximum.

    UP_TO_EPS: only a positive factor on the input of a norm differs, which the norm cancels up to its eps. NEARLY: the
    part's docstring names the difference. NOT: the function changes; weights that fit are still copied.
    """

    EXACTLY = 0
    UP_TO_EPS = 1
    NEARLY = 2
    NOT = 3

    @property
    def words(self) -> str:
        return {"EXACTLY": "exactly", "UP_TO_EPS": "up to the norms' eps", "NEARLY": "nearly", "NOT": "not"}[self.name]


class WeightsMismatch(UserError):
    """The parameters of one part do not fit into another; `retrofit` names the keys that differ."""


def take_parameters(part: nn.Module, old: nn.Module, *, but: str | None = None) -> None:
    """Copy all parameters and buffers of another part, which lacks only the submodule `but`."""
    theirs = old.state_dict()
    ours = {name: tensor for name, tensor in part.state_dict().items() if name.partition(".")[0] != but}
    for name in sorted(ours | theirs):
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            raise WeightsMismatch(f"{name} of {type(part).__name__} does not fit the initial model.")
    part.load_state_dict(theirs, strict=False)


def _first(x: Input, *rest: object) -> Input:
    return x


@dataclass(frozen=True)
class Edge:
    """A producer, represented by `divide(s)`, and its readers: matrices [R, C] whose columns are its channels.

    A reader with fewer columns reads the first channels.

    channel [C] names, for each input channel of the readers, the producer's channel it comes from: the identity, or
    fewer channels if several inputs share one (grouped key-value heads, a gain that all heads share). `look` finds the
    vector in the arguments of `probe`.
    """

    name: str
    readers: tuple[Tensor, ...]
    channel: Tensor
    divide: Callable[[Tensor], None]
    probe: nn.Module
    look: Callable[..., Input] = _first

    @torch.no_grad()
    def fold(self, factor: Tensor) -> None:
        """Divide the producer by `factor` [channels] and multiply the readers, in place."""
        self.divide(factor)
        columns = factor[self.channel.to(factor.device)]
        for reader in self.readers:
            reader.mul_(columns[: reader.shape[1]].to(reader.dtype))


@torch.no_grad()
def divide_rows(projection: Projection, first: int, count: int, by: Tensor) -> None:
    """Divide `count` outputs of a projection, from `first` on."""
    rows = slice(first, first + count)
    projection.weight[rows].div_(by[:, None])
    if isinstance(projection, BiasedProjection):
        projection.bias[rows].div_(by)


@torch.no_grad()
def divide_square(up: Tensor, by: Tensor) -> None:
    """Scale `up` so that relu² outputs shrink by s: relu(x/√s)² = relu(x)²/s. In float64, since relu² squares √s."""
    up.copy_(up.double() / by.double().sqrt()[:, None])
