"""A model for decoding whose junctions come with the norm behind them, and whose heads go straight into the cache.

Each is one kernel. The rewritten model shares every parameter. Its topology hands each sublayer an input that is
already normed, and the sublayers norm nothing: the forward pass is the same, and so are the results but for rounding.
What a gated junction of few rows needs of its streams alone is prepared beside the sublayer. What a junction needs of
parameters is prepared here once, so change no weight afterwards.
"""

from __future__ import annotations

from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.anchors import QueryKeyNorm, Unmixed
from residua.model.attention import SoftmaxAttention
from residua.model.cache import Now
from residua.model.context import Anchors, Context
from residua.model.decoder import Decoder, Sublayer
from residua.model.ffn import FFNS, GatedFFN, PlainFFN, is_watched
from residua.model.norm import RMSNorm
from residua.model.topology.additive import Additive
from residua.model.topology.attnres import BlockAttnRes, FullAttnRes, Read
from residua.model.topology.base import State, Topology
from residua.model.topology.multigate import Gates, MultiGate, Pool
from residua.ops import decode
from residua.ops.decode import MOST_STREAMS, Gate
from residua.ops.decode.gated import as_vectors
from residua.ops.decode.launch import MOST_SOURCES

FFN_KINDS = {shape: kind for kind, shape in FFNS.items()}
FEW = 8
"""Rows up to which a gated junction is prepared beside its sublayer; more take more from its kernels than they save."""


