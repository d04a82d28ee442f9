"""Anchor mixing of a whole model, with a backward that writes each anchor's gradient once.

All layers l mix the same anchor a: m_l = λ1_l ⊙ a + λ2_l ⊙ s_l. Layer by layer, the backward would read and write the
anchor's gradient at every layer, and write ds_l = λ2_l ⊙ dm_l. Here λ2 is folded into the projection, W' = diag(λ2) W.
So the projection's gradient is dm_l itself, and one pass does the rest when all dm_l are available:

    m_l = λ1_l ⊙ a + x W'_lᵀ,    da = Σ_l λ1_l ⊙ dm_l,    dλ1_l = Σ_tokens dm_l ⊙ a

Autograd computes dλ2 from the gradient of W', with C products per row of W' instead of C per token. For anchors made
from the embedding, this pass also goes through their norms and writes the gradient of their projection in one piece.

A *handle* connects each layer with that pass, as in `depth_attention/source_gradients.py`: a tensor without memory,
whose gradient is dm_l, the same tensor as the gradient of the projection; the "gradient" of a second one is γ1_l/γ2_l.
The graph is ordinary, and compile, checkpointing and retain_graph need no special handling.

For a pathway, C wide, of L layers: 4C backward per layer if it has a norm, else 2C (V: a copy into the gradient of the
projection), then C(1 + 2/L), where `autograd.py` moves 6C. A gate is mixed where it is applied (`Gate`), 4C forward and
6C backward with attention's output and its gradient. All dm_l stay in memory until the end. Each replaces its layer's
s_l, which is freed then, so the peak does not rise. Layers that recompute s_l do not use this.

γ that depend on the token leave this unchanged, m_l = γ1_l λ1_l ⊙ a + γ2_l x W'_lᵀ. The gradient of the projection is
γ2_l dm_l, and the last pass multiplies it by γ1_l/γ2_l. Only dγ needs more: V, which has no norm, reads its own
projection and the anchor again (2C). γ is computed from h = W1 x (`reference.factors`), whose gradient goes into the
same rows as the projection's, in the next E columns. So the backward pass is one product for both,
dx = [dm, dh] [W'; W1], and one for the gradient of both matrices. The forward pass has one product for each: x is read
twice (C), and both results are dense. `torch.compile` would pad the rows of one result with R + E columns to whole
cache lines and so copy them for every operator (2R each time). Matrix libraries are also slower for R + E columns than
for R, by more than the second product takes.

If W is a working copy in bfloat16, W' is rounded once more than under autocast, which rounds only W'; results differ by
that rounding.

Handles cannot pass between processes or out of sharded layers, so sharing is off there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.ops._runtime.backend import chosen_backend
from residua.ops._runtime.launch import handle
from residua.ops._runtime.numeric import wide, working_dtype
from residua.ops._runtime.tracing import differentiable, grouped
from residua.ops._runtime.triton_support import supports
from residua.ops.mix_projection import autograd, launch
from residua.ops.mix_projection.reference import Heads, Sections, factors, per_head

WIDEST_HEAD = 512
"""Widest head for which `gather` keeps the sums of all layers in registers."""


def serves(anchors: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether a model with these anchors and weights (λ, W) should share them: in training, if kernels can run."""
    place = anchors[0].device
    whole = all(type(w) in (Tensor, nn.Parameter) and w.device == place for w in weights)  # not sharded, not offloaded
    narrow = all(anchor.shape[-1] <= WIDEST_HEAD for anchor in anchors)
    return whole and narrow and torch.is_grad_enabled() and chosen_backend() != "reference" and supports(*anchors)


def share(
    anchors: Mapping[str, Tensor],
    scales: Sequence[Mapping[str, Tensor]],
    sections: Sections,
    *,
    source: Tensor | None = None,
    gains: Mapping[str, Tensor] | None = None,
    hidden: int = 0,
    eps: float = 1e-6,
) -> list[tuple[Tensor, ...]]:
    """The handles of each layer that mixes the anchors; `scales` are their λ1 by pathway.

    `hidden` is the number E of columns after their projections from which γ is computed; 0 if λ is static.

    If the anchors are columns of one projection in this order, normed if they have one of the `gains`, `source`
    [B, T, ΣHD] is that projection: it gets their gradient, through the norms and in one piece.
    """
    flat = [torch.cat([_elements(by_pathway[s], sections[s]).flatten() for s in anchors]) for by_pathway in scales]
    plan = autograd.plan_sections(sections, list(anchors), normed=False)
    sources = [a.flatten(-2) for a in anchors.values()] if source is None else [source]
    norm_gains = [None if gains is None else gains.get(s) for s in anchors]
    handles = _share(torch.stack(flat), norm_gains, sources, plan, eps, hidden)
    return list(zip(*(handles[i : i + len(scales)] for i in range(0, len(handles), len(scales))), strict=True))


