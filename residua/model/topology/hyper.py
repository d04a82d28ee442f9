"""Hyper-connections: HC (arXiv 2409.19606), mHC (2512.24880) and mHC-lite (2601.05732).

All three have n streams X [B, T, n, C] and mix them by an n×n matrix. They read a sublayer's input as a weighted sum of
the streams, and write its output back with one weight per stream. They differ in the source of the weights. The
convention is always `mix[out, in]`: X'_out = Σ_in mix[out, in] X_in + post_out · y, h = Σ_in pre_in X_in.

The streams start as n copies of the embedding, and the final norm reads their sum.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.body import reset
from residua.model.equivalence import InitFidelity, take_parameters
from residua.model.taps import tap
from residua.model.topology.base import Initialization, State, Topology
from residua.model.topology.facts import Ablations, Costs, SourceNames, add_rows, reads_changed, stream_rows
from residua.ops._runtime.numeric import wide
from residua.ops.hyper_connection import manifold_weights, read_weights
from residua.ops.hyper_connection.reference import project


class Streams(Topology):
    """The part that HC, mHC and mHC-lite share."""

    junctions: nn.ModuleList

    def __init__(self, streams: int, sublayers: int) -> None:
        super().__init__()
        self.streams, self.last = streams, sublayers - 1

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        # the n copies count as one write of the embedding to n empty streams
        X = x[..., None, :].expand(*x.shape[:-1], self.streams, -1)
        like = wide(x[..., :0])
        with full_precision(x):
            nothing = like.new_zeros(self.streams, self.streams)
            return self._junction(0, x, X, like.new_ones(self.streams), nothing, *self._first_logits(x))

    def _first_logits(self, x: Tensor) -> tuple[Tensor, ...]:
        """The logits for the first read, if it needs some before the streams are opened."""
        return ()

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        X, *logits = state
        with full_precision(y):
            post, mix = cast(Junction, self.junctions[k]).write(*logits)
            tap(f"depth.{k}.mix", mix)
            if k < self.last:
                h, state = self._junction(k + 1, y, X, post, mix, *logits)
            else:  # the final norm reads the sum of the streams
                h, X, _ = ops.hyper_step(X, y, post, mix, post.new_ones(self.streams))
                state = (X,)
        tap(f"depth.{k}.streams", state[0])
        return h, state

    def _junction(
        self, k: int, y: Tensor, X: Tensor, post: Tensor, mix: Tensor, *logits: Tensor
    ) -> tuple[Tensor, State]:
        """Write y, then read the input of sublayer k; `logits` are those of this write, if its weights are dynamic.

        The state is X and, for dynamic weights, the logits for the write after sublayer k.
        """
        weights = cast(Junction, self.junctions[k]).read()
        h, X, after = ops.hyper_step(X, y, post, mix, weights.bias, **weights.projection)
        tap(f"depth.{k}.pre", lambda: weights.of(after))
        return h, (X, after) if weights.projection else (X,)

    def costs(self, sublayers: int, width: int) -> Costs:
        junction = stream_rows(self.streams)
        floor = add_rows([junction] * sublayers)
        # of the copy bandwidth, reached by two-pass and single-pass kernels on an H200 (docs/lab/kernels.md)
        share = 0.42 if self.streams <= 4 else 0.24
        products = (
            width * len(self.junctions) * self.streams * (self.streams + 2)
        )  # a read, a write and a mix of n streams
        kept = junction.forward - 1
        return Costs(lambda: floor, floor.total, kept_widths=kept, bandwidth_share=share, products=products)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(False, lambda reader, source: f"stream {source}", lambda reader: reader % self.streams)

    def ablations(self) -> Ablations:
        """The first reader's streams are copies of each other, and the last reader sums them."""
        return Ablations(
            weighing_readers=range(1, self.last + 1),
            with_equal_weights=lambda readers: reads_changed(self, partial(_equal_read, readers)),
            streams=self.streams,
            without_stream=lambda stream: reads_changed(self, partial(_unread, stream)),
        )


