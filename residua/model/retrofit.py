"""Retrofit: start a model with the weights of another and, where the mathematics allows it, with the same function.

Every part defines how it starts as another (`begin_as` of topologies, norms, attention and anchors,
`Topology.initialization`) and reports how well that preserves the function. This module knows no particular kinds. A
part with the same settings copies the parameters of the other. Settings are compared unless their table declares that
they only affect training (`training_only`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.config.settings import Frozen, function_changes
from residua.errors import UserError
from residua.model.attention import SoftmaxAttention
from residua.model.body import Sublayer
from residua.model.decoder import Decoder
from residua.model.equivalence import InitFidelity, WeightsMismatch, take_parameters
from residua.model.norm import Norm, RMSNorm

SHAPES = ("vocab_size", "layers", "width", "ffn", "placement", "order", "learned_positions")
ANSWERED = (
    "gate", "sink", "own_value", "bias", "qk_norm", "qk_eps", "values", "heads", "kv_heads", "head_dim", "full",
    "full.values", "full.kv_heads", "full.head_dim",
)  # fmt: skip
"""Keys of softmax attention that its `begin_as` handles."""


@torch.no_grad()
def retrofit(model: Decoder, old: Decoder) -> dict[str, InitFidelity]:
    """Start `model` as `old`, in place; returns the fidelity of each changed key, and of the whole under `model`."""
    return _Retrofit(model, old).run()


class _Retrofit:
    def __init__(self, model: Decoder, old: Decoder) -> None:
        self.model, self.old = model, old
        self.before, self.after = old.config, model.config
        self.changes = function_changes(self.before, self.after)
        self.fidelity: dict[str, InitFidelity] = {}

    def run(self) -> dict[str, InitFidelity]:
        model, old = self.model, self.old
        self._check_shapes()
        self._begin("attention", lambda: max(_begin_body(new.body, old.body) for new, old in self._sublayers()))
        self._begin("anchors", self._begin_anchors)
        self._begin("norm", self._begin_norms)
        self._begin("topology", self._begin_topology)
        take_parameters(model.embed, old.embed)
        if model.places is not None and old.places is not None:
            take_parameters(model.places, old.places)
        if model.unembed is not None:
            model.unembed.weight.copy_(old.head_weight)
        elif old.unembed is not None:
            self.fidelity["head.kind"] = InitFidelity.NOT
        if not self._same_eps():
            self.fidelity["norm.eps"] = InitFidelity.UP_TO_EPS
        if self._same_topology and self._eps_factors(old) != self._eps_factors(model):
            self.fidelity["reader_eps"] = InitFidelity.UP_TO_EPS
        self.fidelity |= dict.fromkeys(self._unanswered(), InitFidelity.NOT)
        return {key: how for key, how in self.fidelity.items() if how} | {"model": max(self.fidelity.values())}

    def _check_shapes(self) -> None:
        changed = [key for key in SHAPES if getattr(self.before, key) != getattr(self.after, key)]
        if [type(mixer) for mixer in self.before.mixers] != [type(mixer) for mixer in self.after.mixers]:
            changed += self._of("attention")
        if self.before.topology.norms_inputs != self.after.topology.norms_inputs:
            changed.append("topology.kind")
        if changed:
            raise self._refusal(changed)

    def _begin(self, table: str, begin: Callable[[], InitFidelity]) -> None:
        keys = [key for key in self._of(table) if key not in ("norm.eps", *self._unanswered())]
        try:
            self.fidelity[", ".join(keys) or table] = begin()
        except WeightsMismatch:
            if not keys:
                raise
            raise self._refusal(keys) from None

    def _refusal(self, keys: list[str]) -> UserError:
        changed = " and ".join(f"model.{key}{self._values(key)}" for key in keys)
        do, them = ("does", "its value") if len(keys) == 1 else ("do", "their values")
        return UserError(f"{changed} {do} not fit the initial weights: keep {them}.")

    def _values(self, key: str) -> str:
        """The new and old values of a key, as text; empty for whole tables."""
        new, old = (reduce(getattr, key.split("."), config) for config in (self.after, self.before))
        return "" if isinstance(new, Frozen) or isinstance(old, Frozen) else f" = {new!r} (it was {old!r})"

    def _of(self, table: str) -> list[str]:
        """The changed keys of a table."""
        return [key for key in self.changes if key.startswith(f"{table}.")]

    @property
    def _same_topology(self) -> bool:
        return type(self.before.topology) is type(self.after.topology)

    def _begin_anchors(self) -> InitFidelity:
        fidelities = [self.model.anchors.begin_as(self.old.anchors)]
        for new, theirs in self._sublayers():
            if isinstance(new.body, SoftmaxAttention) and isinstance(theirs.body, SoftmaxAttention):
                fidelities.append(new.body.mix.begin_as(theirs.body.mix))
        return max(fidelities)

    def _begin_norms(self) -> InitFidelity:
        pairs = list(zip(_norms(self.model), _norms(self.old), strict=True))
        if self._of("norm") not in ([], ["norm.eps"]):
            return max(new.begin_as(theirs) for new, theirs in pairs)
        for new, theirs in pairs:
            take_parameters(new, theirs)
        return InitFidelity.EXACTLY

    def _begin_topology(self) -> InitFidelity:
        new, theirs = self.model.topology, self.old.topology
        if not self._of("topology"):
            take_parameters(new, theirs)
            return InitFidelity.EXACTLY
        start = new.initialization()
        if self._same_topology:
            if start.begin_as is not None:
                return start.begin_as(theirs)
            take_parameters(new, theirs)
            return InitFidelity.NOT
        added = theirs.initialization()
        if added.output_factors is not None:
            sums = InitFidelity.EXACTLY if start.is_additive else start.init_as_additive()
            return max(sums, self._multiply_outputs(added.output_factors()))
        if not added.is_additive:
            raise UserError(
                f"the initial model has topology.kind = '{self.before.topology.kind}', but only an additive topology "
                "can be replaced by another: keep it, or start from another run."
            )
        fidelity = start.init_as_additive()
        if fidelity is not InitFidelity.UP_TO_EPS:
            return fidelity
        factors = start.factors(self.after.sublayers)
        takes_out = (norm.scale_invariant for norm in _reader_norms(self.model))
        if not all(factor == 1 or removable for factor, removable in zip(factors, takes_out, strict=True)):
            return InitFidelity.NOT
        return InitFidelity.EXACTLY if self.after.reader_eps == "sum" else InitFidelity.UP_TO_EPS

    def _multiply_outputs(self, factors: Tensor) -> InitFidelity:
        """Multiply the gains of norms on outputs, if plain; the readers' norms cancel positive multiples of the sum.

        On the meta device, where factors have no values, they count as positive.
        """
        outputs = [sublayer.after for sublayer in self.model.executions]
        plain = all(type(norm) is RMSNorm for norm in outputs) and not self.after.repeats
        if not plain or not all(norm.scale_invariant for norm in _reader_norms(self.model)):
            return InitFidelity.NOT
        if not factors.is_meta and not (factors > 0).all():
            warnings.warn(
                "a layer factor of the initial model is not positive: the function of the model is not kept",
                stacklevel=2,
            )
            return InitFidelity.NOT
        for norm, factor in zip(outputs, factors, strict=True):
            cast(RMSNorm, norm).weight.mul_(factor)
        return InitFidelity.UP_TO_EPS

    def _same_eps(self) -> bool:
        old, new = (getattr(config.norm, "eps", None) for config in (self.before, self.after))
        return old == new or None in (old, new)

    def _eps_factors(self, model: Decoder) -> list[float]:
        """The factors on the eps of the readers' norms, for norms that have an eps."""
        factors = model.topology.initialization().factors(self.after.sublayers)
        norms = zip(_reader_norms(self.model), factors, strict=True)
        return [c if model.config.reader_eps == "sum" else 1.0 for norm, c in norms if norm.eps is not None]

    def _unanswered(self) -> list[str]:
        """Changed keys that affect the function but have no parameters: positions, windows, scales."""
        answered = ["attention.softmax_every", "attention.softmax_layers"]  # both models have the same mixer per layer
        if isinstance(self.after.softmax, choices.SoftmaxAttention):
            answered += [f"{self.after.attention.softmax_path}.{key}" for key in ANSWERED]
        tables = ("topology.", "norm.", "anchors.", "head.", "reader_eps")
        return [key for key in self.changes if key not in answered and not key.startswith(tables)]

    def _sublayers(self) -> Iterator[tuple[Sublayer, Sublayer]]:
        pairs = zip(self.model.sublayers, self.old.sublayers, strict=True)
        return ((cast(Sublayer, new), cast(Sublayer, theirs)) for new, theirs in pairs)


def _begin_body(new: nn.Module, old: nn.Module) -> InitFidelity:
    if isinstance(new, SoftmaxAttention):
        return new.begin_as(old)
    take_parameters(new, old)
    return InitFidelity.EXACTLY


def _norms(model: Decoder) -> list[Norm]:
    outputs = (cast(Sublayer, sublayer).after for sublayer in model.sublayers)
    return [*_reader_norms(model), *(cast(Norm, norm) for norm in outputs if norm is not None)]


def _reader_norms(model: Decoder) -> list[Norm]:
    """The norm in front of each reader of the topology: the sublayers and the head."""
    return [*(sublayer.norm for sublayer in model.executions), model.norm]
