"""Diagnosis of a Residua model: observations come from its taps (docs/taps.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.diagnose.attention import Scores, attention_sums
from residua.diagnose.observe import (
    NEAR_ZERO,
    Ablation,
    AblationKind,
    AnchorFacts,
    Observation,
    Site,
    SiteKind,
    Subject,
    before_each,
    on_each,
    silenced,
)
from residua.model import taps
from residua.model.body import Body
from residua.model.decoder import Decoder
from residua.model.inference import InferenceDecoder
from residua.model.taps import hooked
from residua.reading import counted

FILL = "fill phase: its output becomes a stream, which is set to zero"


class NativeSubject(Subject):
    """A Residua `Decoder`; see `Subject`."""

    def __init__(self, model: Decoder, name: str) -> None:
        config = model.config
        self.model, self._decoder, self.name = model, model, name
        self.width, self.vocabulary, self.context = config.width, config.vocab_size, config.context
        self.layers = len(config.executed)
        self.bodies: list[Body] = [sublayer.body for sublayer in model.executions]
        self.sites = [Site(k, k // 2, cast(SiteKind, body.role)) for k, body in enumerate(self.bodies)]
        turns = f", run as {self.layers} and numbered so" * config.repeats
        self.description = (
            f"{counted(config.layers, 'layer')} of width {config.width}{turns}, {config.topology.kind} topology, "
            f"{config.attention.kind} attention, {config.ffn.kind} feed-forward, "
            f"{config.norm.kind}, anchors {config.anchors.kind}"
        )
        self.names = model.topology.source_names([site.name for site in self.sites])
        self.state_name = "residual stream" if self.names.one_stream else "sublayer input"
        self._norms = [*(sublayer.norm for sublayer in model.executions), model.norm]
        self.gains = {k: gain for k, norm in enumerate(self._norms) if (gain := norm.gain()) is not None}
        self.skipped = [] if config.softmax_layers else [
            "Attention metrics: no layer of this model uses softmax attention, so there are no attention weights."
        ]  # fmt: skip

    def observe(self, tokens: Tensor, targets: Tensor) -> Observation:
        observation = Observation(tokens)
        with torch.no_grad(), taps.record(_Collector(self, observation)):
            observation.loss = float(self.loss(tokens, targets))
        return observation

    def norm_gate(self, state: int, h: Tensor) -> tuple[Tensor, Tensor] | None:
        return self._norms[state].gate_of(h)

    def norm_parts(self) -> dict[int, dict[str, Tensor]]:
        return {k: parts for k, norm in enumerate(self._norms) if (parts := norm.gain_parts())}

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self._decoder
        if torch.is_grad_enabled():
            # One pass over a few tokens: compiling the backward kernels takes longer, 45 s on a core for Multi-Gate.
            with ops.backend("reference"):
                return model.losses(tokens, targets)[0]
        if tokens.is_cuda and not taps.recording():
            model = InferenceDecoder(model, junctions=False)  # rewritten every time, since a part may be switched off
        return model.losses(tokens, targets)[0]

    def parameters_of(self, site: Site) -> Iterator[nn.Parameter]:
        return self._decoder.executions[site.index].parameters()

    def anchor_scales(self) -> list[AnchorFacts]:
        return [
            AnchorFacts(
                layer=site.layer, pathway=pathway, anchor=_by_head(anchor), current=_by_head(current),
                near_zero=float((anchor.abs() < NEAR_ZERO).double().mean()),
                anchor_channels=anchor.double().flatten().tolist(),
                current_channels=current.double().flatten().tolist(),
            )
            for site, body in zip(self.sites, self.bodies, strict=True)
            if (mix := body.anchor_mix()) is not None
            for pathway, (anchor, current) in mix.scales().items()
        ]  # fmt: skip

    def ablations(self, kinds: Sequence[AblationKind]) -> list[Ablation]:
        parts = {
            "layer": self._layer_ablations,
            "sublayer": self._sublayer_ablations,
            "head": self._head_ablations,
            "source": self._source_ablations,
            "stream": self._stream_ablations,
            "uniform": self._uniform_ablations,
        }
        return [ablation for kind in kinds for ablation in parts[kind]()]

    def _layer_ablations(self) -> list[Ablation]:
        filling = -(-self._decoder.topology.ablations().fill_phase // 2)
        return [
            Ablation("layer", n, f"layer {n}", partial(self.without_layers, [n]), note=FILL if n < filling else "")
            for n in range(self.layers)
        ]

    def without_layers(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        return self._without_sublayers([2 * layer + part for layer in layers for part in (0, 1)])

    @contextmanager
    def _without_sublayers(self, sublayers: Sequence[int]) -> Iterator[None]:
        """Zero the sublayers' outputs in every turn of a loop; the topology omits their writes where it can."""
        order = self._decoder.order
        silent = {order[k] for k in sublayers}
        modules = [self._decoder.sublayers[j] for j in silent]
        sublayers = [k for k, j in enumerate(order) if j in silent]
        with hooked(on_each(modules, silenced)), self._decoder.topology.ablations().without_writes(sublayers):
            yield

    def _sublayer_ablations(self) -> list[Ablation]:
        filling = self._decoder.topology.ablations().fill_phase
        return [
            Ablation(
                "sublayer", k, site.name, partial(self._without_sublayers, [k]), note=FILL if k < filling else ""
            )
            for k, site in enumerate(self.sites)
        ]  # fmt: skip

    def _head_ablations(self) -> list[Ablation]:
        ablations = []
        for site, body in zip(self.sites, cast(list[Any], self.bodies), strict=True):
            heads, width = body.query_heads
            for head in range(heads):
                cut = partial(_cut, slice(head * width, (head + 1) * width))
                label, applied = f"layer {site.layer} head {head}", partial(hooked, before_each([body.out], cut))
                ablations.append(Ablation("head", site.layer, label, applied, head))
        return ablations

    # Routing mass is not importance; the next three methods measure it. Each topology declares which it supports.

    def _source_ablations(self) -> list[Ablation]:
        """Hide each source from every reader, except where it is the reader's only source."""
        ablations, named = self._decoder.topology.ablations(), defaultdict[str, dict[int, int]](dict)
        for k, sources in enumerate(ablations.sources):
            for position in range(len(sources)):
                named[self.names.source(k + 1, position)][k] = position
        return [
            Ablation("source", index, label, partial(ablations.without_source, positions))
            for index, (label, positions) in enumerate(named.items())
        ]

    def _uniform_ablations(self) -> list[Ablation]:
        """Make each reader's weights uniform, then those of all readers at once."""
        ablations = self._decoder.topology.ablations()
        readers, equal = ablations.weighing_readers, ablations.with_equal_weights
        single = [Ablation("uniform", r, f"uniform weights at reader {r}", partial(equal, (r,))) for r in readers]
        every = Ablation("uniform", -1, "uniform weights at every reader", partial(equal, readers))
        return [*single, every] if len(readers) > 1 else single

    def _stream_ablations(self) -> list[Ablation]:
        """Hide each stream from every sublayer; sublayers still write to it."""
        ablations = self._decoder.topology.ablations()
        return [
            Ablation("stream", i, f"stream {i}", partial(ablations.without_stream, i)) for i in range(ablations.streams)
        ]


