"""Who reads what in a model with attention over depth, and which work is done together because of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GROUP = 4
"""Most reads that are evaluated together."""


class Place(NamedTuple):
    """Where a source stands in the state: three tensors from `start` on, then `onward` handles and twice `ahead`."""

    source: int
    start: int
    onward: int
    ahead: int


class Plan:
    """Which sources each read sees. Source 0 is the embedding, source k+1 is made of the output of sublayer k.

    sees: for each read, its sources in ascending order; the readers of a source must be consecutive.
    grows: for each source, whether it is the sum of the source before and a new output (a block's running sum).
    """

    def __init__(self, sees: Sequence[Sequence[int]], grows: Sequence[bool]) -> None:
        self.sees, self.grows = sees, (*grows, False)
        self.readers = [[k for k, seen in enumerate(sees) if source in seen] for source in range(len(grows))]
        for readers in self.readers:
            assert readers == list(range(readers[0], readers[0] + len(readers)))
        self.leads = self._leaders()
        self.own = [self._own_readers(s) for s in range(len(grows))]
        self.group = self._groups()
        # looked up in every step, by a compiler that follows each line of Python: so they are tables, not methods
        self.served = [[s for s in seen if k in self.own[s]] for k, seen in enumerate(sees)]
        self.places = [self._places(k) for k in range(-1, len(sees))]

    def after(self, k: int) -> list[Place]:
        """The sources that anything after read k needs, and where the state has them; −1 is before the first read."""
        return self.places[k + 1]

    def goes_on(self, s: int) -> bool:
        """Whether the next source hands a gradient on to source s: it grew out of it, or leads it."""
        return self.grows[s + 1] or s + 1 in self.leads

    def pending(self, k: int) -> int:
        """How many reads of a group are begun but not finished after read k."""
        return sum(self.group[k]) - 1 - k if k >= 0 else 0

    def _places(self, k: int) -> list[Place]:
        places, start = [], 2 + (self.pending(k) + 1 if self.pending(k) else 0)
        for s in range(k + 2):
            if self.readers[s][-1] > k or (s == k + 1 and self.grows[s + 1]):
                onward = int(s == k + 1 and self.goes_on(s))
                ahead = sum(reader > k for reader in self.own[s])
                places.append(Place(s, start, onward, ahead))
                start += 3 + onward + 2 * ahead
        return places

    def _leaders(self) -> set[int]:
        """Sources whose backward also does most of that of the source before: all of the readers they share.

        At most one reader may be left over, which the cheapest kernel serves.
        """
        leads, s = set(), len(self.readers) - 1
        while s > 0:
            before, after = self.readers[s - 1], self.readers[s]
            alone = not self.grows[s] and not self.grows[s + 1]
            if alone and len(after) > 1 and after in (before, before[1:]):
                leads.add(s)
                s -= 1
            s -= 1
        return leads

    def _own_readers(self, s: int) -> list[int]:
        """The readers of a source that its own backward serves, not its leader's."""
        return [k for k in self.readers[s] if s + 1 not in self.leads or k not in self.readers[s + 1]]

    def _groups(self) -> list[tuple[int, int]]:
        """For each read, where its group begins and how many reads are in it.

        A group of g reads begins with one that sees n sources, and the others see these and newer ones. Reading the n
        once saves n (g − 1) rows; an intermediate result for each of the others is written and read.
        """
        groups: list[tuple[int, int]] = []
        while (k := len(groups)) < len(self.sees):
            n, size = len(self.sees[k]), 1
            while size < GROUP and k + size < len(self.sees) and self.sees[k + size][:n] == self.sees[k]:
                size += 1
            size = size if n * (size - 1) > 2 * size - 1 else 1
            groups += [(k, size)] * size
        return groups
