"""Sublayers, and the base class of their bodies: attention, feed-forwards and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from residua.model.context import Anchors, Context, Input, Reads, map_reads
from residua.model.norm import Norm

if TYPE_CHECKING:
    from residua.model.anchors import Unmixed
    from residua.model.cache import SublayerCache
    from residua.model.equivalence import Edge
    from residua.model.projection import Projection


class Body(nn.Module):
    """The computation of a sublayer between its norms.

    A model calls only `forward(x, anchors, context)`, which returns y and the anchors; a mixture of experts also
    returns its `Routing`. Every other method informs tools and has a default.
    """

    role = "feed-forward"
    """The sublayer's name in diagnoses."""

    takes_reads = False
    """Whether `forward` takes several `Reads`; otherwise it gets r alone."""

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> SublayerCache | None:
        """A cache for up to `capacity` tokens in each of `batch` rows; None if decoding caches nothing here.

        `like` sets dtype and device.
        """
        return None

    def anchor_mix(self) -> Unmixed | None:
        """The module that mixes the anchors in; None if the body only passes them on."""
        return None

    @property
    def query_heads(self) -> tuple[int, int]:
        """The number of query heads and the width of their outputs."""
        return 0, 0

    def readers(self) -> tuple[Tensor, ...]:
        """Every matrix [R, C] that reads the input."""
        raise NotImplementedError(f"{type(self).__name__} does not declare which maps read its input")

    def squared_relu_maps(self) -> tuple[Projection, Projection] | None:
        """W_up and W_out, if the body is y = W_out relu(W_up x)²."""
        return None

    def inner_edges(self, name: str) -> list[Edge]:
        """The edges inside the body along which a factor per channel can move (SmoothQuant)."""
        return []


class Sublayer(nn.Module):
    """y = f(norm(h)): an attention or a feed-forward with its own pre-norm.

    `after` is the norm of the output, if it has one: y = after(f(h)) (OLMo 2), y = after(f(norm(h))) (Gemma 3).
    """

    norm: Norm
    body: Body

    def __init__(self, norm: nn.Module, body: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.body, self.after = cast(Norm, norm), cast(Body, body), after

    def forward(self, h: Input, anchors: Anchors, context: Context) -> tuple[Any, ...]:
        """Return y and the anchors; a mixture of experts adds its `Routing`. Several reads are normed separately."""
        if isinstance(h, Reads):
            h = h._replace(r=h.q) if self.body.takes_reads else h.r
        y, anchors, *routing = self.body(map_reads(self.norm, h), anchors, context)
        if self.after is not None:
            y = self.after(y)
        return y, anchors, *routing


@runtime_checkable
class Resettable(Protocol):
    """A module that initialises its own parameters and buffers."""

    def reset_parameters(self) -> None: ...


def reset(part: nn.Module) -> None:
    """Initialise every module of a part of a model in place."""
    for module in part.modules():
        if isinstance(module, Resettable):
            module.reset_parameters()
