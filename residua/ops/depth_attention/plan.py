"""Which read sees which sources in a model with attention over depth, and which reads and gradients to group.

Separate from `launch.py` because it does not depend on kernels, only on reads, sources and the layout of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

GROUP = 8
"""Most reads to evaluate together."""
BLOCK = 6
"""Most sources whose gradients to compute together."""
FRONT = 3
"""Tensors at the start of a state: u, the queries in the form for scores, and the chain that collects du."""
MAX_FUSED_READERS = 5
"""Most readers for which one kernel computes the whole gradient: as many as a block of sources can leave over."""


class Place(NamedTuple):
    """A source's position in the state: three tensors from `start` on, then `onward` handles and twice `ahead`."""

    source: int
    start: int
    onward: int
    ahead: int


class Step(NamedTuple):
    """The inputs of step k in the state and its outputs there, by position.

    A table per step, since `torch.compile` traces a table lookup faster than the code that computes it, and a deep
    model has thousands of sources.
    """

    newest: int
    """The value of source k, or of another source if that one is no longer needed."""
    onward: list[int]
    """The values of the sources to which source k+1 passes a gradient; score, rstd and handle follow each."""
    pending: int
    """Tensors of an unfinished group of reads, from position FRONT on."""
    values: list[int]
    """The values that are read, except those that the group's first read covered, and the new one."""
    rows: list[int]
    """The row of this read in each of their scores."""
    gradients: list[int]
    """The handles for dh, of every older source whose own backward covers this read."""
    stats: list[int]
    """The handles for (lse, δ), of the same sources."""
    unchanged: list[tuple[int, int]]
    """Ranges of the state that do not change."""


