"""How our parameters are read from the tensors of a folder, and written: as rows, reordered, scaled, or transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residua.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Computes our parameter from their tensors, stacked by rows, and back; by default, they are its rows."""

    read: Callable[[Tensor], Tensor] = lambda stacked: stacked
    write: Callable[[Tensor], Tensor] = lambda parameter: parameter
    shape: Callable[[Shape], Shape] = lambda ours: ours
    """The shape of their tensors, stacked, from our parameter's."""
    exact: bool = True
    """Whether values are copied unchanged."""
    sizes: Shape | None = None
    """The row counts of their tensors, if these are not the maps that are fused in our parameter."""

    def rows(self, ours: Shape, parts: Shape, count: int) -> Shape:
        """The row counts of `count` tensors of a parameter with the shape `ours`, which fuses maps of `parts` rows.

        If `count` is 1, the tensor has all rows; if tensors do not have the rows of our maps, they are of equal size.
        """
        if self.sizes is not None:
            return self.sizes
        total = self.shape(ours)[0]
        if count != 1 and sum(parts) == total:
            return parts
        return (total // max(1, count),) * count


ROWS = Layout()
TRANSPOSED = Layout(lambda theirs: theirs.T.contiguous(), lambda ours: ours.T.contiguous(), lambda ours: ours[::-1])
"""Their tensor has inputs as rows (GPT-2's Conv1D)."""
ONES = Layout(torch.ones_like, exact=False)
"""Our parameter is 1, whatever theirs is: another parameter absorbs theirs."""
NO_TENSOR = Layout(torch.ones_like, exact=False, sizes=())
"""Our parameter is 1, and they have none."""
KERNELS = Layout(
    lambda theirs: theirs.squeeze(1).flip(-1).T.contiguous(),
    lambda ours: ours.T.flip(-1).unsqueeze(1).contiguous(),
    lambda ours: (ours[1], 1, ours[0]),
)
"""Convolutions: theirs [channels, 1, taps], the oldest token first; ours [taps, channels], the newest first."""
RATES = Layout(torch.flatten, lambda ours: ours.view(1, 1, -1, 1), lambda ours: (1, 1, ours[0], 1))
"""Decay rates: theirs [1, 1, heads, 1], ours [heads]."""


def stacks(experts: int) -> Layout:
    """The matrices of all experts: theirs [E, rows, C], ours [E·rows, C]."""
    return Layout(
        lambda theirs: theirs.flatten(0, 1),
        lambda ours: ours.unflatten(0, (experts, -1)),
        lambda ours: (experts, ours[0] // experts, *ours[1:]),
    )


def transposed_stacks(experts: int, *, interleaved: bool) -> Layout:
    """Theirs are [E, C, rows], or biases [E, rows]; `interleaved` if rows of gate and up alternate (gpt-oss)."""

    def turned(by_expert: Tensor, pairs: tuple[int, int]) -> Tensor:
        return by_expert.unflatten(1, pairs).transpose(1, 2).flatten(1, 2) if interleaved else by_expert

    return Layout(
        lambda theirs: turned(theirs.movedim(-1, 1), (-1, 2)).flatten(0, 1),
        lambda ours: turned(ours.unflatten(0, (experts, -1)), (2, -1)).movedim(1, -1).contiguous(),
        lambda ours: (experts, *ours[1:], ours[0] // experts),
    )


def reordered(order: Tensor, sizes: Shape | None = None, factor: Tensor | None = None) -> Layout:
    """Our row i is row `order[i]` of their tensors, which have `sizes` rows (None: those of the fused maps).

    With `factor` [rows], our row i is factor[i] times theirs.
    """
    scale = torch.ones(len(order)) if factor is None else factor
    exact = bool(scale.eq(1).all())
    if exact and sizes is None and order.equal(torch.arange(len(order))):
        return ROWS

    def column(like: Tensor) -> Tensor:
        return scale.view(-1, *[1] * (like.dim() - 1))

    def read(theirs: Tensor) -> Tensor:
        return theirs[order] if exact else theirs[order].float() * column(theirs)

    def write(ours: Tensor) -> Tensor:
        scaled = ours if exact else ours.float() / column(ours)
        return torch.empty_like(scaled).index_copy_(0, order, scaled)

    return Layout(read, write, exact=exact, sizes=sizes)


@dataclass(frozen=True)
class Rule:
    """How to form one parameter of ours: their tensors, stacked by `rows`, then (x + shift) · scale."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    shift: float = 0.0
    scale: float = 1.0
    layout: Layout = ROWS
    also: tuple[str, ...] = ()
    """More of their tensors that this rule reads; other rules write them."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of their tensors."""
        for name, rows in zip(self.theirs, self.rows, strict=True):
            yield name, (rows, *self.layout.shape(self.shape)[1:])

    @property
    def exact(self) -> bool:
        """Whether values are copied unchanged and can therefore keep their precision."""
        return self.shift == 0 and self.scale == 1 and self.layout.exact

    def read(self, parts: list[Tensor]) -> Tensor:
        """Our parameter from their tensors."""
        parts = parts or [torch.empty(self.shape)]  # they have no such tensor
        whole = self.layout.read(parts[0] if len(parts) == 1 else torch.cat(parts))
        return whole if self.exact else (whole.float() + self.shift) * self.scale

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        """Their tensors from our parameter."""
        whole = parameter if self.exact else parameter.float() / self.scale - self.shift
        if not self.theirs:
            if not torch.equal(self.read([]), whole):
                raise UserError(f"parameter {self.ours} has no counterpart in this layout, and differs from 1.")
            return {}
        return dict(zip(self.theirs, self.layout.write(whole).split(self.rows), strict=True))


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
