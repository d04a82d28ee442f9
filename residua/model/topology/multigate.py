"""Multi-Gate Residuals (arXiv 2605.23259), and the highway network that they generalise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.config.topologies import depth_bias, gate_bias, lerping_sublayers
from residua.errors import UserError
from residua.model.equivalence import InitFidelity
from residua.model.taps import tap
from residua.model.topology.base import (
    Boundary,
    FromEmbedding,
    Initialization,
    Items,
    Recovery,
    State,
    reentrant_checkpoint,
)
from residua.model.topology.facts import (
    Ablations,
    Costs,
    SourceNames,
    add_rows,
    junctions_skipped,
    parameters_set,
    pool_rows,
    reads_changed,
    stream_rows,
)
from residua.ops._runtime.numeric import wide
from residua.ops.multi_gate.inversion import amplification, junctions_to_keep

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.model.topology.inference import InferenceTopology


class Pool(nn.Module):
    """h = Σ a_i s_i with a = softmax_i( w2 · RMS(s_i)/√C ); w2 starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, streams: State) -> tuple[Tensor, State]:
        """h, and the streams to continue with."""
        return ops.pool_streams(streams, self.query)


class Gates(nn.Module):
    """The gate's query w1, which starts at zero, and its biases, which start by the depth-scaled formula."""

    def __init__(self, width: int, bias: tuple[float, ...]) -> None:
        super().__init__()
        self.start = bias
        self.query = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(len(bias)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.start, dtype=torch.float64))

    def begin(self, bias: Sequence[float]) -> None:
        self.start = tuple(bias)
        self.reset_parameters()


