"""Multi-Gate Residuals (arXiv 2605.23259), and the highway they generalise."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.config.depth import depth_bias, gate_bias, lerping_sublayers
from residua.model.taps import tap
from residua.model.topology.base import State, Topology
from residua.ops._runtime.numeric import wide


class Pool(nn.Module):
    """h = Σ a_i s_i with a = softmax_i( w2 · RMS(s_i)/√C ); w2 starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, streams: State) -> tuple[Tensor, State]:
        """h, and the streams to go on with."""
        return ops.pool_streams(streams, self.query)


class Gates(nn.Module):
    """The gate's query w1, from zero, and its biases, from the depth-scaled formula."""

    def __init__(self, width: int, bias: tuple[float, ...]) -> None:
        super().__init__()
        self.start = bias
        self.query = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(len(bias)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.start))


class MultiGate(Topology):
    """n streams; every sublayer's output is written into each through its own gate, and the next input is their pool.

        z_i = w1 · RMS(s_i)/√C + b_i,   β = exp(z_i)/(Σ_j exp(z_j) + exp(b_0))  or  sigmoid(z_i)
        s'_i = s_i + β_i (f − s_i),     h = Σ softmax_i( w2 · RMS(s'_i)/√C ) s'_i

    Fill phase: stream 1 is the embedding and the first n − 1 outputs are appended as the others. (n copies of the
    embedding would stay identical for ever.) The state is the tuple of streams until the first write through gates,
    then one [B, T, n, C], after which the operator may keep tensors of its own.
    """

    def __init__(self, config: choices.MultiGate, sublayers: int, width: int) -> None:
        super().__init__()
        lerping = lerping_sublayers(sublayers, config.streams)
        bias = gate_bias(config, lerping)
        self.fill = sublayers - lerping
        self.competitive, self.memory, self.last = config.gate == "competitive", config.memory, sublayers - 1
        self.pools = nn.ModuleList(Pool(width) for _ in range(sublayers))
        self.gates = nn.ModuleList(Gates(width, bias) for _ in range(lerping))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State, ends: bool = False) -> tuple[Tensor, State]:
        """See `Topology`; `ends` says that the streams leave this process, so that nothing comes back but gradients."""
        if k < self.fill:
            return self._append(k, y, state)
        gates, pool = cast(Gates, self.gates[k - self.fill]), cast(Pool, self.pools[k])
        h, after = self._write(ends or k == self.last, state, y, gates.query, gates.bias, pool.query)
        tap(f"depth.{k}.beta", lambda: self._beta(gates, state[0] if k > self.fill else torch.stack(state, -2)))
        tap(f"depth.{k}.weights", lambda: ops.pool_weights(after[0], pool.query))
        tap(f"depth.{k}.streams", after[0])
        return h, after

    def _write(self, last: bool, state: State, y: Tensor, *weights: Tensor) -> tuple[Tensor, State]:
        memory, competitive = self.memory, self.competitive
        if isinstance(memory, choices.Invert):
            return ops.multi_gate_inverted(state, y, *weights, competitive=competitive, last=last, share=memory.share)
        return ops.multi_gate_chain(state, y, *weights, competitive=competitive, segment=memory.segment)

    def _append(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        pool = cast(Pool, self.pools[k])
        h, streams = pool((*state, y))
        tap(f"depth.{k}.weights", lambda: ops.pool_weights(torch.stack(streams, -2), pool.query))
        tap(f"depth.{k}.streams", lambda: torch.stack(streams, -2))
        return h, streams

    def _beta(self, gates: Gates, streams: Tensor) -> Tensor:
        return ops.gates(streams, gates.query, gates.bias, competitive=self.competitive)


class Highway(Topology):
    """One gated stream (arXiv 1505.00387): h' = h + T ⊙ (y − h).

    scalar: T = sigmoid( w · RMS(h)/√C + b ), MGR's gate with one stream; elementwise: T = sigmoid(W h + b), the
    original. The bias starts MGR's way, so that T begins at sqrt(21/sublayers)·sigmoid(−3).
    """

    def __init__(self, config: choices.Highway, sublayers: int, width: int) -> None:
        super().__init__()
        bias = -depth_bias(sublayers, 1)
        gate = {"scalar": ScalarGate, "elementwise": ElementGate}[config.gate]
        self.gates = nn.ModuleList(gate(width, bias) for _ in range(sublayers))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0]
        gate = self.gates[k](h)
        tap(f"depth.{k}.beta", gate)
        h = (wide(h) + wide(gate) * (wide(y) - wide(h))).to(h.dtype)
        return h, (h,)


class ScalarGate(nn.Module):
    """sigmoid( w · RMS(h)/√C + b ), [B, T, 1]."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.gates = Gates(width, (bias,))

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

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(h, self.weight.to(h.dtype), self.bias.to(h.dtype)))