def mix_heads(
    x: Tensor,
    weight: Tensor,
    handles: Sequence[Tensor],
    sections: Sections,
    anchors: Mapping[str, Tensor],
    anchor_scales: Mapping[str, Tensor],
    table: tuple[Tensor, Tensor],
    *,
    gains: tuple[Tensor, Tensor] | None = None,
    network: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> tuple[Heads, Gate | None]:
    """`ops.mix_heads` of one layer with its handles, starting from its input x [B, T, C].

    weight [R, C] is W', with λ2 folded in. `network` are W2 [F, E] and b [F] of `reference.factors`; W1 [E, C] is then
    below W'. An elementwise gate is not among the heads, but returned separately as a `Gate`.
    """
    gated = sections.get("g") == sections["q"]
    plan = autograd.plan_sections(sections, list(anchors), gains is not None, gated=gated)
    scales = [_elements(anchor_scales[s], sections[s]).detach() for s in anchors]
    values, dtype = [a.detach() for a in anchors.values()], working_dtype(x)
    (of_dm, *of_quotients), (up, bias) = handles, network or (None, None)
    outputs = _mix(
        x.to(dtype), weight.to(dtype), up, bias, of_dm, of_quotients, table, values, scales, gains or (), plan, eps
    )
    heads = dict(zip([s for s in sections if not (gated and s == "g")], outputs, strict=False))
    if not gated:
        return heads, None
    projected, gamma, *to = outputs[len(heads) :] if network else (outputs[len(heads)], None, outputs[-1])
    return heads, Gate(plan, 0 if network is None else network[0].shape[1], projected, gamma, to, values, scales)


class Gate(NamedTuple):
    """o ⊙ σ(m) with the mixture m of a gate, which both passes compute where it is applied.

    Computed earlier, m and its gradient would be written and read (4C more, 6C with γ), and m stored (C). The backward
    pass creates the layer's dm with the gate's columns, and passes it on to the backward of the other sections.
    """

    plan: launch.SectionPlan
    hidden: int
    projected: Tensor
    gamma: Tensor | None
    handles: Sequence[Tensor]
    anchors: list[Tensor]
    scales: list[Tensor]

    def apply(self, o: Tensor) -> Tensor:
        return _gate(o, self.handles, self.projected, self.gamma, self.anchors, self.scales, self.plan, self.hidden)

    def values(self) -> Tensor:
        """σ(m) [B, T, H, D]."""
        s = launch.gate_section(self.plan)
        mixed = wide(self.projected[..., s.columns].unflatten(-1, (s.heads, s.width)))
        if s.mixed:
            first, second = (
                (1.0, 1.0)
                if self.gamma is None
                else wide(self.gamma)[..., None, None].unbind(-3)[2 * s.anchor : 2 * s.anchor + 2]
            )
            mixed = first * self.scales[s.anchor] * wide(self.anchors[s.anchor]) + second * mixed
        return torch.sigmoid(mixed).to(self.projected.dtype)


def _elements(scale: Tensor, section: tuple[int, int]) -> Tensor:
    return per_head(scale).expand(section)


def _share_backward(ctx: Any, *grads: Tensor | None) -> Sequence[Any]:
    scales, gains, sources = grouped(ctx.saved_tensors, ctx.lengths[:3])
    dm, quotients = (_known(grads[i : i + len(scales)]) for i in (0, len(scales)))
    if not dm:
        return ()
    mixed = sorted((s for s in launch.sections(ctx.plan) if s.anchor >= 0), key=lambda s: s.anchor)
    widths = [s.heads * s.width for s in mixed]
    columns = sources if len(sources) > 1 else sources[0].split(widths, -1)
    anchors = [a.unflatten(-1, (s.heads, s.width)) for a, s in zip(columns, mixed, strict=True)]
    sums, d_anchors = launch.gather(dm, quotients, anchors, gains, scales.float(), ctx.plan, ctx.eps)
    by_head = [d.view(s.heads, s.width) for d, s in zip(sums[-1].split(widths), mixed, strict=True)]
    d_gains = [None if g is None else d.sum(0).to(g.dtype) for d, g in zip(by_head, gains, strict=True)]
    d_sources = [d_anchors] if len(sources) == 1 else d_anchors.split(widths, -1)
    return sums[: len(scales)].to(scales.dtype), d_gains, d_sources


@differentiable(_share_backward)
def _share(
    ctx: Any, scales: Tensor, gains: list[Tensor | None], sources: list[Tensor], plan: launch.SectionPlan, eps: float,
    hidden: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The handles of all dm_l, then of all γ1_l/γ2_l. The anchors, before their norms, are one source or several."""
    ctx.plan, ctx.eps = plan, eps
    ctx.save_for_backward(scales, *gains, *sources)
    ctx.set_materialize_grads(False)
    lead = sources[0].shape[:2]
    width = sum(s.heads * s.width for s in launch.sections(plan))
    of_dm = [handle(sources[0], (*lead, width + hidden)) for _ in scales]
    of_quotients = [handle(sources[0], (*lead, len(gains)), torch.float32) for _ in scales if hidden]
    return *of_dm, *of_quotients


def _known(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients, with zeros for missing ones; empty if all are missing."""
    like = next((g for g in gradients if g is not None), None)
    return [] if like is None else [torch.zeros_like(like) if g is None else g for g in gradients]


def _mix_backward(ctx: Any, *grads: Tensor | None) -> Sequence[Any]:
    if all(g is None for g in grads):
        return ()
    x, weight, projected, gamma, hidden, up, table, anchors, scales, gains = grouped(
        ctx.saved_tensors, [None] * 6 + ctx.lengths[6:10]
    )
    sections = [s for s in launch.sections(ctx.plan) if not s.gates]
    dy = [
        projected.new_zeros((*projected.shape[:-1], s.heads, s.width)) if g is None else g
        for s, g in zip(sections, grads, strict=False)
    ]
    begun = grads[len(sections) + (1 if gamma is None else 2) :]  # started by the gate
    dm, d_gamma = launch.gradients(projected, gamma, 0 if up is None else up.shape[1])
    if any(g is not None for g in begun):
        dm, d_gamma = (*begun, d_gamma)[:2]  # type: ignore[assignment]
    elif begun:
        dm, d_gamma = dm.zero_(), d_gamma.zero_()
    sums, d_network, quotients = launch.folded_backward(
        dm, d_gamma, dy, projected, gamma, table, anchors, scales, gains, hidden, up, ctx.plan, ctx.eps
    )
    d_gains = [d.to(gain.dtype) for d, gain in zip(sums, gains, strict=True)]
    d_up, d_bias = (None, None) if up is None else (d_network[:, :-1].to(up.dtype), d_network[:, -1])
    flat = launch.rows(dm)
    dx, d_weight = (flat @ weight).view_as(x), flat.t() @ launch.rows(x)
    return dx, d_weight, d_up, d_bias, dm, [] if gamma is None else [quotients], None, None, None, d_gains


@differentiable(_mix_backward)
def _mix(
    ctx: Any, x: Tensor, weight: Tensor, up: Tensor | None, bias: Tensor | None, of_dm: Tensor,
    of_quotients: Sequence[Tensor], table: Sequence[Tensor], anchors: Sequence[Tensor], scales: Sequence[Tensor],
    gains: Sequence[Tensor], plan: launch.SectionPlan, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The heads of all sections but the gate. With a gate, also the projection and γ, and a handle for each, through
    which the gate's backward passes on the gradients that it has started.
    """
    ctx.plan, ctx.eps = plan, eps
    columns = sum(s.heads * s.width for s in launch.sections(plan))
    projected, hidden, gamma = linear(x, weight[:columns]), None, None
    if up is not None and bias is not None:
        hidden = linear(x, weight[columns:])
        gamma = factors(hidden, up, bias)
    ctx.save_for_backward(x, weight, projected, gamma, hidden, up, *table, *anchors, *scales, *gains)
    ctx.set_materialize_grads(False)
    outputs = iter(launch.forward(projected, gamma, table, anchors, scales, (), gains, (), plan, eps))
    heads = [
        projected[..., s.columns].unflatten(-1, (s.heads, s.width)) if s.passes else next(outputs)
        for s in launch.sections(plan)
        if not s.gates
    ]
    if len(heads) == len(launch.sections(plan)):
        return tuple(heads)
    read = [projected] if gamma is None else [projected, gamma]
    ctx.mark_non_differentiable(*read)
    handles = [handle(projected, of_dm.shape)]
    if gamma is not None:
        handles.append(handle(gamma, gamma.shape, torch.float32))
    return (*heads, *read, *handles)


def _gate_backward(ctx: Any, dy: Tensor) -> Sequence[Any]:
    o, projected, gamma, anchors, scales = grouped(ctx.saved_tensors, [None] * 3 + ctx.lengths[4:6])
    d_o, dm, d_gamma = launch.gate_backward(dy, o, projected, gamma, anchors, scales, ctx.hidden, ctx.plan)
    return d_o, [dm] if gamma is None else [dm, d_gamma]


@differentiable(_gate_backward)
def _gate(
    ctx: Any, o: Tensor, handles: Sequence[Tensor], projected: Tensor, gamma: Tensor | None, anchors: list[Tensor],
    scales: list[Tensor], plan: launch.SectionPlan, hidden: int,
) -> Tensor:  # fmt: skip
    """The gated output of attention; the handles' gradients are those of the projection and of γ."""
    ctx.plan, ctx.hidden = plan, hidden
    ctx.save_for_backward(o, projected, gamma, *anchors, *scales)
    return launch.gate(o, projected, gamma, anchors, scales, plan)
