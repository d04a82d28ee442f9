"""Launching whole layers: requirements, and the buffers, addresses and counts that persist between launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, device_guard, next_power_of_2
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors, supports
from residua.ops.inference.reference import GATED, KEY_EPS

kernels = Kernels("residua.ops.whole_layers.kernels")

MOST_ROWS = 2
"""The kernel processes rows sequentially: with more of them, one launch per operation for all rows is faster."""
MOST_STREAMS = 4
WARPS = 8
LINE = 256
SPARE = 4
"""Programs without weights, which prepare junctions; each reads a share of the sources."""
SPLITS = 8
"""Parts that a head's slots are split into."""
SLOTS_HELD = 8192
"""Elements of the keys in a tile of slots."""
MOST_HELD = 160
"""Most registers per thread that may hold weights."""


class Junctions(NamedTuple):
    """How sublayers are joined; `kind` is sum, read or gate.

    Reads have blocks of `size` sublayers. Gates have `streams` streams, and each junction from number `streams` on has
    a gate query and bias. `queries` [C] belong to the reads or pools of every junction but the first.
    """

    kind: str
    queries: Sequence[Tensor] = ()
    size: int = 1
    streams: int = 1
    gates: Sequence[tuple[Tensor, Tensor]] = ()
    competitive: bool = True


class Shape(NamedTuple):
    """The sizes that all layers share, and the plain numbers of `Junctions`.

    `gate` is the width of a head's gate, 0 without one. `mixed` says where anchors are mixed in: nowhere; into values,
    from the first layer's values; or into all heads, from `Layers.anchor`. `network` is the width of the network that
    computes γ, 0 for static λ.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    kind: str
    eps: float
    junction: str = "sum"
    streams: int = 1
    size: int = 1
    competitive: bool = True
    gate: int = 0
    mixed: str = "none"
    network: int = 0

    @property
    def projected(self) -> int:
        """The number of rows of the fused projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim + self.heads * self.gate

    @property
    def anchored(self) -> int:
        """The number of mixed channels."""
        return self.projected if self.mixed == "heads" else self.kv_heads * self.head_dim


