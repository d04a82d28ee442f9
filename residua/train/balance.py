"""Keeping a mixture of experts balanced by statistics of the whole step, whatever micro-batches and ranks it is cut in.

Per layer the loss is L = E · Σ_e f_e P_e: f_e is the share of the step's choices that fell on expert e, a count without
gradient, and P_e the mean router probability over the step's tokens (arXiv 2501.11873). With f given, L is linear
in P, and P is the mean of the micro-batches': Σ_m s_m P_e^m with s_m the part of the tokens that micro-batch m has. So

    Σ_m s_m · E Σ_e f_e P_e^m = E Σ_e f_e P_e

in value and gradient, for any cut. What is left is that f must be there before the first backward pass. `same_step`
finds it by a forward pass over the step's micro-batches, unless there is only one; `previous_step` takes the last
step's f, known to every rank (uniform before the first step, where L is constant). The routing changes little in one
step, and neither statistic depends on the cut. Statistics are returned by the forward pass and added up here, so a
sublayer that is run again in the backward pass is not counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residua.config.run import Balance
from residua.data.loader import Batch
from residua.model.moe import MoE, Routing, balance_loss, mixtures


@dataclass(frozen=True)
class Spread:
    """The experts over some steps: means of the balance loss (1 is balanced) and the router's lse² over steps and
    layers, and the share of the choices that each expert of each layer got."""

    balance: float
    router_z: float
    load: list[list[float]]

    @property
    def heaviest(self) -> float:
        """The load of the busiest expert of any layer, 1 being its fair share."""
        return max(max(layer) * len(layer) for layer in self.load)

    @property
    def lightest(self) -> float:
        """The load of the idlest expert of any layer, 1 being its fair share."""
        return min(min(layer) * len(layer) for layer in self.load)


class Balancer:
    """The balance loss of a model's mixtures, and what the log says about them.

    `add_ranks` sums a tensor over the processes that share a step; shares of tokens are shares of the whole step.
    """

    def __init__(
        self,
        config: Balance,
        mixtures: Sequence[MoE],
        device: torch.device,
        add_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self._add_ranks = config, add_ranks
        experts = mixtures[0].count
        zeros = torch.zeros(len(mixtures), experts, dtype=torch.float64, device=device)
        self._load: Tensor | None = zeros + 1 / experts
        self._step = Routing(zeros, zeros, zeros[:, 0])
        self._sums = Routing(zeros, zeros[0, 0], zeros[0, 0])
        self._steps = 0

    def begin(self, batches: Sequence[Batch], shares: Sequence[float], route: Callable[[Batch], Routing]) -> None:
        """Before a step's first forward pass: settle its f. `shares` are the batches' parts of the step's tokens."""
        if self.config.load == "same_step":
            alone = len(batches) == 1 and self._add_ranks is None
            self._load = None if alone else self._measure(batches, shares, route)

    def loss(self, routing: Routing, share: float) -> Tensor:
        """A micro-batch's part of the step's loss; it has `share` of the step's tokens."""
        own = Routing(*(part.detach().double() * share for part in routing))
        self._step = Routing(*(a + b for a, b in zip(self._step, own, strict=True)))
        load = routing.load if self._load is None else self._load.to(routing.probability.dtype)
        balance = balance_loss(load, routing.probability).sum()
        return share * (self.config.weight * balance + self.config.router_z * routing.z.sum())

    def end(self) -> None:
        """After a step's last backward pass: its statistics are whole."""
        step = Routing(*(self._summed(part) for part in self._step))
        self._load = step.load
        self._step = Routing(*(torch.zeros_like(part) for part in step))
        balance = balance_loss(step.load, step.probability).mean()
        self._sums = Routing(
            self._sums.load + step.load, self._sums.probability + balance, self._sums.z + step.z.mean()
        )
        self._steps += 1

    def spread(self) -> Spread:
        """What came about since `clear`; waits for the device."""
        load, balance, z = (part / max(1, self._steps) for part in self._sums)
        return Spread(float(balance), float(z), load.tolist())

    def clear(self) -> None:
        """Begin a new interval of the log."""
        self._sums = Routing(*(torch.zeros_like(part) for part in self._sums))
        self._steps = 0

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as plain numbers that read back exactly."""
        load = None if self._load is None else self._load.tolist()
        return {"load": load, "sums": [part.tolist() for part in self._sums], "steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that was read before."""
        like = self._step.load
        self._load = None if state["load"] is None else like.new_tensor(state["load"])
        self._sums = Routing(*(like.new_tensor(part) for part in state["sums"]))
        self._steps = state["steps"]

    @torch.no_grad()
    def _measure(self, batches: Sequence[Batch], shares: Sequence[float], route: Callable[[Batch], Routing]) -> Tensor:
        parts = [route(batch).load.double() * share for batch, share in zip(batches, shares, strict=True)]
        return self._summed(torch.stack(parts).sum(0))

    def _summed(self, part: Tensor) -> Tensor:
        return part if self._add_ranks is None else self._add_ranks(part)


def build_balancer(
    model: nn.Module, config: Balance, device: torch.device, add_ranks: Callable[[Tensor], Tensor] | None = None
) -> Balancer | None:
    """The balancer of a model's mixtures of experts, None if it has none."""
    found = mixtures(model)
    return Balancer(config, found, device, add_ranks) if found else None
