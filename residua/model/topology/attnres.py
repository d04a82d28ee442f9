"""Attention Residuals (arXiv 2603.15031): every sublayer attends over depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.equivalence import InitFidelity, take_parameters
from residua.model.taps import tap
from residua.model.topology.base import Boundary, Initialization, Items, State, Topology
from residua.model.topology.facts import Ablations, Costs, Rows, SourceNames, parameters_set, read_rows, sources_dropped
from residua.ops.depth_attention import source_gradients
from residua.ops.depth_attention.plan import ReadPlan

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.model.topology.inference import InferenceTopology


class Read(nn.Module):
    """One read over the sources: a_i = softmax_i( scale · w · (g ⊙ RMS(v_i)) ), h = Σ a_i v_i; values are raw.

    w starts at zero, so that the read starts as the plain average of its sources.
    """

    def __init__(self, config: choices.AttentionResidual, index: int, width: int) -> None:
        super().__init__()
        self.index = index
        self.options: dict[str, Any] = {
            "scale": config.scale,
            "key_norm": config.key_norm,
            "activation": config.activation,
        }
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width)) if config.key_norm == "rms" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(self, sources: State) -> Tensor:
        tap(f"depth.{self.index}.weights", lambda: self.weights(sources))
        h: Tensor = ops.depth_attention(sources, self.query, norm_weight=self.gain, **self.options)
        return h

    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """a_i [B, T, sources]."""
        _, weights = ops.depth_attention.reference(
            sources, self.query, norm_weight=self.gain, return_weights=True, **self.options
        )
        return cast(Tensor, weights)


def begin_reads(topology: BlockAttnRes | BoundaryAttnRes, old: Topology) -> bool:
    """Copy the reads of another topology, dividing queries by the growth of `scale`; return whether this preserves the
    depth weights.
    """
    take_parameters(topology, old)
    same = True
    for new, theirs in zip(cast("list[Read]", topology.reads), cast("list[Read]", old.reads), strict=True):
        with torch.no_grad():
            new.query.mul_(theirs.options["scale"] / new.options["scale"])
        same &= new.options | {"scale": 1.0} == theirs.options | {"scale": 1.0}
    return same


class BlockAttnRes(Topology):
    """Sublayers in blocks of S. Sources are the embedding b_0, the finished blocks and the current block's running sum.

    b_n = Σ of block n's outputs, from zero. The first sublayer of a block reads [b_0 … b_{n−1}], each later one also
    the partial sum so far; the last read, before the head, sees every block. The newest source is the last block,
    finished or partial, so the state is the tuple of sources, and a new block appends to it.

    The first sublayer has a single source, with weight 1 for any query, so it reads the embedding without a query.
    """

    def __init__(self, config: choices.AttentionResidual, sublayers: int, width: int) -> None:
        super().__init__()
        self.config, self.block_size = config, self._block_size(config)
        self.reads = nn.ModuleList(Read(config, k, width) for k in range(sublayers))
        self.plan = self._plan(sublayers)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        if source_gradients.serves(x, key_norm=self.config.key_norm, activation=self.config.activation):
            return x, source_gradients.open(self.plan, x, self._queries())
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        if source_gradients.holds(self.plan, k, state):
            read = cast(Read, self.reads[k])
            tap(f"depth.{k}.weights", lambda: read.weights(source_gradients.values(self.plan, k, y, state)))
            return source_gradients.step(self.plan, k, y, state)
        sources = self.sources(k, y, state)
        return self.reads[k](sources), sources

    def sources(self, k: int, y: Tensor, sources: State) -> State:
        """The sources of read k: y starts a block or is added to the running sum."""
        return (*sources, y) if self._begins_block(k) else (*sources[:-1], sources[-1] + y)

    def _block_size(self, config: choices.AttentionResidual) -> int | None:
        """The number of sublayers in a block; None if reads do not see all earlier blocks."""
        assert isinstance(config, choices.BlockAttnRes)
        return config.sublayers_per_block

    def _begins_block(self, k: int) -> bool:
        assert self.block_size is not None
        return k % self.block_size == 0

    def _plan(self, sublayers: int) -> ReadPlan:
        """`sources` by number: 0 is the embedding, k+1 is y_k or the sum that y_k was added to."""
        finished = [k + 1 for k in range(sublayers) if self._begins_block(k + 1)]
        sees = [[0, *(s for s in finished if s <= k), k + 1] for k in range(sublayers)]
        return ReadPlan(sees, [False, *(not self._begins_block(k) for k in range(sublayers))])

    def _queries(self) -> Tensor:
        """u_l = scale · w_l ⊙ g_l of every read, [reads, C]."""
        w = torch.stack([cast(Read, read).query for read in self.reads])
        g = torch.stack([cast(Tensor, read.gain) for read in self.reads])
        return self.config.scale * w.float() * g.float()

    def initialization(self) -> Initialization:
        factors = None if self.block_size is None else [1.0, *self._shares()]
        return Initialization(init_as_additive=self._init_as_additive, sum_factors=factors, begin_as=self._begin_as)

    def _shares(self) -> list[float]:
        """The initial weight of each source in every read."""
        weigh: Callable[[int], float] = {"softmax": lambda n: 1 / n, "sigmoid": lambda n: 0.5}[self.config.activation]
        return [weigh(len(sources)) for sources in self.plan.sees]

    def _init_as_additive(self) -> InitFidelity:
        """Zero queries weight all sources equally, so a reader gets the sum divided by the number of sources.

        This fails if a window hides sources.
        """
        for read in self.reads:
            cast(Read, read).reset_parameters()
        return InitFidelity.NOT if self.block_size is None else InitFidelity.UP_TO_EPS

    def _begin_as(self, old: BlockAttnRes) -> InitFidelity:
        """A different `scale` moves into the queries. The function is preserved if every read sees the same sources."""
        same = begin_reads(self, old) and (self.plan.sees, self.plan.grows) == (old.plan.sees, old.plan.grows)
        return InitFidelity.EXACTLY if same else InitFidelity.NOT

    def boundary(self) -> Boundary:
        return SourcesBoundary(self)

    def inference(self, norms: Sequence[RMSNorm]) -> InferenceTopology | None:
        from residua.model.topology.inference import ReadInference  # training does not need it

        return ReadInference(self.plan, self._queries().detach(), self.block_size, norms) if self._plain else None

    @property
    def _plain(self) -> bool:
        """Whether kernels support this topology's reads."""
        softmax = self.config.key_norm == "rms" and self.config.activation == "softmax"
        return softmax and type(self) in (BlockAttnRes, FullAttnRes)

    def costs(self, sublayers: int, width: int) -> Costs:
        """The bytes moved by the plan of grouped reads and gradients; pipeline stages read one at a time."""
        pairs = zip(self.plan.sees, self.plan.grows[1:], strict=False)
        return Costs(
            self._floor,
            self.plan.rows,
            kept_widths=1.12,
            junctions=[read_rows(len(sources)).total + 3 * grows for sources, grows in pairs],
            bandwidth_share=0.63,  # measured in training steps on an H200, docs/lab/ranks.md
            by_reads=lambda read: partial(self._read_all, read),
            products=read_products(self.reads, map(len, self.plan.sees), width),
        )

    def _floor(self) -> Rows:
        """Each read over depth by itself, and the gradient of each source once.

        Forward: a read's sources → h; in the same pass, a running sum grows, p, y → p'. Backward: a source and the dh
        of its readers → dv, with the gradient of the source that grew out of it. Grouped reads can move less.
        """
        plan = self.plan
        forward = sum(len(sources) + 1 for sources in plan.sees) + 2 * sum(plan.grows)
        backward = sum(len(readers) + 2 for readers in plan.readers) + sum(plan.grows)
        return Rows(forward, backward)

    def _read_all(self, read: Callable[..., Sequence[Tensor]], x: Tensor, *outputs: Tensor) -> list[Tensor]:
        sources: State = (x,)
        inputs: list[Tensor] = []
        for k, (y, weights) in enumerate(zip(outputs, self.reads, strict=False)):
            sources = self.sources(k, y, sources)
            inputs += read(weights.query, weights.gain, *sources)
        return inputs

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        assert self.block_size is not None
        return block_names(self.block_size)

    def ablations(self) -> Ablations:
        reads = cast("list[Read]", list(self.reads))
        return Ablations(
            sources=self.plan.sees,
            without_source=lambda positions: sources_dropped(reads, {k: (at,) for k, at in positions.items()}),
            weighing_readers=range(1, len(reads) + 1),
            with_equal_weights=lambda readers: _equal_weights([reads[reader - 1] for reader in readers]),
            without_writes=self._without_writes,
        )

    def _without_writes(self, sublayers: Sequence[int]) -> AbstractContextManager[None]:
        """No read sees a source that these sublayers alone wrote."""
        empty: list[bool] = [False]
        for k in range(len(self.reads)):
            empty.append(k in sublayers and (empty[k] or not self.plan.grows[k + 1]))
        sees = enumerate(self.plan.sees)
        positions = {k: [i for i, source in enumerate(sources) if empty[source]] for k, sources in sees}
        return sources_dropped(list(self.reads), positions)