class MultiGate(FromEmbedding):
    """n streams; a gate per stream writes every sublayer's output into it, and the next input pools the streams.

        z_i = w1 · RMS(s_i)/√C + b_i,   β = exp(z_i)/(Σ_j exp(z_j) + exp(b_0))  or  sigmoid(z_i)
        s'_i = s_i + β_i (f − s_i),     h = Σ softmax_i( w2 · RMS(s'_i)/√C ) s'_i

    Fill phase: stream 1 is the embedding, and the first n − 1 outputs become the other streams, since n copies of the
    embedding would stay identical. The state is the tuple of streams until the first gated write, then [B, T, n, C] and
    any tensors of the operator.
    """

    def __init__(self, config: choices.MultiGate, sublayers: int, width: int) -> None:
        super().__init__()
        lerping = lerping_sublayers(sublayers, config.streams)
        bias = gate_bias(config, lerping)
        self.fill = sublayers - lerping
        self.competitive, self.memory, self.last = config.gate == "competitive", config.memory, sublayers - 1
        invert = config.memory if isinstance(config.memory, choices.Invert) else None
        self._recovery = None if invert is None else StreamRecovery(self.fill + 1, self.last, invert.share)
        self.pools = nn.ModuleList(Pool(width) for _ in range(sublayers))
        self.gates = nn.ModuleList(Gates(width, bias) for _ in range(lerping))

    def step(self, k: int, y: Tensor, state: State, ends: bool = False) -> tuple[Tensor, State]:
        """See `Topology`; with `ends`, the streams leave this process and only gradients return."""
        if k < self.fill:
            return self._append(k, y, state)
        gates, pool = cast(Gates, self.gates[k - self.fill]), cast(Pool, self.pools[k])
        keeps = ends or k == self.last or (self._recovery is not None and k in self._recovery.kept)
        h, after = self._write(keeps, state, y, gates.query, gates.bias, pool.query)
        tap(f"depth.{k}.beta", lambda: self._beta(gates, state, y))
        tap(f"depth.{k}.weights", lambda: ops.pool_weights(after[0], pool.query))
        tap(f"depth.{k}.streams", after[0])
        return h, after

    def _write(self, last: bool, state: State, y: Tensor, *weights: Tensor) -> tuple[Tensor, State]:
        memory, competitive = self.memory, self.competitive
        if isinstance(memory, choices.Invert):
            if reentrant_checkpoint((y, *state)):
                raise UserError(
                    "topology.memory.kind = 'invert' recomputes streams backwards from junction to junction, which a "
                    "reentrant checkpoint interrupts: set use_reentrant=False, or topology.memory.kind = 'recompute'."
                )
            return ops.multi_gate_inverted(state, y, *weights, competitive=competitive, last=last, share=memory.share)
        return ops.multi_gate_chain(state, y, *weights, competitive=competitive, segment=memory.segment)

    def _append(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        pool = cast(Pool, self.pools[k])
        h, streams = pool((*state, y))
        tap(f"depth.{k}.weights", lambda: ops.pool_weights(torch.stack(streams, -2), pool.query))
        tap(f"depth.{k}.streams", lambda: torch.stack(streams, -2))
        return h, streams

    def initialization(self) -> Initialization:
        return Initialization(init_as_additive=self._init_as_additive, sum_factors=averaging(len(self.pools)))

    def _init_as_additive(self) -> InitFidelity:
        """The streams' mean stays a multiple of the sum if the j-th gated write has β = 1/(n + j) for every stream.

        After the fill phase the n streams add up to the sum S. Writing y with β gives Σ s' = (1 − β) Σ s + n β y. With
        Σ s = c S, this is a multiple of S + y if (1 − β) c = n β. Hence β_j = 1/(n + j) and c_j = n/(n + j). The pools
        weight all streams equally, so that a reader gets S/(n + j).
        """
        n = self.fill + 1
        for pool in self.pools:
            cast(Pool, pool).reset_parameters()
        for j, gate in enumerate(self.gates, 1):
            # e^0 / (n e^0 + e^b) = 1/(n + j), or sigmoid(b) = 1/(n + j)
            bias = (math.log(j), *(0.0,) * n) if self.competitive else (-math.log(n + j - 1),) * n
            cast(Gates, gate).begin(bias)
        return InitFidelity.UP_TO_EPS

    def _beta(self, gates: Gates, state: State, y: Tensor) -> Tensor:
        """The gates of a state, including the last state of the fill phase."""
        streams = state[0] if state[0].dim() > y.dim() else torch.stack(state, -2)
        return ops.gates(streams, gates.query, gates.bias, competitive=self.competitive)

    def recovery(self) -> Recovery | None:
        return self._recovery

    def boundary(self) -> Boundary:
        return StreamsBoundary(self)

    def inference(self, norms: Sequence[RMSNorm]) -> InferenceTopology | None:
        from residua.model.topology.inference import StreamInference  # training does not need it

        if type(self) is not MultiGate:
            return None
        gates = [(gate.query, gate.bias) for gate in cast("list[Gates]", self.gates)]
        pools = [cast(Pool, pool).query.detach() for pool in self.pools]
        return StreamInference(gates, pools, norms, competitive=self.competitive)

    def costs(self, sublayers: int, width: int) -> Costs:
        """The backward pass needs the streams at every second junction, and each update."""
        streams = self.fill + 1
        filling = [pool_rows(k + 2) for k in range(self.fill)]
        floor = add_rows([*filling, *[stream_rows(streams)] * (sublayers - self.fill)])
        products = self._products(width)
        return Costs(lambda: floor, floor.total, kept_widths=streams / 2 + 1, products=products)

    def _products(self, width: int) -> int:
        """For every stream a gate's score, its update, a pool's score and its sum; parameters count w1 and w2 once."""
        gated = width * (4 * (self.fill + 1) - 2) * len(self.gates)
        return gated + width * sum(2 * (k + 2) - 1 for k in range(self.fill))

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(False, lambda reader, source: f"stream {source}")

    def ablations(self) -> Ablations:
        """A zero query scores all streams equally.

        A gate would write zeros and fade the streams, so without_writes skips its junction; outputs of the fill phase
        stay.
        """
        queries = [cast(Pool, pool).query for pool in self.pools]
        return Ablations(
            weighing_readers=range(1, len(queries) + 1),
            with_equal_weights=lambda readers: parameters_set([queries[r - 1] for r in readers], torch.zeros_like),
            streams=self.fill + 1,
            without_stream=lambda stream: reads_changed(self, partial(_unread, stream)),
            without_writes=lambda sublayers: junctions_skipped(self, [k for k in sublayers if k >= self.fill]),
            fill_phase=self.fill,
        )


def averaging(sublayers: int) -> Sequence[float]:
    """Reader k gets the mean of the embedding and k outputs."""
    return [1 / (k + 1) for k in range(sublayers + 1)]


def _unread(index: int, k: int, h: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """The read after sublayer k without one stream: the softmax runs over the others."""
    streams = tensors[f"depth.{k}.streams"]
    if index >= streams.shape[-2]:
        return h
    stream = streams[..., index, :]
    weight = tensors[f"depth.{k}.weights"][..., index, None].to(stream.dtype)
    return (h - weight * stream) / (1 - weight.clamp(max=1 - 1e-6))


class StreamRecovery(Recovery):
    """Inversion (EQUATIONS §3.2): s = (s' − β f) / (1 − β) amplifies rounding where a gate overwrites much."""

    def __init__(self, streams: int, last: int, share: float) -> None:
        super().__init__(streams)
        self.last, self.share = last, share

    def amplification(self, k: int, beta: Tensor) -> Tensor | None:
        return None if k == self.last else amplification(beta, self.share)

    def needs_keeping(self, amplification: Mapping[int, float], epsilon: float) -> Sequence[int]:
        return junctions_to_keep(amplification, self.kept, epsilon)


class StreamsBoundary(Boundary):
    """After the fill phase only the streams cross; the rest of the state belongs to the fused operator."""

    plain = False
    topology: MultiGate

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        h, state = self.topology.step(k, y, state, ends=True)
        streams = state[:1] if state[0].dim() == 4 else state
        return {f"input.{k}": h, **{f"state.{k}.{i}": tensor for i, tensor in enumerate(streams)}}


class Highway(FromEmbedding):
    """One gated stream (arXiv 1505.00387): h' = h + T ⊙ (y − h).

    scalar: T = sigmoid( w · RMS(h)/√C + b ), MGR's gate with one stream; elementwise: T = sigmoid(W h + b), the
    original. The bias starts as in MGR, so that T begins at sqrt(21/sublayers)·sigmoid(−3).
    """

    def __init__(self, config: choices.Highway, sublayers: int, width: int) -> None:
        super().__init__()
        bias = -depth_bias(sublayers, 1)
        gate = {"scalar": ScalarGate, "elementwise": ElementGate}[config.gate]
        self.gates = nn.ModuleList(gate(width, bias) for _ in range(sublayers))

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0]
        gate = self.gates[k](h)
        tap(f"depth.{k}.beta", gate)
        h = (wide(h) + wide(gate) * (wide(y) - wide(h))).to(h.dtype)
        return h, (h,)

    def initialization(self) -> Initialization:
        return Initialization(init_as_additive=self._init_as_additive, sum_factors=averaging(len(self.gates)))

    def _init_as_additive(self) -> InitFidelity:
        """T_k = 1/(k + 2) makes h the mean of the embedding and all outputs so far."""
        for k, gate in enumerate(self.gates):
            cast(ScalarGate | ElementGate, gate).begin(-math.log(k + 1))
        return InitFidelity.UP_TO_EPS


class ScalarGate(nn.Module):
    """sigmoid( w · RMS(h)/√C + b ), [B, T, 1]."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.gates = Gates(width, (bias,))

    def begin(self, bias: float) -> None:
        self.gates.begin((bias,))

    def forward(self, h: Tensor) -> Tensor:
        return ops.gates(h[..., None, :], self.gates.query, self.gates.bias, competitive=False)


class ElementGate(nn.Module):
    """sigmoid(W h + b), [B, T, C]; W starts at zero."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.start = bias
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"weight": (width,)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.start)

    def begin(self, bias: float) -> None:
        self.start = bias
        self.reset_parameters()

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(h, self.weight.to(h.dtype), self.bias.to(h.dtype)))
