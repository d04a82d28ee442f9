"""Causal softmax attention: project → mix anchors → qk-norm → rotate → attend → gate → out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from residua import ops
from residua.config import choices
from residua.errors import UserError
from residua.model.anchor_kinds import build_mix
from residua.model.anchor_source import HeadShape
from residua.model.anchors import FoldedMix, LayerPlace, Mix, QueryKeyNorm, RotaryTable, Unmixed, Write
from residua.model.body import Body
from residua.model.cache import KeyValueCache
from residua.model.context import Anchors, Context, Input, Reads, map_reads
from residua.model.equivalence import Edge, InitFidelity, divide_rows
from residua.model.norm import DyT
from residua.model.projection import BiasedProjection, Projection, is_watched, projection
from residua.model.rope import GROWING, grow_queries
from residua.model.sdpa import attend
from residua.model.taps import tap
from residua.ops._runtime.numeric import wide
from residua.ops.inference.reference import KEY_EPS


def head_shape(config: choices.SoftmaxAttention, width: int) -> HeadShape:
    """The heads of each projection: queries, keys and values, and the gate if it is elementwise."""
    kv = config.kv_heads or config.heads
    return HeadShape({"q": config.heads, "k": kv, "v": kv, "g": config.heads}, config.head_dim or width // config.heads)


def layer_place(
    config: choices.SoftmaxAttention,
    layer: int,
    layers: Sequence[int],
    width: int,
    *,
    std: float = 0.0,
    vocabulary: int = 0,
    taken: Sequence[str] = (),
) -> LayerPlace:
    """A layer's place among the softmax `layers` and the heads of its projection, for its anchors.

    The layer does not project heads that it takes (`taken`) from another layer.
    """
    shape = head_shape(config, width)
    gate = {"none": {}, "headwise": {"g": 1}, "elementwise": {"g": shape.head_dim}}[config.gate]
    widths = dict.fromkeys("qkv" if config.values == "projected" else "qk", shape.head_dim) | gate
    sections = {s: (shape.heads[s], w) for s, w in widths.items() if s not in taken}
    return LayerPlace(layers.index(layer), len(layers), shape, sections, width, std, vocabulary)


class QKNorm(QueryKeyNorm):
    """RMS over head_dim with a gain each for queries and keys (arXiv 2010.04245), then rotation by position."""

    def __init__(self, shape: HeadShape, config: choices.SoftmaxAttention) -> None:
        super().__init__(config.qk_eps)
        query, key = self._sizes(shape)
        self.query = nn.Parameter(torch.empty(query))
        self.key: nn.Parameter | None = nn.Parameter(torch.empty(key))
        self.reset_parameters()

    @staticmethod
    def _sizes(shape: HeadShape) -> tuple[int, int]:
        return shape.head_dim, shape.head_dim

    def reset_parameters(self) -> None:
        nn.init.ones_(self.query)
        if self.key is not None:
            nn.init.ones_(self.key)

    def drop_keys(self) -> None:
        self.key = None

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        assert self.key is not None
        return self.query, self.key

    @property
    def in_kernels(self) -> bool:
        return type(self) is QKNorm and self.eps == KEY_EPS

    def turn_queries(self, q: Tensor, table: RotaryTable) -> Tensor:
        return self._turn(q, self.query, table)

    def turn_keys(self, k: Tensor, table: RotaryTable) -> Tensor:
        assert self.key is not None
        return self._turn(k, self.key, table)

    def _turn(self, x: Tensor, gain: Tensor, table: RotaryTable) -> Tensor:
        return ops.norm_rotate(x, gain, *table, eps=self.eps)


class QKVNorm(QKNorm):
    """`QKNorm`, plus RMS over head_dim without a gain for values (Gemma 4)."""

    def norm_values(self, v: Tensor) -> Tensor:
        return ops.rms(v, eps=self.eps)


class JointQKNorm(QKNorm):
    """RMS over all query heads together, and over all key heads, each with a gain [H·D] (OLMo 2)."""

    @staticmethod
    def _sizes(shape: HeadShape) -> tuple[int, int]:
        return shape.rows("q"), shape.rows("k")

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a norm over all heads has no gain per head")

    def _turn(self, x: Tensor, gain: Tensor, table: RotaryTable) -> Tensor:
        return ops.rotate(ops.rms_norm(x.flatten(-2), gain, eps=self.eps).view_as(x), table)


class TanhQKNorm(QueryKeyNorm):
    """DyT over head_dim, each with its own α, gain and bias for queries and keys, then rotation by position."""

    def __init__(self, shape: HeadShape, config: choices.SoftmaxAttention) -> None:
        super().__init__(config.qk_eps)
        self.query, self.key = (DyT(choices.DyT(alpha=config.qk_alpha), shape.head_dim) for _ in range(2))

    def drop_keys(self) -> None:
        del self.key

    def turn_queries(self, q: Tensor, table: RotaryTable) -> Tensor:
        return ops.rotate(self.query(q), table)

    def turn_keys(self, k: Tensor, table: RotaryTable) -> Tensor:
        return ops.rotate(self.key(k), table)


class NoQKNorm(QueryKeyNorm):
    """Rotates queries and keys by position, nothing else."""

    gains = None
    in_kernels = True

    def __init__(self, shape: HeadShape, config: choices.SoftmaxAttention) -> None:
        super().__init__(config.qk_eps)

    def turn_queries(self, q: Tensor, table: RotaryTable) -> Tensor:
        return ops.rotate(q, table)

    def turn_keys(self, k: Tensor, table: RotaryTable) -> Tensor:
        return ops.rotate(k, table)


def _begin_projection(new: Projection, old: Projection, rows: Tensor) -> InitFidelity:
    """Copy these rows of another projection; the remaining rows are zero."""
    nn.init.zeros_(new.weight)
    new.weight[: len(rows)] = old.weight[rows]
    if isinstance(new, BiasedProjection):
        nn.init.zeros_(new.bias)
        if isinstance(old, BiasedProjection):
            new.bias[: len(rows)] = old.bias[rows]
    lost_bias = isinstance(old, BiasedProjection) and not isinstance(new, BiasedProjection)
    return InitFidelity.NOT if lost_bias else InitFidelity.EXACTLY


def _begin_qk_norm(new: nn.Module, old: nn.Module) -> InitFidelity:
    if type(new) is not type(old):
        return InitFidelity.NOT
    theirs = old.state_dict()  # may hold more: a layer that takes another layer's keys has no gain for them
    new.load_state_dict({name: theirs[name] for name in new.state_dict()})
    same_eps = not isinstance(new, QKNorm) or not isinstance(old, QKNorm) or new.eps == old.eps
    return InitFidelity.EXACTLY if same_eps else InitFidelity.UP_TO_EPS


def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """z = y − (y·v) v/‖v‖², where v is the value of the query's own token (XSA, arXiv 2603.09078).

    y [B, T, H, D] are the heads' outputs, v [B, T, H_kv, D] the values; H/H_kv consecutive heads share each value.
    """
    heads = wide(y).unflatten(2, (v.shape[2], -1))
    direction = normalize(wide(v), dim=-1).unsqueeze(3)
    without: Tensor = heads - (heads * direction).sum(-1, keepdim=True) * direction
    return without.flatten(2, 3).to(y.dtype)


NEW_SINK = -10.0

QK_NORMS: dict[str, Callable[[HeadShape, choices.SoftmaxAttention], QueryKeyNorm]] = {
    "rms": QKNorm,
    "rms_all": JointQKNorm,
    "rms_qkv": QKVNorm,
    "dyt": TanhQKNorm,
    "none": NoQKNorm,
}


class SoftmaxAttention(Body):
    """softmax(QKᵀ/√d) V, causal, with grouped key-value heads. Options:

    a gate Y ⊙ σ(x W_g) on its output, one per element or head (arXiv 2505.06708); a learned sink, one logit per head in
    the softmax's denominator; a sliding window; soft-capped scores c·tanh(s/c); biases; outputs without the direction
    of the token's own value (`remove_own_value`). `place` is the layer's place in the model.
    """

    role = "attention"
    takes_reads = True

    def __init__(
        self,
        config: choices.SoftmaxAttention,
        anchors: choices.AnchorChoice,
        layer: int,
        place: LayerPlace,
        *,
        output_std: float,
    ) -> None:
        super().__init__()
        self.layer = layer
        shape, width = place.shape, place.width
        self.head_width: dict[str, int] = {s: w for s, (_, w) in place.sections.items()}
        self.shape, self.rows = shape, tuple(shape.heads[s] * w for s, w in self.head_width.items())
        biased = config.bias != "none"
        self.project = projection(width, sum(self.rows), std=place.std, bias=biased, parts=self.rows)
        self.mix = build_mix(anchors, place)
        self.qk_norm = QK_NORMS[config.qk_norm](shape, config)
        if "k" not in self.head_width:
            self.qk_norm.drop_keys()
        self.window, self.softcap = config.window_at(layer), config.softcap
        local = self.window is not None and config.local_rope_theta is not None
        unturned = layer in (config.unturned_layers or ())
        self.table = slice(-2, None) if unturned else slice(2, 4) if local else slice(0, 2)
        self.growth, self.place = config.query_growth, 2 if config.local_rope_theta is None else 4
        self.steady = config.rope_scaling is None or config.rope_scaling.kind not in GROWING
        self.sink = nn.Parameter(torch.empty(config.heads)) if config.sink == "learned" else None
        self.removes_own, self.values_are_keys = config.own_value == "removed", config.values == "keys"
        self.out = projection(shape.rows("q"), width, std=output_std, bias=config.bias == "all")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def new_cache(self, batch: int, capacity: int, like: Tensor) -> KeyValueCache:
        return KeyValueCache(batch, capacity, self.shape.heads["k"], self.shape.head_dim, like)

    def forward(self, x: Input, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        assert context.rotary is not None
        cos, sin = context.rotary[self.table]
        project: Any = self.project
        if isinstance(x, Reads):  # the mixture sees q's input
            project, x = partial(self.projected, x), x.q
        (q, k, v, gate), anchors = self.mix(project, x, anchors, self.qk_norm, (cos, sin), context)
        if self.growth is not None:
            q = grow_queries(q, self.growth, context.rotary[self.place], context.segments)
        if context.sharing is not None and isinstance(self.mix, Write):
            anchors = context.sharing.share(anchors)
        self.mix.publish(self.layer, x)
        for name, heads in (("query", q), ("key", k), ("value", v)):
            tap(f"attention.{self.layer}.{name}", heads)
        now = context.now
        if now is None:
            attending = context.across or attend
            y = attending(q, k, v, segments=context.segments, **self.scoring)
        else:
            y = context.cache.attend(q, k, v, now, **self.scoring)
        if self.removes_own:
            y = remove_own_value(y, v)
        if gate is not None:
            tap(f"attention.{self.layer}.gate", gate.values)
            y = gate.apply(y)
        return self.out(y.flatten(-2)), anchors

    @property
    def scoring(self) -> dict[str, Any]:
        """The arguments of `attend` that change the weights."""
        return {"sink": self.sink, "window": self.window, "softcap": self.softcap}

    def projected(self, x: Input, *_: Tensor) -> Tensor:
        """The fused projection [B, T, R] of one input, or of separate inputs for q, k and v; the gate reads q's."""
        if isinstance(x, Tensor):
            whole: Tensor = self.project(x)
            return whole
        # `config/model.py` refuses several reads in a model whose layers take keys or values from others
        places = [{"q": 0, "k": 1, "v": 2, "g": 0}[s] for s in self.head_width]
        replaced = type(self.project) not in (Projection, BiasedProjection)
        if replaced or is_watched(self.project) or type(self.project.weight) not in (nn.Parameter, Tensor):
            every = map_reads(self.project, x)
            parts = [every[place].split(self.rows, -1)[i] for i, place in enumerate(places)]
            return torch.cat(parts, -1)
        weights, bias = self.project.weight.split(self.rows), self.project.bias
        biases = [None] * len(places) if bias is None else bias.to(weights[0].dtype).split(self.rows)
        parts = [linear(x[place], *part) for place, *part in zip(places, weights, biases, strict=True)]
        return torch.cat(parts, -1)

    @torch.no_grad()
    def begin_as(self, old: nn.Module) -> InitFidelity:
        """Start as another attention with the same heads.

        A new gate starts at σ(0) = ½ with W_g = 0, and W_out is doubled. A headwise gate is repeated for the elements
        of its head. A new bias starts at zero. A new sink starts at `NEW_SINK`, which takes about e^NEW_SINK off the
        softmax: almost nothing, but with a gradient. Anchors have their own `begin_as`.
        """
        if not isinstance(old, SoftmaxAttention) or self._heads != old._heads:
            raise UserError(
                "model.attention.heads, kv_heads or head_dim differ from the initial model: keep its values."
            )
        ours, theirs = "g" in self.head_width, "g" in old.head_width
        new_gate, lost_gate = ours and not theirs, theirs and not ours
        lost_values = self.values_are_keys and not old.values_are_keys
        lost = lost_gate or lost_values or self.removes_own != old.removes_own
        kept = [
            InitFidelity.NOT if lost else InitFidelity.EXACTLY,
            _begin_projection(self.project, old.project, self._rows_of(old)),
            _begin_projection(self.out, old.out, torch.arange(len(old.out.weight), device=old.out.weight.device)),
            _begin_qk_norm(self.qk_norm, old.qk_norm),
        ]
        if new_gate:
            self.out.weight.mul_(2)
        if self.sink is not None:
            self.sink.copy_(old.sink) if old.sink is not None else nn.init.constant_(self.sink, NEW_SINK)
        if (self.sink is None) != (old.sink is None):
            kept.append(InitFidelity.NOT if self.sink is None else InitFidelity.NEARLY)
        return max(kept)

    @property
    def _heads(self) -> tuple[dict[str, int], int]:
        return dict(self.shape.heads), self.shape.head_dim

    def _rows_of(self, old: SoftmaxAttention) -> Tensor:
        """The rows of the old projection to copy; its gate rows are repeated if the new gate is finer."""
        ours, theirs = self.head_width.get("g"), old.head_width.get("g")
        every = torch.arange(len(old.project.weight), device=old.project.weight.device)
        places = dict(zip(old.head_width, every.split(old.rows), strict=True))
        if old.values_are_keys:
            places["v"] = places["k"]
        if any(s not in places for s in self.head_width if s != "g"):
            raise UserError(
                "the layers of the initial model share keys or values, so they have no separate ones to continue "
                "with: keep model.anchors, or start from another run."
            )
        rows = torch.cat([places[s] for s in self.head_width if s != "g"])
        if ours is None or theirs is None:
            return rows
        if ours < theirs:
            raise UserError(
                "model.attention.gate = 'headwise' has one gate per head, but the initial model has one per "
                "element: keep 'elementwise'."
            )
        return torch.cat([rows, places["g"].repeat_interleave(ours // theirs)])

    @property
    def direct_to_cache(self) -> bool:
        """Whether decoding kernels may write the projected heads straight to the cache: anchors are mixed into values
        only."""
        return self.mix.only_values and self.attends_to_all

    @property
    def attends_to_all(self) -> bool:
        """Whether decoding kernels can compute this attention over the whole cache.

        This requires a QK-norm that kernels support, angles independent of the length, no window, queries that do not
        grow with position, and uncapped scores. Values must be projected, and outputs must keep their own values.
        """
        whole = self.window is None and self.softcap is None and self.growth is None and not self.removes_own
        return self.qk_norm.in_kernels and self.steady and whole and "v" in self.head_width

    def own_values(self, projected: Tensor) -> Tensor:
        """The values [..., H_kv, D] of a fused projection [..., R], as a view."""
        first = sum(self.rows[:2])
        values: Tensor = projected[..., first : first + self.rows[2]].unflatten(-1, (-1, self.head_width["v"]))
        return values

    def anchor_mix(self) -> Unmixed:
        return self.mix

    @property
    def query_heads(self) -> tuple[int, int]:
        width = self.head_width["q"]
        return self.rows[0] // width, width

    def readers(self) -> tuple[Tensor, ...]:
        return (self.project.weight, *self.mix.readers())

    def inner_edges(self, name: str) -> list[Edge]:
        """From values to output: attention averages them and the gate multiplies them, both channel by channel."""
        free = "v" in self.head_width and not self.removes_own and not isinstance(self.qk_norm, QKVNorm)
        divide = self._divide_values() if free else None
        if divide is None:
            return []
        head_dim, heads = self.shape.head_dim, self.shape.heads["q"]
        served = torch.arange(heads) // (heads // self.shape.heads["v"])
        channel = served[:, None] * head_dim + torch.arange(head_dim)
        return [Edge(f"{name}.values", (self.out.weight,), channel.flatten(), divide, self.out)]

    def _divide_values(self) -> Callable[[Tensor], None] | None:
        """Without anchors, divides the rows of W_v; with anchors, which all layers share, only λ can be divided."""
        if "v" not in self.mix.pathways:
            return partial(divide_rows, self.project, sum(self.rows[:2]), self.rows[2])
        return self.mix.divide_values()


@torch.no_grad()
def fold_mixing(model: nn.Module) -> int:
    """Fold every static λ2 of a model into its projections, in place; returns the number of layers changed."""
    # skip projections in low precision, whose rows are already rounded
    attentions = [
        body
        for body in model.modules()
        if isinstance(body, SoftmaxAttention) and type(body.mix) is Mix and type(body.project) is Projection
    ]
    for body in attentions:
        assert isinstance(body.mix, Mix)
        body.project.weight.copy_(body.mix.folded(body.project.weight))
        body.mix = FoldedMix(body.mix)
    return len(attentions)