class ReadPlan:
    """Which sources each read sees. Source 0 is the embedding, source k+1 is computed from the output of sublayer k.

    sees: for each read, its sources in ascending order; the readers of a source must be consecutive.
    grows: for each source, whether it is the sum of the source before and a new output (a block's running sum).
    """

    def __init__(self, sees: Sequence[Sequence[int]], grows: Sequence[bool]) -> None:
        self.sees, self.grows = sees, (*grows, False)
        self.readers = [[k for k, sources in enumerate(sees) if source in sources] for source in range(len(grows))]
        for readers in self.readers:
            assert readers == list(range(readers[0], readers[0] + len(readers)))
        self.leads = self._leaders()
        self.leader = {s: leader for leader, led in self.leads.items() for s in led}
        self.own_readers = [self._own_readers(s) for s in range(len(grows))]
        self.group = self.groups()
        self.rows = self._rows()
        self.places = [self._places(k) for k in range(-1, len(sees))]
        self.steps = [self._step(k) for k in range(len(sees))]

    def before(self, k: int) -> list[Place]:
        """The sources that read k or anything later needs, and their places in the state before step k."""
        return self.places[k]

    def keeps_new(self, k: int) -> bool:
        """Whether anything after read k needs the source that step k creates."""
        return bool(self.places[k + 1]) and self.places[k + 1][-1].source == k + 1

    def goes_on(self, s: int) -> bool:
        """Whether a later source passes a gradient to source s: it is a sum that includes s, or it leads s."""
        return self.grows[s + 1] or s in self.leader

    def fuses(self, k: int) -> bool:
        """Whether one kernel computes step k's sum and read: no other read sees the sum and no group begins here."""
        start, size = self.group[k]
        return self._read_once(k) and (k > start or size == 1)

    def pending(self, k: int) -> int:
        """How many reads of a group are started but not finished after read k."""
        return sum(self.group[k]) - 1 - k if k >= 0 else 0

    def _places(self, k: int) -> list[Place]:
        places, start = [], FRONT + (self.pending(k) + 1 if self.pending(k) else 0)
        for s in range(k + 2):
            if self.readers[s][-1] > k or (s == k + 1 and self.grows[s + 1]):
                onward = int(self.leader.get(s, s + 1 if self.grows[s + 1] else 0) > k + 1)
                ahead = sum(reader > k for reader in self.own_readers[s])
                places.append(Place(s, start, onward, ahead))
                start += 3 + onward + 2 * ahead
        return places

    def _step(self, k: int) -> Step:
        places = {place.source: place for place in self.before(k)}
        start, _ = self.group[k]
        sources = self.sees[k] if k == start else self.sees[k][len(self.sees[start]) :]
        older = [s for s in sources if s <= k]
        first = {s: place.start + 3 + place.onward for s, place in places.items()}
        served = [s for s in self.sees[k] if s <= k and k in self.own_readers[s]]
        onward = [k] if self.grows[k + 1] else self.leads.get(k + 1, [])
        ranges, after = [], {place.source: place for place in self.places[k + 1]}
        for s, place in places.items():
            if s in after:
                used, middle = int(s in served), first[s] + place.ahead
                ranges += [
                    (place.start, place.start + 3 + after[s].onward),
                    (first[s] + used, middle),
                    (middle + used, middle + place.ahead),
                ]
        return Step(
            newest=max(places.values()).start,
            onward=[places[s].start for s in onward],
            pending=min(place.start for place in places.values()) - FRONT,
            values=[places[s].start for s in older],
            rows=[k - self.readers[s][0] for s in older],
            gradients=[first[s] for s in served],
            stats=[first[s] + places[s].ahead for s in served],
            unchanged=_joined(ranges),
        )

    def _leaders(self) -> dict[int, list[int]]:
        """Maps each leader to the sources whose shared-reader gradients it computes, latest first.

        The source's own backward handles its few other readers.
        """
        ends = cheapest(len(self.readers), BLOCK, self._gradient_cost)
        return {end - 1: list(range(end - 2, start - 1, -1)) for start, end in ends if end - start > 1}

    def _gradient_cost(self, first: int, size: int) -> float | None:
        """Rows moved for the gradients of `size` sources computed together; None if they cannot be.

        With m shared readers: m rows read; each source's value read and its gradient through the values written; both
        read, and the gradient written, once more for the part through the scores. Then each source's other readers.
        """
        sources = range(first, first + size)
        shared = self.readers[sources[-1]]
        m, others = len(shared), [len(self.readers[s]) - len(shared) for s in sources]
        if size == 1 and m <= MAX_FUSED_READERS:
            return m + 2
        together = all(self.readers[s][-m:] == shared and not self.grows[s] and not self.grows[s + 1] for s in sources)
        if size > 1 and (m == 1 or max(others) > MAX_FUSED_READERS or not together):
            return None
        return m + 5 * size + sum(3 + r for r in others if r)

    def _own_readers(self, s: int) -> list[int]:
        """The readers of a source that its own backward covers, not its leader's."""
        return [k for k in self.readers[s] if s not in self.leader or k not in self.readers[self.leader[s]]]

    def groups(self, sizes: Container[int] = range(GROUP + 1)) -> list[tuple[int, int]]:
        """For each read, the start and size of its group; `sizes` are the allowed sizes and include 1."""
        ranges = cheapest(len(self.sees), GROUP, lambda first, n: self._read_cost(first, n) if n in sizes else None)
        return [(start, end - start) for start, end in ranges for _ in range(start, end)]

    def _rows(self) -> float:
        """Rows of C elements that the kernels move per token, forward and backward: reads, gradients and scores."""
        reads = cheapest(len(self.sees), GROUP, self._read_cost)
        gradients = cheapest(len(self.readers), BLOCK, self._gradient_cost)
        costs = [self._read_cost(start, end - start) for start, end in reads]
        costs += [self._gradient_cost(start, end - start) for start, end in gradients]
        return sum(cost for cost in costs if cost is not None) + len(self.readers)

    def _read_cost(self, first: int, size: int) -> float | None:
        """Rows moved by `size` reads as a group; None if they cannot form one.

        The first read of a group sees n sources, and the others see these and newer ones. The n are read once for all;
        for each of the others an intermediate result is written, and read again with the newer sources.
        """
        first_sources = self.sees[first]
        n, later = len(first_sources), self.sees[first + 1 : first + size]
        if not all(sources[:n] == first_sources for sources in later):
            return None
        fused = sum(self._read_once(first + i) for i in range(size) if i or size == 1)
        return n + size - fused + sum(len(sources) - n + 2 for sources in later)

    def _read_once(self, k: int) -> bool:
        """Whether read k is the only one that sees the sum of step k."""
        return self.grows[k + 1] and len(self.readers[k + 1]) == 1


def cheapest(length: int, most: int, cost: Callable[[int, int], float | None]) -> list[tuple[int, int]]:
    """Split 0 … length into ranges (start, end) of at most `most`, with the least total cost(start, size)."""
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, [])]
    for end in range(1, length + 1):
        ways = []
        for start in range(max(0, end - most), end):
            price = cost(start, end - start)
            if price is not None:
                ways.append((best[start][0] + price, -start))
        total, start = min(ways)
        best.append((total, [*best[-start][1], (-start, end)]))
    return best[-1][1]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges into as few as possible with the same positions."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        if stop > start:
            joined.append((start, stop))
    return joined
