"""Anchor mixing: tile sizes, and launching the kernels section by section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, addresses, aligned, cdiv, dense_like, next_power_of_2
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import multiprocessors
from residua.ops.norm_rotate.launch import sum_rows

kernels = Kernels("residua.ops.mix_projection.kernels")


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
FOLDED_BACKWARD = Tiling(512, 8, stages=3)
FACTORS = Tiling(512, 2)
GATHER = Tiling(512, 3, registers=168)
"""Here `tile` counts the elements of whole tiles."""
MOST_READERS = 12
"""Most layers whose gradients one launch of `gather` reads, since each layer's sums take registers."""


class Section(NamedTuple):
    """The columns of one pathway in the projection. A section without gain and anchor is passed through."""

    first: int
    heads: int
    width: int
    gain: int
    """Index of the gain of its norm before the rotation; −1: not rotated, −2: rotated without a norm, −3: a gate,
    which is applied to the output of attention after mixing."""
    anchor: int
    """Index of the anchor to mix with; −1: none."""

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.heads * self.width)

    @property
    def passes(self) -> bool:
        return self.gain == -1 and self.anchor < 0

    @property
    def gates(self) -> bool:
        return self.gain == -3

    @property
    def mixed(self) -> bool:
        return self.anchor >= 0

    @property
    def turned(self) -> bool:
        return self.gain >= 0 or self.gain == -2

    @property
    def normed(self) -> bool:
        return self.gain >= 0

    def sums(self, inputs: Inputs) -> int:
        """How many [heads, width] `backward` sums over tokens: λ1 and λ2, the gain, the anchor's gain."""
        return 2 * self.mixed + self.normed + (self.mixed and len(inputs.anchor_gains) > 0)


SectionPlan = list[int]
"""Sections as an operator's argument: the five numbers of each section, concatenated."""


def sections(plan: Sequence[int]) -> list[Section]:
    return [Section(*plan[i : i + 5]) for i in range(0, len(plan), 5)]


class Inputs(NamedTuple):
    """The tensors that both directions read. `table` is (cos, sin), `gains` the QK-norm's, `anchor_gains` the anchors'.

    Scales are [heads, width] for every granularity. Without `current_scales`, λ2 is folded into the projection, and
    `gather` computes the gradients of the anchors and of λ1.
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

    def arguments(self, s: Section, tiling: Tiling) -> dict[str, Any]:
        """The kernels' arguments for a section; any tensor stands for a missing one."""
        flat, (batches, length) = rows(self.projected), self.projected.shape[:2]
        anchor = self.anchors[s.anchor].reshape(-1, s.heads, s.width) if s.mixed else flat[:, None]
        gamma = flat if self.gamma is None else rows(self.gamma)[:, 2 * s.anchor :]
        cos, sin = (t.contiguous() for t in self.table) if s.turned else (flat, flat)
        sizes = tiling.sizes(s.width)
        return {
            "s_ptr": flat[:, s.first :],
            "a_ptr": anchor if anchor.stride(-1) == 1 else anchor.contiguous(),
            "other_ptr": self.anchor_scales[s.anchor].contiguous() if s.mixed else flat,
            "gamma_ptr": gamma,
            "gain_ptr": self.gains[s.gain] if s.normed else flat,
            "cos_ptr": cos,
            "sin_ptr": sin,
            "batches": batches,
            "length": length,
            "tiles": cdiv(length, sizes["ROWS"]),
            "turns": length if s.turned and cos.shape[:-1].numel() > length else 0,
            "heads": s.heads,
            "stride_st": flat.stride(0),
            "stride_at": anchor.stride(0),
            "stride_ah": anchor.stride(1),
            "stride_gt": gamma.stride(0),
            **sizes,
            "MIXED": s.mixed,
            "DYNAMIC": s.mixed and self.gamma is not None,
            "NORMED": s.normed,
            "TURNED": s.turned,
        }

    def unfolded(self, s: Section) -> dict[str, Any]:
        """The arguments for λ2 and for the norm of an anchor."""
        anchor_normed = s.mixed and len(self.anchor_gains) > 0
        return {
            "own_ptr": self.current_scales[s.anchor].contiguous() if s.mixed and not self.folded else self.projected,
            "anchor_gain_ptr": self.anchor_gains[s.anchor] if anchor_normed else self.projected,
            "ANCHOR_NORMED": anchor_normed,
        }


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
    chosen = [s for s in sections(plan) if not (s.passes or s.gates)]
    heads = [projected.new_empty((*projected.shape[:-1], s.heads, s.width)) for s in chosen]
    yield heads
    inputs = Inputs(projected, gamma, table, anchors, anchor_scales, current_scales, gains, anchor_gains)
    for s, y in zip(chosen, heads, strict=True):
        _forward(inputs, s, None, y, eps)