STORED = {
    ("sublayer", "input"): ("states", 0),
    ("sublayer", "output"): ("outputs", 0),
    ("depth", "weights"): ("weights", 1),
    ("depth", "beta"): ("betas", 0),
    ("depth", "streams"): ("streams", 1),
    ("moe", "load"): ("loads", 0),
    ("attention", "gate"): ("gates", 0),
    ("attention", "value_gate"): ("value_gates", 0),
}
"""The field of an observation for a tap; 1 for what the next reader sees."""


class _Collector(dict[str, Tensor]):
    """Receives taps as they are published: sums queries and keys immediately, stores the rest in the observation."""

    def __init__(self, subject: NativeSubject, observation: Observation) -> None:
        super().__init__()
        self.subject, self.observation = subject, observation
        self.query: Tensor | None = None

    def __setitem__(self, name: str, value: Tensor) -> None:
        observation = self.observation
        match taps.parts(name):
            case None if name == "final.input":
                observation.states[len(self.subject.sites)] = value
            case part, k, what if (part, what) in STORED:
                field, later = STORED[part, what]
                getattr(observation, field)[k + later] = value
            case "depth", k, "pre":
                observation.weights[k] = value.expand(*observation.tokens.shape, -1)
            case "attention", layer, "gamma":
                for index, pathway in enumerate(self._attention(layer).mix.pathways):  # q1, q2, k1, k2, …
                    observation.gammas[layer, pathway] = value[..., 2 * index : 2 * index + 2]
            case "attention", _, "query":
                self.query = value
            case "attention", layer, "key":
                assert self.query is not None
                body, q = self._attention(layer), self.query
                how = Scores(q.shape[-1] ** -0.5, body.window, softcap=body.softcap, sink=body.sink)
                observation.attention[layer] = attention_sums(q.transpose(1, 2), value.transpose(1, 2), how)
                self.query = None

    def _attention(self, layer: int) -> Any:
        return self.subject.bodies[2 * layer]


def _by_head(scale: Tensor) -> list[float]:
    flat = scale.double().reshape(scale.shape[0] if scale.dim() else 1, -1)
    means: list[float] = flat.mean(1).tolist()
    return means


def _cut(part: slice, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook of the output projection that sets one head's slice of its input to zero."""
    y = args[0].clone()
    y[..., part] = 0
    return (y, *args[1:])
