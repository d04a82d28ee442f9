"""A Residua model under diagnosis: observations come from its taps (docs/taps.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.diagnose import depth_ablations
from residua.diagnose.attention import AttentionSums, Scores, attention_sums
from residua.diagnose.interventions import hooked, on_each, silenced
from residua.diagnose.observe import Ablation, AblationKind, AnchorScales, Observation, Site, SiteKind, Subject
from residua.model import taps
from residua.model.body import Body
from residua.model.decoder import Decoder, Sublayer
from residua.model.forward import for_sequences
from residua.reading import counted

NEAR_ZERO = 1e-3
FILL = "fill phase: its output becomes a stream, which is zero instead of missing"


class NativeSubject(Subject):
    """A Residua `Decoder`; see `Subject`."""

    def __init__(self, model: Decoder, name: str) -> None:
        config = model.config
        self.model, self._decoder, self.name = model, model, name
        self.width, self.vocabulary, self.context = config.width, config.vocab_size, config.context
        self.layers = config.layers
        roles = [cast(SiteKind, cast(Sublayer, s).body.role) for s in model.sublayers]
        self.sites = [Site(k, k // 2, role) for k, role in enumerate(roles)]
        self.description = (
            f"{counted(config.layers, 'layer')} of width {config.width}, {config.topology.kind} topology, "
            f"{config.attention.kind} attention, {config.ffn.kind} feed-forward, "
            f"{config.norm.kind}, anchors {config.anchors.kind}"
        )
        self._names = model.topology.source_names([site.name for site in self.sites])
        self.state_name = "residual stream" if self._names.one_stream else "sublayer input"
        self._norms = [*(cast(Sublayer, s).norm for s in model.sublayers), model.norm]
        self.gains = {k: gain for k, norm in enumerate(self._norms) if (gain := norm.gain()) is not None}
        self.skipped = [] if config.softmax_layers else [
            "Attention metrics: no layer of this model has a softmax, so there are no attention weights to look at."
        ]  # fmt: skip

    def observe(self, tokens: Tensor, targets: Tensor) -> Observation:
        seen = Observation(tokens)
        with torch.no_grad(), taps.record(_Collector(self, seen)):
            seen.loss = float(self.loss(tokens, targets))
        return seen

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
            model = for_sequences(model, junctions=False)  # something may be switched off: rewritten every time
        return model.losses(tokens, targets)[0]

    def parameters_of(self, site: Site) -> Iterator[nn.Parameter]:
        return self._decoder.sublayers[site.index].parameters()

    def source_name(self, reader: int, source: int) -> str:
        return self._names.source(reader, source)

    def initial_source(self, reader: int) -> int | None:
        return self._names.initial(reader)

    def block_of_reader(self, reader: int) -> str | None:
        return None if self._names.block_of_reader is None else self._names.block_of_reader(reader)

    def block_of_source(self, reader: int, source: int) -> str:
        assert self._names.block_of_source is not None
        return self._names.block_of_source(reader, source)

    def anchor_scales(self) -> list[AnchorScales]:
        found = []
        for site in self.sites:
            mix = self._body(site).anchor_mix()
            for pathway, (anchor, current) in mix.scales().items() if mix is not None else ():
                near = float((anchor.abs() < NEAR_ZERO).double().mean())
                found.append(AnchorScales(
                    site.layer, pathway, _by_head(anchor), _by_head(current), near,
                    anchor.double().flatten().tolist(), current.double().flatten().tolist(),
                ))  # fmt: skip
        return found

    def ablations(self, kinds: Sequence[AblationKind]) -> list[Ablation]:
        depth = self._decoder.topology.ablations()
        makers = {
            "layer": self._layer_ablations,
            "sublayer": self._sublayer_ablations,
            "head": self._head_ablations,
            "source": lambda: depth_ablations.sources(depth, self.source_name),
            "stream": lambda: depth_ablations.streams(depth),
            "uniform": lambda: depth_ablations.uniform(depth),
        }
        return [ablation for kind in kinds for ablation in makers[kind]()]

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
        """Their outputs are zero, and the topology writes nothing of them where it can."""
        modules = [self._decoder.sublayers[k] for k in sublayers]
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
        found = []
        for site in self.sites:
            body: Any = self._body(site)
            heads, width = body.query_heads
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                found.append(
                    Ablation("head", site.layer, f"layer {site.layer} head {head}", _without(body.out, part), head)
                )
        return found

    def _body(self, site: Site) -> Body:
        return cast(Sublayer, self._decoder.sublayers[site.index]).body


class _Collector(dict[str, Tensor]):
    """Receives taps as they are published: sums queries and keys at once, stores the rest in the observation."""

    def __init__(self, subject: NativeSubject, seen: Observation) -> None:
        super().__init__()
        self.subject, self.seen = subject, seen
        self.query: Tensor | None = None

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name == "final.input":
            self.seen.states[len(self.subject.sites)] = value
        elif (found := taps.parts(name)) is not None:
            part, number, what = found
            take = getattr(self, f"_{part}_{what}", None)
            if take is not None:
                take(number, value)

    def _sublayer_input(self, k: int, value: Tensor) -> None:
        self.seen.states[k] = value

    def _sublayer_output(self, k: int, value: Tensor) -> None:
        self.seen.outputs[k] = value

    def _depth_weights(self, k: int, value: Tensor) -> None:
        self.seen.weights[k + 1] = value

    def _depth_pre(self, k: int, value: Tensor) -> None:
        self.seen.weights[k] = value.expand(*self.seen.tokens.shape, -1)

    def _depth_beta(self, k: int, value: Tensor) -> None:
        self.seen.betas[k] = value

    def _depth_streams(self, k: int, value: Tensor) -> None:
        self.seen.streams[k + 1] = value

    def _attention_gate(self, layer: int, value: Tensor) -> None:
        self.seen.gates[layer] = value

    def _attention_gamma(self, layer: int, value: Tensor) -> None:
        body: Any = self.subject._body(self.subject.sites[2 * layer])
        for index, pathway in enumerate(body.mix.pathways):  # in the order q1, q2, k1, k2, …
            self.seen.gammas[layer, pathway] = value[..., 2 * index : 2 * index + 2]

    def _moe_load(self, layer: int, value: Tensor) -> None:
        self.seen.loads[layer] = value

    def _attention_query(self, layer: int, value: Tensor) -> None:
        self.query = value

    def _attention_key(self, layer: int, value: Tensor) -> None:
        assert self.query is not None
        self.seen.attention[layer] = self._sums(layer, self.query, value)
        self.query = None

    def _sums(self, layer: int, query: Tensor, key: Tensor) -> AttentionSums:
        body: Any = self.subject._body(self.subject.sites[2 * layer])
        how = Scores(scale=query.shape[-1] ** -0.5, window=body.window, sink=body.sink)
        return attention_sums(query.transpose(1, 2), key.transpose(1, 2), how)


def _by_head(scale: Tensor) -> list[float]:
    flat = scale.double().reshape(scale.shape[0] if scale.dim() else 1, -1)
    means: list[float] = flat.mean(1).tolist()
    return means


def _without(out: nn.Module, part: slice) -> Any:
    """A context in which one head's slice of the output projection's input is zero."""

    def cut(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y = given[0].clone()
        y[..., part] = 0
        return (y, *given[1:])

    @contextmanager
    def applied() -> Iterator[None]:
        handle = out.register_forward_pre_hook(cut)
        try:
            yield
        finally:
            handle.remove()

    return applied
