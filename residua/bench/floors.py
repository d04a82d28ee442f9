"""What a junction or operator cannot do without: what it reads from memory once and what it writes once, per token.

Numbers count rows of C elements. A junction finds the depth's state in memory and leaves it there, because a sublayer
runs before the next one; so a whole depth counts each of its sources at every read, which kernels that evaluate several
reads together need not do. Backward is with every tensor that forward read still stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from residua.model.topology.additive import Additive
from residua.model.topology.attnres import BlockAttnRes
from residua.model.topology.base import Topology
from residua.model.topology.hyper import Streams
from residua.model.topology.multigate import MultiGate

if TYPE_CHECKING:
    from residua.ops.depth_attention.deferred import Plan


class Floor(NamedTuple):
    """Rows moved by the forward and by the backward pass."""

    forward: int
    backward: int


GATED_NORM = Floor(2, 3)
"""x → y; x, dy → dx."""
ADDITION = Floor(3, 3)
"""h, y → h'; dh and the gradient of h' → that of h, which is also y's."""
ADD_NORM = Floor(4, 4)
"""x, y → x + y, its norm; x + y and the gradients of both → that of x, which is also y's."""
MIX = Floor(3, 5)
"""The projection and its anchor → the mix; both and the mix's gradient → theirs."""


def streams(n: int) -> Floor:
    """A junction of n streams: s, f → s', h (2n + 2); s, f, ds', dh → ds, df (3n + 3)."""
    return Floor(2 * n + 2, 3 * n + 3)


def pool(n: int) -> Floor:
    """A read of n streams that go on as they are: s → h; s, ds, dh → ds with what came through the read."""
    return Floor(n + 1, 3 * n + 1)


def read(sources: int) -> Floor:
    """One read alone: v → h; v, dh → dv."""
    return Floor(sources + 1, 2 * sources + 1)


def walk(plan: Plan) -> Floor:
    """Every read over depth, one by one, and the gradient of each source once.

    Forward: a read's sources → h; a source that grows is made on the way, p, y → p'. Backward: a source and the dh of
    its readers → dv, with the gradient of the source that grew out of it. Reads in groups can move less than this.
    """
    forward = sum(len(seen) + 1 for seen in plan.sees) + 2 * sum(plan.grows)
    backward = sum(len(readers) + 2 for readers in plan.readers) + sum(plan.grows)
    return Floor(forward, backward)


def depth(topology: Topology, sublayers: int) -> Floor:
    """All junctions of a topology."""
    if isinstance(topology, BlockAttnRes):
        return walk(topology.plan)
    if isinstance(topology, MultiGate):
        filled = [pool(k + 2) for k in range(topology.fill)]
        return _total([*filled, *[streams(topology.fill + 1)] * (sublayers - topology.fill)])
    if isinstance(topology, Streams):
        return _total([streams(topology.streams)] * sublayers)
    assert isinstance(topology, Additive)
    return _total([ADDITION] * sublayers)


def _total(floors: Iterable[Floor]) -> Floor:
    forward, backward = zip(*floors, strict=True)
    return Floor(sum(forward), sum(backward))
