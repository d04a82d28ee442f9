"""Projection mixing: attention layers mix anchor projections into their own (ResFormer, NuResFormer, ExoFormer).

    Ŝ_k = λ1 ⊙ N(S_anc) + λ2 ⊙ S_k          for each pathway S of Q, K, V, G

The anchors are normalised once, when they are written, because all layers read the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from residua import ops
from residua.config import choices
from residua.errors import UserError
from residua.model.anchor_source import AnchorNorm, HeadShape
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity
from residua.model.projection import Projection, is_plain, is_watched
from residua.model.taps import tap
from residua.ops._runtime.numeric import wide
from residua.ops._runtime.triton_support import INSTALLED
from residua.ops.mix_projection import per_head
from residua.ops.mix_projection.reference import Mixing

if INSTALLED:
    from residua.ops.mix_projection import anchor_gradients

Projections = dict[str, Tensor]
"""Pathway name to [B, T, heads, head_dim]."""

RotaryTable = tuple[Tensor, Tensor]
"""cos and sin, as in `Context.rotary`."""


GRANULARITIES = ("scalar", "headwise", "elementwise")
"""Granularities, indexed by the number of axes of λ."""


class Gate(Protocol):
    """A gate on the attention output [B, T, H, D], with values [B, T, H, D] or [B, T, H, 1]."""

    def apply(self, y: Tensor, /) -> Tensor: ...

    def values(self) -> Tensor: ...


class SigmoidGate(NamedTuple):
    """Y ⊙ σ(G). A tuple like `Context`, because torch 2.11 cannot call an object constructed in compiled code."""

    projected: Tensor

    def apply(self, y: Tensor) -> Tensor:
        return y * self.values()

    def values(self) -> Tensor:
        return torch.sigmoid(self.projected)


class Heads(NamedTuple):
    """Queries [B, T, H, D], keys and values [B, T, H_kv, D], and the output gate, if any."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate | None


def _heads(heads: Projections, gate: Gate | None = None) -> Heads:
    if "g" in heads:
        gate = SigmoidGate(heads["g"])
    return Heads(heads["q"], heads["k"], heads["v"], gate)


class QueryKeyNorm(nn.Module):
    """The operation on queries and keys [B, T, heads, head_dim] before their product."""

    def turn_queries(self, q: Tensor, table: RotaryTable) -> Tensor:
        """The queries, normalised and rotated by position."""
        raise NotImplementedError

    def turn_keys(self, k: Tensor, table: RotaryTable) -> Tensor:
        """The keys, normalised and rotated by position."""
        raise NotImplementedError

    def norm_values(self, v: Tensor) -> Tensor:
        """The values, normalised if required."""
        return v

    def drop_keys(self) -> None:
        """Drop the parameters for keys: the layer uses another layer's keys, already rotated."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    @property
    def gains(self) -> tuple[Tensor, Tensor] | None:
        """The gains, for kernels that compute this norm; None if it only rotates."""
        raise NotImplementedError(f"{type(self).__name__} has no gain shared by all heads")

    @property
    def in_kernels(self) -> bool:
        """Whether decoding kernels support this norm."""
        return False


class LayerPlace(NamedTuple):
    """A softmax layer for which a mix is built: its index among the model's `layers` softmax layers, its heads, the
    sections of its fused projection, and the model's width, std of new weights and vocabulary."""

    layer: int
    layers: int
    shape: HeadShape
    sections: ops.Sections
    width: int
    std: float
    vocabulary: int


