"""Divides a model among the stages of a pipeline, so that no stage has much more work than the others.

A stage has consecutive sublayers; it may end inside a layer, between attention and feed-forward. The first stage also
embeds. The head of a large vocabulary costs as much as several layers. The last stage computes it alone if that leaves
the stages balanced; otherwise the head is cut along the vocabulary into pieces that the last stages share (`stage`).

Three things cross between stages: the topology's state (`Topology.boundary`), the anchors, and the numbers of a divided
head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.model.attention import head_shape
from residua.model.size import Work, measure_work
from residua.model.topology import build_topology
from residua.model.topology.base import Items

EMBEDDING, HIDDEN, LSE, PICKED = "embedding", "head.hidden", "head.lse", "head.picked"
"""Names of tensors that cross between stages."""

MAX_UNEVENNESS = 1.10
"""The head stays in one piece if the most expensive stage has at most this multiple of the mean work."""

HEAD_PIECES = 16
DIVIDED_HEAD_COST = 1.25
"""Assumed cost of a divided head relative to a whole one. On an H200, pieces that compute their logits twice took 1.49
times as long (docs/lab/ranks.md); pieces that keep their softmax were not measured."""


@dataclass(frozen=True)
class Share:
    """The computation of one stage: its sublayers, and its pieces of a head cut into `pieces`."""

    sublayers: range
    head: range
    pieces: int

    def rows(self, vocabulary: int) -> tuple[int, int]:
        """The rows [start, stop) of the head that this stage multiplies with."""
        return vocabulary * self.head.start // self.pieces, vocabulary * self.head.stop // self.pieces


def shares_of(config: RunConfig, work: Work | None = None, *, stages: int | None = None) -> list[Share]:
    """The shares of a run's stages; `work` is that of its model, if known, `stages` overrides the configured number."""
    stages = stages or config.parallel.stages
    if config.parallel.split == "layers":
        return share_layers(len(config.model.executed), stages)
    return share_work(work or work_of(config), stages, min(HEAD_PIECES, config.model.vocab_size))


def work_of(config: RunConfig) -> Work:
    """The work of a run's model at its training sequence length."""
    return measure_work(config.model.model_copy(update={"context": config.sequence}))


