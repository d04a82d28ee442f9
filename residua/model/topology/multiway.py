"""Separate reads for queries, keys and values: MUDD (arXiv 2502.12170), DeepCrossAttention (arXiv 2502.06785)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from residua import ops
from residua.config import choices
from residua.model.context import Input, Reads
from residua.model.equivalence import InitFidelity, take_parameters
from residua.model.taps import tap
from residua.model.topology.base import Boundary, Initialization, Items, State, Topology
from residua.model.topology.facts import ADDED_IN_NORM, Costs, SourceNames, trace_rows
from residua.ops._runtime.numeric import wide

EPS = 1e-6


class LayerReads(Topology):
    """Sources are the embedding X_0 and one tensor X_i for each transformer layer so far. A layer reads mixtures of
    them; inside it, the feed-forward reads r plus the output of attention.

    The state is the running sum and the sources. Inside a layer with `keeps_update`, the output of attention follows
    them, as the first part of the next source.
    """

    keeps_update = False
    """Whether a source is the update that its layer adds, not the running sum after it."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.layers = sublayers // 2

    @abstractmethod
    def read(self, layer: int, sources: State) -> Input:
        """The input of a layer; layer L is the final norm."""

    @abstractmethod
    def ways_of(self, layer: int) -> Sequence[str]:
        """The distinct mixtures that a layer reads."""

    @abstractmethod
    def trim(self, sources: State) -> State:
        """The sources to keep after a layer; the last one is new."""

    @abstractmethod
    def spans(self, layer: int) -> list[range]:
        """For each source of a layer, the range of outputs that it sums; the embedding is output 0."""

    def open(self, x: Tensor) -> tuple[Input, State]:
        return self._begin(0, (x,))

    def step(self, k: int, y: Tensor, state: State) -> tuple[Input, State]:
        return self.enter(k, self.advance(k, y, state))

    def advance(self, k: int, y: Tensor, state: State) -> State:
        """The state after sublayer k; at the end of a layer, only the sources."""
        h = state[0] + y
        if k % 2 == 0:
            return (h, *state[1:], y) if self.keeps_update else (h, *state[1:])
        return self.trim((*state[1:-1], state[-1] + y) if self.keeps_update else (*state[1:], h))

    def enter(self, k: int, state: State) -> tuple[Input, State]:
        """The input of sublayer k+1 and its state, from the result of `advance`."""
        return (state[0], state) if k % 2 == 0 else self._begin((k + 1) // 2, state)

    def _begin(self, layer: int, sources: State) -> tuple[Input, State]:
        h = self.read(layer, sources)
        return h, (h.r if isinstance(h, Reads) else h, *sources)

    def names(self, k: int) -> list[str]:
        """Names of the tensors that `advance` returns after sublayer k. A layer's output no longer changes."""
        sources = [f"output.{s.start}" if len(s) == 1 else f"sum.{s.stop}" for s in self.spans((k + 1) // 2)]
        if k % 2:
            return sources
        return [f"input.{k}", *sources, *([f"update.{k}"] if self.keeps_update else [])]

    def initialization(self) -> Initialization:
        return Initialization(init_as_additive=self._init_as_additive, begin_as=self._begin_as)

    def _init_as_additive(self) -> InitFidelity:
        """As in a new model."""
        for module in self.modules():
            if isinstance(module, DynamicWeights | Selector):
                module.reset_parameters()
        return InitFidelity.EXACTLY

    def _begin_as(self, old: LayerReads) -> InitFidelity:
        """Preserves the function if every layer reads the same sources in the same ways."""
        take_parameters(self, old)
        ours, theirs = ([(t.spans(i), t.ways_of(i)) for i in range(t.layers + 1)] for t in (self, old))
        return InitFidelity.EXACTLY if ours == theirs else InitFidelity.NOT

    def boundary(self) -> Boundary:
        return LayerBoundary(self)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Additions, and reads: sources → reads; sources and the gradients of the reads → those of the sources."""
        readers = [(len(self.spans(i)), len(self.ways_of(i))) for i in range(1, self.layers + 1) if self.ways_of(i)]
        step = ADDED_IN_NORM * sublayers + sum(4 * sources + 2 * ways for sources, ways in readers)
        kept = sum(ways for _, ways in readers) / sublayers
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=kept)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        def source(reader: int, source: int) -> str:
            span = self.spans(reader // 2)[source]
            if span.start == 0:
                return "embedding"
            return f"layer {span.start - 1}" if len(span) == 1 else f"layers 0 to {span.stop - 2}"

        return SourceNames(one_stream=False, source=source)


class LayerBoundary(Boundary):
    """The sources cross, inside a layer with its running sum; the next slice reads them."""

    topology: LayerReads

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        return dict(zip(self.topology.names(k), self.topology.advance(k, y, state), strict=True))

    def enter(self, k: int, items: Items) -> tuple[Input, State]:
        return self.topology.enter(k, tuple(items[name] for name in self.topology.names(k)))

    def embedding(self) -> str | None:
        return "output.0"


class Mudd(LayerReads):
    """Multiway dynamic dense connections: X_i is the residual stream after layer i, and the next layer reads

        X̄_c = Σ_{j ≤ i} (A_c[j] + a_c[j]) X_j,   A = W2 gelu(W1 N(X_i))     for each way c of q, k, v, r

    N is RMSNorm without a gain, W1 has as many rows as W2. W2 starts at zero, W1 normal with std 1/√C, and a_c selects
    X_i, as in the authors' JAX code, so a new model is a pre-norm model. Ways not in `ways` and layers not in `layers`
    read X_i; layer L is the final norm, which reads one mixture. `sources` limits the sources to the embedding and that
    many of the newest outputs.
    """

    def __init__(self, config: choices.Mudd, sublayers: int, width: int) -> None:
        super().__init__(sublayers)
        self.config = config
        mixed = {layer: self.ways_of(layer) for layer in range(1, self.layers + 1)}
        self.weights = nn.ModuleDict(
            {str(i): DynamicWeights(len(ways), len(self.spans(i)), width) for i, ways in mixed.items() if ways}
        )

    def ways_of(self, layer: int) -> Sequence[str]:
        if self.config.layers is not None and layer not in self.config.layers:
            return ()
        return self.config.ways if layer < self.layers else ("r",)

    def spans(self, layer: int) -> list[range]:
        kept = self.config.sources
        oldest = 1 if kept is None else max(1, layer + 1 - kept)
        return [range(1), *(range(i, i + 1) for i in range(oldest, layer + 1))]

    def trim(self, sources: State) -> State:
        kept = self.config.sources
        return sources if kept is None else (sources[0], *sources[1:][-kept:])

    def read(self, layer: int, sources: State) -> Input:
        if str(layer) not in self.weights:
            return sources[-1]
        weights, reads = self.weights[str(layer)](sources[-1]), {}
        for way, weight in zip(self.ways_of(layer), weights.unbind(-2), strict=True):
            _tap_weights(layer, way, weight)
            mixed = sum(w[..., None] * wide(x) for w, x in zip(weight.unbind(-1), sources, strict=True))
            reads[way] = mixed.to(sources[-1].dtype)
        return reads["r"] if [*reads] == ["r"] else Reads(*(reads.get(way, sources[-1]) for way in "qkvr"))

    def costs(self, sublayers: int, width: int) -> Costs:
        """Every way weights all channels of every source."""
        weights = cast("list[DynamicWeights]", self.weights.values())
        return replace(super().costs(sublayers, width), products=width * sum(w.static.numel() for w in weights))

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        names = super().source_names(sublayers)
        return SourceNames(source=names.source, initial=lambda reader: len(self.spans(reader // 2)) - 1)


def _tap_weights(layer: int, way: str, weight: Tensor | Callable[[], Tensor]) -> None:
    """Publish the weights [B, T, sources] of a layer's read; the name for r has no suffix."""
    if layer > 0:
        tap(f"depth.{2 * layer - 1}.weights{'' if way == 'r' else f'_{way}'}", weight)


class DynamicWeights(nn.Module):
    """A + a [B, T, ways, sources] of X_i [B, T, C], as in `Mudd`."""

    rounded = ("down", "up")

    def __init__(self, ways: int, sources: int, width: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(ways * sources, width))
        self.up = nn.Parameter(torch.empty(ways * sources, ways * sources))
        self.static = nn.Parameter(torch.empty(ways, sources))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)
        nn.init.zeros_(self.static)
        with torch.no_grad():
            self.static[:, -1] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(linear(ops.rms(x), self.down.to(x.dtype)))
        return wide(linear(hidden, self.up.to(x.dtype)).unflatten(-1, self.static.shape)) + wide(self.static)


class DeepCross(LayerReads):
    """DeepCrossAttention: X_i is the sum of layer i's attention and feed-forward outputs, and each layer reads

        X̄_c = Σ_j X_j ⊙ relu(b_cj + w_c · N(X_j))       for c of q, k, v; r equals q's read

    with a vector b_cj for each source and one w_c; N is RMSNorm without a gain. b starts at 1 and w at 0, so a new
    model is a pre-norm model. The final norm reads one such mixture. With `recent`, the sources are the embedding, the
    newest outputs, and the sum of the outputs between them.

    The paper and public code have b + relu(w · X_j). That has no gradient for w at w = 0, so here the bias is inside.
    """

    keeps_update = True

    def __init__(self, config: choices.DeepCross, sublayers: int, width: int) -> None:
        super().__init__(sublayers)
        self.recent = config.recent
        self.selectors = nn.ModuleList(
            nn.ModuleDict({way: Selector(len(self.spans(layer)), width) for way in self.ways_of(layer)})
            for layer in range(self.layers + 1)
        )

    def ways_of(self, layer: int) -> Sequence[str]:
        return ("q", "k", "v") if layer < self.layers else ("q",)

    def spans(self, layer: int) -> list[range]:
        oldest = 1 if self.recent is None else max(1, layer + 1 - self.recent)
        between = [range(1, oldest)] if oldest > 1 else []
        return [range(1), *between, *(range(i, i + 1) for i in range(oldest, layer + 1))]

    def trim(self, sources: State) -> State:
        if self.recent is None or len(sources) <= self.recent + 2:
            return sources
        first, between, oldest, *newest = sources
        return (first, between + oldest, *newest)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Every way has two products of C channels with every source, but parameters count a product with w once."""
        layers = range(self.layers + 1)
        products = width * sum(len(self.ways_of(layer)) * (len(self.spans(layer)) - 1) for layer in layers)
        return replace(super().costs(sublayers, width), products=products)

    def read(self, layer: int, sources: State) -> Input:
        selectors = cast("list[Selector]", [*cast(nn.ModuleDict, self.selectors[layer]).values()])
        queries = wide(torch.stack([selector.query for selector in selectors]))  # [ways, C]
        biases = wide(torch.stack([selector.bias for selector in selectors], 1))  # [sources, ways, C]
        values = [wide(source)[..., None, :] for source in sources]
        weights = [_select(x, queries, bias) for x, bias in zip(values, biases.unbind(), strict=True)]
        _tap_weights(layer, "r", partial(_channel_means, weights))  # q's weights, which r shares
        mixed = sum(weight * x for weight, x in zip(weights, values, strict=True))
        reads = cast(Tensor, mixed).to(sources[-1].dtype).unbind(-2)
        if len(reads) == 1:
            return reads[0]
        q, k, v = reads
        return Reads(q, k, v, r=q)


def _channel_means(weights: Sequence[Tensor]) -> Tensor:
    """The mean over channels of the first way's weights, [B, T, sources]."""
    return torch.stack([weight[..., 0, :].mean(-1) for weight in weights], -1)


def _select(x: Tensor, queries: Tensor, bias: Tensor) -> Tensor:
    """relu(b + w · N(x)) [B, T, ways, C] of one source x [B, T, 1, C], for all ways at once.

    This halves the nodes of a step's graph, which is quadratic in layers. Compiled code makes no normed copy of a
    source. The score is one number, not a product of two: a weight then depends on so few tensors that compiled code
    computes the gradients through it where they are summed. Otherwise it writes them in float32 per source and way.
    Gradients written by hand move fewer bytes, but with them a step of `mini` took 3.7 instead of 1.6 times pre-norm's.
    """
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return torch.relu(bias + (x * inverse_rms * queries).sum(-1, keepdim=True))


class Selector(nn.Module):
    """The parameters w and b_j of one way."""

    def __init__(self, sources: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(sources, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.bias)
