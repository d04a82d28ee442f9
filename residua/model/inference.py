"""Models without gradients: prompts, scoring, perplexity, and decoding one token per row.

On a GPU a model is rewritten (`InferenceDecoder`): junctions also apply the next norm (`topology/inference.py`), heads
are written straight to the cache, and an activation is one kernel. `Forward` runs whole sequences through it, as CUDA
graphs where these are faster; `generate/engine.py` runs decoding steps.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from residua.model.anchors import mix_values
from residua.model.attention import NoQKNorm, QKNorm, SoftmaxAttention
from residua.model.body import Body, Sublayer
from residua.model.cache import Cache, KeyValueCache, Now
from residua.model.context import Anchors, Context, Input
from residua.model.decoder import Decoder
from residua.model.ffn import FeedForward, SquaredReluFFN
from residua.model.moe import mixtures
from residua.model.norm import NoNorm, RMSNorm
from residua.model.projection import is_plain, is_watched
from residua.model.sdpa import attend
from residua.model.topology.inference import InferenceTopology
from residua.ops import inference
from residua.ops._runtime.library import compile_ahead

MOST_GRAPHS = 8
"""Number of shapes whose graphs are cached."""
GRAPHED_TOKENS = 65_536
"""Largest batch to capture, in tokens: in larger ones, kernels take longer than their launches."""
HALVED_TOKENS = 4096
"""Smallest batch, in tokens, whose halves run in parallel in a graph: one half's memory traffic overlaps with the
other's products."""
COMPILED_TOKENS = 2048
"""Most tokens to compile kernels with; larger batches use the same kernels."""


def _begins(now: Now | None) -> bool:
    """Whether the tokens start their rows."""
    return now is None or (now.visible is None and now.until is None)


