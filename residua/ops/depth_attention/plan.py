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


class Step(NamedTuple):
    """What step k takes from the state and what it leaves there, by position: a table for each step.

    A compiler that follows every line of Python follows a look into a table quickest, and in a deep model it has
    thousands of sources to follow.
    """

    newest: int
    """The value of source k; where nothing needs that any more, of another source."""
    pending: int
    """Tensors of a group of reads that is under way, from position 2 on."""
    seen: list[int]
    """The values that are read, without those that the group's first read took in and without the new one."""
    rows: list[int]
    """In which row of each of their scores this read's are."""
    gradients: list[int]
    """The handles for dh, of every older source whose own backward serves this read."""
    stats: list[int]
    """The handles for (lse, δ), of the same."""
    kept: list[tuple[int, int]]
    """From where to where the state goes on as it is."""


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
        self.places = [self._places(k) for k in range(-1, len(sees))]
        self.steps = [self._step(k) for k in range(len(sees))]

    def before(self, k: int) -> list[Place]:
        """The sources that read k or anything after it needs, and where the state before step k has them."""
        return self.places[k]

    def keeps_new(self, k: int) -> bool:
        """Whether anything after read k needs the source that step k makes."""
        return bool(self.places[k + 1]) and self.places[k + 1][-1].source == k + 1

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

    def _step(self, k: int) -> Step:
        places = {place.source: place for place in self.before(k)}
        start, _ = self.group[k]
        seen = self.sees[k] if k == start else self.sees[k][len(self.sees[start]) :]
        older = [s for s in seen if s <= k]
        first = {s: place.start + 3 + place.onward for s, place in places.items()}
        served = [s for s in self.sees[k] if s <= k and k in self.own[s]]
        kept = []
        for s, place in places.items():
            if any(after.source == s for after in self.places[k + 1]):
                used, middle = int(s in served), first[s] + place.ahead
                kept += [
                    (place.start, place.start + 3),
                    (first[s] + used, middle),
                    (middle + used, middle + place.ahead),
                ]
        return Step(
            newest=max(places.values()).start,
            pending=min(place.start for place in places.values()) - 2,
            seen=[places[s].start for s in older],
            rows=[k - self.readers[s][0] for s in older],
            gradients=[first[s] for s in served],
            stats=[first[s] + places[s].ahead for s in served],
            kept=_joined(kept),
        )

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


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions in as few ranges as can be."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        if stop > start:
            joined.append((start, stop))
    return joined
