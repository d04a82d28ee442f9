"""Parameters that several ranks of a pipeline use: each computes a part of the gradient, all apply the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from residua.distributed.construct import materialise
from residua.distributed.mesh import Mesh
from residua.distributed.pipeline.deal import Share, head_ranks, head_repeats
from residua.storage.sharded import local

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class SharedParameters:
    """Every rank has the parameters of the topology. The head's matrix is on every rank that computes a part of it, and
    on the first if it is tied to the embedding.

    Every rank has ExoFormer's projections if stages recompute anchors; otherwise only the first stage uses them.
    """

    def __init__(self, model: Decoder, mesh: Mesh, recompute_anchors: bool, shares: Sequence[Share]) -> None:
        self.mesh, self.model = mesh, model
        common = [model.topology, model.anchors] if recompute_anchors else [model.topology]
        for module in common:  # they stay whole, so they can have their memory now, and be known by it
            materialise(module, mesh.device)
        everywhere = [parameter for module in common for parameter in module.parameters()]
        if not recompute_anchors and mesh.pipeline_rank > 0:
            model.anchors = nn.Identity()  # type: ignore[assignment]
        self.parameters: list[nn.Parameter] = everywhere
        self._known = set(everywhere)
        self.tied = model.unembed is None
        heads = head_ranks(shares, mesh.config.pipeline)
        self.users = sorted({*heads, 0}) if self.tied else list(heads)
        """The ranks of the pipeline that have the head's matrix."""
        self._repeats = head_repeats(shares, mesh.config.pipeline, self.tied)

    @property
    def unsharded(self) -> set[nn.Parameter]:
        """What FSDP2 must leave whole on every rank: what all stages share, and a head that a rank uses twice."""
        head = self._head() if self._repeats else None
        return self._known if head is None else self._known | {cast(nn.Parameter, head)}

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds a parameter to the gradient norm: of a shared one, the first rank does."""
        if parameter in self._known:
            return self.mesh.pipeline_rank == 0
        return parameter is not self._head() or self.mesh.pipeline_rank == self.users[0]

    def complete(self, whole: Sequence[nn.Parameter], ranks: int) -> None:
        """Reduce gradients: of shared parameters over the pipeline, of unsharded (`whole`) ones over the batch."""
        if self.mesh.config.pipeline > 1:
            self._add(self.parameters, self.mesh.pipeline)
            self._add_head()
        if ranks > 1 and whole:
            for group in (self.mesh.data, self.mesh.shard):
                self._add(whole, group)
            torch._foreach_div_([cast(Tensor, p.grad) for p in whole], ranks)

    def _add(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Sum gradients over a group in one message; a rank that has no gradient adds zero."""
        if group.size() == 1 or not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def _add_head(self) -> None:
        """The ranks that have the head's matrix exchange their gradients of it, and add them in the same order."""
        if len(self.users) == 1 or self.mesh.pipeline_rank not in self.users:
            return
        head = self._head()
        assert head is not None and head.grad is not None
        mine = local(head.grad).contiguous()
        parts = {rank: mine if rank == self.mesh.pipeline_rank else torch.empty_like(mine) for rank in self.users}
        messages = []
        for rank in self.users:
            if rank != self.mesh.pipeline_rank:
                peer = dist.get_global_rank(self.mesh.pipeline, rank)
                messages += [
                    dist.P2POp(dist.isend, mine, peer, self.mesh.pipeline),
                    dist.P2POp(dist.irecv, parts[rank], peer, self.mesh.pipeline),
                ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        first, *others = (parts[rank] for rank in self.users)
        summed = first.clone()
        for part in others:
            summed += part
        local(head.grad).copy_(summed)

    def _head(self) -> Tensor | None:
        # looked up each time: sharding replaces the parameter
        module = self.model.embed if self.tied else self.model.unembed
        return None if module is None else module.weight