@launcher("gate_heads")
def gate(
    o: Tensor,
    projected: Tensor,
    gamma: Tensor | None,
    anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor],
    plan: Sequence[int],
) -> Iterator[Tensor]:
    """o ⊙ σ(m) for the output of attention o [B, T, H, D] and the mixture m of the section that gates it."""
    y = dense_like(o)
    yield y
    _forward(Inputs(projected, gamma, (), anchors, anchor_scales, (), (), ()), gate_section(plan), o, y, 0.0)


def _forward(inputs: Inputs, s: Section, o: Tensor | None, y: Tensor, eps: float) -> None:
    arguments = inputs.arguments(s, FORWARD)
    chunks = _chunks([(s, arguments)], y, FORWARD)
    if chunks:
        kernels.forward_kernel[(chunks * s.heads,)](
            **arguments, **inputs.unfolded(s), **_heads("o", y if o is None else o), y_ptr=y, eps=eps,
            FOLDED=inputs.folded, GATED=o is not None,
        )  # fmt: skip


def gate_section(plan: Sequence[int]) -> Section:
    """The section that gates the output of attention."""
    (section,) = (s for s in sections(plan) if s.gates)
    return section


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
    plan: Sequence[int],
    eps: float,
) -> Iterator[list[Tensor]]:
    """From the gradient of every section, and the anchors' gradients from later layers (or none): the gradients of the
    projection and of γ, the sums over tokens [S] of `Section.sums` for each section, and the anchors' gradients.
    """
    inputs = Inputs(projected, gamma, table, anchors, anchor_scales, current_scales, gains, anchor_gains)
    d_projected, d_gamma, sums, *d_anchors = outputs = _gradients(inputs, plan)
    yield outputs
    flat = d_projected.view(-1, d_projected.shape[-1])
    for s, g in zip(sections(plan), dy, strict=True):
        if s.passes:
            d_projected[..., s.columns] = g.flatten(-2)
    work = [(s, inputs.arguments(s, BACKWARD) | inputs.unfolded(s)) for s in sections(plan) if not s.passes]
    chunks = _chunks(work, projected, BACKWARD)
    partial = projected.new_empty((chunks, len(sums)), dtype=torch.float32)
    given = [g for s, g in zip(sections(plan), dy, strict=True) if not s.passes]
    heads = max(s.heads for s, _ in work)
    per_head = d_gamma.new_zeros((len(flat), len(anchors), heads, 2) if gamma is not None else (0,))  # dγ
    column = 0
    for g, (s, arguments) in zip(given, work, strict=True):
        if chunks:
            kernels.backward_kernel[(chunks * s.heads,)](
                **arguments,
                **_heads("y", g, "dy_ptr"),
                later_ptr=later[s.anchor].contiguous() if later and s.mixed else flat,
                ds_ptr=flat[:, s.first :],
                da_ptr=d_anchors[s.anchor] if s.mixed else flat,
                d_gamma_ptr=per_head[:, s.anchor] if arguments["DYNAMIC"] else flat,
                partial_ptr=partial[:, column:],
                stride_dst=flat.stride(0),
                stride_dgt=per_head.stride(0),
                stride_p=partial.stride(0),
                eps=eps,
                LATER=len(later) > 0 and s.mixed,
            )
        column += s.sums(inputs) * s.heads * s.width
    if gamma is not None:
        torch.sum(per_head, 2, out=d_gamma.view(len(flat), len(anchors), 2))
    sum_rows(partial, sums, rows=chunks)


@launcher("gate_heads_backward")
def gate_backward(
    dy: Tensor,
    o: Tensor,
    projected: Tensor,
    gamma: Tensor | None,
    anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor],
    hidden: int,
    plan: Sequence[int],
) -> Iterator[list[Tensor]]:
    """From the gradient of o ⊙ σ(m): that of o, and for `folded_backward` the gradients of the projection, followed by
    `hidden` columns, and of γ (or nothing); in these only the gate's columns are written.
    """
    d_o, dm, d_gamma = dense_like(o), *gradients(projected, gamma, hidden)
    yield [d_o, dm, d_gamma]
    inputs = Inputs(projected, gamma, (), anchors, anchor_scales, (), (), ())
    _folded_backward(inputs, gate_section(plan), dy, dm, d_gamma, 0.0, o=o, d_o=d_o)


