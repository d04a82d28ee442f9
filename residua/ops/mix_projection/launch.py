"""Anchor mixing: tile sizes, and launching the kernels section by section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import addresses, aligned, cdiv, device_guard, next_power_of_2
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import multiprocessors
from residua.ops.mix_projection import kernels
from residua.ops.norm_rotate.launch import sum_rows


class Tiling(NamedTuple):
    """Elements of a half tile, programs per multiprocessor, warps per program, pipeline stages, and the most registers
    per thread."""

    tile: int
    programs: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None

    def sizes(self, width: int) -> dict[str, Any]:
        half = cdiv(width, 2)
        lanes = next_power_of_2(half)
        sizes = {"D": width, "HALF": half, "LANES": lanes, "ROWS": max(1, self.tile // lanes)}
        return sizes | {"STAGES": self.stages, "num_warps": self.warps, "maxnreg": self.registers}


FORWARD, BACKWARD = Tiling(1024, 16), Tiling(512, 8, stages=2)
FACTORS = Tiling(512, 2)
GATHER = Tiling(512, 3, registers=168)
"""Of whole tiles."""
MOST_READERS = 12
"""Most layers whose gradients one launch of `gather` reads: the sums of each take registers."""


class Section(NamedTuple):
    """Columns of the projection that are one pathway. A section that is neither rotated nor mixed is passed through."""

    first: int
    heads: int
    width: int
    gain: int
    """Index of the gain of its norm before the rotation; −1: not rotated, −2: rotated without a norm."""
    anchor: int
    """Index of the anchor it is mixed with; −1: none."""

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.heads * self.width)

    @property
    def passes(self) -> bool:
        return self.gain == -1 and self.anchor < 0

    def parts(self, dynamic: bool, anchor_normed: bool, folded: bool) -> dict[str, bool]:
        """The kernels' switches."""
        mixed = self.anchor >= 0
        return {
            "MIXED": mixed,
            "FOLDED": mixed and folded,
            "DYNAMIC": mixed and dynamic,
            "ANCHOR_NORMED": mixed and anchor_normed,
            "NORMED": self.gain >= 0,
            "TURNED": self.gain != -1,
        }

    def sums(self, inputs: Inputs) -> int:
        """How many [heads, width] the backward pass sums over tokens: λ1 and λ2, the gain, the anchor's gain."""
        parts = self.parts(False, len(inputs.anchor_gains) > 0, inputs.folded)
        return 2 * (parts["MIXED"] and not inputs.folded) + parts["NORMED"] + parts["ANCHOR_NORMED"]


SectionPlan = list[int]
"""Sections as an operator takes them: the five numbers of each, one section after the other."""


def sections(plan: Sequence[int]) -> list[Section]:
    return [Section(*plan[i : i + 5]) for i in range(0, len(plan), 5)]


