"""The forward pass over whole sequences without gradients, for prefill, scoring and perplexity.

On a GPU the model is rewritten: junctions apply the next norm as well (`topology/normed.py`), heads go straight into
the cache, and an activation is one kernel. The rewritten model shares every parameter; parts without such a form stay.
A batch of few tokens, whose kernels the host cannot launch as fast as the GPU runs them, is captured as a CUDA graph
when its shape comes a second time. On a CPU the model runs as it is.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from copy import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from residua.model.anchors import mix_values
from residua.model.attend import attend
from residua.model.attention import NoQKNorm, QKNorm, SoftmaxAttention
from residua.model.body import Body
from residua.model.cache import Cache, Now
from residua.model.context import Anchors, Context
from residua.model.decoder import Decoder, Sublayer
from residua.model.ffn import FeedForward, SquaredReluFFN
from residua.model.moe import mixtures
from residua.model.norm import Norm
from residua.model.projection import is_watched
from residua.ops import decode, prefill
from residua.ops._runtime.ahead import compile_ahead
from residua.ops.mix_projection.reference import Mixing

MOST_GRAPHS = 8
"""Shapes whose graphs are kept."""
GRAPHED_TOKENS = 65_536
"""Most tokens of a batch that is captured: with more, kernels take longer than their launches."""
HALVED_TOKENS = 4096
"""Fewest tokens of a batch whose halves run side by side in a graph, so that what one half reads and writes between its
products overlaps with the products of the other."""
COMPILED_TOKENS = 2048
"""Most tokens of the batch that kernels are compiled with; those of larger batches are the same."""


class SequenceAttention(Body):
    """Softmax attention without anchors but the first layer's values: project → norm, rotate, mix and store → attend →
    gate → out."""

    def __init__(self, attention: SoftmaxAttention) -> None:
        super().__init__()
        self.attention = attention
        self.heads, self.width = attention.query_heads
        self.kv_heads = attention.rows[1] // self.width

    @staticmethod
    def serves(body: nn.Module) -> bool:
        """Whether the kernels compute what an attention does before it attends."""
        if type(body) is not SoftmaxAttention or is_watched(body):
            return False
        return body.mix.only_values and type(body.qk_norm) in (QKNorm, NoQKNorm)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        attention = self.attention
        assert context.rotary is not None
        projected = attention.project(x)
        own = attention.own_values(projected)
        mixing, anchors = mix_values(attention.mix, own, anchors)
        q, k, v = self._heads(projected, own, mixing, context.rotary[attention.table], context)
        y = attend(q, k, v, segments=context.segments, sink=attention.sink, window=attention.window)
        if "g" in attention.head_width:
            width = attention.head_width["g"]
            y = y * torch.sigmoid(projected[..., -self.heads * width :].unflatten(-1, (self.heads, width)))
        return attention.out(y.flatten(-2)), anchors

    def _heads(
        self,
        projected: Tensor,
        own: Tensor,
        mixing: Mixing | None,
        table: tuple[Tensor, ...],
        context: Context,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values that attend, of the projection and its own values."""
        norm, (cos, sin) = self.attention.qk_norm, table
        assert isinstance(norm, QKNorm | NoQKNorm)
        if context.now is None and mixing is None:
            q, k = prefill.turn_heads(projected, self.heads, self.kv_heads, norm.gains, cos, sin, eps=norm.eps)
            return q, k, own
        if context.now is None:
            k, v = (projected.new_empty(own.shape) for _ in range(2))
        else:
            k, v = context.cache.first(projected.shape[1])
        q = prefill.enter_heads(projected, self.heads, norm.gains, cos, sin, k, v, mixing, eps=norm.eps)
        return q, k, v


class SequenceFFN(Body):
    """A feed-forward whose activation, gate included, is one kernel."""

    def __init__(self, body: FeedForward) -> None:
        super().__init__()
        self.entry, self.out, self.kind = body.entry, body.out, cast(str, body.activation)

    @staticmethod
    def serves(body: nn.Module) -> bool:
        """Whether there is such a kernel. A squared ReLU is already part of a product."""
        known = isinstance(body, FeedForward) and body.activation is not None
        return known and not isinstance(body, SquaredReluFFN) and not is_watched(body)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        entered = self.entry(x)
        return self.out(decode.activate(entered.flatten(0, 1), self.kind).unflatten(0, x.shape[:2])), anchors


class SequenceDecoder(Decoder):
    """A decoder of sequences that begin with their first token: all rows have the same positions, and one table."""

    def _rotary(
        self, tokens: Tensor, now: Now | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, ...] | None:
        return super()._rotary(tokens)