class Layer(NamedTuple):
    """A layer's matrices, all of one dtype, its caches [B, S, H_kv, D], and W1 of the network that computes γ."""

    project: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor
    network: Tensor | None = None

    @property
    def matrices(self) -> list[Tensor]:
        return [self.project, self.out, self.up, self.down, *([] if self.network is None else [self.network])]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the order of the address table."""
        return [tensor for tensor in self if tensor is not None]


class Vectors(NamedTuple):
    """Small parameters in float32.

    Per junction: gain, query and gate query [J, 3, C], gate biases [J, n + 1]. Per layer: the gains of queries and keys
    [L, 2, D], or None. Then cos and sin [positions, D/2]. With anchors, per layer: λ1 and λ2 of the mixed channels and,
    if λ is dynamic, W2 and b [8, E + 1], two rows for each of q, k, v and g.
    """

    junctions: Tensor
    biases: Tensor
    gains: Tensor | None
    cos: Tensor
    sin: Tensor
    mixing: Tensor | None = None


def serves(shape: Shape, layers: Sequence[Layer]) -> bool:
    """Whether the kernels support these layers: few rows, dense tensors of one dtype, weights that fit in registers."""
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    first = layers[0].keys
    caches = {(t.shape, t.stride()) for layer in layers for t in (layer.keys, layer.values)}
    alike = len(caches) == 1 and len({t.dtype for t in tensors}) == 1
    dense = all(t.is_contiguous() for layer in layers for t in layer.matrices) and first.stride(3) == 1
    aligned = all(t.data_ptr() % 16 == 0 and t.shape[-1] % 8 == 0 for t in tensors)
    few = len(first) <= min(MOST_ROWS, _division(first)[0]) and shape.streams <= MOST_STREAMS
    return alike and dense and aligned and few and _held(shape, first) <= MOST_HELD and supports(*tensors)


def _division(x: Tensor) -> tuple[int, int]:
    """The numbers of programs with and without weights."""
    programs = multiprocessors(x)
    spare = SPARE if programs > 4 * SPARE else 1
    return programs - spare, spare


def _held(shape: Shape, x: Tensor) -> int:
    """The registers per thread that hold weights, in the phase that needs most."""
    work, (width, attended) = _division(x)[0], (shape.width, shape.heads * shape.head_dim)
    phases = [
        ((shape.projected, shape.network), width),
        ((width,), attended),
        ((shape.hidden,) * (2 if shape.kind in GATED else 1), width),
        ((width,), shape.hidden),
    ]
    each = (sum(cdiv(cdiv(n, work), WARPS) for n in rows) * cdiv(columns, line(width)) for rows, columns in phases)
    return max(each) * line(width) * x.element_size() // (32 * 4)


def line(width: int) -> int:
    """Channels of a line of weights: in bfloat16, 16 bytes per thread of a warp; fewer for narrower rows."""
    return min(LINE, next_power_of_2(width))


class Layers:
    """The layers of a model and their final norm, for one cache. Owns the state between phases and all address tables.

    Write the embedded tokens [M, C] to `y` and, if all heads are mixed, their anchors to `anchor`. Then call it with
    the number of tokens in each row's cache.
    """

    def __init__(self, shape: Shape, layers: Sequence[Layer], vectors: Vectors) -> None:
        self.shape, self.layers, self.vectors = shape, layers, vectors
        like = layers[0].keys
        rows, width, n = len(like), shape.width, shape.streams
        slots = {"sum": 2, "read": 3 + cdiv(2 * len(layers), shape.size), "gate": 2 * n}[shape.junction]
        spare = _division(like)[1]
        ready = {"sum": 1, "read": spare * rows * (width + 1), "gate": rows * n * (n + 5) // 2}[shape.junction]
        shares = rows * shape.heads * SPLITS
        self.y, self.normed = like.new_empty(rows, width), like.new_empty(rows, width)
        self._state = like.new_zeros(slots, rows, width)
        self._ready = like.new_zeros(ready, dtype=torch.float32)
        self._projected = like.new_empty(rows, shape.projected + shape.network)
        self.anchor = like.new_zeros(rows, shape.anchored)
        self._part = like.new_empty(shares, shape.head_dim, dtype=torch.float32)
        self._lse = like.new_empty(shares, dtype=torch.float32)
        self._hidden = like.new_empty(rows, shape.hidden)
        self._count = torch.zeros(2, dtype=torch.int32, device=like.device)
        addresses = [[tensor.data_ptr() for tensor in layer.tensors] for layer in layers]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=like.device)
        self._settings = self._sizes()

    def _sizes(self) -> dict[str, Any]:
        shape, like = self.shape, self.layers[0].keys
        work, spare = _division(like)
        lanes = next_power_of_2(shape.head_dim)
        sizes = {
            "M": len(like), "C": shape.width, "HEADS": shape.heads, "KV": shape.kv_heads, "D": shape.head_dim,
            "LANES": lanes, "GATE": shape.gate, "E": shape.network, "LANES_E": next_power_of_2(max(1, shape.network)),
            "HIDDEN": shape.hidden, "KIND": shape.kind, "NORM": self.vectors.gains is not None, "MIXED": shape.mixed,
            "JUNCTION": shape.junction, "N": shape.streams, "SIZE": shape.size, "COMPETITIVE": shape.competitive,
            "WIDE": next_power_of_2(shape.width), "WORK": work, "SPARE": spare, "ROWS": WARPS, "SPLITS": SPLITS,
            "SLOTS": max(16, SLOTS_HELD // lanes), "LINE": line(shape.width),
        }  # fmt: skip
        return sizes if INTERPRETED else sizes | {"num_warps": WARPS, "num_stages": 1}

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the final normed state [M, C] of `y`, and write the new token's heads to the cache.

        The launch is cooperative: the driver guarantees that all programs run at once. Otherwise two models that decode
        in parallel could each occupy some of the multiprocessors and deadlock waiting for the rest.
        """
        if INTERPRETED:
            return self.in_phases(lengths)
        with device_guard(self.y):
            self._launch(lengths, 0, len(self.layers), -1, launch_cooperative_grid=True)
        return self.normed

    def in_phases(self, lengths: Tensor) -> Tensor:
        """Like a call, with one launch per phase: the interpreter runs programs one at a time, so none can wait."""
        count = len(self.layers)
        with device_guard(self.y):
            for layer in range(count):
                for phase in range(5):
                    self._launch(lengths, layer, layer + 1, phase)
            self._launch(lengths, count, count, 5)
        return self.normed

    def _launch(self, lengths: Tensor, first: int, last: int, only: int, **settings: Any) -> None:
        shape, vectors, keys = self.shape, self.vectors, self.layers[0].keys
        kernels.layers_kernel[(sum(_division(keys)),)](
            self._table, vectors.junctions, vectors.biases, self._lse if vectors.gains is None else vectors.gains,
            vectors.cos, vectors.sin, self._lse if vectors.mixing is None else vectors.mixing, lengths, self.y,
            self._state, self._ready, self._projected, self.anchor, self._part, self._lse, self._hidden, self.normed,
            self._count, first, last, shape.eps, KEY_EPS, shape.head_dim**-0.5, shape.width**-0.5, *keys.stride()[:3],
            ONLY=only, **self._settings, **settings,
        )  # fmt: skip
