"""The edges of a model along which SmoothQuant may move a factor; its parts state them (`residua.model.edges`).

A norm that gates its own output reads that output too: GatedNorm's `down` is a reader inside the producer, and leaving
it out changes the gate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua.errors import UserError
from residua.model.decoder import Decoder, Sublayer
from residua.model.edges import Edge
from residua.model.norm import NoNorm


def edges(model: Decoder, *, inside: bool = True) -> list[Edge]:
    """The edges from a model's norms and, if `inside`, those within sublayers, in the order of the forward pass."""
    found = []
    width = torch.arange(model.config.width)
    for k, sublayer in enumerate(cast(Iterable[Sublayer], model.sublayers)):
        body: Any = sublayer.body
        if not isinstance(sublayer.norm, NoNorm):
            divide = stated(sublayer.norm, "divide", "how its output can be divided by channel")
            found.append(Edge(f"sublayers.{k}.norm", readers(body), width, divide, body))
        if inside and hasattr(body, "inner_edges"):
            found += body.inner_edges(f"sublayers.{k}.body")
    return found


def readers(body: nn.Module) -> tuple[Tensor, ...]:
    """Every linear map that reads a sublayer's normed input."""
    found: tuple[Tensor, ...] = stated(body, "readers", "which maps read its input")()
    return found


def stated(module: nn.Module, name: str, what: str) -> Any:
    """A method of a module; one that lacks it is refused by name."""
    method = getattr(module, name, None)
    if method is None:
        raise UserError(f"{type(module).__name__} does not say {what}: give it a method {name}().")
    return method