def for_sequences(model: Decoder, *, junctions: bool = True) -> Decoder:
    """The model rewritten for whole sequences without gradients; it shares every parameter.

    A sublayer that someone looks into stays as it is, and then so do all junctions; also without `junctions`, where the
    topology may be changed.
    """
    rewritten = copy(model)
    rewritten._modules = dict(model._modules)
    rewritten.__class__ = SequenceDecoder
    sublayers = [cast(Sublayer, sublayer) for sublayer in model.sublayers]
    watched = [is_watched(sublayer) or is_watched(sublayer.norm) for sublayer in sublayers]
    norms: list[Any] = [*(sublayer.norm for sublayer in sublayers), model.norm]
    plain = junctions and not any(watched) and all(getattr(norm, "plain_rms", False) for norm in norms)
    topology = model.topology.normed(norms) if plain else None
    if topology is not None:
        norms = [nn.Identity() for _ in norms]
        rewritten.topology, rewritten.norm = topology, cast(Norm, norms[-1])
    rewritten.sublayers = nn.ModuleList(
        sublayer if looked_into else Sublayer(norm, _body(sublayer.body), sublayer.after)
        for norm, sublayer, looked_into in zip(norms[:-1], sublayers, watched, strict=True)
    )
    return rewritten.eval()


def _body(body: Body) -> Body:
    if SequenceAttention.serves(body):
        return SequenceAttention(cast(SoftmaxAttention, body))
    return SequenceFFN(cast(FeedForward, body)) if SequenceFFN.serves(body) else body


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    counts: Tensor | None
    hidden: Tensor


class Forward:
    """`model.hidden` of whole sequences without gradients, as fast as the device allows; change no weight afterwards.

    What it returns may be overwritten by the next call: use it before, or copy it.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._fast = for_sequences(model) if model.embed.weight.is_cuda else None
        self._graphs: OrderedDict[tuple[Any, ...], _Graph | None] = OrderedDict()
        self._pool = None if self._fast is None else torch.cuda.graph_pool_handle()  # memory that all graphs share
        self._cache: Cache | None = None
        routed = bool(mixtures(model))
        # experts may run in a loop that needs the host, and so does attention with a sink
        self._refused = routed or any(getattr(m, "sink", None) is not None for m in model.modules())
        # experts are chosen by what the kernels compute, so a mixture cannot run without them
        self._compiled = self._fast is None or routed

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """The final normed states [B, T, C] of `Decoder.hidden`; tokens that follow cached ones run on the model."""
        if self._fast is None or (cache is not None and (cache.reach > 0 or cache.static)):
            return self.model.hidden(tokens, segments, cache, counts)
        if cache is not None and cache is not self._cache:
            self._graphs.clear()  # they write to the other cache
            self._cache = cache
        if not self._compiled:
            self._compile(tokens.numel())
        key = (*tokens.shape, cache is not None, counts is not None)
        if self._refused or segments is not None or tokens.numel() > GRAPHED_TOKENS or not self._known(key):
            return self._fast.hidden(tokens, segments, cache, counts)
        graph = self._graphs[key] = self._graphs[key] or self._capture(tokens, cache, counts)
        if graph is None:
            return self._fast.hidden(tokens, segments, cache, counts)
        graph.tokens.copy_(tokens, non_blocking=True)
        if counts is not None and graph.counts is not None:
            graph.counts.copy_(counts, non_blocking=True)
        graph.graph.replay()
        if cache is not None:
            cache.reach = tokens.shape[1]
        return graph.hidden

    def _pass(self, tokens: Tensor, cache: Cache | None, counts: Tensor | None) -> Tensor:
        """What a graph holds: the whole batch or, if there is enough to do, its halves on two streams.

        Halves are for passes that follow one another; the answer to a single batch of prompts came later with them.
        """
        assert self._fast is not None
        middle = len(tokens) // 2
        if cache is not None or middle == 0 or tokens.numel() < HALVED_TOKENS:
            return self._fast.hidden(tokens, None, cache, counts)
        hidden, here, side = [], torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        for stream, rows in ((side, slice(middle)), (here, slice(middle, None))):
            with torch.cuda.stream(stream):
                hidden.append(self._fast.hidden(tokens[rows], None, None, None if counts is None else counts[rows]))
        here.wait_stream(side)
        return torch.cat(hidden)

    def _compile(self, tokens: int) -> None:
        """Compile the kernels for batches of so many tokens side by side, if there is anything to compile."""
        assert self._fast is not None
        few = torch.zeros(1, min(tokens, COMPILED_TOKENS), dtype=torch.int64, device=self._fast.embed.weight.device)
        compile_ahead(partial(self._fast.hidden, few))
        self._compiled = True

    def _known(self, key: tuple[Any, ...]) -> bool:
        """Whether the shape has come before; the one that has not come for the longest time is forgotten."""
        known = key in self._graphs
        self._graphs.setdefault(key, None)
        self._graphs.move_to_end(key)
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return known

    def _capture(self, tokens: Tensor, cache: Cache | None, counts: Tensor | None) -> _Graph | None:
        assert self._fast is not None
        reach = 0 if cache is None else cache.reach
        static = tokens.clone(), None if counts is None else counts.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may use the device during the capture
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = self._pass(static[0], cache, static[1])
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._refused = True
            reason = str(error).splitlines()[0]
            warnings.warn(f"this model cannot be made a CUDA graph and runs without one: {reason}", stacklevel=3)
            return None
        finally:
            if cache is not None:
                cache.reach = reach
        return _Graph(graph, *static, hidden)
