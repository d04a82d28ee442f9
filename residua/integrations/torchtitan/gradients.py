"""The gradients of a step: completed over the ranks, and clipped by one norm in which each element counts once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from residua.distributed.experts import expert_matrices
from residua.integrations.torchtitan.model import ResiduaModel
from residua.storage.sharded import local


class Gradients:
    """The gradients of this rank's model part, built when its parameters have their final form.

    FSDP2 has added up those of its parameters. Others are whole on every rank: scalars, and in a pipeline what several
    stages use.
    """

    def __init__(self, model: ResiduaModel) -> None:
        self.grid, self.shared = model.grid, model.shared
        self.parameters = list(model.parameters())
        self.split = {parameter for name, parameter in model.named_parameters() if name in model.splits}
        self.experts: list[Any] = expert_matrices(model, model.grid)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Add up over the ranks what is not yet, and scale all to a common norm of at most `max_norm`."""
        self.complete()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        counted = [local(p.grad) for p in self.parameters if p.grad is not None and self._counts(p)]
        zero = torch.zeros(1, device=self.grid.device)
        square = torch.stack(torch._foreach_norm([zero, *counted])).square().sum()
        for group in (self.grid.shard, self.grid.tensor, self.grid.pipeline):
            if group.size() > 1:
                dist.all_reduce(square, group=group)
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
        return norm

    def complete(self) -> None:
        """Add up the gradients of shared parameters over stages, and of whole ones over ranks with other tokens."""
        if self.shared is not None:
            self.shared.complete([], ranks=1)
        if self.grid.ranks == 1:
            return
        for parameter in self.experts if self.grid.config.data > 1 else ():
            dist.all_reduce(local(parameter.grad), group=self.grid.data)
        for parameter in self.parameters:
            if not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                split = parameter in self.split
                self.grid.over_copies(parameter.grad) if split else self.grid.over_batch(parameter.grad)

    def _counts(self, parameter: Any) -> bool:
        """Whether this rank adds its part of a parameter to the norm: of equal copies, one rank does."""
        if not isinstance(parameter, DTensor):
            first = self.grid.shard_rank == 0 and (self.grid.tensor_rank == 0 or parameter in self.split)
            if not first:
                return False
        return self.shared is None or self.shared.counts(parameter)
