"""Anchor mixing, fused: operators and gradients.

For a layer with P mixed pathways, each C wide: forward reads the projection and the anchors and writes the heads, 3PC
per token; backward reads dy, both again and the anchors' gradient from later layers, and writes the gradients of the
projection and of the anchors, 6PC. Two things save whole passes. The operator takes the whole projection and writes its
gradient in one piece, where splitting would require a concatenation (2PC). It also returns the anchors for the next
layer. Their gradient then arrives as the sum over all later layers, and the kernel adds to it (1PC more to read).
Autograd would add in a separate pass at every layer (3PC). When a whole model shares its anchors, one last pass
computes their gradient instead (`anchor_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.tracing import differentiable, grouped
from residua.ops.mix_projection import launch
from residua.ops.mix_projection.reference import Heads, Sections, per_head


def mix_heads(
    projected: Tensor,
    sections: Sections,
    anchors: Mapping[str, Tensor],
    anchor_scales: Mapping[str, Tensor],
    current_scales: Mapping[str, Tensor],
    table: tuple[Tensor, Tensor],
    *,
    gains: tuple[Tensor, Tensor] | None = None,
    gamma: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Heads, tuple[Tensor, ...]]:
    """The fused twin of the reference."""
    plan = plan_sections(sections, list(anchors), gains is not None)
    outputs = _mix_heads(
        projected, gamma, table, list(anchors.values()),
        [per_head(anchor_scales[s]).expand(sections[s]) for s in anchors],
        [per_head(current_scales[s]).expand(sections[s]) for s in anchors],
        gains or (), (), plan, eps,
    )  # fmt: skip
    return dict(zip(sections, outputs, strict=False)), outputs[len(sections) :]


def mix_projection(
    current: Tensor,
    anchor: Tensor,
    current_scale: Tensor,
    anchor_scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The fused twin of the reference."""
    *_, heads, width = current.shape
    of_anchor, of_current = (per_head(scale).expand(heads, width) for scale in (anchor_scale, current_scale))
    mixed, _ = _mix_heads(
        current.reshape(1, -1, heads * width), None, (), [anchor.reshape(1, -1, heads, width)], [of_anchor],
        [of_current], (), () if norm_weight is None else (norm_weight,), [0, heads, width, -1, 0], eps,
    )  # fmt: skip
    return mixed.reshape(current.shape)


def plan_sections(
    sections: Sections, anchors: Sequence[str], normed: bool, *, gated: bool = False
) -> launch.SectionPlan:
    """The sections as operators' arguments. `normed`: queries and keys have a norm before their rotation. `gated`: the
    gate is mixed only when it is applied."""
    plan, first = [], 0
    for s, (heads, width) in sections.items():
        gain = ("qk".index(s) if normed else -2) if s in "qk" else -3 if s == "g" and gated else -1
        plan += [first, heads, width, gain, anchors.index(s) if s in anchors else -1]
        first += heads * width
    return plan


def _mix_heads_backward(ctx: Any, *grads: Tensor | None) -> Sequence[Any]:
    if all(g is None for g in grads):
        return ()
    inputs, sections = launch.Inputs(*grouped(ctx.saved_tensors, ctx.lengths[:8])), launch.sections(ctx.plan)
    projected, gamma = inputs.projected, inputs.gamma
    dy = [
        projected.new_zeros((*projected.shape[:-1], s.heads, s.width)) if g is None else g
        for s, g in zip(sections, grads, strict=False)
    ]
    passed = grads[len(sections) :]
    later = [torch.zeros_like(a) if g is None else g for a, g in zip(inputs.anchors, passed, strict=True)]
    known = any(g is not None for g in passed)
    d_projected, d_gamma, sums, *d_anchors = launch.backward(dy, later if known else [], *inputs, ctx.plan, ctx.eps)
    d_rest = [d.to(t.dtype) for d, t in zip(parts(sums, sections, inputs), _summed(inputs), strict=True)]
    g_gamma = None if gamma is None else d_gamma.to(gamma.dtype)
    return d_projected, g_gamma, None, d_anchors, *grouped(d_rest, ctx.lengths[4:8])


@differentiable(_mix_heads_backward)
def _mix_heads(
    ctx: Any, projected: Tensor, gamma: Tensor | None, table: Sequence[Tensor], anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor], current_scales: Sequence[Tensor], gains: Sequence[Tensor],
    anchor_gains: Sequence[Tensor], plan: launch.SectionPlan, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Every section's heads, then the unchanged anchors for the next layer."""
    groups = (table, anchors, anchor_scales, current_scales, gains, anchor_gains)
    ctx.plan, ctx.eps = plan, eps
    ctx.save_for_backward(projected, gamma, *chain.from_iterable(groups))
    ctx.set_materialize_grads(False)
    outputs = iter(launch.forward(projected, gamma, *groups, plan, eps))
    heads = [
        projected[..., s.columns].unflatten(-1, (s.heads, s.width)) if s.passes else next(outputs)
        for s in launch.sections(plan)
    ]
    return *heads, *(anchor.view_as(anchor) for anchor in anchors)


def _summed(inputs: launch.Inputs) -> list[Tensor]:
    """The tensors whose gradient is a sum over tokens, in the order of the function's arguments."""
    return [*inputs.anchor_scales, *inputs.current_scales, *inputs.gains, *inputs.anchor_gains]


def parts(sums: Tensor, sections: list[launch.Section], inputs: launch.Inputs) -> list[Tensor]:
    """Split the one row of sums, ordered by section, into the gradients of `_summed`; heads share gains."""
    anchor_scales, current_scales, gains, anchor_gains = {}, {}, {}, {}
    normed = len(inputs.anchor_gains) > 0
    counts = [s.sums(inputs) for s in sections]
    rows = sums.split([count * s.heads * s.width for count, s in zip(counts, sections, strict=True)])
    for s, count, row in zip(sections, counts, rows, strict=True):
        left = iter(row.view(count, s.heads, s.width))
        if s.mixed:
            anchor_scales[s.anchor], current_scales[s.anchor] = next(left), next(left)
        if s.normed:
            gains[s.gain] = next(left).sum(0)
        if s.mixed and normed:
            anchor_gains[s.anchor] = next(left).sum(0)
    return [part for group in (anchor_scales, current_scales, gains, anchor_gains) for _, part in sorted(group.items())]