class Inputs(NamedTuple):
    """What both directions read. `table` is (cos, sin), `gains` the QK-norm's, `anchor_gains` the anchors'.

    Scales are [heads, width] whatever their granularity. Without `current_scales` λ2 is inside the projection, and the
    backward pass leaves the gradients of the anchors and of λ1 to `gather`.
    """

    projected: Tensor
    gamma: Tensor | None
    table: Sequence[Tensor]
    anchors: Sequence[Tensor]
    anchor_scales: Sequence[Tensor]
    current_scales: Sequence[Tensor]
    gains: Sequence[Tensor]
    anchor_gains: Sequence[Tensor]

    @property
    def folded(self) -> bool:
        return len(self.anchors) > 0 and len(self.current_scales) == 0

    def arguments(self, plan: Sequence[int], tiling: Tiling) -> Iterator[tuple[Section, dict[str, Any]]]:
        """Each section that is not passed through, with the kernels' arguments; any tensor stands for a missing one."""
        flat, (batches, length) = rows(self.projected), self.projected.shape[:2]
        for s in sections(plan):
            if s.passes:
                continue
            mixed, turned, normed = s.anchor >= 0, s.gain != -1, s.gain >= 0
            anchor = self.anchors[s.anchor].reshape(-1, s.heads, s.width) if mixed else flat[:, None]
            gamma = flat if self.gamma is None else rows(self.gamma)[:, 2 * s.anchor :]
            cos, sin = (t.contiguous() for t in self.table) if turned else (flat, flat)
            sizes = tiling.sizes(s.width)
            yield (
                s,
                {
                    "s_ptr": flat[:, s.first :],
                    "a_ptr": anchor if anchor.stride(-1) == 1 else anchor.contiguous(),
                    "own_ptr": self.current_scales[s.anchor].contiguous() if mixed and not self.folded else flat,
                    "other_ptr": self.anchor_scales[s.anchor].contiguous() if mixed else flat,
                    "gamma_ptr": gamma,
                    "gain_ptr": self.gains[s.gain] if normed else flat,
                    "anchor_gain_ptr": self.anchor_gains[s.anchor] if mixed and self.anchor_gains else flat,
                    "cos_ptr": cos,
                    "sin_ptr": sin,
                    "batches": batches,
                    "length": length,
                    "tiles": cdiv(length, sizes["ROWS"]),
                    "turns": length if turned and cos.shape[:-1].numel() > length else 0,
                    "heads": s.heads,
                    "stride_st": flat.stride(0),
                    "stride_at": anchor.stride(0),
                    "stride_ah": anchor.stride(1),
                    "stride_gt": gamma.stride(0),
                    **sizes,
                    **s.parts(self.gamma is not None, len(self.anchor_gains) > 0, self.folded),
                },
            )


@launcher("mix_heads")
def forward(
    projected: Tensor,
    gamma: Tensor | None,
    table: Sequence[Tensor],
    anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor],
    current_scales: Sequence[Tensor],
    gains: Sequence[Tensor],
    anchor_gains: Sequence[Tensor],
    plan: Sequence[int],
    eps: float,
) -> Iterator[list[Tensor]]:
    """The heads [B, T, H, D] of every section that is not passed through, from the projection [B, T, R]."""
    lead = projected.shape[:-1]
    made = [projected.new_empty((*lead, s.heads, s.width)) for s in sections(plan) if not s.passes]
    yield made
    inputs = Inputs(projected, gamma, table, anchors, anchor_scales, current_scales, gains, anchor_gains)
    for out, (section, arguments) in zip(made, inputs.arguments(plan, FORWARD), strict=True):
        chunks = _chunks([(section, arguments)], projected, FORWARD)
        if chunks:
            with device_guard(projected):
                kernels.forward_kernel[(chunks * section.heads,)](**arguments, y_ptr=out, eps=eps)


