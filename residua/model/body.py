"""The base class of attention, feed-forwards and mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

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


@runtime_checkable
class Resettable(Protocol):
    """A module that initialises its own parameters and buffers."""

    def reset_parameters(self) -> None: ...


def reset(part: nn.Module) -> None:
    """Initialise every module of a part of a model in place."""
    for module in part.modules():
        if isinstance(module, Resettable):
            module.reset_parameters()
