"""Grouped linear maps in plain PyTorch: a loop over the groups."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y_i = W_e x_i for the rows i of group e, those from ends[e − 1] (or 0) up to ends[e].

    x [N, K], its rows sorted by group; weight [E, O, K]; ends [E], rising to N. A group may be empty. Returns [N, O].
    """
    if torch.compiler.is_dynamo_compiling():
        return _untraced(x, weight, ends)
    return _loop(x, weight, ends)


def _loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([linear(rows, w) for rows, w in zip(x.split(sizes), weight.unbind(), strict=True)])


# Group sizes are data: every new split would be recompiled. `torch.compiler.disable` would import Dynamo at once.
_untraced = torch._disable_dynamo(_loop)
