"""Diagnosis of Hugging Face causal language models. We find their parts by structure, not by a list of names.

The decoder layers are the longest list of modules that keep the hidden width and feed each other. The sublayers of a
layer are its parts that hold matrices and return that width. A norm has one gain per dimension, or acts as a norm.
Through transformers' attention interface, we replace softmax attention with a function that returns the same output and
sums the weights. We check all of this against the model itself (hf_checks.py); whatever does not match is left out and
listed in `skipped`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from residua.diagnose.hf_checks import (
    Checked,
    check_layers,
    listed,
    not_measured,
    reason,
    require_causal,
    same_losses,
    tensors,
)
from residua.diagnose.hf_recorder import Recorder
from residua.diagnose.hf_structure import (
    DENSE_MASKS,
    INTERFACE,
    Layer,
    acting_gains,
    attention,
    find_layers,
    has_experts,
    is_norm,
    looks_like_attention,
    main_input,
    watching,
    without_head,
)
from residua.diagnose.observe import (
    Ablation,
    AblationKind,
    Observation,
    Site,
    SiteKind,
    Subject,
    first,
    on_each,
    replaced_first,
    silenced,
)
from residua.errors import UserError
from residua.model.taps import hooked
from residua.ops._runtime.numeric import wide
from residua.reading import counted

PROBE_LENGTH = 16
LOGITS_AT_ONCE = 1 << 24
_RECURRENT = ("A_log", "dt_bias")


class HuggingFaceSubject(Subject):
    """A `PreTrainedModel` with a language-modelling head; see `Subject`.

    `unused` lists the tensors in its folder that the model does not use.
    """

    state_name = "residual stream"

    def __init__(self, model: Any, name: str, unused: Sequence[str] = ()) -> None:
        self.model, self.name = model.eval(), name
        config = model.config.get_text_config(decoder=True)
        if not hasattr(config, "hidden_size"):
            raise UserError(
                f"{type(model).__name__} has no hidden width in its configuration, so it cannot be diagnosed."
            )
        embedding = model.get_input_embeddings()
        self.width, self.vocabulary = int(config.hidden_size), int(embedding.weight.shape[0])
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.skipped: list[str] = []
        self.calls: dict[int, int] = {}
        self.carrying: set[int] = set()
        self.compressed: set[int] = set()
        self.returning: set[int] = set()
        self.scales: dict[int, float] = {}
        self.checked = False
        probe = torch.arange(PROBE_LENGTH, device=embedding.weight.device)[None] % self.vocabulary
        require_causal(model, probe)
        self._own_attention = _implementations(model.config)
        self._install()
        self.decoder, plain_norms = self._find_layers(probe)
        self.layers = len(self.decoder)
        observation = self._check_sublayers(probe)
        final = self._final_norm(plain_norms)
        norms = [norm for layer in self.decoder for norm in layer.norms]
        self.gains = acting_gains(model, norms, final, self._bodies, self.sites, probe)
        counts = Counter(site.kind for site in self.sites)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        self.description = (
            f"{type(model).__name__}: {counted(self.layers, 'layer')} of width {self.width} ({kinds} sublayers)"
        )
        if unused:
            self.description += f", without {tensors(unused, 1)} of its folder"
            self.skipped.append(reason("unused tensors", tensors=tensors(unused, 8), model=type(model).__name__))
        if observation.streams:
            self.state_name = "sublayer input"
        calls = [{id(module) for module in layer.module.modules()} & set(self.calls) for layer in self.decoder]
        blind = [n for n, seeing in enumerate(calls) if not seeing]
        self.skipped += not_measured(self.decoder, self.sites, observation, blind, self.skipped, bool(self.carrying))

    def observe(self, tokens: Tensor, targets: Tensor) -> Observation:
        theirs = None if self.checked or not self.calls else self._own_losses(tokens, targets)
        observation, losses = self._record(tokens, targets)
        if theirs is not None and not same_losses(losses, theirs, next(self.model.parameters()).dtype):
            self._leave_attention(
                f"with Residua's attention function the model gives a loss of {float(losses.mean()):.4f} on the first "
                f"batch, with its own {float(theirs.mean()):.4f}"
            )
            observation, losses = self._record(tokens, targets)
        if not self.checked and self.compressed:
            self.skipped.append(reason("compressed keys", self.compressed))
        self.checked = True
        observation.loss = float(losses.mean())
        return observation

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._losses(tokens, targets).mean()

    def parameters_of(self, site: Site) -> Iterator[nn.Parameter]:
        body = self._bodies[site.index]
        inner = self.decoder[site.layer].prepared.get(id(body), [])
        return (parameter for part in (*inner, body) for parameter in part.parameters())

    def ablations(self, kinds: Sequence[AblationKind]) -> list[Ablation]:
        by_kind: dict[str, list[Ablation]] = {
            "layer": [
                Ablation("layer", n, f"layer {n}", partial(hooked, on_each([layer.module], _passed_through, True)))
                for n, layer in enumerate(self.decoder)
            ],
            "sublayer": [
                Ablation("sublayer", site.index, site.name, partial(hooked, on_each([body], silenced)))
                for site, body in zip(self.sites, self._bodies, strict=True)
                if site.kind != "layer" and site.index not in self.carrying
            ],
            "head": self._head_ablations(),
        }
        return [ablation for kind in kinds for ablation in by_kind.get(kind, [])]

    def _head_ablations(self) -> list[Ablation]:
        """One ablation per head; if a layer has several attention modules, their heads are numbered consecutively."""
        ablations: list[Ablation] = []
        before: Counter[int] = Counter()
        for layer, module, heads in self._attention_modules():
            for head in range(heads):
                number = before[layer] + head
                label = f"layer {layer} head {number}"
                ablations.append(Ablation("head", layer, label, partial(without_head, module, head), number))
            before[layer] += heads
        return ablations

    def _losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of every target, in nats."""
        logits = self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
        parts = zip(logits.split(rows), targets.flatten().split(rows), strict=True)
        return torch.cat([cross_entropy(wide(z), t, reduction="none") for z, t in parts])

    def _own_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the same with the model's original attention."""
        self._set_attention(self._own_attention)
        with torch.no_grad():
            losses = self._losses(tokens, targets)
        self._set_attention(self._interface)
        return losses

    def _record(
        self, tokens: Tensor, targets: Tensor, ends: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Observation, Tensor]:
        """Run one pass with hooks; return the observation and the loss of every target."""
        observation = Observation(tokens)
        with torch.no_grad(), watching() as watch:
            parts = (self.decoder, self.sites, self._bodies, self.width)
            recorder = Recorder(*parts, observation, watch, ends, self.returning)
            with hooked(recorder.attach):
                losses = self._losses(tokens, targets)
        self.carrying |= recorder.carrying
        self.compressed |= recorder.compressed
        for k, factor in self.scales.items():
            if k in observation.outputs:
                observation.outputs[k] = factor * observation.outputs[k]
        return observation, losses

    def _install(self) -> None:
        """Switch the model to our attention function, if it uses the interface."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask

        for name, masks in ((INTERFACE, sdpa_mask), (DENSE_MASKS, eager_mask)):
            AttentionInterface.register(name, attention)
            AttentionMaskInterface.register(name, masks)
        self._interface = INTERFACE if getattr(self.model, "_supports_sdpa", False) else DENSE_MASKS
        try:
            self._set_attention(self._interface)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            self._leave_attention(f"it refuses another one ({error})")

    def _set_attention(self, implementation: str | dict[str, str]) -> None:
        from transformers.utils import logging

        model: Any = self.model
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            model.set_attn_implementation(implementation)
        finally:
            logging.set_verbosity(level)

    def _leave_attention(self, reason: str) -> None:
        """Restore the model's own attention and skip its measurements."""
        self._set_attention(self._own_attention)
        self.calls = {}
        self.skipped.append(
            f"Attention metrics: {type(self.model).__name__} runs with its own attention, because {reason}."
        )

    def _find_layers(self, probe: Tensor) -> tuple[list[Layer], set[int]]:
        try:
            decoder, plain_norms, watch = find_layers(self.model, probe, self.width)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            if _implementations(self.model.config) == self._own_attention:
                raise
            self._leave_attention(f"Residua's attention function fails there ({str(error).splitlines()[0]})")
            return find_layers(self.model, probe, self.width)[:2]
        self.calls = dict(watch.heads)
        if watch.unknown:
            names = ", ".join(sorted(watch.unknown))
            self._leave_attention(
                f"its attention receives {names}, which Residua's attention function does not support"
            )
        elif not watch.calls:
            self._set_attention(self._own_attention)
        return decoder, plain_norms

    def _make_sites(self, whole: Collection[int] = ()) -> tuple[list[Site], list[nn.Module]]:
        """Return the sublayers of all layers; layers without any, and those in `whole`, count as one sublayer."""
        sites: list[Site] = []
        bodies: list[nn.Module] = []
        for n, layer in enumerate(self.decoder):
            parts = [] if n in whole else layer.bodies
            for body in parts or [layer.module]:
                largest = max([body, *layer.prepared.get(id(body), [])], key=_size)
                kind: SiteKind = self._kind(largest) if parts else "layer"
                sites.append(Site(len(sites), n, kind))
                bodies.append(body)
        return sites, bodies

    def _check_sublayers(self, probe: Tensor) -> Observation:
        """Check all layers in one pass; a layer whose sublayers do not match counts as one sublayer."""
        observation, checked = self._look_again(probe)
        if observation.streams:  # with streams, a part whose output is the next part's input has added no residual
            pairs = (s for s, t in pairwise(self.sites) if s.layer == t.layer)
            checked.inner = [s.index for s in pairs if s.index in self.carrying]
        if checked.inner:
            for k in checked.inner:
                self.decoder[self.sites[k].layer].join(self._bodies[k])
            observation, checked = self._look_again(probe)
        if checked.returning:
            self.returning = {id(self._bodies[k]) for k in checked.returning}
            observation, checked = self._look_again(probe)
        if checked.wrong:
            where = f" (of layers {listed(checked.unread)}, what the first one reads)" if checked.unread else ""
            self.skipped.append(reason("wrong sublayers", checked.wrong, where=where))
            observation, checked = self._look_again(probe, checked.wrong)
        if checked.partial:
            self.skipped.append(reason("partial sublayers", checked.partial))
        if not observation.states:
            raise UserError(
                f"{type(self.model).__name__} has no states of shape [batch, length, {self.width}], so it "
                "cannot be diagnosed."
            )
        self.scales = checked.scales
        return observation

    def _look_again(self, probe: Tensor, whole: Collection[int] = ()) -> tuple[Observation, Checked]:
        """Rebuild the sites and check them again."""
        self.carrying = set()
        self.sites, self._bodies = self._make_sites(whole)
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        observation, _ = self._record(probe, probe, ends)
        return observation, check_layers(observation, self.sites, ends)

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
        """Return layer, module and heads of every attention module that is not shared between layers."""
        candidates = [
            (n, module, self.calls[id(module)])
            for n, layer in enumerate(self.decoder)
            for module in layer.module.modules()
            if id(module) in self.calls
        ]
        uses = Counter(id(module) for _, module, _ in candidates)
        return [(n, module, heads) for n, module, heads in candidates if uses[id(module)] == 1]

    def _final_norm(self, plain_norms: set[int]) -> nn.Module | None:
        """Return the last norm of the hidden width outside all layers."""
        inside = {id(module) for layer in self.decoder for module in layer.module.modules()}
        outside = [
            m for m in self.model.modules() if id(m) not in inside and (is_norm(m, self.width) or id(m) in plain_norms)
        ]
        return outside[-1] if outside else None


def _size(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _implementations(config: Any) -> dict[str, str]:
    """Return the attention implementations of a model and its parts (text, vision), by configuration name."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}}
    used = {name: getattr(part, "_attn_implementation", None) for name, part in ({"": config} | parts).items()}
    return {name: implementation for name, implementation in used.items() if implementation is not None}


def _passed_through(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    """A forward hook that makes the layer return its input."""
    x = main_input(args, named, first(output).shape[-1])
    return replaced_first(output, lambda y: x if isinstance(x, Tensor) and x.shape == y.shape else y)
