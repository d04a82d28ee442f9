"""Ablations of depth routing: a source that nobody reads, a stream that nobody reads, weights made uniform.

Routing mass is not importance; these measure importance. What a topology supports, it states itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from residua.diagnose.observe import Ablation
from residua.model.topology.facts import Ablations


def sources(ablations: Ablations, name: Callable[[int, int], str]) -> list[Ablation]:
    """Each source hidden from every reader; a reader's only source stays."""
    named: dict[str, dict[int, int]] = {}
    for k, seen in enumerate(ablations.sources):
        for position in range(len(seen)):
            named.setdefault(name(k + 1, position), {})[k] = position
    return [
        Ablation("source", index, label, partial(ablations.without_source, positions))
        for index, (label, positions) in enumerate(named.items())
    ]


def uniform(ablations: Ablations) -> list[Ablation]:
    """Each reader's weights made equal, and then all readers' at once."""
    readers, equal = ablations.weighing_readers, ablations.with_equal_weights
    made = [
        Ablation("uniform", reader, f"uniform weights at reader {reader}", partial(equal, (reader,)))
        for reader in readers
    ]
    if len(readers) > 1:
        made.append(Ablation("uniform", -1, "uniform weights at every reader", partial(equal, readers)))
    return made


def streams(ablations: Ablations) -> list[Ablation]:
    """Each stream hidden from every sublayer; it is still written."""
    return [
        Ablation("stream", i, f"stream {i}", partial(ablations.without_stream, i)) for i in range(ablations.streams)
    ]