def share_layers(layers: int, stages: int) -> list[Share]:
    """Whole layers, divided evenly; the first stages get one more if needed, the last has the head."""
    sizes = [layers // stages + (i < layers % stages) for i in range(stages)]
    return cut([2 * sum(sizes[: i + 1]) for i in range(stages - 1)], 2 * layers, 1)


def share_work(work: Work, stages: int, pieces: int) -> list[Share]:
    """The division whose most expensive stage is cheapest; among ties, the most even one."""
    count = len(work.sublayers)
    whole = cut(_best_cuts(_costs(work, 1), stages), count, 1)
    if max(stage_work(work, whole)) <= MAX_UNEVENNESS * work.total / stages:
        return whole
    divided = cut(_best_cuts(_costs(work, pieces), stages), count, pieces)
    return min(whole, divided, key=lambda shares: max(stage_work(work, shares)))


def stage_work(work: Work, shares: Sequence[Share]) -> list[float]:
    """The cost of each stage, in FLOPs per token."""
    return [
        (work.embedding if number == 0 else 0.0)
        + sum(work.sublayers[share.sublayers.start : share.sublayers.stop])
        + head_work(work, share)
        for number, share in enumerate(shares)
    ]


def head_ranks(shares: Sequence[Share], ranks: int) -> list[int]:
    """The ranks of a pipeline that compute a part of the head."""
    return sorted({number % ranks for number, share in enumerate(shares) if share.head})


def head_repeats(shares: Sequence[Share], ranks: int, tied: bool) -> bool:
    """Whether two stages of a rank use the head's matrix; if it is `tied`, the first stage does too."""
    users = [number for number, share in enumerate(shares) if share.head or (tied and number == 0)]
    return len({number % ranks for number in users}) < len(users)


def _costs(work: Work, pieces: int) -> list[float]:
    """The costs to divide, in order: sublayers, the first including the embedding, then pieces of the head."""
    first, *others = work.sublayers
    return [work.embedding + first, *others, *[_piece(work, pieces)] * pieces]


def head_work(work: Work, share: Share) -> float:
    """The cost of a stage's pieces of the head."""
    return _piece(work, share.pieces) * len(share.head)


def _piece(work: Work, pieces: int) -> float:
    return work.head if pieces == 1 else DIVIDED_HEAD_COST * work.head / pieces


def cut(cuts: Sequence[int], sublayers: int, pieces: int) -> list[Share]:
    """The stages between cuts at these places in the list of sublayers and pieces of the head."""
    places = [0, *cuts, sublayers + pieces]
    return [
        Share(
            range(min(start, sublayers), min(stop, sublayers)),
            range(max(start - sublayers, 0), max(stop - sublayers, 0)),
            pieces,
        )
        for start, stop in pairwise(places)
    ]


def _best_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut a list into nonempty parts to minimize the largest sum, and among ties the sum of squares."""
    bound, _ = _best(costs, stages, max, lambda cost: cost)
    # rounding must not exclude the part that determines the bound
    _, cuts = _best(costs, stages, lambda a, b: a + b, lambda cost: cost**2 if cost <= bound * (1 + 1e-9) else inf)
    return list(cuts)


def _best(
    costs: Sequence[float], stages: int, join: Callable[[float, float], float], weigh: Callable[[float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least `join` of the weighted sums of all parts, and the cuts between them."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return weigh(sums[-1] - sums[first]), ()
        least: tuple[float, tuple[int, ...]] | None = None
        for end in range(first + 1, len(costs) - left + 2):
            value, cuts = best(end, left - 1)
            value = join(weigh(sums[end] - sums[first]), value)
            if least is None or value < least[0]:
                least = value, (end, *cuts)
        assert least is not None
        return least

    return best(0, stages)


def anchors_after(config: ModelConfig, k: int) -> dict[str, str]:
    """The anchors after sublayer k, in order: name → pathway. Anchors that replace others get new names."""
    layers = sum(2 * config.executed.index(layer) <= k for layer in config.softmax_layers)
    writer = config.anchors.lender(layers) if config.anchors.taken(layers) else 0
    carried = () if config.softmax is None else config.anchors.carried(layers)
    return {f"anchor.{writer}.{i}": pathway for i, pathway in enumerate(carried)}


def _anchor_items(config: ModelConfig, k: int, shape: Sequence[int], dtype: torch.dtype) -> Items:
    """The anchors that exist after sublayer k."""
    if config.softmax is None:
        return {}
    heads = head_shape(config.softmax, config.width)
    sizes = {name: (*shape[:-1], heads.heads[s], heads.head_dim) for name, s in anchors_after(config, k).items()}
    return {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}


def recomputes_anchors(config: ModelConfig, how: str) -> bool:
    """Whether slices compute anchors (ExoFormer's) from the embedding instead of receiving them.

    Sending the embedding costs one width per token, or nothing if it crosses anyway; the anchors cost up to four.
    """
    if not config.anchors.from_embedding or config.softmax is None:
        return False
    heads = head_shape(config.softmax, config.width)
    fewer = sum(heads.rows(s) for s in config.anchors.mixed) > config.width
    return {"auto": fewer, "send": False, "recompute": True}[how]


def crossing(
    config: ModelConfig, ends: Sequence[int], shape: Sequence[int], dtype: torch.dtype, anchors: str
) -> list[Items]:
    """The tensors that cross after each sublayer in `ends`, without memory; `shape` is [B, T, C]."""
    sends: list[Items] = []
    with FakeTensorMode(), torch.no_grad():
        topology = build_topology(config.topology, config.sublayers, config.width)
        boundary, x = topology.boundary(), torch.empty(*shape, dtype=dtype)
        ids = (torch.zeros(shape[:2], dtype=torch.int64),) if topology.reads_tokens else ()
        _, state = boundary.begin(x, *ids)
        y = torch.empty_like(x)
        for k in range(max(ends, default=-1) + 1):
            if k in ends:
                items = boundary.close(k, y, state, *ids)
                if not recomputes_anchors(config, anchors):
                    items |= _anchor_items(config, k, x.shape, x.dtype)
                elif boundary.embedding() is None:
                    items |= {EMBEDDING: x}
                sends.append(items)
            state = boundary.after(k, y, state, *ids)
    return [{name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in items.items()} for items in sends]


def boundaries_of(
    config: ModelConfig,
    shares: Sequence[Share],
    shape: Sequence[int],
    dtype: torch.dtype,
    anchors: str,
    known: Mapping[int, Items] | None = None,
) -> list[Items]:
    """The tensors that cross between the stages of a pipeline, without memory; `shape` is [B, T, C].

    `known` may hold the tensors that cross after each sublayer.
    """
    ends = [share.sublayers.stop - 1 for share, after in pairwise(shares) if after.head.start == 0]
    items = crossing(config, ends, shape, dtype, anchors) if known is None else [known[end] for end in ends]
    return items + [head_items(share, shape, dtype) for share in shares[len(ends) : -1]]


def head_items(share: Share, shape: Sequence[int], dtype: torch.dtype) -> Items:
    """The tensors that cross inside a divided head: its input, which does not change, and two numbers per token."""
    numbers = torch.empty(*shape[:-1], dtype=torch.promote_types(dtype, torch.float32), device="meta")
    hidden = torch.empty(*shape, dtype=dtype, device="meta")
    return {HIDDEN: hidden, f"{LSE}.{share.head.stop}": numbers, f"{PICKED}.{share.head.stop}": numbers.clone()}
