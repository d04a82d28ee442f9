"""Causal softmax attention: project → mix anchors → qk-norm → rotate → attend → gate → out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.anchors import HeadShape, build_mix
from residua.model.attend import attend
from residua.model.cache import KeyValueCache
from residua.model.context import Anchors, Context
from residua.model.edges import Edge, divide_rows
from residua.model.projection import Projection
from residua.model.taps import tap


def head_shape(config: choices.SoftmaxAttention, width: int) -> HeadShape:
    """Heads of each projection: queries, keys and values, and the gate if it is elementwise."""
    kv = config.kv_heads or config.heads
    return HeadShape({"q": config.heads, "k": kv, "v": kv, "g": config.heads}, config.head_dim or width // config.heads)


class QKNorm(nn.Module):
    """RMS over head_dim with a gain each for queries and keys (arXiv 2010.04245), then rotation by position."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(head_dim))
        self.key = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.query)
        nn.init.ones_(self.key)

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        return self.query, self.key

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return ops.norm_rotate(q, self.query, *table), ops.norm_rotate(k, self.key, *table)


class NoQKNorm(nn.Module):
    """Rotates queries and keys by position, nothing else."""

    gains = None

    def __init__(self, head_dim: int) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return ops.rotate(q, table), ops.rotate(k, table)


class SoftmaxAttention(nn.Module):
    """softmax(QKᵀ/√d) V, causal, with grouped key-value heads, and optionally

    a gate Y ⊙ σ(x W_g) on its output, one per element or head (arXiv 2505.06708), and a learned sink, one logit per
    head in the softmax's denominator. `first_layer` is the first layer of the model that has softmax attention.
    """

    role = "attention"

    def __init__(
        self,
        config: choices.SoftmaxAttention,
        anchors: choices.Anchors,
        layer: int,
        width: int,
        *,
        first_layer: int = 0,
        std: float,
        output_std: float,
    ) -> None:
        super().__init__()
        self.layer = layer
        shape = head_shape(config, width)
        gate = {"none": {}, "headwise": {"g": 1}, "elementwise": {"g": shape.head_dim}}[config.gate]
        self.head_width: dict[str, int] = dict.fromkeys("qkv", shape.head_dim) | gate
        self.rows = tuple(shape.heads[s] * w for s, w in self.head_width.items())
        self.project = Projection(width, sum(self.rows), std=std, parts=self.rows)
        sections = {s: (shape.heads[s], w) for s, w in self.head_width.items()}
        self.mix = build_mix(anchors, layer - first_layer, shape, sections, width, std=std)
        self.qk_norm = {"rms": QKNorm, "none": NoQKNorm}[config.qk_norm](shape.head_dim)
        self.sink = nn.Parameter(torch.empty(config.heads)) if config.sink == "learned" else None
        self.out = Projection(shape.rows("q"), width, std=output_std)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> KeyValueCache:
        """Room for the keys and values of `capacity` tokens in each of `batch` rows; `like` gives dtype and device."""
        heads, head_dim = self.rows[1] // self.head_width["k"], self.head_width["k"]
        return KeyValueCache(batch, capacity, heads, head_dim, like)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        own, anchors = self.mix(self.project(x), anchors, x, self.qk_norm, context.rotary)
        q, k = own["q"], own["k"]
        for name, projected in (("query", q), ("key", k), ("value", own["v"])):
            tap(f"attention.{self.layer}.{name}", projected)
        v, now = own["v"], context.now
        if now is None:
            y = attend(q, k, v, segments=context.segments, sink=self.sink)
        else:
            y = context.cache.attend(q, k, v, now, sink=self.sink)
        if "g" in own:
            gate = torch.sigmoid(own["g"])
            tap(f"attention.{self.layer}.gate", gate)
            y = y * gate
        return self.out(y.flatten(-2)), anchors

    @property
    def plain_heads(self) -> bool:
        """Whether decoding kernels may put the projected heads straight into the cache: no anchors are mixed in."""
        return self.mix.plain

    @property
    def query_heads(self) -> tuple[int, int]:
        """The number of query heads and their width."""
        width = self.head_width["q"]
        return self.rows[0] // width, width

    def readers(self) -> tuple[Tensor, ...]:
        """Every matrix [R, C] that reads the input."""
        return (self.project.weight, *self.mix.readers())

    def inner_edges(self, name: str) -> list[Edge]:
        """From values to output: attention averages them and the gate multiplies them, both channel by channel."""
        divide = self._divide_values()
        if divide is None:
            return []
        head_dim, kv = self.head_width["v"], self.rows[2]
        heads = self.rows[0] // head_dim
        served = torch.arange(heads) // (heads * head_dim // kv)
        channel = served[:, None] * head_dim + torch.arange(head_dim)
        return [Edge(f"{name}.values", (self.out.weight,), channel.flatten(), divide, self.out)]

    def _divide_values(self) -> Callable[[Tensor], None] | None:
        """Without a mixture the rows of W_v are divided; in one, the anchors serve all layers and only λ can be."""
        if not self.mix.mixes("v"):
            return partial(divide_rows, self.project.weight, sum(self.rows[:2]), self.rows[2])
        return self.mix.divide_values()
