"""The training step on several ranks: the same loss and the same update as on one process.

The order of a step is that of `train.step.Step`; the classes here override its hooks. All ranks do at the same time:

1. Count the targets of the step and sum the count over the ranks: the loss is the mean over the targets of all ranks.
2. For each of this rank's micro-batches: forward and backward. DDP (`ReplicatedStep`) and FSDP2 (`ShardedStep`) reduce
   gradients over the ranks during the backward pass of the last micro-batch; before that they stay on the rank.
3. Reduce the gradients that DDP and FSDP2 do not handle, then clip all gradients by one norm over all ranks.
4. Update. Each rank updates the rows it has; Muon orthogonalises each matrix on one rank (`optimizer`).

A `PipelinedStep` (in `pipeline.step`) differs in 2: a schedule moves the micro-batches through stages on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from residua.config.run import RunConfig, TrainConfig
from residua.distributed.experts import complete_expert_gradients, divide_experts, expert_matrices
from residua.distributed.mesh import Mesh
from residua.distributed.optimizer import RankedOptimizer
from residua.distributed.shard import (
    GatheredCopies,
    Parts,
    construct,
    gathered_modules,
    replicated_losses,
    shard_model,
    sharded_losses,
)
from residua.distributed.units import Unit
from residua.storage.shard_files import local
from residua.train.balance import Balancer, build_balancer
from residua.train.losses import LossFunction
from residua.train.optimizer import HybridOptimizer, build_optimizer
from residua.train.step import Step, Totals, resolve
from residua.train.timing import Stopwatch

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class RankedStep(Step):
    """The base of replicated, sharded and pipelined steps.

    DDP and FSDP2 average gradients over the ranks that have different micro-batches, but the loss of a step is a sum
    over them. So each rank multiplies its loss by the number of ranks before the backward pass.
    """

    capturable = False
    copying = False

    def __init__(self, model: Decoder, config: RunConfig, mesh: Mesh) -> None:
        self.mesh, self.parallel = mesh, config.parallel
        self.ranks, self.place = config.parallel.batch_ranks, mesh.batch_rank
        self.watch = Stopwatch(mesh.device)
        super().__init__(model, config.train, mesh.device)

    def totals(self) -> Totals:
        """The sums over all ranks; every rank must call it. Norm and step count, equal on all, come from rank 0."""
        summed = self._totals.clone()
        if self.mesh.rank:
            summed[2:] = 0
        return Totals(*self.mesh.over_all(summed).tolist())

    def set_totals(self, totals: Sequence[float]) -> None:
        super().set_totals(totals if self.mesh.rank == 0 else [0.0, 0.0, *totals[2:]])

    def _build_optimizer(self, config: TrainConfig) -> HybridOptimizer:
        self._experts = expert_matrices(self.model, self.mesh)
        kind = partial(RankedOptimizer, mesh=self.mesh, experts=self._experts)
        return build_optimizer(self.model, config.optimizer, kind)

    def _build_balancer(self, config: TrainConfig) -> Balancer | None:
        return build_balancer(self.model, config.balance, self.device, lambda t: self.mesh.over_batch(t.clone()))

    def _over_ranks(self, count: Tensor) -> Tensor:
        return self.mesh.over_batch(self._move(count.clone()))

    def _largest_over_ranks(self, values: Tensor) -> Tensor:
        return self.mesh.over_batch(values, dist.ReduceOp.MAX)

    def _backward(self, loss: Tensor) -> None:
        (loss * self.ranks).backward()

    @torch.no_grad()
    def _clip(self) -> Tensor:
        """Clip by one norm over the gradients of all ranks, in which each element counts once."""
        complete_expert_gradients(self._experts, self.mesh)
        groups = (self.mesh.shard, self.mesh.pipeline)
        return clip_together(self._parameters, self._counts, groups, self._clip_norm, self.device)

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds its part of a parameter to the norm; of equal copies, only one counts."""
        return isinstance(parameter, DTensor) or self.mesh.shard_rank == 0


@torch.no_grad()
def clip_together(
    parameters: Iterable[nn.Parameter],
    counts: Callable[[nn.Parameter], bool],
    groups: Iterable[dist.ProcessGroup],
    max_norm: float,
    device: torch.device,
) -> Tensor:
    """Scale all gradients to a common norm of at most `max_norm` over the ranks of `groups`; returns the norm before.

    `counts`: whether this rank adds its part of a parameter to the norm, in which each element counts once.
    """
    gradients = {p: local(p.grad) for p in parameters if p.grad is not None}
    counted = [gradient for parameter, gradient in gradients.items() if counts(parameter)]
    zero = torch.zeros(1, device=device)
    square = torch.stack(torch._foreach_norm([zero, *counted])).square().sum()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(square, group=group)
    norm = square.sqrt()
    torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class ReplicatedStep(RankedStep):
    """A copy of the model on every rank (DDP)."""

    def __init__(self, model: Decoder, parts: Parts, config: RunConfig, mesh: Mesh) -> None:
        construct(model, parts, mesh)
        super().__init__(model, config, mesh)

    def _build_losses(self, config: TrainConfig) -> LossFunction:
        self._ddp = replicated_losses(self.model, self.compiled, self.mesh, config.z_loss)
        return self._ddp

    def _forward(self, tokens: Tensor, targets: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        with self.watch.measure():
            return super()._forward(tokens, targets, segments)

    def _begin_micro_batch(self, *, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last


class ShardedStep(RankedStep):
    """A shard of every parameter on every rank (FSDP2); with `data` > 1 the shards are replicated."""

    has_whole_weights = False

    def __init__(self, model: Decoder, parts: Parts, config: RunConfig, mesh: Mesh) -> None:
        self._completes = True
        precision, _ = resolve(config.train, mesh.device)
        divided = divide_experts(model, mesh, precision, config.train.recompute)
        self._root: Any = shard_model(model, mesh, precision, config.train.z_loss, divided)
        self._gathered = gathered_modules(self._root, mesh)
        construct(model, parts, mesh)
        super().__init__(model, config, mesh)
        for unit in self._root.modules():
            if isinstance(unit, Unit):
                unit.watch = self.watch

    def _build_losses(self, config: TrainConfig) -> LossFunction:
        return sharded_losses(self._root, self.compiled, config.z_loss, self._copies)

    def _build_copies(self, config: TrainConfig) -> GatheredCopies | None:
        """Copies only if the model is gathered as one unit: layer units are already gathered in compute precision."""
        rounded = self.precision is not torch.float32 and config.recompute == "none"
        return GatheredCopies(self._root, self.precision) if rounded and self.parallel.unit == "model" else None

    def _begin_micro_batch(self, *, last: bool) -> None:
        if last == self._completes:
            return
        self._completes = last
        for module in self._gathered:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)

    def _complete_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                self.mesh.over_batch(parameter.grad.div_(self.ranks))
