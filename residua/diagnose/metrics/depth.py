"""How layers talk: depth weights, write gates, streams, attention gates, experts."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.diagnose.observe import Observation
from residua.diagnose.schema import BetaFacts, ExpertFacts, GateFacts, StreamFacts
from residua.ops._runtime.numeric import wide

BINS = 20
CLOSED = 0.2


class Mean:
    """The mean of tensors of one shape, each counted alike."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.count = 0

    def add(self, total: Tensor, count: int) -> None:
        total = total.double().cpu()
        self.sum = total if self.sum is None else self.sum + total
        self.count += count

    def value(self) -> Tensor:
        assert self.sum is not None
        return self.sum / self.count


class DepthMetrics:
    """Means over all tokens, by reader (weights, streams), by writer (β) and by layer (gates, experts)."""

    def __init__(self) -> None:
        self.weights: dict[int, Mean] = {}
        self.beta: dict[int, Mean] = {}
        self.histogram: dict[int, Mean] = {}
        self.turned: dict[int, Mean] = {}
        self.alike: dict[int, Mean] = {}
        self.gate: dict[int, Mean] = {}
        self.load: dict[int, Mean] = {}

    def add(self, seen: Observation) -> None:
        tokens = seen.tokens.numel()
        for reader, weights in seen.weights.items():
            self._mean(self.weights, reader).add(wide(weights).double().flatten(0, 1).sum(0), tokens)
        for site, beta in seen.betas.items():
            # An elementwise gate has one β per channel of its one stream.
            by_stream = wide(beta).mean(-1, keepdim=True) if beta.shape[-1] == self._width(seen) else wide(beta)
            self._mean(self.beta, site).add(by_stream.double().flatten(0, 1).sum(0), tokens)
            counts = torch.histc(wide(beta).float().flatten(), BINS, 0.0, 1.0)
            self._mean(self.histogram, site).add(counts, beta.numel())
        self._add_streams(seen)
        for layer, gate in seen.gates.items():
            sums = torch.stack([wide(gate).double().sum(), (gate < CLOSED).double().sum()])
            self._mean(self.gate, layer).add(sums, gate.numel())
        for layer, load in seen.loads.items():
            self._mean(self.load, layer).add(load.double() * tokens, tokens)

    def _add_streams(self, seen: Observation) -> None:
        """Angular distance arccos(cos)/π of each stream to itself one reader earlier; mean cosine between streams."""
        before: Tensor | None = None
        for reader in sorted(seen.streams):
            streams = wide(seen.streams[reader])
            u = streams / streams.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            count, tokens = u.shape[-2], seen.tokens.numel()
            if before is not None:
                shared = min(count, before.shape[-2])
                cosine = (u[..., :shared, :] * before[..., :shared, :]).sum(-1).double().clamp(-1, 1)
                self._mean(self.turned, reader).add((cosine.arccos() / torch.pi).flatten(0, 1).sum(0), tokens)
            if count > 1:
                total = u.double().sum(-2).square().sum(-1) - u.double().square().sum((-2, -1))
                self._mean(self.alike, reader).add((total / (count * (count - 1))).sum(), tokens)
            before = u

    @staticmethod
    def _mean(table: dict[int, Mean], key: int) -> Mean:
        return table.setdefault(key, Mean())

    @staticmethod
    def _width(seen: Observation) -> int:
        return next(iter(seen.states.values())).shape[-1]

    def betas(self) -> list[BetaFacts]:
        return [
            BetaFacts(site=site, mean=mean.value().tolist(), histogram=self.histogram[site].value().tolist())
            for site, mean in sorted(self.beta.items())
        ]

    def streams(self) -> list[StreamFacts]:
        found = []
        for reader, alike in sorted(self.alike.items()):
            turned = self.turned.get(reader)
            angles: list[float | None] = [] if turned is None else turned.value().tolist()
            found.append(StreamFacts(reader=reader, angular_distance=angles, similarity=float(alike.value())))
        return found

    def gates(self) -> list[GateFacts]:
        return [
            GateFacts(layer=layer, mean=float(mean.value()[0]), closed=float(mean.value()[1]))
            for layer, mean in sorted(self.gate.items())
        ]

    def experts(self) -> list[ExpertFacts]:
        return [ExpertFacts(layer=layer, load=mean.value().tolist()) for layer, mean in sorted(self.load.items())]