def _equal_read(readers: Sequence[int], k: int, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Replace pre_i by the token's mean of pre, which preserves their sum."""
    if k + 1 not in readers:
        return h
    share = wide(seen[f"depth.{k + 1}.pre"]).mean(-1, keepdim=True)
    return (share * wide(seen[f"depth.{k}.streams"]).sum(-2)).to(h.dtype)


def _unread(index: int, k: int, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """The read after sublayer k without one stream."""
    stream = seen[f"depth.{k}.streams"][..., index, :]
    pre = seen.get(f"depth.{k + 1}.pre")
    return h - (stream if pre is None else pre[..., index, None].to(stream.dtype) * stream)


def full_precision(x: Tensor) -> torch.autocast:
    """Disable autocast: the streams' weights are small matrix products that must not be rounded to bfloat16."""
    return torch.autocast(x.device.type, enabled=False)


class ReadWeights(NamedTuple):
    """How `ops.hyper_step` computes pre, and with it the logits of post and mix."""

    bias: Tensor
    projection: dict[str, Any]
    """scale, phi and norm; empty if pre is the bias."""

    def of(self, logits: Tensor) -> Tensor:
        """pre [..., n]."""
        scale, norm = self.projection.get("scale"), self.projection.get("norm", "none")
        return read_weights(logits, self.bias, scale, norm)


class Junction(nn.Module):
    """The weights around one sublayer, computed from the streams that the sublayer reads."""

    @abstractmethod
    def read(self) -> ReadWeights:
        """The weights that pre is computed from."""

    @abstractmethod
    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        """post [..., n] and mix [..., out, in], from the logits that the read computed, if any."""


class StaticJunction(Junction):
    """HC with static weights: post = 1, pre = e_{k mod n}, mix = I at the start, which is the pre-norm model.

    `mix` free: n×n parameters. cyclic: Σ_j softmax(c)_j Shift^j with n parameters c, near the identity at first; doubly
    stochastic, so equal streams stay equal. identity: no parameters.
    """

    OTHER_SHIFTS = -5.0

    def __init__(self, k: int, streams: int, width: int, mix: str = "free") -> None:
        super().__init__()
        self.k, self.streams = k, streams
        self.pre = nn.Parameter(torch.empty(streams))
        self.post = nn.Parameter(torch.empty(streams))
        size = {"free": (streams, streams), "cyclic": (streams,), "identity": None}[mix]
        self.mix = None if size is None else nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.pre)
        with torch.no_grad():
            self.pre[self.k % self.streams] = 1.0
        nn.init.ones_(self.post)
        if self.mix is not None and self.mix.dim() == 2:
            nn.init.eye_(self.mix)
        elif self.mix is not None:
            nn.init.constant_(self.mix, self.OTHER_SHIFTS)
            nn.init.zeros_(self.mix[:1])

    def read(self) -> ReadWeights:
        return ReadWeights(self.pre, {})

    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        return wide(self.post), self.static_mix()

    def static_mix(self) -> Tensor:
        """mix [out, in], the same for every token."""
        if self.mix is not None and self.mix.dim() == 2:
            return wide(self.mix)
        streams = torch.arange(self.streams, device=self.post.device)
        shifts = (streams[:, None] - streams) % self.streams
        return (shifts == 0).to(wide(self.post).dtype) if self.mix is None else wide(self.mix).softmax(-1)[shifts]


class DynamicMaps(nn.Module):
    """The maps W from normalised streams to weights, zero at the start, and their scales s = 0.01."""

    SCALE = 0.01

    def __init__(self, streams: int, width: int, mix: str = "free") -> None:
        super().__init__()
        self.pre = nn.Parameter(torch.empty(width))
        self.post = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(width, streams)) if mix == "free" else None
        self.alpha = nn.Parameter(torch.empty(()))
        self.beta = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.pre, self.post, self.mix):
            if weight is not None:
                nn.init.zeros_(weight)
        nn.init.constant_(self.alpha, self.SCALE)
        nn.init.constant_(self.beta, self.SCALE)

    def rows(self, pre: Tensor) -> Tensor:
        """The maps of a read, `pre` [C], and of this write, stacked as rows."""
        return torch.cat([pre[None], self.post[None], *([] if self.mix is None else [self.mix.T])])


class DynamicJunction(StaticJunction):
    """HC as published: each weight is static + s · tanh(RMS(X) W). A mix that is not free stays static."""

    def __init__(self, k: int, streams: int, width: int, mix: str = "free") -> None:
        super().__init__(k, streams, width, mix)
        self.maps = DynamicMaps(streams, width, mix)

    def read(self) -> ReadWeights:
        maps = self.maps
        return ReadWeights(self.pre, {"scale": maps.alpha, "phi": maps.rows(maps.pre), "norm": "each"})

    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        post, mix = torch.tanh(logits[0][..., 1]), self.static_mix()
        if self.maps.mix is not None:
            # the paper's A_r [in, out] acts transposed: H' = A_rᵀ H
            mix = mix + self.maps.alpha * torch.tanh(logits[0][..., 2:]).transpose(-1, -2)
        return self.post + self.maps.beta * post, mix


