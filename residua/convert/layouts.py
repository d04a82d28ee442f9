"""How the tensors of a folder are laid out in our parameters: as rows, reordered, scaled, or transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Layout:
    """Their tensors are the rows of our parameter."""

    exact = True
    """Whether values are copied unchanged."""

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The row counts of `count` tensors; `parts` are those of the maps that are fused in the parameter.

        If `count` is 1, the tensor has the rows of all maps.
        """
        return (sum(parts),) if count == 1 else parts

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor of theirs with `rows` rows; `ours` is our parameter's shape."""
        return rows, *ours[1:]

    def read(self, stacked: Tensor) -> Tensor:
        """Our parameter from their tensors, stacked by rows."""
        return stacked

    def write(self, parameter: Tensor) -> Tensor:
        """Their tensors, stacked by rows, from our parameter."""
        return parameter


ROWS = Layout()


class Transposed(Layout):
    """Their tensor has inputs as rows (GPT-2's Conv1D)."""

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (parameter.shape[1],)

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return rows, ours[0]

    def read(self, stacked: Tensor) -> Tensor:
        return stacked.T.contiguous()

    def write(self, parameter: Tensor) -> Tensor:
        return parameter.T.contiguous()


class Ones(Layout):
    """Our parameter is 1, whatever theirs is: another parameter absorbs theirs, or they have none."""

    exact = False

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return parts[:count]

    def read(self, stacked: Tensor) -> Tensor:
        return torch.ones_like(stacked)


class Stacked(Layout):
    """The matrices of all experts: theirs [E, rows, C], ours [E·rows, C]."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (self.experts,)

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return rows, ours[0] // rows, *ours[1:]

    def read(self, stacked: Tensor) -> Tensor:
        return stacked.flatten(0, 1)

    def write(self, parameter: Tensor) -> Tensor:
        by_expert: Tensor = parameter.unflatten(0, (self.experts, -1))
        return by_expert


class TransposedStacks(Stacked):
    """Theirs are [E, C, rows], or biases [E, rows]; `interleaved` if rows of gate and up alternate (gpt-oss)."""

    def __init__(self, experts: int, *, interleaved: bool) -> None:
        super().__init__(experts)
        self.interleaved = interleaved

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return rows, *ours[1:], ours[0] // rows

    def read(self, stacked: Tensor) -> Tensor:
        return self._turned(stacked.movedim(-1, 1), (-1, 2)).flatten(0, 1)

    def write(self, parameter: Tensor) -> Tensor:
        return self._turned(super().write(parameter), (2, -1)).movedim(1, -1).contiguous()

    def _turned(self, by_expert: Tensor, pairs: tuple[int, int]) -> Tensor:
        turned: Tensor = by_expert.unflatten(1, pairs).transpose(1, 2).flatten(1, 2) if self.interleaved else by_expert
        return turned


@dataclass(frozen=True)
class Reordered(Layout):
    """Our row i is row `order[i]` of their tensors, which have `sizes` rows (None: those of the fused maps).

    With `factor` [rows], our row i is factor[i] times theirs.
    """

    order: Tensor
    sizes: tuple[int, ...] | None = None
    factor: Tensor | None = None

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.factor is None

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return super().rows(parameter, parts, count) if self.sizes is None else self.sizes

    def read(self, stacked: Tensor) -> Tensor:
        ordered = stacked[self.order]
        return ordered if self.factor is None else ordered.float() * self._column(ordered)

    def write(self, parameter: Tensor) -> Tensor:
        scaled = parameter if self.factor is None else parameter.float() / self._column(parameter)
        return torch.empty_like(scaled).index_copy_(0, self.order, scaled)

    def _column(self, like: Tensor) -> Tensor:
        assert self.factor is not None
        return self.factor.view(-1, *[1] * (like.dim() - 1))


def turned_order(head_dim: int, turned: int | None = None, *, interleaved: bool = False) -> Tensor:
    """Indices [head_dim] that put the elements of their heads into our order.

    Residua rotates the pairs (i, i + head_dim/2), of which the first turned/2 have a frequency. They rotate the first
    `turned` elements in pairs (i, i + turned/2), or (2i, 2i + 1) if interleaved.
    """
    turned = head_dim if turned is None else turned
    first = torch.arange(turned).unflatten(0, (-1, 2)).T if interleaved else torch.arange(turned).unflatten(0, (2, -1))
    still = torch.arange(turned, head_dim).unflatten(0, (2, -1))
    return torch.cat([first, still], 1).flatten()


def by_head(heads: Sequence[int], orders: Sequence[Tensor]) -> Tensor:
    """The row order of stacked maps: each has `heads` heads, whose elements are in the matching one of `orders`."""
    start, rows = 0, []
    for count, order in zip(heads, orders, strict=True):
        width = len(order)
        rows.append((start + width * torch.arange(count)[:, None] + order).flatten())
        start += count * width
    return torch.cat(rows)