@launcher("mix_heads_folded_backward", mutates=("dm", "d_gamma"))
def folded_backward(
    dm: Tensor,
    d_gamma: Tensor,
    dy: Sequence[Tensor],
    projected: Tensor,
    gamma: Tensor | None,
    table: Sequence[Tensor],
    anchors: Sequence[Tensor],
    anchor_scales: Sequence[Tensor],
    gains: Sequence[Tensor],
    hidden: Tensor | None,
    up: Tensor | None,
    plan: Sequence[int],
    eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """With λ2 folded into the projection, write the gradients dm [B, T, R] of all sections except the gate, and d_gamma
    [B, T, F] of γ. They come from dy, the gradients of these sections' heads. Returns the gains' gradients [G, D].

    With `hidden` [B, T, E] and `up` [F, E], γ is computed from these (`reference.factors`). The gradient of `hidden` is
    written after that of the projection, [B, T, R + E]. The results then also include the gradients of `up` and its
    bias, side by side [F, E + 1], and for `gather` the quotients γ1/γ2 of each anchor, [B, T, F/2].
    """
    d_gains = d_gamma.new_empty((len(gains), len(gains[0]) if gains else 0))
    d_network = d_gamma.new_empty((0, 1) if up is None else (len(up), up.shape[1] + 1))
    quotients = d_gamma.new_empty((0,) if gamma is None else (*gamma.shape[:-1], gamma.shape[-1] // 2))
    yield d_gains, d_network, quotients
    inputs = Inputs(projected, gamma, table, anchors, anchor_scales, (), gains, ())
    for s, g in zip((s for s in sections(plan) if not s.gates), dy, strict=True):
        if s.passes:
            dm[..., s.columns] = g.flatten(-2)
        else:
            partial = _folded_backward(inputs, s, g, dm, d_gamma, eps)
            if s.normed:
                sum_rows(partial, d_gains[s.gain], rows=len(partial))
    if gamma is not None and hidden is not None and up is not None:
        _factors(d_gamma, rows(gamma), rows(hidden), up.contiguous(), rows(dm), quotients, d_network)


def gradients(projected: Tensor, gamma: Tensor | None, hidden: int) -> tuple[Tensor, Tensor]:
    """Empty gradients of the projection, and of γ in float32, for `gate_backward` and `folded_backward` to fill."""
    *lead, columns = projected.shape
    factors = (0,) if gamma is None else gamma.shape
    return projected.new_empty((*lead, columns + hidden)), projected.new_empty(factors, dtype=torch.float32)


def _folded_backward(
    inputs: Inputs, s: Section, dy: Tensor, dm: Tensor, d_gamma: Tensor, eps: float, *, o: Tensor | None = None,
    d_o: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write one section's columns. Returns each program's partial sum of the gradient of its gain, [P, width]."""
    arguments, flat = inputs.arguments(s, FOLDED_BACKWARD), dm.view(-1, dm.shape[-1])
    if not (s.normed or s.gates or arguments["DYNAMIC"]):
        arguments["MIXED"] = False  # dm does not depend on m, so s and the anchor are not read
    tiles = arguments["batches"] * arguments["tiles"]
    chunks = min(tiles, FOLDED_BACKWARD.programs * multiprocessors(dm))
    partial = flat.new_empty((chunks, s.width if s.normed else 0), dtype=torch.float32)
    if chunks:
        kernels.folded_backward_kernel[(chunks,)](
            **arguments, **_heads("y", dy, "dy_ptr"), **_heads("o", dy if o is None else o),
            do_ptr=flat if d_o is None else d_o, ds_ptr=flat[:, s.first :],
            d_gamma_ptr=rows(d_gamma)[:, 2 * s.anchor :] if arguments["DYNAMIC"] else flat, partial_ptr=partial,
            stride_dst=flat.stride(0), stride_dgt=d_gamma.shape[-1], stride_p=partial.stride(0), eps=eps,
            GATED=o is not None,
        )  # fmt: skip
    return partial


def _factors(
    d_gamma: Tensor, gamma: Tensor, hidden: Tensor, up: Tensor, dm: Tensor, quotients: Tensor, sums: Tensor
) -> None:
    """Write the gradient of `hidden` after that of the projection, and those of `up` and its bias into sums."""
    (factors, width), tokens = up.shape, len(gamma)
    lanes = next_power_of_2(width)
    size = max(1, FACTORS.tile // lanes)
    tiles = cdiv(tokens, size)
    chunks = min(tiles, FACTORS.programs * multiprocessors(gamma))
    partial = d_gamma.new_empty((chunks, sums.numel()))
    if chunks:
        kernels.factors_kernel[(chunks,)](
            d_gamma, gamma.contiguous(), hidden, up, dm[:, -width:], quotients, partial, tokens, tiles,
            hidden.stride(0), dm.stride(0), FACTORS=factors, E=width, LANES=lanes, ROWS=size,
            num_warps=FACTORS.warps,
        )  # fmt: skip
    sum_rows(partial, sums.view(-1), rows=chunks)


@launcher("gather_anchors")
def gather(
    dm: Sequence[Tensor],
    quotients: Sequence[Tensor],
    anchors: Sequence[Tensor],
    gains: Sequence[Tensor | None],
    scales: Tensor,
    plan: Sequence[int],
    eps: float,
) -> Iterator[list[Tensor]]:
    """From the gradients dm_l [B, T, R] of the mixtures of all layers: the gradients of λ1 and, if an anchor has a
    norm, one more row for its gain, per head, [layers (+ 1), ΣHD]; and those of the anchors before their norms, side by
    side.

    scales are the λ1, [layers, ΣHD] float32, with anchors concatenated. The last row's columns without a gain are
    unset. quotients are the γ1_l/γ2_l [B, T, anchors] of all layers in float32; `dm` is then γ2_l dm_l. There are none
    if λ is the same for all tokens.
    """
    layers, columns = scales.shape
    sums = scales.new_empty((layers + any(gain is not None for gain in gains), columns))
    d_anchors = anchors[0].new_empty((*anchors[0].shape[:2], columns))
    yield [sums, d_anchors]
    dm, quotients, scales = [aligned(d) for d in dm], [aligned(q) for q in quotients], scales.contiguous()
    mixed = sorted((s for s in sections(plan) if s.anchor >= 0), key=lambda s: s.anchor)
    tokens, fewest = d_anchors.shape[:2].numel(), min(s.heads for s in mixed)
    lines = {s.width: max(1, GATHER.tile // next_power_of_2(s.width)) for s in mixed}
    chunks = min(cdiv(tokens, max(lines.values())), cdiv(GATHER.programs * multiprocessors(scales), fewest))
    partial = scales.new_empty((chunks, *sums.shape))
    groups = cdiv(layers, MOST_READERS)
    bounds = [layers * i // groups for i in range(groups + 1)]
    for start, stop in pairwise(bounds) if chunks else ():
        table, column = addresses(dm[start:stop], ()), 0
        factors = addresses(quotients[start:stop], ()) if quotients else table
        for s, anchor, gain in zip(mixed, anchors, gains, strict=True):
            flat = rows(anchor.flatten(-2))
            kernels.gather_kernel[(chunks * s.heads,)](
                table, factors, flat, flat if gain is None else gain, scales[start:, column:],
                d_anchors[..., column:], partial[:, start:, column:], partial[:, -1, column:], tokens,
                cdiv(tokens, lines[s.width]), s.heads, s.first, s.anchor, dm[0].shape[-1], len(mixed),
                flat.stride(0), scales.shape[1], scales.stride(0), partial.stride(0), eps,
                D=s.width, LANES=next_power_of_2(s.width), ROWS=lines[s.width], READERS=stop - start,
                NORMED=gain is not None, DYNAMIC=len(quotients) > 0, ADD=start > 0, LAST=stop == layers,
                STAGES=GATHER.stages, num_warps=GATHER.warps, maxnreg=GATHER.registers,
            )  # fmt: skip
            column += s.heads * s.width
    sum_rows(partial.view(chunks, sums.numel()), sums.view(-1), rows=chunks)


def rows(x: Tensor) -> Tensor:
    """View [..., R] as [M, R], with its last axis dense."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _heads(name: str, x: Tensor, pointer: str | None = None) -> dict[str, Any]:
    """A kernel's arguments for heads [B, T, H, D] in any memory order: a pointer and three strides."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    strides = {f"stride_{name}{axis}": x.stride(i) for i, axis in enumerate("bth")}
    return {pointer or f"{name}_ptr": x, **strides}


def _gradients(inputs: Inputs, plan: Sequence[int]) -> list[Tensor]:
    """Empty tensors for the results of `backward`."""
    projected = inputs.projected
    factors = (*projected.shape[:-1], 0 if inputs.gamma is None else inputs.gamma.shape[-1])
    sums = sum(s.sums(inputs) * s.heads * s.width for s in sections(plan))
    return [
        projected.new_empty(projected.shape),
        projected.new_empty(factors, dtype=torch.float32),
        projected.new_empty((sums,), dtype=torch.float32),
        *(a.new_empty(a.shape) for a in inputs.anchors),
    ]


def _chunks(work: list[tuple[Section, dict[str, Any]]], projected: Tensor, tiling: Tiling) -> int:
    """Programs per head, the same for every section, so that one kernel adds all their partial sums."""
    tiles = max(arguments["batches"] * arguments["tiles"] for _, arguments in work)
    fewest = min(s.heads for s, _ in work)
    return min(tiles, cdiv(tiling.programs * multiprocessors(projected), fewest))
