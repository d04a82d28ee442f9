"""Grouped linear maps in plain PyTorch: a loop over the groups, and a version with fixed shapes for compiled code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y_i = W_e x_i for the rows i of group e, from ends[e − 1] (or 0) up to ends[e].

    x [N, K], its rows sorted by group; weight [E, O, K]; ends [E], rising to N. A group may be empty. Returns [N, O].
    """
    if torch.compiler.is_compiling():
        return _in_blocks(x, weight, ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([linear(rows, w) for rows, w in zip(x.split(sizes), weight.unbind(), strict=True)])


def _in_blocks(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` with shapes that do not depend on group sizes: one graph serves every division of the rows.

    Each group's rows fill whole blocks of ⌈N/E⌉ rows, the last one padded with zeros, so 2E blocks always suffice. If
    there are at most E rows, each is a block. A batched product multiplies each block by a copy of its group's matrix.
    """
    rows, groups = len(x), len(weight)
    size, count = (1, rows) if rows <= groups else (-(-rows // groups), 2 * groups)
    begins = ends - ends.diff(prepend=ends.new_zeros(1))
    blocks = (ends - begins + size - 1) // size
    block_ends = blocks.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(rows, device=x.device), right=True)
    place = (block_ends - blocks)[group] * size + torch.arange(rows, device=x.device) - begins[group]
    # blocks past the last used one are empty, so any matrix will do
    owner = torch.searchsorted(block_ends, torch.arange(count, device=x.device), right=True).clamp(max=groups - 1)
    padded = x.new_zeros(count * size, x.shape[1]).index_copy(0, place, x)
    return torch.bmm(padded.unflatten(0, (count, size)), weight[owner].mT).flatten(0, 1)[place]
