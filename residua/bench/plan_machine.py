"""The devices of a plan and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A device, its links and its node.

    memory: bytes of a device. flops: FLOP/s that an additive model's step reaches. link, between: bytes/s that a device
    sends to others of its node, and to other nodes. bandwidth: bytes/s of a copy in its memory, read and written bytes
    together (an H200's, measured). node: devices in a node. latency: seconds until a message arrives. host: bytes of a
    node's memory.
    """

    memory: float
    flops: float
    link: float
    between: float = 50e9
    bandwidth: float = 4.25e12
    node: int = 8
    latency: float = 1e-5
    host: float = 2000 * GIB

    def group(self, size: int, stride: int) -> Group:
        """The links of `size` ranks, each `stride` after the one before."""
        nodes = max(1, size * stride // self.node)
        return Group(self, size, 1 if size * stride <= self.node else min(size, nodes))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and the number of nodes they are on."""

    machine: Machine
    size: int
    nodes: int

    def ring(self, sent: float, collectives: float = 1.0) -> float:
        """Seconds of ring collectives in which each rank sends so many bytes.

        The ranks of one node cross to the next over all their network cards at once. A collective over k nodes takes k
        latencies.
        """
        if self.size == 1:
            return 0.0
        here = self.size / self.nodes
        rate = self.machine.link if self.nodes == 1 else min(self.machine.link, here * self.machine.between)
        return sent / rate + collectives * self.nodes * self.machine.latency

    def exchange(self, sent: float, collectives: float = 1.0) -> float:
        """Seconds in which each rank sends so many bytes, divided among all others (all-to-all)."""
        if self.size == 1:
            return 0.0
        leaving = sent * (1 - 1 / self.nodes)
        rates = max((sent - leaving) / self.machine.link, leaving / self.machine.between)
        return rates + collectives * self.machine.latency

    def hop(self, sent: float) -> float:
        """Seconds until the next rank has so many bytes."""
        return sent / (self.machine.link if self.nodes == 1 else self.machine.between) + self.machine.latency
