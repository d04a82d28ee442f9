"""Hugging Face causal language models under diagnosis. Their parts are found by structure, not by a list of names.

The decoder layers are the longest list of modules whose outputs keep the hidden width. The sublayers of a layer are its
children that hold matrices and return that width; a norm is a child with one gain per dimension. Softmax attention is
replaced, through transformers' attention interface, by a function that returns the same output and keeps sums of the
weights. What does not fit is left out, and `skipped` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from residua.diagnose.hf_attention import INTERFACE, attention, watching, without_head
from residua.diagnose.hf_recorder import Recorder
from residua.diagnose.hf_structure import (
    acting_gains,
    find_layers,
    has_experts,
    is_norm,
    looks_like_attention,
    main_input,
)
from residua.diagnose.interventions import hooked, on_each, replaced_first, silenced
from residua.diagnose.observe import Ablation, AblationKind, AnchorScales, Observation, Site, SiteKind, Subject
from residua.ops._runtime.numeric import wide
from residua.reading import counted

PROBE_LENGTH = 16
LOGITS_AT_ONCE = 1 << 24
_RECURRENT = ("A_log", "dt_bias")


class HuggingFaceSubject(Subject):
    """A `PreTrainedModel` with a language-modelling head; see `Subject`."""

    state_name = "residual stream"

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model.eval(), name
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        self.width, self.vocabulary = int(config.hidden_size), int(embedding.weight.shape[0])
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.skipped: list[str] = []
        probe = torch.arange(PROBE_LENGTH, device=embedding.weight.device)[None] % self.vocabulary
        self._install(model)
        self.decoder, self.calls = find_layers(model, probe, self.width)
        self.layers = len(self.decoder)
        self.sites, self._bodies = self._make_sites()
        self.gains = acting_gains(model, self.decoder, self._final_norm(), self._bodies, self.sites, probe)
        counts = Counter(site.kind for site in self.sites)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        self.description = (
            f"{type(model).__name__}: {counted(self.layers, 'layer')} of width {self.width} ({kinds} sublayers)"
        )
        self.carrying: set[int] = set()
        self._say_what_is_missing(self.observe(probe, probe))

    def observe(self, tokens: Tensor, targets: Tensor) -> Observation:
        seen = Observation(tokens)
        recorder = Recorder(self.decoder, self.sites, self._bodies, self.width, seen)
        with torch.no_grad(), hooked(recorder.attach), watching() as watch:
            seen.loss = float(self.loss(tokens, targets))
        self.carrying |= recorder.carrying
        for layer, part in enumerate(self.decoder):
            for module in part.module.modules():
                if id(module) in watch.sums:
                    seen.attention[layer] = watch.sums[id(module)]
        return seen

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
        parts = zip(logits.split(rows), targets.flatten().split(rows), strict=True)
        return torch.stack([cross_entropy(wide(z), t, reduction="sum") for z, t in parts]).sum() / targets.numel()

    def parameters_of(self, site: Site) -> Iterator[nn.Parameter]:
        return self._bodies[site.index].parameters()

    def source_name(self, reader: int, source: int) -> str:
        return f"stream {source}"

    def initial_source(self, reader: int) -> int | None:
        return None

    def anchor_scales(self) -> list[AnchorScales]:
        return []

    def ablations(self, kinds: Sequence[AblationKind]) -> list[Ablation]:
        made: dict[str, list[Ablation]] = {
            "layer": [
                Ablation(
                    "layer",
                    n,
                    f"layer {n}",
                    partial(hooked, on_each([layer.module], _passed_through, with_kwargs=True)),
                )
                for n, layer in enumerate(self.decoder)
            ],
            "sublayer": [
                Ablation("sublayer", site.index, site.name, partial(hooked, on_each([body], silenced)))
                for site, body in zip(self.sites, self._bodies, strict=True)
                if site.kind != "layer" and site.index not in self.carrying
            ],
            "head": [
                Ablation("head", layer, f"layer {layer} head {head}", partial(without_head, module, head), head)
                for layer, module, heads in self._attention_modules()
                for head in range(heads)
            ],
        }
        return [ablation for kind in kinds for ablation in made.get(kind, [])]

    def _install(self, model: Any) -> None:
        """Let the model use our attention function, if it uses the interface."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
        from transformers.utils import logging

        AttentionInterface.register(INTERFACE, attention)
        AttentionMaskInterface.register(INTERFACE, sdpa_mask)
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            model.set_attn_implementation(INTERFACE)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            self.skipped.append(f"Attention metrics: {type(self.model).__name__} keeps its own attention ({error}).")
        finally:
            logging.set_verbosity(level)

    def _make_sites(self) -> tuple[list[Site], list[nn.Module]]:
        sites: list[Site] = []
        bodies: list[nn.Module] = []
        for n, layer in enumerate(self.decoder):
            for body in layer.bodies or [layer.module]:
                kind: SiteKind = self._kind(body) if layer.bodies else "layer"
                sites.append(Site(len(sites), n, kind))
                bodies.append(body)
        return sites, bodies

    def _kind(self, body: nn.Module) -> SiteKind:
        inside = list(body.modules())
        if any(id(module) in self.calls for module in inside):
            return "attention"
        if any(isinstance(m, nn.Conv1d) or any(hasattr(m, name) for name in _RECURRENT) for m in inside):
            return "linear attention"
        if looks_like_attention(body):
            return "attention"
        return "mixture of experts" if has_experts(body) else "feed-forward"

    def _attention_modules(self) -> list[tuple[int, nn.Module, int]]:
        return [
            (n, module, self.calls[id(module)])
            for n, layer in enumerate(self.decoder)
            for module in layer.module.modules()
            if id(module) in self.calls
        ]

    def _final_norm(self) -> nn.Module | None:
        """The last norm of the hidden width that is not inside a layer."""
        inside = {id(module) for layer in self.decoder for module in layer.module.modules()}
        outside = [m for m in self.model.modules() if id(m) not in inside and is_norm(m, self.width)]
        return outside[-1] if outside else None

    def _say_what_is_missing(self, seen: Observation) -> None:
        blind = [s.layer for s in self.sites if s.kind == "attention" and not self._sees(s.layer)]
        linear = [s.layer for s in self.sites if s.kind == "linear attention" and not self._sees(s.layer)]
        if blind and not any(text.startswith("Attention") for text in self.skipped):
            self.skipped.append(
                f"Attention metrics of layers {_listed(blind)}: they compute attention outside transformers' attention "
                "interface, where it cannot be seen."
            )
        if linear:
            self.skipped.append(
                f"Attention metrics of layers {_listed(linear)}: they are linear attention and have no softmax weights."
            )
        if any(site.kind == "layer" for site in self.sites):
            self.skipped.append(
                "Sublayers: some layers have no part that returns the hidden width; each counts as one sublayer."
            )
        if self.carrying:
            self.skipped.append(
                "Removal of single sublayers: they add the residual themselves, so only whole layers are removed."
            )
        if seen.streams:
            self.state_name = "sublayer input"
        partial_layers = [n for n in range(self.layers) if not seen.streams and not self._adds_up(n, seen)]
        if partial_layers:
            self.skipped.append(
                f"Part of layers {_listed(partial_layers)}: their sublayers' outputs do not add up to what the layer "
                "changes, so part of it happens outside them; only removing whole layers measures that part."
            )
        self.skipped.append("Depth weights, gates, anchors and expert load: published by Residua models only.")

    def _adds_up(self, layer: int, seen: Observation) -> bool:
        """Whether state + Σ outputs is the next layer's state; true if the states are not known."""
        own = [site.index for site in self.sites if site.layer == layer]
        before, after = seen.states.get(own[0]), seen.states.get(own[-1] + 1)
        if before is None or after is None or any(k not in seen.outputs for k in own):
            return True
        change = sum((wide(seen.outputs[k]) for k in own), torch.zeros_like(wide(before)))
        return bool((wide(after) - wide(before) - change).norm() <= 0.05 * change.norm() + 1e-6)

    def _sees(self, layer: int) -> bool:
        return any(n == layer for n, _, _ in self._attention_modules())


def _passed_through(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    """A forward hook that makes the layer return its input."""
    x = main_input(given, named)
    return replaced_first(output, lambda y: x if isinstance(x, Tensor) and x.shape == y.shape else y)


def _listed(layers: Sequence[int]) -> str:
    """`0, 1, 2, 4`; of more than twelve the first, the last and how many."""
    unique = sorted(set(layers))
    return ", ".join(map(str, unique)) if len(unique) <= 12 else f"{unique[0]} to {unique[-1]} ({len(unique)} of them)"