class HyperConnections(Streams):
    """HC: h = A_mᵀ H, H' = B y + A_rᵀ H, with static or dynamic weights; A_r may also be the identity or cyclic.

    The output projections start √n times as large, since the head sees the sum of n streams.
    """

    def __init__(self, config: choices.HyperConnections | choices.SinglePassHyper, sublayers: int, width: int) -> None:
        super().__init__(config.streams, sublayers)
        junction = {"static": StaticJunction, "dynamic": DynamicJunction}[config.weights]
        self.junctions = nn.ModuleList(junction(k, config.streams, width, config.mix) for k in range(sublayers))

    def initialization(self) -> Initialization:
        return Initialization(
            output_gain=math.sqrt(self.streams),
            init_as_additive=self._init_as_additive,
            sum_factors=[1.0] * len(self.junctions) + [float(self.streams)],
            begin_as=self._begin_as,
        )

    def _init_as_additive(self) -> InitFidelity:
        """Every stream holds the sum and each sublayer reads one of them; the final norm gets n times the sum."""
        reset(self.junctions)
        return InitFidelity.UP_TO_EPS

    def _begin_as(self, old: HyperConnections) -> InitFidelity:
        """Dynamic weights start as static ones if their maps are zero."""
        pairs = list(zip(self.junctions, old.junctions, strict=True))
        if not all(type(new) is DynamicJunction and type(theirs) is StaticJunction for new, theirs in pairs):
            take_parameters(self, old)
            return InitFidelity.NOT
        for new, theirs in pairs:
            take_parameters(new, theirs, but="maps")
        return InitFidelity.EXACTLY

    def costs(self, sublayers: int, width: int) -> Costs:
        """Dynamic maps multiply every stream."""
        maps = (junction.maps for junction in self.junctions if isinstance(junction, DynamicJunction))
        again = (self.streams - 1) * sum(p.numel() for part in maps for p in part.parameters() if p.dim())
        costs = super().costs(sublayers, width)
        return replace(costs, products=costs.products + again)


class SinglePassHyper(HyperConnections):
    """HC whose sublayer k+1 reads with weights from the streams that sublayer k read, before its output is written.

    One pass over the streams then computes all weights of a junction: pre of the next read, post and mix of this write.
    h and the new streams need no second pass. The first sublayer's weights come from the copies of the embedding.
    DeepSeek-V4.1 does the same with mHC's weights (docs/reference/topology-notes.md).
    """

    def _first_logits(self, x: Tensor) -> tuple[Tensor, ...]:
        first = cast(DynamicJunction, self.junctions[0])
        return (project(x[..., None, :], first.maps.pre[None], "each").expand(*x.shape[:-1], self.streams, -1),)

    def _junction(
        self, k: int, y: Tensor, X: Tensor, post: Tensor, mix: Tensor, *logits: Tensor
    ) -> tuple[Tensor, State]:
        """As in the base class, but `logits` begin with those of this read.

        The new logits are those of the next read, then those of the write after sublayer k.
        """
        junction, following = (cast(DynamicJunction, self.junctions[i]) for i in (k, min(k + 1, self.last)))
        pre = read_weights(logits[0], junction.pre, junction.maps.alpha, "each")
        tap(f"depth.{k}.pre", pre)
        h, X, after = ops.single_pass_step(X, y, post, mix, pre, junction.maps.rows(following.maps.pre))
        return h, (X, after)