class Unmixed(nn.Module):
    """A layer without anchors: splits the projection into heads, and normalises and rotates queries and keys."""

    pathways: tuple[str, ...] = ()
    """Pathways that the layer mixes with an anchor or writes as one."""
    taken: tuple[str, ...] = ()
    """Pathways that an earlier layer projects for this one."""
    WHOLE = 1.0
    """The λ2 that leaves a projection unchanged."""

    def __init__(self, sections: ops.Sections) -> None:
        super().__init__()
        self.sections = sections

    def forward(
        self,
        project: Projection,
        x: Tensor,
        anchors: Anchors,
        qk_norm: QueryKeyNorm,
        table: RotaryTable,
        context: Context,
    ) -> tuple[Heads, Anchors]:
        """The heads for attention, from the layer's fused projection [B, T, R] of x, and anchors for later layers."""
        projections, anchors = self.mix(self.split(project(x)), x, anchors, context)
        if "v" not in self.taken:
            projections["v"] = qk_norm.norm_values(projections["v"] if "v" in projections else projections["k"])
        projections["q"] = qk_norm.turn_queries(projections["q"], table)
        if "k" not in self.taken:
            projections["k"] = qk_norm.turn_keys(projections["k"], table)
        projections, anchors = self.mix_turned(projections, anchors)
        return _heads(projections), anchors

    def mixing_products(self) -> int:
        """Multiply-adds per token of a forward pass that mix heads of layers, beyond one for each parameter."""
        return 0

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        """Mix anchors into the layer's own projections, before QK-norm and rotation; return both results, the mixed
        projections and the anchors for later layers.

        A kind of anchors overrides this or `mix_turned`; one with its own kernels may override `forward`.
        """
        return own, anchors

    def mix_turned(self, own: Projections, anchors: Anchors) -> tuple[Projections, Anchors]:
        """Like `mix`, but after QK-norm and rotation."""
        return own, anchors

    def publish(self, layer: int, x: Tensor) -> None:
        """Tap token-dependent values (`model/taps.py`) for diagnoses."""

    @property
    def plain(self) -> bool:
        """Whether the layer neither mixes nor writes anchors."""
        return type(self) is Unmixed

    @property
    def only_values(self) -> bool:
        """Whether the layer writes anchors only from values, or mixes them only into values with static λ."""
        return self.plain

    @property
    def in_kernels(self) -> bool:
        """Whether decoding kernels mix every pathway."""
        return False

    def scales_of(self, pathway: str) -> tuple[Tensor, Tensor] | None:
        """λ1 and λ2 [H, D] of mixed heads; None if they are not mixed."""
        return None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections W1 and W2 of the network that computes γ; empty for static mixing."""
        return ()

    @property
    def network(self) -> tuple[Tensor, Tensor] | None:
        """W2 [2·pathways, hidden] and b of the network that computes γ; None for static mixing."""
        return None

    def begin_as(self, old: Unmixed) -> InitFidelity:
        """Start as another layer's mixing, pathway by pathway. A newly mixed pathway starts with λ1 = 0."""
        return InitFidelity.EXACTLY if old.plain else InitFidelity.NOT

    def readers(self) -> tuple[Tensor, ...]:
        """Every matrix [R, C] that reads the layer's input."""
        return ()

    def divide_values(self) -> Callable[[Tensor], None] | None:
        """A function that divides this layer's values per channel; None if impossible."""
        return None

    def scales(self, gamma: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """λ1 and λ2 by pathway, multiplied by the means of `gamma` [..., 2·pathways] if given; empty if nothing is
        mixed.
        """
        return {}

    def split(self, projected: Tensor) -> Projections:
        parts = projected.split([heads * width for heads, width in self.sections.values()], -1)
        return {s: part.unflatten(-1, self.sections[s]) for s, part in zip(self.sections, parts, strict=True)}


class Write(Unmixed):
    """The first layer of ResFormer and NuResFormer, whose projections become the anchors; it mixes nothing."""

    def __init__(self, sections: ops.Sections, pathways: tuple[str, ...], norm: str, shape: HeadShape) -> None:
        super().__init__(sections)
        self.pathways = pathways
        self.norm = AnchorNorm(pathways, norm, shape.head_dim)

    @property
    def only_values(self) -> bool:
        return self.pathways == ("v",) and not self.norm.gains

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        return own, tuple(self.norm(s, own[s]) for s in self.pathways)

    def begin_as(self, old: Unmixed) -> InitFidelity:
        if old.plain:
            return InitFidelity.EXACTLY
        if not isinstance(old, Write):
            raise _other_source()
        return self.norm.begin_as(old.norm, [s for s in self.pathways if s in old.pathways])


def _other_source() -> UserError:
    return UserError(
        "model.anchors.kind: anchors of the embedding ('exoformer') cannot replace those of the first layer "
        "(such as 'resformer'), or vice versa: keep the kind, or start from a run without anchors."
    )


class Mix(Unmixed):
    """Ŝ = λ1 ⊙ S_anc + λ2 ⊙ S on each pathway, λ per element, head or layer; `start` gives both, ½ in the paper."""

    HANDLES = 1
    """The number of handles of a layer that shares the gradient pass of the anchors."""

    def __init__(
        self,
        sections: ops.Sections,
        pathways: tuple[str, ...],
        granularity: str,
        shape: HeadShape,
        start: choices.Start = (0.5, 0.5),
    ) -> None:
        super().__init__(sections)
        self.pathways, self.start = pathways, start
        rank = GRANULARITIES.index(granularity)
        sizes = {s: (shape.heads[s], shape.head_dim)[:rank] for s in pathways}
        self.anchor_scale = nn.ParameterDict({s: nn.Parameter(torch.empty(sizes[s])) for s in pathways})
        self.current_scale = nn.ParameterDict({s: nn.Parameter(torch.empty(sizes[s])) for s in pathways})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for scales, start in zip((self.anchor_scale, self.current_scale), self.start, strict=True):
            for scale in scales.values():
                nn.init.constant_(scale, start * self.WHOLE)

    @property
    def own_scale(self) -> nn.ParameterDict:
        """λ2 by pathway, unless it is folded into the projection."""
        return self.current_scale

    def factors(self, x: Tensor) -> Tensor | None:
        """γ [B, T, 2·pathways]; None for static mixing."""
        return None

    def stacked(self, weight: Tensor) -> Tensor:
        """All matrices that read x: the folded weights, stacked on W1 of the network that computes γ."""
        first = [part.weight.to(weight.dtype) for part in self.projections[:1]]
        return torch.cat([self.folded(weight), *first]) if first else self.folded(weight)

    def folded(self, weight: Tensor) -> Tensor:
        """diag(λ2) W for the weight W [R, C] of a fused projection; rows of unmixed pathways are unchanged."""
        ones = weight.new_ones((), dtype=wide(weight).dtype)
        scales = [per_head(self.current_scale[s] if s in self.pathways else ones) for s in self.sections]
        rows = [wide(s).expand(shape).flatten() for s, shape in zip(scales, self.sections.values(), strict=True)]
        return (wide(weight) * torch.cat(rows)[:, None]).to(weight.dtype)

    @property
    def only_values(self) -> bool:
        return type(self) in (Mix, FoldedMix) and self.pathways == ("v",)

    @property
    def in_kernels(self) -> bool:
        known = type(self) in (Mix, DynamicMix, FoldedMix)
        return known and all(map(is_plain, self.projections)) and not any(map(is_watched, (self, *self.children())))

    def scales_of(self, pathway: str) -> tuple[Tensor, Tensor] | None:
        """`scales` for one pathway, without copies."""
        if pathway not in self.pathways:
            return None
        first, second = per_head(self.anchor_scale[pathway]), per_head(self.own_scale[pathway])
        return first.expand(self.sections[pathway]), second.expand(self.sections[pathway])

    def _shares(self, anchors: Anchors) -> bool:
        """Whether handles come after the anchors in the tuple; the first handles belong to this layer."""
        return len(anchors) > len(self.pathways)

    @torch.no_grad()
    def begin_as(self, old: Unmixed) -> InitFidelity:
        """A newly mixed pathway starts with λ1 = 0 and λ2 = 1; with γ, which starts at ½, λ2 = 2.

        A pathway that was already mixed keeps its λ, repeated if the new granularity is finer.
        """
        if isinstance(old, Write):
            raise _other_source()
        for anchor, current in zip(self.anchor_scale.values(), self.current_scale.values(), strict=True):
            nn.init.zeros_(anchor)
            nn.init.constant_(current, self.WHOLE)
        if not isinstance(old, Mix):
            return super().begin_as(old)
        for pathway in self.both(old):
            for scales, theirs in ((self.anchor_scale, old.anchor_scale), (self.current_scale, old.current_scale)):
                scales[pathway].copy_(_repeated(theirs[pathway], scales[pathway]) * (self.WHOLE / old.WHOLE))
        lost = len(self.both(old)) < len(old.pathways) or (isinstance(old, DynamicMix) and type(self) is Mix)
        return InitFidelity.NOT if lost else InitFidelity.EXACTLY

    def both(self, old: Mix) -> list[str]:
        """The pathways that both layers mix."""
        return [pathway for pathway in self.pathways if pathway in old.pathways]

    def forward(
        self,
        project: Projection,
        x: Tensor,
        anchors: Anchors,
        qk_norm: QueryKeyNorm,
        table: RotaryTable,
        context: Context,
    ) -> tuple[Heads, Anchors]:
        """With shared anchors (`Sharing`), λ2 is folded into the weights of the projection."""
        named, scales = dict(zip(self.pathways, anchors, strict=False)), dict(self.anchor_scale.items())
        if self._shares(anchors):
            first = len(self.pathways)
            rest = first + self.HANDLES
            heads, gate = anchor_gradients.mix_heads(
                x, self.stacked(project.weight), anchors[first:rest], self.sections, named, scales, table,
                gains=qk_norm.gains, network=self.network, eps=qk_norm.eps,
            )  # fmt: skip
            return _heads(heads, gate), (*anchors[:first], *anchors[rest:])
        heads, anchors = ops.mix_heads(
            project(x),
            self.sections,
            named,
            scales,
            dict(self.own_scale.items()),
            table,
            gains=qk_norm.gains,
            gamma=self.factors(x),
            eps=qk_norm.eps,
        )
        return _heads(heads), anchors

    def divide_values(self) -> Callable[[Tensor], None] | None:
        """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V: divides both λ, if they have one number per element."""
        return self._divide_scales if self.own_scale["v"].dim() == 2 else None

    @torch.no_grad()
    def _divide_scales(self, by: Tensor) -> None:
        for scale in (self.anchor_scale["v"], self.own_scale["v"]):
            scale.div_(by.view_as(scale))

    def scales(self, gamma: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        means = [1.0] * 2 * len(self.pathways) if gamma is None else wide(gamma).flatten(0, -2).mean(0).unbind()
        return {
            s: (self.anchor_scale[s].detach() * means[2 * i], self.own_scale[s].detach() * means[2 * i + 1])
            for i, s in enumerate(self.pathways)
        }


class Modulation(nn.Module):
    """γ = σ(GELU(x W1) W2 + b): one factor per λ and token. W2 and b start at zero, so that initially γ = ½ exactly."""

    def __init__(self, factors: int, width: int, hidden: int, *, std: float) -> None:
        super().__init__()
        self.down = Projection(width, hidden, std=std)
        self.up = Projection(hidden, factors, std=0.0)
        self.bias = nn.Parameter(torch.empty(factors))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(self.down(x))
        return torch.sigmoid(self.up(hidden) + self.bias.to(hidden.dtype))

    @torch.no_grad()
    def begin_as(self, old: Modulation, rows: Sequence[tuple[int, int]]) -> None:
        """Start as a narrower network; `rows` pairs each output row here with a row of the old network."""
        hidden = len(old.down.weight)
        if len(self.down.weight) < hidden:
            raise UserError(
                f"model.anchors.mixing.hidden = {len(self.down.weight)} is less than the {hidden} of the initial "
                f"model, whose weights do not fit: use at least {hidden}."
            )
        self.down.weight[:hidden] = old.down.weight
        for row, old_row in rows:
            self.up.weight[row, :hidden] = old.up.weight[old_row]
            self.bias[row] = old.bias[old_row]


class DynamicMix(Mix):
    """λ ⊙ γ instead of λ, with γ computed from the layer's normalised input x, in the order q1, q2, k1, k2, …

    λ starts twice as large, so that with γ = ½ the mixing starts like the static one.
    """

    WHOLE = 2.0
    HANDLES = 2

    def __init__(
        self, sections: ops.Sections, pathways: tuple[str, ...], granularity: str, shape: HeadShape,
        start: choices.Start = (0.5, 0.5), *, width: int, hidden: int, std: float,
    ) -> None:  # fmt: skip
        super().__init__(sections, pathways, granularity, shape, start)
        self.gamma = Modulation(2 * len(pathways), width, hidden, std=std)

    def factors(self, x: Tensor) -> Tensor:
        gamma: Tensor = self.gamma(x)
        return gamma

    def publish(self, layer: int, x: Tensor) -> None:
        tap(f"attention.{layer}.gamma", partial(self.factors, x))

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gamma.down, self.gamma.up

    @property
    def network(self) -> tuple[Tensor, Tensor]:
        return self.gamma.up.weight, self.gamma.bias

    def begin_as(self, old: Unmixed) -> InitFidelity:
        kept = super().begin_as(old)
        if isinstance(old, DynamicMix):
            first = [(2 * self.pathways.index(s), 2 * old.pathways.index(s)) for s in self.both(old)]
            self.gamma.begin_as(old.gamma, [(row + i, old_row + i) for row, old_row in first for i in (0, 1)])
        return kept

    def readers(self) -> tuple[Tensor, ...]:
        return (self.gamma.down.weight,)


class FoldedMix(Mix):
    """Ŝ = λ1 ⊙ S_anc + W' x with W' = diag(λ2) W, for inference (`attention.fold_mixing`).

    Mixing precedes QK-norm, rotation and the gate's sigmoid, so on every pathway the scale moves into W exactly, up to
    rounding. A layer that writes the anchors keeps its W. A dynamic λ depends on the token and cannot be folded.
    """

    def __init__(self, mix: Mix) -> None:
        Unmixed.__init__(self, mix.sections)
        self.pathways, self.start, self.anchor_scale = mix.pathways, mix.start, mix.anchor_scale
        ones = {s: torch.ones_like(scale) for s, scale in mix.current_scale.items()}
        self.ones = nn.ParameterDict({s: nn.Parameter(one, requires_grad=False) for s, one in ones.items()})

    @property
    def own_scale(self) -> nn.ParameterDict:
        return self.ones


def mix_values(mix: Unmixed, values: Tensor, anchors: Anchors) -> tuple[Mixing | None, Anchors]:
    """How kernels mix a layer's own values [..., H_kv, D] (None: not at all), and the anchors for later layers.

    Only for layers with `only_values`.
    """
    if isinstance(mix, Write):
        return None, (values,)
    scales = mix.scales_of("v")
    return None if scales is None else Mixing(anchors[0], *scales), anchors


def _repeated(old: Tensor, new: Tensor) -> Tensor:
    """Repeat λ to the shape of a finer granularity."""
    if old.dim() > new.dim():
        raise UserError(
            f"model.anchors.granularity = '{GRANULARITIES[new.dim()]}' has fewer λ than the initial model: keep "
            f"'{GRANULARITIES[old.dim()]}'."
        )
    return old.reshape((*old.shape, *(1,) * (new.dim() - old.dim()))).expand_as(new)