class InferenceAttention(Body):
    """Softmax attention whose only anchors, if any, are the first layer's values: project → norm, rotate, mix and store
    → attend → gate → out.

    With `decodes`, decoding one token per row finds the table of all positions in `context.rotary`. Otherwise tokens
    that follow cached ones run through the original attention.
    """

    def __init__(self, attention: SoftmaxAttention, decodes: bool) -> None:
        super().__init__()
        self.takes_reads = attention.takes_reads
        self.attention, self.decodes = attention, decodes
        self.heads, width = attention.query_heads
        self.kv_heads = attention.rows[1] // width

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> KeyValueCache:
        return self.attention.new_cache(batch, capacity, like)

    @staticmethod
    def serves(body: Body) -> bool:
        """Whether the kernels can compute an attention's steps before the attention product."""
        if type(body) is not SoftmaxAttention or is_watched(body) or body.removes_own or body.growth is not None:
            return False
        projected = "v" in body.head_width
        return projected and body.mix.only_values and type(body.qk_norm) in (QKNorm, NoQKNorm)

    def forward(self, x: Input, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        attention, cache = self.attention, context.cache
        until = None if context.now is None else context.now.until
        if not (_begins(context.now) if until is None else self.decodes):
            return cast("tuple[Tensor, Anchors]", attention(x, anchors, context))
        norm, projected = attention.qk_norm, attention.projected(x)
        assert context.rotary is not None and isinstance(norm, QKNorm | NoQKNorm)
        cos, sin = context.rotary[attention.table]
        values, heads = attention.own_values(projected), (projected, self.heads, norm.gains, cos, sin)
        mixing, anchors = mix_values(attention.mix, values, anchors)
        if until is not None:
            q = inference.enter_cache(*heads, cache.keys, cache.values, until, mixing, eps=norm.eps)
            y = inference.decode_attention(q[:, 0], cache.keys, cache.values, until, attention.sink)[:, None]
        else:
            if context.now is None and mixing is None:
                q, k = inference.turn_heads(projected, self.heads, self.kv_heads, norm.gains, cos, sin, eps=norm.eps)
                v = values
            else:
                k, v = values.new_empty(2, *values.shape) if cache is None else cache.first(projected.shape[1])
                q = inference.enter_cache(*heads, k, v, None, mixing, eps=norm.eps)
            y = attend(q, k, v, segments=context.segments, **attention.scoring)
        if "g" in attention.head_width:
            width = attention.head_width["g"]
            y = y * torch.sigmoid(projected[..., -self.heads * width :].unflatten(-1, (self.heads, width)))
        return attention.out(y.flatten(-2)), anchors


class InferenceFFN(Body):
    """A feed-forward whose activation, gate included, is one kernel.

    For several tokens, a squared ReLU is already part of a product.
    """

    def __init__(self, body: FeedForward) -> None:
        super().__init__()
        self.body, self.kind = body, cast(str, body.activation)

    @staticmethod
    def serves(body: Body) -> bool:
        """Whether a kernel computes the body's activation."""
        return isinstance(body, FeedForward) and body.activation is not None and not is_watched(body)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        if isinstance(self.body, SquaredReluFFN) and x.shape[1] > 1:
            return cast("tuple[Tensor, Anchors]", self.body(x, anchors, context))
        entered = self.body.entry(x)
        return self.body.out(inference.activate(entered.flatten(0, 1), self.kind).unflatten(0, x.shape[:2])), anchors


def inference_topology(model: Decoder) -> InferenceTopology | None:
    """Junctions that also apply the model's norms; None if the topology or a norm does not support this."""
    norms = [*(sublayer.norm for sublayer in model.executions), model.norm]
    plain = [norm for norm in norms if isinstance(norm, RMSNorm) and norm.plain_rms]
    return model.topology.inference(plain) if len(plain) == len(norms) else None


class InferenceDecoder(Decoder):
    """A model rewritten to run without gradients; it shares every parameter. Change no weight afterwards.

    Parts without an inference form stay unchanged. If a hook watches a sublayer, that sublayer and all junctions stay
    unchanged. `junctions=False` keeps the junctions too, for callers that change the topology. Uncached rows all start
    at position 0. With `positions`, decoding looks up rotary angles in a table of that many positions, if every
    attention supports it.
    """

    def __init__(self, model: Decoder, positions: int = 0, *, junctions: bool = True) -> None:
        nn.Module.__init__(self)
        self.config, self.embed, self.anchors, self.unembed = model.config, model.embed, model.anchors, model.unembed
        self.topology, self.norm, self.order, self.places = model.topology, model.norm, model.order, model.places
        sublayers = [cast(Sublayer, sublayer) for sublayer in model.sublayers]
        watched = [is_watched(sublayer) or is_watched(sublayer.norm) for sublayer in sublayers]
        norms = [sublayer.norm for sublayer in sublayers]
        topology = inference_topology(model) if junctions and not any(watched) else None
        if topology is not None:
            self.topology, self.norm = topology, NoNorm()
            norms = [NoNorm() for _ in norms]
        direct = [
            not looked_into and sublayer.body.direct_to_cache and InferenceAttention.serves(sublayer.body)
            for sublayer, looked_into in zip(sublayers, watched, strict=True)
            if isinstance(sublayer.body, SoftmaxAttention)
        ]
        self.table: tuple[Tensor, ...] | None = None
        if positions and direct and all(direct):
            every = torch.zeros(1, positions, dtype=torch.int64, device=model.embed.weight.device)
            self.table = super()._rotary(every)
        self.sublayers = nn.ModuleList(
            sublayer if looked_into else Sublayer(norm, self._body(sublayer.body), sublayer.after)
            for norm, sublayer, looked_into in zip(norms, sublayers, watched, strict=True)
        )
        self.eval()

    def _body(self, body: Body) -> Body:
        if InferenceAttention.serves(body):
            return InferenceAttention(cast(SoftmaxAttention, body), self.table is not None)
        return InferenceFFN(cast(FeedForward, body)) if InferenceFFN.serves(body) else body

    def _rotary(
        self, tokens: Tensor, now: Now | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, ...] | None:
        if now is not None and now.until is not None and self.table is not None:
            return self.table
        return super()._rotary(tokens) if _begins(now) else super()._rotary(tokens, now)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    counts: Tensor | None
    hidden: Tensor


class Forward:
    """`model.hidden` of whole sequences without gradients, as fast as the device allows; change no weight afterwards.

    A small batch, whose kernels the GPU runs faster than the host can launch them, is captured as a CUDA graph when its
    shape occurs a second time. On a CPU, the model runs unchanged.

    The next call may overwrite the result: use or copy it first.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._fast = InferenceDecoder(model) if model.embed.weight.is_cuda else None
        self._graphs: OrderedDict[tuple[Any, ...], _Graph | None] = OrderedDict()
        self._pool = None if self._fast is None else torch.cuda.graph_pool_handle()  # memory that all graphs share
        self._cache: Cache | None = None
        routed = bool(mixtures(model))
        # experts may run in a loop on the host, and attention with a sink needs the host too
        self._refused = routed or any(isinstance(m, SoftmaxAttention) and m.sink is not None for m in model.modules())
        # routing depends on kernel results, so a mixture cannot run in a dry run without kernels
        self._compiled = self._fast is None or routed

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """The result of `Decoder.hidden` [B, T, C]; tokens that follow cached ones run on the original model."""
        if self._fast is None or (cache is not None and (cache.reach > 0 or cache.static)):
            return self.model.hidden(tokens, segments, cache, counts)
        if cache is not None and cache is not self._cache:
            self._graphs.clear()  # they write to the previous cache
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
        """The work that a graph captures: the whole batch or, if it is large enough, its halves on two streams.

        Halves speed up consecutive passes; for a single batch of prompts they were slower, so a cache disables them.
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
        """Compile the kernels for batches of `tokens` tokens in parallel."""
        assert self._fast is not None
        few = torch.zeros(1, min(tokens, COMPILED_TOKENS), dtype=torch.int64, device=self._fast.embed.weight.device)
        compile_ahead(partial(self._fast.hidden, few))
        self._compiled = True

    def _known(self, key: tuple[Any, ...]) -> bool:
        """Whether the shape has occurred before; forgets the least recently used shape beyond `MOST_GRAPHS`."""
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
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, so it runs without one: {reason}", stacklevel=3
            )
            return None
        finally:
            if cache is not None:
                cache.reach = reach
        return _Graph(graph, *static, hidden)


def bare_attention(body: nn.Module) -> SoftmaxAttention | None:
    """The body, if it is softmax attention to the whole cache with neither sink nor bias."""
    if not isinstance(body, SoftmaxAttention) or not body.attends_to_all or body.sink is not None:
        return None
    return body if is_plain(body.project) and is_plain(body.out) else None


def bare_ffn(body: nn.Module) -> FeedForward | None:
    """The body, if it is a dense feed-forward without bias whose activation kernels support."""
    if not isinstance(body, FeedForward) or body.activation is None:
        return None
    return body if is_plain(body.entry) and is_plain(body.out) else None