class SinkhornMixing(nn.Module):
    """post = 2 sigmoid, and mix = Sinkhorn(exp(res)), res [..., n²].

    Off-diagonal logits start at −5: close to the identity, but with a gradient (at −8 it is known to vanish).
    """

    OFF_DIAGONAL = -5.0

    def __init__(self, streams: int, iterations: int) -> None:
        super().__init__()
        self.streams, self.iterations = streams, iterations
        self.logits = streams * streams

    def start(self) -> Tensor:
        return (self.OFF_DIAGONAL * (1 - torch.eye(self.streams))).flatten()

    def forward(self, logits: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return manifold_weights(logits, alpha, bias, self.streams, self.iterations)


class PermutationMixing(nn.Module):
    """post = 2 sigmoid, and mix = Σ_k softmax(res)_k P_k over the n! permutation matrices, so doubly stochastic."""

    OTHERS = -8.0
    BITS = 2
    """Bits of an index below n ≤ 4; n! indices fit into 64 bits."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams, self.logits = streams, math.factorial(streams)
        shuffled = list(permutations(range(streams)))
        # the columns of the ones in row i of all P_k; a buffer would get lost between the meta device and a file
        self.columns = [sum(p[i] << self.BITS * k for k, p in enumerate(shuffled)) for i in range(streams)]

    def basis(self, like: Tensor) -> Tensor:
        """P [n!, n, n], on the device of `like`."""
        shifts = self.BITS * torch.arange(self.logits, device=like.device)
        columns = torch.stack([(row >> shifts) % 2**self.BITS for row in self.columns], -1)
        return (columns[..., None] == torch.arange(self.streams, device=like.device)).to(like.dtype)

    def start(self) -> Tensor:
        bias = torch.full((self.logits,), self.OTHERS)
        bias[0] = 0.0  # permutations() yields the identity first
        return bias

    def forward(self, logits: Tensor, alpha: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (self.streams, self.streams, self.logits)
        _, post, res = (a * z + b for a, z, b in zip(alpha, logits.split(sizes, -1), bias.split(sizes), strict=True))
        return 2 * torch.sigmoid(post), torch.einsum("...k,kij->...ij", res.softmax(-1), self.basis(res))


class ManifoldJunction(Junction):
    """[pre, post, res] = α · (vec(X) φ)/rms(vec(X)) + b;  pre = sigmoid, post and mix by `mixing`.

    φ starts at zero, α at 0.01. The papers do not specify the biases. Ours (±1) favour one stream per sublayer in turn,
    so that streams that start as equal copies can diverge.
    """

    SCALE = 0.01
    FAVOUR = 1.0
    OTHERS_READ = 0.05

    def __init__(self, k: int, streams: int, width: int, mixing: SinkhornMixing | PermutationMixing) -> None:
        super().__init__()
        self.k, self.streams, self.mixing = k, streams, mixing
        self.sizes = (streams, streams, mixing.logits)
        self.phi = nn.Parameter(torch.empty(sum(self.sizes), streams * width))
        self.alpha = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.phi)
        nn.init.constant_(self.alpha, self.SCALE)
        favour = torch.full((self.streams,), -self.FAVOUR)
        favour[self.k % self.streams] = self.FAVOUR
        with torch.no_grad():
            self.bias.copy_(torch.cat([favour, favour, self.mixing.start()]))

    @torch.no_grad()
    def init_as_additive(self) -> None:
        """post = 1 and Σ pre = 1, mostly on one stream in turn; any doubly stochastic mix leaves equal streams equal.

        A single stream is read with pre = ½.
        """
        reset(self)
        n, others = self.streams, self.OTHERS_READ
        nn.init.constant_(self.bias[: 2 * n], 0.0)
        if n > 1:
            nn.init.constant_(self.bias[:n], math.log(others / (1 - others)))
            nn.init.constant_(self.bias[self.k % n], math.log(1 / ((n - 1) * others) - 1))

    def read(self) -> ReadWeights:
        projection = {"scale": self.alpha[0], "phi": self.phi, "norm": "all"}
        return ReadWeights(self.bias[: self.streams], projection)

    def write(self, *logits: Tensor) -> tuple[Tensor, Tensor]:
        post, mix = self.mixing(logits[0], self.alpha, self.bias)
        return post, mix


class ManifoldHyper(Streams):
    """mHC: X' = H_res X + H_postᵀ f(H_pre X); Sinkhorn makes H_res doubly stochastic, preserving the streams' mean."""

    def __init__(self, config: choices.ManifoldHyper | choices.ManifoldHyperLite, sublayers: int, width: int) -> None:
        super().__init__(config.streams, sublayers)
        junctions = (ManifoldJunction(k, config.streams, width, self._mixing(config)) for k in range(sublayers))
        self.junctions = nn.ModuleList(junctions)

    def _mixing(self, config: Any) -> SinkhornMixing | PermutationMixing:
        return SinkhornMixing(config.streams, config.iterations)

    def initialization(self) -> Initialization:
        read = 1.0 if self.streams > 1 else 0.5
        factors = [read] * len(self.junctions) + [float(self.streams)]
        return Initialization(init_as_additive=self._init_as_additive, sum_factors=factors)

    def _init_as_additive(self) -> InitFidelity:
        """Every stream holds the sum; the final norm gets n times the sum."""
        for junction in self.junctions:
            cast(ManifoldJunction, junction).init_as_additive()
        return InitFidelity.UP_TO_EPS


class ManifoldHyperLite(ManifoldHyper):
    """mHC-lite: H_res is a convex combination of permutations, for at most 4 streams."""

    def _mixing(self, config: Any) -> SinkhornMixing | PermutationMixing:
        return PermutationMixing(config.streams)
