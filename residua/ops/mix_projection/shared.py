"""Anchor mixing of a whole model, with a backward that writes each anchor's gradient once.

All layers l mix the same anchor a: m_l = λ1_l ⊙ a + λ2_l ⊙ s_l. Taken layer by layer, the backward would read and write
the anchor's gradient at every layer, and write ds_l = λ2_l ⊙ dm_l. Here λ2 is inside the projection, W' = diag(λ2) W.
So the gradient of the projection is dm_l itself, and the rest is done in one pass when all dm_l are there:

    m_l = λ1_l ⊙ a + x W'_lᵀ,    da = Σ_l λ1_l ⊙ dm_l,    dλ1_l = Σ_tokens dm_l ⊙ a

(Autograd takes dλ2 from the gradient of W': C products for each of its rows, where s would be one for each token.)
For anchors that are made from the embedding, this pass also goes through their norms, and writes the gradient of their
projection in one piece.

A *handle* connects each layer with that pass, as in `depth_attention/deferred.py`: a tensor without memory, whose
gradient is dm_l, the same tensor as the gradient of the projection; the "gradient" of a second one is γ_l. The graph is
an ordinary one, and compile, checkpointing and retain_graph need nothing special.

For a pathway, C wide, of L layers: 4C backward per layer if it has a norm, else 2C (V and G: a copy into the gradient
of the projection), then C(1 + 2/L), where `autograd.py` moves 6C. All dm_l are alive until the end; each takes the
place of its layer's s_l, which is freed then, so the peak does not rise (and not where s_l would be recomputed).

γ that depend on the token leave this as it is, m_l = γ1_l λ1_l ⊙ a + γ2_l x W'_lᵀ. The gradient of the projection is
γ2_l dm_l, and the last pass multiplies it by γ1_l/γ2_l. Only dγ needs more: V and G, which have no norm, read their own
projection and the anchor again (2C each). Per layer and pathway this is 4C, then C(1 + 2/L). γ is made from h = W1 x
(`reference.factors`), whose gradient goes into the same rows as that of the projection, E columns behind it. So the
backward pass is one product for both, dx = [dm, dh] [W'; W1], and one for the gradient of both matrices. The forward
pass has a product for each: x is read twice (C), and both results are dense. As one result of R + E columns, they would
have rows that `torch.compile` pads to whole cache lines, so that it would copy them for every operator (2R each time);
and matrix libraries are slower for R + E columns than for R by more than the second product takes.

W' is rounded once more than W where W is a working copy in bfloat16: results differ from those of autocast, which
rounds W' alone, by that rounding.

Not where handles cannot go: between processes, or out of sharded layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from residua.ops._runtime.backend import chosen_backend
from residua.ops._runtime.launch import handle
from residua.ops._runtime.numeric import wide, working_dtype
from residua.ops._runtime.tracing import in_graph
from residua.ops._runtime.triton_support import supports
from residua.ops.mix_projection import autograd, launch
from residua.ops.mix_projection.reference import Heads, Sections, factors, per_head

WIDEST_HEAD = 512
"""Widest head for which `gather` keeps the sums of all layers in registers."""


def serves(anchors: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether a model with these anchors and weights (λ, W) should share them: in training, where kernels can run."""
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

    `hidden` is the number E of columns behind their projections that γ is made from; 0: their λ have no γ.

    If the anchors are columns of one projection in this order, normed if they have one of the `gains`, that is their
    `source` [B, T, ΣHD]: it gets their gradient, through the norms and in one piece.
    """
    flat = [torch.cat([_elements(own[s], sections[s]).flatten() for s in anchors]) for own in scales]
    plan = autograd.plan_sections(sections, list(anchors), normed=False)
    sources = [a.flatten(-2) for a in anchors.values()] if source is None else [source]
    found = [None if gains is None else gains.get(s) for s in anchors]
    handles = _share(plan, eps, hidden, torch.stack(flat), found, sources)
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
) -> Heads:
    """`ops.mix_heads` of one layer with its handles, from its input x [B, T, C] on.

    weight [R, C] is W', which has λ2 inside. `network` are W2 [F, E] and b [F] of `reference.factors`; then W1 [E, C]
    is below W'.
    """
    plan = autograd.plan_sections(sections, list(anchors), gains is not None)
    plain = list(sections).index("g") if "g" in anchors and gate_in_graph() else -1
    scales = [_elements(anchor_scales[s], sections[s]).detach() for s in anchors]
    values = [a.detach() for a in anchors.values()]
    dtype = working_dtype(x)
    product = (x.to(dtype), weight.to(dtype))
    made = _mix(plan, eps, plain, product, network, list(handles), list(table), values, scales, list(gains or ()))
    return dict(zip(sections, made, strict=True))


def gate_in_graph() -> bool:
    """Whether the gate, which is neither normed nor rotated, is mixed in plain PyTorch.

    In compiled code it is, so that `torch.compile` mixes it in the kernel that applies it.
    """
    return torch.compiler.is_compiling()


def _elements(scale: Tensor, section: tuple[int, int]) -> Tensor:
    return per_head(scale).expand(section)


@in_graph
def _share(
    plan: launch.SectionPlan, eps: float, hidden: int, scales: Tensor, gains: list[Tensor | None],
    sources: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    handles: tuple[Tensor, ...] = _Share.apply(plan, eps, hidden, len(gains), scales, *gains, *sources)
    return handles


@in_graph
def _mix(
    plan: launch.SectionPlan, eps: float, plain: int, product: tuple[Tensor, Tensor],
    network: tuple[Tensor, Tensor] | None, handles: list[Tensor], table: list[Tensor], anchors: list[Tensor],
    scales: list[Tensor], gains: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    passed = (*product, *(network or (None, None)), *(handles if network else (*handles, None)))
    tensors = (*table, *anchors, *scales, *gains)
    made: tuple[Tensor, ...] = _Mix.apply(plan, eps, plain, len(anchors), *passed, *tensors)
    return made


class _Share(torch.autograd.Function):
    """The handles of all dm_l, then of all γ_l. The anchors, before their norms, are one source or several in a row."""

    @staticmethod
    def forward(
        ctx: Any, plan: launch.SectionPlan, eps: float, hidden: int, count: int, scales: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.plan, ctx.eps, ctx.count = plan, eps, count
        ctx.save_for_backward(scales, *tensors)
        ctx.set_materialize_grads(False)
        source: Any = tensors[count]
        width = sum(s.heads * s.width for s in launch.sections(plan))
        widths = (width + hidden, 2 * count) if hidden else (width,)
        return tuple(handle(source, (*source.shape[:2], each)) for each in widths for _ in scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        scales, *tensors = ctx.saved_tensors
        gains, sources = tensors[: ctx.count], tensors[ctx.count :]
        dm, gammas = (_known(grads[i : i + len(scales)]) for i in (0, len(scales)))
        if not dm:
            return (None,) * (5 + len(tensors))
        mixed = sorted((s for s in launch.sections(ctx.plan) if s.anchor >= 0), key=lambda s: s.anchor)
        widths = [s.heads * s.width for s in mixed]
        columns = sources if len(sources) > 1 else sources[0].split(widths, -1)
        anchors = [a.unflatten(-1, (s.heads, s.width)) for a, s in zip(columns, mixed, strict=True)]
        sums, d_anchors = launch.gather(dm, gammas, anchors, gains, scales.float(), ctx.plan, ctx.eps)
        by_head = [d.view(s.heads, s.width) for d, s in zip(sums[-1].split(widths), mixed, strict=True)]
        d_gains = [None if g is None else d.sum(0).to(g.dtype) for d, g in zip(by_head, gains, strict=True)]
        d_sources = [d_anchors] if len(sources) == 1 else d_anchors.split(widths, -1)
        return None, None, None, None, sums[: len(scales)].to(scales.dtype), *d_gains, *d_sources


def _known(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients with zeros for those that are missing; empty if all are."""
    like = next((g for g in gradients if g is not None), None)
    return [] if like is None else [torch.zeros_like(like) if g is None else g for g in gradients]


