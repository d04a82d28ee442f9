"""Load balancing of experts over a whole step, however it is divided into micro-batches and ranks.

Per layer the loss is L = E · Σ_e f_e P_e: f_e is the share of the step's choices that fell on expert e, a count without
gradient, and P_e the mean router probability over the step's tokens (arXiv 2501.11873). With f given, L is linear
in P, and P is a mean over micro-batches: Σ_m s_m P_e^m, where micro-batch m has the share s_m of the tokens. So

    Σ_m s_m · E Σ_e f_e P_e^m = E Σ_e f_e P_e

in value and gradient, for any division. But f must be known before the first backward pass. `same_step` measures it
with an extra forward pass over the step's micro-batches, unless there is only one. `previous_step` uses the last step's
f, which every rank knows, because routing changes little in one step; before the first step f is uniform, so L is
constant. The forward pass returns its statistics and they are summed here, so a sublayer that is recomputed in the
backward pass is not counted twice.

In routers with a bias (`model/moe.py`), the bias does the balancing: after each step it is updated from the load of the
whole step, equally on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residua.config.run import Balance
from residua.data.loader import Batch
from residua.errors import UserError
from residua.model.moe import MoE, Routing, balance_loss, mixtures


@dataclass(frozen=True)
class Spread:
    """Statistics of the experts over several steps.

    The balance loss (1 is balanced) and the router's lse² are means over steps and layers; `load` is the share of the
    choices that each expert of each layer got.
    """

    balance: float
    router_z: float
    load: list[list[float]]

    @property
    def heaviest(self) -> float:
        """The load of the busiest expert of any layer; 1 is an equal share."""
        return max(max(layer) * len(layer) for layer in self.load)

    @property
    def lightest(self) -> float:
        """The load of the least used expert of any layer; 1 is an equal share."""
        return min(min(layer) * len(layer) for layer in self.load)

    def record(self) -> dict[str, Any]:
        """The rounded values for metrics.jsonl."""
        return {
            "balance": round(self.balance, 6),
            "router_z": round(self.router_z, 6),
            "heaviest": round(self.heaviest, 4),
            "lightest": round(self.lightest, 4),
            "load": [[round(share, 5) for share in layer] for layer in self.load],
        }


class Balancer:
    """The balance loss of a model's mixtures of experts, and their statistics for the log.

    `add_ranks` sums a tensor over the processes that share a step. Shares of tokens refer to the whole step.
    """

    def __init__(
        self,
        config: Balance,
        mixtures: Sequence[MoE],
        device: torch.device,
        add_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self._add_ranks = config, add_ranks
        # a pipeline stage has only the routers of its layers; the others have no memory
        self._routers = {i: m.router for i, m in enumerate(mixtures) if not m.router.weight.is_meta}
        experts = mixtures[0].count
        zeros = torch.zeros(len(mixtures), experts, dtype=torch.float64, device=device)
        # A captured step reads and writes these at fixed addresses, so change them only in place.
        self._load = zeros + 1 / experts
        self._alone = torch.zeros((), dtype=torch.bool, device=device)
        self._step = Routing(zeros.clone(), zeros.clone(), zeros[:, 0].clone())
        self._sums = Routing(zeros, zeros[0, 0], zeros[0, 0])
        self._steps = 0

    def begin(self, batches: Sequence[Batch], shares: Sequence[float], route: Callable[[Batch], Routing]) -> None:
        """Determine f before a step's first forward pass. `shares` are the batches' shares of the step's tokens."""
        if self.config.load == "same_step":
            alone = len(batches) == 1 and self._add_ranks is None
            self._alone.fill_(alone)
            if not alone:
                self._load.copy_(self._measure(batches, shares, route))

    def loss(self, routing: Routing, share: float | Tensor) -> Tensor:
        """The balance loss of a micro-batch that has `share` of the step's tokens."""
        dtype = routing.probability.dtype
        share = torch.as_tensor(share, dtype=torch.float64, device=self._load.device)
        for total, part in zip(self._step, routing, strict=True):
            total.add_(part.detach().double() * share)
        # if a step has one micro-batch, its load is the step's
        load = torch.where(self._alone, routing.load, self._load.to(dtype))
        balance = balance_loss(load, routing.probability).sum()
        return share.to(dtype) * (self.config.weight * balance + self.config.router_z * routing.z.sum())

    def end(self) -> None:
        """Complete a step's statistics after its last backward pass, and update the router biases."""
        step = Routing(*(self._summed(part) for part in self._step))
        self._load.copy_(step.load)
        for i, router in self._routers.items():
            router.correct(step.load[i], self.config.bias_rate)
        balance = balance_loss(step.load, step.probability).mean()
        self._sums = Routing(
            self._sums.load + step.load, self._sums.probability + balance, self._sums.z + step.z.mean()
        )
        self._steps += 1
        for part in self._step:
            part.zero_()

    def restart(self) -> None:
        """Reset all statistics for another run."""
        self._load.fill_(1 / self._load.shape[-1])
        for part in self._step:
            part.zero_()
        self.clear()

    def spread(self) -> Spread:
        """Statistics since `clear`. Waits for the device."""
        load, balance, z = (part / max(1, self._steps) for part in self._sums)
        return Spread(float(balance), float(z), load.tolist())

    def clear(self) -> None:
        """Start a new log interval."""
        self._sums = Routing(*(torch.zeros_like(part) for part in self._sums))
        self._steps = 0

    def state(self) -> dict[str, Any]:
        """The state for a resumed run, as numbers that are restored exactly."""
        return {"load": self._load.tolist(), "sums": [part.tolist() for part in self._sums], "steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state returned by `state`."""
        if not state:
            raise UserError("it has no expert balance")
        like = self._load
        load = like if state["load"] is None else like.new_tensor(state["load"])
        sums = Routing(*(like.new_tensor(part) for part in state["sums"]))
        if [part.shape for part in (load, *sums)] != [part.shape for part in (like, *self._sums)]:
            raise UserError("the saved expert balance belongs to another model")
        self._load.copy_(load)
        self._sums, self._steps = sums, state["steps"]

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
    layers = mixtures(model)
    return Balancer(config, layers, device, add_ranks) if layers else None