@launcher("mix_heads_backward")
def backward(
    dy: Sequence[Tensor],
    later: Sequence[Tensor],
    projected: Tensor,
    gamma: Tensor | None,
    table: Sequence[Tensor],
    anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor],
    current_scales: Sequence[Tensor],
    gains: Sequence[Tensor],
    anchor_gains: Sequence[Tensor],
    hidden: Tensor | None,
    up: Tensor | None,
    plan: Sequence[int],
    eps: float,
) -> Iterator[list[Tensor]]:
    """From the gradient of every section, and the anchors' from later layers (or none): the gradients of the projection
    and of γ, the sums over tokens [S] of `Section.sums`, section after section, and the anchors' gradients, unless λ2
    is inside the projection.

    With `hidden` [B, T, E] and `up` [F, E], γ [..., F] is made from these (`reference.factors`): the gradient of
    `hidden` comes behind that of the projection, [B, T, R + E], and those of `up` and its bias, side by side
    [F, E + 1], in the place of that of γ.
    """
    inputs = Inputs(projected, gamma, table, anchors, anchor_scales, current_scales, gains, anchor_gains)
    d_projected, d_gamma, sums, *d_anchors = outputs = _gradients(inputs, plan, up)
    yield outputs
    flat = d_projected.view(-1, d_projected.shape[-1])
    for s, g in zip(sections(plan), dy, strict=True):
        if s.passes:
            d_projected[..., s.columns] = g.flatten(-2)
    work = list(inputs.arguments(plan, BACKWARD))
    chunks = _chunks(work, projected, BACKWARD)
    partial = projected.new_empty((chunks, len(sums)), dtype=torch.float32)
    given = [g for s, g in zip(sections(plan), dy, strict=True) if not s.passes]
    heads = max(s.heads for s, _ in work)
    per_head = d_gamma.new_zeros((len(flat), len(anchors), heads, 2) if gamma is not None else (0,))  # dγ
    column = 0
    for g, (s, arguments) in zip(given, work, strict=True):
        g = g if g.stride(-1) == 1 else g.contiguous()
        if arguments["FOLDED"] and not (arguments["NORMED"] or arguments["DYNAMIC"]):
            arguments["MIXED"] = False  # dm does not depend on m: neither s nor the anchor is read
        if chunks:
            with device_guard(projected):
                kernels.backward_kernel[(chunks * s.heads,)](
                    **arguments,
                    dy_ptr=g,
                    later_ptr=later[s.anchor].contiguous() if later and s.anchor >= 0 else flat,
                    ds_ptr=flat[:, s.first :],
                    da_ptr=d_anchors[s.anchor] if s.anchor >= 0 and d_anchors else flat,
                    d_gamma_ptr=per_head[:, s.anchor] if arguments["DYNAMIC"] else flat,
                    partial_ptr=partial[:, column:],
                    stride_yb=g.stride(0),
                    stride_yt=g.stride(1),
                    stride_yh=g.stride(2),
                    stride_dst=flat.stride(0),
                    stride_dgt=per_head.stride(0),
                    stride_p=partial.stride(0),
                    eps=eps,
                    LATER=len(later) > 0 and s.anchor >= 0,
                )
        column += s.sums(inputs) * s.heads * s.width
    if up is not None and gamma is not None and hidden is not None:
        _factors(per_head, rows(gamma), rows(hidden), up.contiguous(), flat, d_gamma)
    elif gamma is not None:
        torch.sum(per_head, 2, out=d_gamma.view(len(flat), len(anchors), 2))
    sum_rows(partial, sums, rows=chunks)