class FusedTopology(Topology):
    """Junctions that norm: norms[k] is applied to the input of sublayer k, the last to the final state."""

    def __init__(self, norms: list[RMSNorm]) -> None:
        super().__init__()
        self.norms = norms
        self.unread = torch.zeros(1, norms[0].weight.shape[0], device=norms[0].weight.device)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        rows, norm = x.flatten(0, 1).contiguous(), self.norms[0]
        normed, *_ = decode.read_sources([], rows, None, self.unread, norm.weight, eps=norm.eps)
        return normed.view_as(x), (rows,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        normed, state = self.junction(k, y.flatten(0, 1).contiguous(), state)
        return normed.view_as(y), state

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """`step` on rows [M, C]."""
        raise NotImplementedError


class FusedAdditive(FusedTopology):
    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        normed, h = decode.add_norm(state[0], y, norm.weight, eps=norm.eps)
        return normed, (h,)


class FusedBlock(FusedTopology):
    """Block Attention Residuals in two phases (arXiv 2603.15031).

    When a block is finished, its sum and all earlier ones are final: the reads of the whole coming block are evaluated
    against them together. Inside the block each read merges its running sum into what is already there.
    State: o, lse and ‖o‖² of the coming reads, the finished blocks, and the running sum if the block has begun.
    """

    def __init__(self, topology: BlockAttnRes, size: int, norms: list[RMSNorm]) -> None:
        super().__init__(norms)
        self.size = size
        self.queries = torch.stack([_query(cast(Read, read), topology.config.scale) for read in topology.reads])
        self.opening = torch.cat([self.unread, self.queries[: size - 1]])

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        norm = self.norms[0]
        normed, v, *reads = decode.read_sources([], x.flatten(0, 1), None, self.opening, norm.weight, eps=norm.eps)
        return normed.view_as(x), (*reads, v)

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        (o, lse, square), sources, place = state[:3], state[3:], k % self.size
        norm = self.norms[k + 1]
        base = sources[-1] if place else None
        finished = sources[:-1] if place else sources
        if place == self.size - 1:
            coming = self.queries[k : k + self.size]
            normed, v, *reads = decode.read_sources(finished, y, base, coming, norm.weight, eps=norm.eps)
            return normed, (*reads, *finished, v)
        read = (o[place], lse[place], square[place])
        normed, p = decode.read_partial(read, y, base, self.queries[k], norm.weight, eps=norm.eps)
        return normed, (o, lse, square, *finished, p)


class FusedMultiGate(FusedTopology):
    """Multi-Gate Residuals: while the streams fill, a junction is a read of them; then one gated write and read.

    State: the streams and, of few rows, what the coming write needs of them alone, made while the sublayer runs.
    """

    def __init__(self, topology: MultiGate, norms: list[RMSNorm]) -> None:
        super().__init__(norms)
        self.fill, self.competitive = topology.fill, topology.competitive
        self.gates = [cast(Gates, gates) for gates in topology.gates]
        self.pools = [cast(Pool, pool).query.detach() for pool in topology.pools]
        self.filling = [pool.float()[None] * len(pool) ** -0.5 for pool in self.pools[: self.fill]]

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        normed, streams = (self._append if k < self.fill else self._write)(k, y, state)
        return normed, (*streams, *self._ahead(k + 1, streams))

    def _append(self, k: int, y: Tensor, streams: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        normed, *_ = decode.read_sources(streams, y, None, self.filling[k], norm.weight, eps=norm.eps)
        return normed, (*streams, y)

    def _write(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        streams, prepared = state[: self.fill + 1], state[self.fill + 1 :]
        norm, gate = self.norms[k + 1], self._gate(k, streams)
        if prepared:
            return decode.gate_prepared(gate, prepared[0], y, norm.weight, eps=norm.eps)
        return decode.gate_norm(
            streams, y, gate.query, gate.bias, gate.pool_query, norm.weight, competitive=self.competitive, eps=norm.eps
        )

    def _ahead(self, k: int, streams: State) -> State:
        """What the junction behind sublayer k needs of the streams alone, where it pays to make that apart."""
        written = self.fill <= k < len(self.pools)
        pays = len(streams[0]) <= FEW and as_vectors(streams)
        return (decode.prepare_gates(self._gate(k, streams)),) if written and pays else ()

    def _gate(self, k: int, streams: State) -> Gate:
        gates = self.gates[k - self.fill]
        return Gate(streams, gates.query, gates.bias, self.pools[k], self.competitive)


class FusedAttention(nn.Module):
    """Softmax attention of one token per row: project → into the cache → attend → gate → out.

    `context.rotary` is the table of all positions (`FusedDecoder`).
    """

    def __init__(self, attention: SoftmaxAttention) -> None:
        super().__init__()
        self.attention = attention
        self.heads = attention.rows[0] // attention.head_width["q"]
        self.gains: tuple[Tensor, Tensor] | None = cast(QueryKeyNorm, attention.qk_norm).gains

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        now, cache, attention = context.now, context.cache, self.attention
        assert now is not None and now.until is not None and context.rotary is not None
        projected = attention.project(x)[:, 0]
        q = decode.enter_cache(projected, self.heads, self.gains, *context.rotary, cache.keys, cache.values, now.until)
        y = decode.decode_attention(q, cache.keys, cache.values, now.until, attention.sink)
        if "g" in attention.head_width:
            width = attention.head_width["g"]
            y = y * torch.sigmoid(projected[:, -self.heads * width :].unflatten(-1, (self.heads, width)))
        return attention.out(y.flatten(1))[:, None], anchors


class FusedFFN(Sublayer):
    """A feed-forward sublayer whose activation, gate and all, is one kernel."""

    def __init__(self, norm: nn.Module, body: nn.Module) -> None:
        super().__init__(norm, body)
        self.kind = FFN_KINDS[_shape(body)]

    @property
    def entry(self) -> nn.Module:
        return self.body.gate_up if isinstance(self.body, GatedFFN) else cast(PlainFFN, self.body).up

    def forward(self, h: Tensor, anchors: Anchors, context: Context) -> tuple[Any, ...]:
        y = decode.activate(self.entry(self.norm(h)).flatten(0, 1), self.kind)
        return cast(PlainFFN, self.body).out(y).view_as(h), anchors


class FusedDecoder(Decoder):
    """A decoder that looks rotary angles up in a table of all positions instead of computing them in every step."""

    table: tuple[Tensor, Tensor]

    def _rotary(self, tokens: Tensor, now: Now | None = None) -> tuple[Tensor, Tensor]:
        return self.table


def fuse(model: Decoder, positions: int) -> Decoder:
    """The model rewritten for steps of one token per row, up to `positions`; what has no fused form stays as it is."""
    rewritten = copy(model)
    rewritten._modules = dict(model._modules)
    sublayers = [cast(Sublayer, sublayer) for sublayer in model.sublayers]
    norms = [*(sublayer.norm for sublayer in sublayers), model.norm]
    topology = fused_topology(model.topology, norms)
    if topology is not None:
        norms = [nn.Identity() for _ in norms]
        rewritten.topology, rewritten.norm = topology, norms[-1]
    bodies = [sublayer.body for sublayer in sublayers]
    mixers = [body for body in bodies if isinstance(body, SoftmaxAttention)]
    if mixers and all(type(mixer.mix) is Unmixed for mixer in mixers):
        bodies = [FusedAttention(body) if isinstance(body, SoftmaxAttention) else body for body in bodies]
        rewritten.__class__ = FusedDecoder
        every = torch.zeros(1, positions, dtype=torch.int64, device=model.embed.weight.device)
        cast(FusedDecoder, rewritten).table = cast("tuple[Tensor, Tensor]", model._rotary(every))
    rewritten.sublayers = nn.ModuleList(_sublayer(*parts) for parts in zip(norms[:-1], bodies, strict=True))
    return rewritten.eval()


def _sublayer(norm: nn.Module, body: nn.Module) -> Sublayer:
    return FusedFFN(norm, body) if _shape(body) in FFN_KINDS and not is_watched(body) else Sublayer(norm, body)


def _shape(body: nn.Module) -> Any:
    """The class and activation of a feed-forward, as in `FFNS`."""
    return type(body), getattr(body, "act", None)


def fused_topology(topology: Topology, norms: list[nn.Module]) -> FusedTopology | None:
    """The junctions of a topology with the norms behind them; None where there are none."""
    gains = [norm for norm in norms if type(norm) is RMSNorm]
    return _with_norms(topology, gains) if len(gains) == len(norms) else None


def _with_norms(topology: Topology, norms: list[RMSNorm]) -> FusedTopology | None:
    if type(topology) is Additive:
        return FusedAdditive(norms)
    if type(topology) is MultiGate and topology.fill < MOST_STREAMS:
        return FusedMultiGate(topology, norms)
    if isinstance(topology, BlockAttnRes) and (size := _block_size(topology)) is not None:
        plain = topology.config.key_norm == "rms" and topology.config.activation == "softmax"
        if plain and len(topology.reads) // size < MOST_SOURCES:
            return FusedBlock(topology, size, norms)
    return None


def _block_size(topology: BlockAttnRes) -> int | None:
    """Sublayers in a block; Full is blocks of one, and a window is neither."""
    config = topology.config
    if isinstance(config, choices.BlockAttnRes):
        return config.sublayers_per_block
    assert isinstance(topology, FullAttnRes) and isinstance(config, choices.FullAttnRes)
    return 1 if config.window is None else None


def _query(read: Read, scale: float) -> Tensor:
    """u = scale · w ⊙ g."""
    assert read.gain is not None
    return scale * read.query.detach().float() * read.gain.detach().float()