def read_products(reads: Iterable[nn.Module], sources: Iterable[int], width: int) -> int:
    """Multiply-adds of reads: a score and a weighted sum of C channels for every source, less the reads' parameters."""
    own = sum(p.numel() for read in reads for p in read.parameters())
    return 2 * width * sum(sources) - own


def block_names(size: int) -> SourceNames:
    """The embedding and blocks of `size` sublayers."""

    def source(reader: int, source: int) -> str:
        return "embedding" if source == 0 else f"block {source}"

    return SourceNames(False, source, block_of_reader=lambda r: f"block {r // size + 1}", block_of_source=source)


def _equal_weights(reads: Sequence[Read]) -> AbstractContextManager[None]:
    """Zero queries score all sources equally."""
    return parameters_set([read.query for read in reads], torch.zeros_like)


class FullAttnRes(BlockAttnRes):
    """Every output is a source: blocks of one sublayer.

    With a window, a read sees the embedding and the last `window` outputs.
    """

    def sources(self, k: int, y: Tensor, sources: State) -> State:
        return (sources[0], *(*sources[1:], y)[-self._window(len(self.reads)) :])

    def _plan(self, sublayers: int) -> ReadPlan:
        window = self._window(sublayers)
        sees = [[0, *range(max(1, k + 2 - window), k + 2)] for k in range(sublayers)]
        return ReadPlan(sees, [False] * (sublayers + 1))

    def _window(self, sublayers: int) -> int:
        assert isinstance(self.config, choices.FullAttnRes)
        return self.config.window or sublayers

    def _block_size(self, config: choices.AttentionResidual) -> int | None:
        assert isinstance(config, choices.FullAttnRes)
        return 1 if config.window is None else None

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return output_names(self.plan, sublayers)