def _factors(d_gamma: Tensor, gamma: Tensor, hidden: Tensor, up: Tensor, d_projected: Tensor, sums: Tensor) -> None:
    """Write the gradient of the hidden columns into that of the projection, those of `up` and its bias into sums."""
    (factors, width), (tokens, _, heads, _) = up.shape, d_gamma.shape
    lanes = next_power_of_2(width)
    size = max(1, FACTORS.tile // lanes)
    tiles = cdiv(tokens, size)
    chunks = min(tiles, FACTORS.programs * multiprocessors(gamma))
    partial = d_gamma.new_empty((chunks, sums.numel()))
    if chunks:
        with device_guard(gamma):
            kernels.factors_kernel[(chunks,)](
                d_gamma, gamma.contiguous(), hidden, up, d_projected[:, -width:], partial, tokens, tiles, heads,
                hidden.stride(0), d_projected.stride(0), FACTORS=factors, HEADS=next_power_of_2(heads),
                E=width, LANES=lanes, ROWS=size, num_warps=FACTORS.warps,
            )  # fmt: skip
    sum_rows(partial, sums.view(-1), rows=chunks)


@launcher("gather_anchors")
def gather(
    dm: Sequence[Tensor],
    gammas: Sequence[Tensor],
    anchors: Sequence[Tensor],
    gains: Sequence[Tensor | None],
    scales: Tensor,
    plan: Sequence[int],
    eps: float,
) -> Iterator[list[Tensor]]:
    """From the gradients dm_l [B, T, R] of the mixtures of all layers: those of λ1 and, if an anchor has a norm, one
    more row for its gain, by head, [layers (+ 1), ΣHD]; and those of the anchors, before their norms, side by side.

    scales are the λ1, [layers, ΣHD] float32, anchor after anchor. Columns of the last row without a gain are not set.
    gammas are the γ_l [B, T, 2·anchors] of all layers, and then `dm` the γ2_l dm_l; none if λ are the same for all
    tokens.
    """
    layers, columns = scales.shape
    sums = scales.new_empty((layers + any(gain is not None for gain in gains), columns))
    d_anchors = anchors[0].new_empty((*anchors[0].shape[:2], columns))
    yield [sums, d_anchors]
    dm, gammas, scales = [aligned(d) for d in dm], [aligned(g) for g in gammas], scales.contiguous()
    mixed = sorted((s for s in sections(plan) if s.anchor >= 0), key=lambda s: s.anchor)
    tokens, fewest = d_anchors.shape[:2].numel(), min(s.heads for s in mixed)
    lines = {s.width: max(1, GATHER.tile // next_power_of_2(s.width)) for s in mixed}
    chunks = min(cdiv(tokens, max(lines.values())), cdiv(GATHER.programs * multiprocessors(scales), fewest))
    partial = scales.new_empty((chunks, *sums.shape))
    groups = cdiv(layers, MOST_READERS)
    bounds = [layers * i // groups for i in range(groups + 1)]
    for start, stop in pairwise(bounds) if chunks else ():
        table, column = addresses(dm[start:stop], ()), 0
        factors = addresses(gammas[start:stop], ()) if gammas else table
        for s, anchor, gain in zip(mixed, anchors, gains, strict=True):
            flat = rows(anchor.flatten(-2))
            with device_guard(scales):
                kernels.gather_kernel[(chunks * s.heads,)](
                    table, factors, gammas[0] if gammas else flat, flat, flat if gain is None else gain,
                    scales[start:, column:], d_anchors[..., column:], partial[:, start:, column:],
                    partial[:, -1, column:], tokens, cdiv(tokens, lines[s.width]), s.heads, s.first, 2 * s.anchor,
                    dm[0].shape[-1], 2 * len(mixed), flat.stride(0), scales.shape[1], scales.stride(0),
                    partial.stride(0), eps,
                    D=s.width, LANES=next_power_of_2(s.width), ROWS=lines[s.width], READERS=stop - start,
                    NORMED=gain is not None, DYNAMIC=len(gammas) > 0, ADD=start > 0, LAST=stop == layers,
                    STAGES=GATHER.stages, num_warps=GATHER.warps, maxnreg=GATHER.registers,
                )  # fmt: skip
            column += s.heads * s.width
    sum_rows(partial.view(chunks, sums.numel()), sums.view(-1), rows=chunks)


def rows(x: Tensor) -> Tensor:
    """[..., R] as [M, R], its last axis dense."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _gradients(inputs: Inputs, plan: Sequence[int], up: Tensor | None) -> list[Tensor]:
    """The results of the backward pass, still empty."""
    projected, lead = inputs.projected, inputs.projected.shape[:-1]
    factors = (*lead, 0 if inputs.gamma is None else inputs.gamma.shape[-1])
    sums = sum(s.sums(inputs) * s.heads * s.width for s in sections(plan))
    return [
        projected.new_empty((*lead, projected.shape[-1] + (0 if up is None else up.shape[1]))),
        projected.new_empty(factors if up is None else (len(up), up.shape[1] + 1), dtype=torch.float32),
        projected.new_empty((sums,), dtype=torch.float32),
        *(a.new_empty(a.shape) for a in inputs.anchors if not inputs.folded),
    ]


def _chunks(work: list[tuple[Section, dict[str, Any]]], projected: Tensor, tiling: Tiling) -> int:
    """Programs per head, the same for every section, so that one kernel sums all their parts."""
    tiles = max(arguments["batches"] * arguments["tiles"] for _, arguments in work)
    fewest = min(s.heads for s, _ in work)
    return min(tiles, cdiv(tiling.programs * multiprocessors(projected), fewest))
