"""The training step on several ranks: the same loss and the same update as on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from residua.config.run import RunConfig, TrainConfig
from residua.data.loader import IGNORED, Batch
from residua.distributed.mesh import Mesh
from residua.distributed.optimizer import RankedOptimizer, local
from residua.distributed.shard import GatheredCopies, kept_modules, replicated_losses, shard_losses, sharded_entry
from residua.train.balance import Balancer, build_balancer
from residua.train.optimizer import HybridOptimizer, build_optimizer
from residua.train.step import Step, Totals, resolve

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

Way = Literal["replicate", "shard", "pipeline"]


class RankedStep(Step):
    """What replicated, sharded and pipelined steps have in common.

    DDP and FSDP2 average gradients over the ranks that have different micro-batches. The step's loss is a sum of
    parts, each a share of the whole batch: times the number of ranks, the average is that sum.
    """

    capturable = False
    copying = False

    def __init__(self, model: Decoder, config: RunConfig, mesh: Mesh) -> None:
        self.mesh, self.parallel = mesh, config.parallel
        self.ranks = config.parallel.batch_ranks
        super().__init__(model, config.train, mesh.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """As on one rank. All ranks compute equally often: one without a batch repeats the first, for nothing."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self._copies is not None:
            self._copies.refresh()
        for first in range(0, len(batches), self.ranks):
            mine = first + self.mesh.batch_rank
            batch = batches[mine] if mine < len(batches) else batches[0]
            count = int((batch.targets != IGNORED).sum()) if mine < len(batches) else 0
            sums += torch.stack([self._forward(*self._moved(batch))[0].double() * count, sums.new_tensor(count)])
        total, targets = self.mesh.over_batch(sums).tolist()
        return total / targets, int(targets)

    def totals(self) -> Totals:
        """The sums over all ranks; every rank must ask. What is the same everywhere counts on rank 0."""
        summed = self._totals.clone()
        if self.mesh.rank:
            summed[2:] = 0
        return Totals(*self.mesh.over_all(summed).tolist())

    def set_totals(self, totals: Sequence[float]) -> None:
        super().set_totals(totals if self.mesh.rank == 0 else [0.0, 0.0, *totals[2:]])

    def _build_optimizer(self, config: TrainConfig) -> HybridOptimizer:
        return build_optimizer(self.model, config.optimizer, partial(RankedOptimizer, mesh=self.mesh))

    def _build_balancer(self, config: TrainConfig) -> Balancer | None:
        return build_balancer(self.model, config.balance, self.device, lambda t: self.mesh.over_batch(t.clone()))

    def _over_ranks(self, count: Tensor) -> Tensor:
        return self.mesh.over_batch(self._move(count.clone()))

    def _backward(self, loss: Tensor) -> None:
        (loss * self.ranks).backward()

    @torch.no_grad()
    def _clip(self) -> Tensor:
        """One norm over all gradients, whichever rank has them: each element counts once."""
        self._complete_gradients()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        counted = [local(p.grad) for p in self._parameters if p.grad is not None and self._counts(p)]
        zero = torch.zeros(1, device=self.device)
        square = torch.stack(torch._foreach_norm([zero, *counted])).square().sum()
        for group in (self.mesh.shard, self.mesh.pipeline):
            if group.size() > 1:
                dist.all_reduce(square, group=group)
        norm = square.sqrt()
        factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(g) for g in gradients], factor)
        return norm

    def _counts(self, parameter: Tensor) -> bool:
        """Whether this rank's part of a parameter is in no other rank's count."""
        return isinstance(parameter, DTensor) or self.mesh.shard_rank == 0

    def _complete_gradients(self) -> None:
        """Add up what the engine did not."""


class ReplicatedStep(RankedStep):
    """A copy of the model on every rank."""

    def __init__(self, model: Decoder, config: RunConfig, mesh: Mesh) -> None:
        super().__init__(model.to(mesh.device), config, mesh)

    def _entry(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor, Any]]:
        self._ddp = replicated_losses(self.model, self.compiled, self.mesh, config.z_loss)
        return self._ddp

    def _begin(self, *, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last


class ShardedStep(RankedStep):
    """A piece of every matrix on every rank; where there are copies as well, the same piece in each."""

    def __init__(self, model: Decoder, config: RunConfig, mesh: Mesh) -> None:
        self._completes = True
        self._root: Any = shard_losses(model, mesh, resolve(config.train, mesh.device)[0], config.train.z_loss)
        self._kept = kept_modules(self._root, mesh)
        super().__init__(model, config, mesh)

    def _entry(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor, Any]]:
        return sharded_entry(self._root, self.compiled, config.z_loss, self._copies)

    def _build_copies(self, config: TrainConfig) -> GatheredCopies | None:
        """For the model as one unit; units of layers are gathered in the products' precision."""
        rounded = self.precision is not torch.float32 and config.recompute == "none"
        return GatheredCopies(self._root, self.precision) if rounded and self.parallel.unit == "model" else None

    def _begin(self, *, last: bool) -> None:
        if last == self._completes:
            return
        self._completes = last
        for module in self._kept:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)

    def _complete_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                self.mesh.over_batch(parameter.grad.div_(self.ranks))


def build_ranked_step(model: Decoder, config: RunConfig, mesh: Mesh, way: Way | None = None) -> RankedStep:
    """The step that the mesh calls for; `way` insists on one, also where its axis has a single rank."""
    parallel = config.parallel
    found: Way = "pipeline" if parallel.pipeline > 1 else "shard" if parallel.shard > 1 else "replicate"
    way = way or found
    if way == "pipeline":
        from residua.distributed.pipeline.step import PipelinedStep

        return PipelinedStep(model, config, mesh)
    return {"replicate": ReplicatedStep, "shard": ShardedStep}[way](model, config, mesh)
