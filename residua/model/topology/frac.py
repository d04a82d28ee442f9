"""Frac-connections (arXiv 2503.14125): hyper-connections between slices of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.taps import tap
from residua.model.topology.base import Initialization, State, Topology
from residua.model.topology.facts import Costs, SourceNames, stream_rows, trace_rows
from residua.model.topology.hyper import DynamicMaps, full_precision
from residua.ops._runtime.numeric import few_products, mix_slices, stored, wide

EPS = 1e-6


class FracConnections(Topology):
    """The stream h consists of m slices H_i of C/m channels. Each sublayer has matrices Y and A and m numbers B:

        input_i = Σ_j Y[i, j] H_j,    H'_i = Σ_j A[i, j] H_j + B_i y_i,    y_i being the slices of its output

    dynamic: each gets an added s · tanh(RMS(H) W), from the slices that the sublayer reads; the paper's matrices are
    [j, i], like HC's. At the start Y = A = I, B = 1 and W = 0, which is the pre-norm model, and s = 0.01. RMS has no
    gain, since W could absorb it. The final norm reads h. The state is h, and if dynamic the logits of the next write.
    """

    def __init__(self, config: choices.FracConnections, sublayers: int, width: int) -> None:
        super().__init__()
        self.fractions, self.last = config.fractions, sublayers - 1
        junction = {"static": SliceWeights, "dynamic": DynamicSliceWeights}[config.weights]
        self.junctions = nn.ModuleList(junction(config.fractions, width) for _ in range(sublayers))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return self._read(0, x)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h, *logits = state
        with full_precision(y):
            mix, post = cast(SliceWeights, self.junctions[k]).write(*logits)
            tap(f"depth.{k}.mix", mix)
            slices = mix_slices(mix, self._slices(h)) + post[..., None] * wide(self._slices(y))
        return self._read(k + 1, slices.flatten(-2).to(y.dtype))

    def _slices(self, x: Tensor) -> Tensor:
        """[B, T, m, C/m] of [B, T, C]."""
        slices: Tensor = x.unflatten(-1, (self.fractions, -1))
        return slices

    def _read(self, k: int, h: Tensor) -> tuple[Tensor, State]:
        if k > self.last:
            return h, (h,)
        H, junction = self._slices(h), cast(SliceWeights, self.junctions[k])
        with full_precision(h):
            logits = junction.logits(H)
            read = mix_slices(junction.read(*logits), H)
        return read.flatten(-2).to(h.dtype), (h, *logits)

    def initialization(self) -> Initialization:
        return Initialization.additive_when_new(self)

    def costs(self, sublayers: int, width: int) -> Costs:
        """A compiled step fuses the junction of the one stream."""
        step = stream_rows(1).total * sublayers
        products = self._products(width)
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=2.0, products=products)

    def _products(self, width: int) -> int:
        """Y and A multiply every slice m times, B once; dynamic maps multiply every slice."""
        maps = [each.maps.weight for each in self.junctions if isinstance(each, DynamicSliceWeights)]
        again = (self.fractions - 1) * sum(weight.numel() for weight in maps)
        return width * len(self.junctions) * (2 * self.fractions + 1) + again

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(one_stream=False, source=lambda reader, source: f"slice {source}")


class SliceWeights(nn.Module):
    """Y, A [out, in] and B of one sublayer."""

    def __init__(self, fractions: int, width: int) -> None:
        super().__init__()
        self.pre, self.mix = (nn.Parameter(torch.empty(fractions, fractions)) for _ in range(2))
        self.post = nn.Parameter(torch.empty(fractions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.eye_(self.pre)
        nn.init.eye_(self.mix)
        nn.init.ones_(self.post)

    def logits(self, H: Tensor) -> tuple[Tensor, ...]:
        """Logits of the slices [B, T, m, C/m] for `read` and `write`; empty if the weights are parameters."""
        return ()

    def read(self, *logits: Tensor) -> Tensor:
        """Y."""
        return wide(self.pre)

    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        """A and B."""
        return wide(self.mix), wide(self.post)


class DynamicSliceWeights(SliceWeights):
    """Adds terms that depend on the slices; the logits are tanh(RMS(H) W) [B, T, m, 2m + 1]."""

    def __init__(self, fractions: int, width: int) -> None:
        super().__init__(fractions, width)
        self.maps = SliceMaps(fractions, width // fractions)

    def logits(self, H: Tensor) -> tuple[Tensor, ...]:
        scores = few_products(H, wide(self.maps.weight), len(self.post))
        return (stored(torch.tanh(scores * torch.rsqrt(wide(H).square().mean(-1, keepdim=True) + EPS))),)

    def read(self, *logits: Tensor) -> Tensor:
        m = len(self.post)
        return stored(self.pre + self.maps.alpha * logits[0][..., :m].transpose(-1, -2))

    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        m = len(self.post)
        mix = self.mix + self.maps.alpha * logits[0][..., m : 2 * m].transpose(-1, -2)
        return stored(mix), stored(self.post + self.maps.beta * logits[0][..., -1])


class SliceMaps(nn.Module):
    """W for Y, A and B, as rows that start at zero, and s for the matrices and for B."""

    def __init__(self, fractions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * fractions + 1, width))
        self.alpha, self.beta = (nn.Parameter(torch.empty(())) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.alpha, DynamicMaps.SCALE)
        nn.init.constant_(self.beta, DynamicMaps.SCALE)