class _Mix(torch.autograd.Function):
    """Every section's heads; section `plain` in plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, plan: launch.SectionPlan, eps: float, plain: int, count: int, x: Tensor, weight: Tensor,
        up: Tensor | None, bias: Tensor | None, dm: Tensor, of_gamma: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.plan, ctx.eps, ctx.count = plan, eps, count
        rows = sum(s.heads * s.width for s in launch.sections(plan))
        projected, hidden, gamma = linear(x, weight[:rows]), None, None
        if up is not None and bias is not None:
            hidden = linear(x, weight[rows:])
            gamma = factors(hidden, up, bias)
        ctx.save_for_backward(x, weight, projected, gamma, hidden, up, *tensors)
        ctx.set_materialize_grads(False)
        inputs, heads = _inputs(projected, gamma, tensors, count), []
        # to the operator, a section that is mixed here has no anchor
        rest = [-1 if i == 5 * plain + 4 else n for i, n in enumerate(plan)]
        made = iter(launch.forward(*inputs, rest, eps))
        for i, (s, left) in enumerate(zip(launch.sections(plan), launch.sections(rest), strict=True)):
            current = projected[..., s.columns].unflatten(-1, (s.heads, s.width))
            if i == plain:
                anchor, layer = inputs.anchor_scales[s.anchor] * wide(inputs.anchors[s.anchor]), wide(current)
                if gamma is not None:
                    first, second = wide(gamma)[..., 2 * s.anchor : 2 * s.anchor + 2, None, None].unbind(-3)
                    anchor, layer = first * anchor, second * layer
                current = (anchor + layer).to(projected.dtype)
            heads.append(current if left.passes else next(made))
        return tuple(heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, weight, projected, gamma, hidden, up, *tensors = ctx.saved_tensors
        if all(g is None for g in grads):
            return (None,) * (10 + len(tensors))
        inputs, sections = _inputs(projected, gamma, tensors, ctx.count), launch.sections(ctx.plan)
        lead = projected.shape[:-1]
        dy = [
            projected.new_zeros((*lead, s.heads, s.width)) if g is None else g
            for s, g in zip(sections, grads, strict=True)
        ]
        dm, d_network, sums = launch.backward(dy, [], *inputs, hidden, up, ctx.plan, ctx.eps)
        d_gains = [
            d.to(gain.dtype) for d, gain in zip(autograd.parts(sums, sections, inputs), inputs.gains, strict=True)
        ]
        d_up, d_bias = (None, None) if up is None else (d_network[:, :-1].to(up.dtype), d_network[:, -1])
        flat = launch.rows(dm)
        dx, d_weight = (flat @ weight).view_as(x), flat.t() @ launch.rows(x)
        return (*[None] * 4, dx, d_weight, d_up, d_bias, dm, gamma, *[None] * (2 + 2 * ctx.count), *d_gains)


def _inputs(projected: Tensor, gamma: Tensor | None, tensors: Sequence[Tensor], count: int) -> launch.Inputs:
    """The table's two, `count` anchors and as many λ1, then gains."""
    anchors, scales, gains = tensors[2 : 2 + count], tensors[2 + count : 2 + 2 * count], tensors[2 + 2 * count :]
    return launch.Inputs(projected, gamma, tensors[:2], anchors, scales, (), gains, ())