def output_names(plan: ReadPlan, sublayers: Sequence[str]) -> SourceNames:
    """The embedding and single outputs. In diagnoses, a block is a Transformer layer: attention and feed-forward."""

    def source(reader: int, source: int) -> str:
        number = plan.sees[reader - 1][source]
        return "embedding" if number == 0 else sublayers[number - 1]

    def block(reader: int, source: int) -> str:
        return "embedding" if source == 0 else f"layer {(plan.sees[reader - 1][source] - 1) // 2}"

    return SourceNames(False, source, block_of_reader=lambda r: f"layer {r // 2}", block_of_source=block)


class BoundaryAttnRes(Topology):
    """Block AttnRes as in the authors' article: attention over depth only between blocks, x + f(x) within them.

    Block n starts from h_n, the first from the embedding x. Each sublayer adds its output, h ← h + y, and at the end of
    the block B_n = h. The next block starts from a read of [x, B_1 … B_n]. The final norm reads the last block's h.

    The authors' pseudocode (`BlockAttnRes`) differs in three ways. Every sublayer reads over depth, not only the first
    of a block. A block's sum starts from zero, so it contains the block's outputs but not its initial state. The head
    has a read too. The article's code also weights normalised values; here values are raw, as in the paper.
    """

    def __init__(self, config: choices.BoundaryAttnRes, sublayers: int, width: int) -> None:
        super().__init__()
        self.block_size = config.sublayers_per_block
        last = range(self.block_size - 1, sublayers - 1, self.block_size)
        self.reads = nn.ModuleList(Read(config, k, width) for k in last)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x, x)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """The state is h, then the sources x, B_1 …"""
        h, sources = state[0] + y, state[1:]
        block = (k + 1) // self.block_size
        if (k + 1) % self.block_size == 0 and block <= len(self.reads):
            sources = (*sources, h)
            h = self.reads[block - 1](sources)
        return h, (h, *sources)

    def initialization(self) -> Initialization:
        return Initialization(begin_as=self._begin_as)

    def _begin_as(self, old: BoundaryAttnRes) -> InitFidelity:
        """A different `scale` moves into the queries."""
        same = begin_reads(self, old) and (not self.reads or self.block_size == old.block_size)
        return InitFidelity.EXACTLY if same else InitFidelity.NOT

    def costs(self, sublayers: int, width: int) -> Costs:
        products = read_products(self.reads, range(2, len(self.reads) + 2), width)
        return replace(super().costs(sublayers, width), products=products)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return block_names(self.block_size)

    def ablations(self) -> Ablations:
        reads, size = cast("list[Read]", list(self.reads)), self.block_size
        return Ablations(
            weighing_readers=range(size, size * len(reads) + 1, size),
            with_equal_weights=lambda readers: _equal_weights([reads[reader // size - 1] for reader in readers]),
        )


class SourcesBoundary(Boundary):
    """The sources cross, and the next slice reads them.

    Inside a slice the state is also the plain tuple of sources, since handles of the deferred backward cannot be sent.
    """

    plain = False
    topology: BlockAttnRes

    def __init__(self, topology: BlockAttnRes) -> None:
        super().__init__(topology)
        self.blocks = None if topology.block_size is None else len(topology.reads) / topology.block_size

    def begin(self, x: Tensor, *ids: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def after(self, k: int, y: Tensor, state: State, *ids: Tensor) -> State:
        return self.topology.sources(k, y, state)

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        sources = self.after(k, y, state)
        return {f"source.{number}": v for number, v in zip(self._numbers(k), sources, strict=True)}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        sources = tuple(items[f"source.{number}"] for number in self._numbers(k))
        h: Tensor = self.topology.reads[k](sources)
        return h, sources

    def embedding(self) -> str | None:
        return "source.0"

    def _numbers(self, k: int) -> Sequence[int]:
        """The sources of read k, numbered as in the deferred plan: a block by its last output."""
        return self.topology.plan.sees[k]
