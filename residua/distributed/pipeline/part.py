"""The part of a model on one rank of a pipeline: the slices for its stages, and parameters shared between ranks.

Each rank that uses a shared parameter computes a part of its gradient, and all apply the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from residua.config.run import RunConfig
from residua.distributed.experts import divide_experts
from residua.distributed.mesh import Mesh
from residua.distributed.pipeline.shares import (
    Share,
    boundaries_of,
    head_ranks,
    head_repeats,
    recomputes_anchors,
    shares_of,
)
from residua.distributed.pipeline.stage import Settings, Slice, Stage
from residua.distributed.pipeline.transport import StageCache, plan_routes
from residua.distributed.shard import materialise
from residua.model.moe import Routing, mixtures
from residua.model.topology.base import Items
from residua.storage.shard_files import local

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class Part:
    """The slices of a model on the meta device that the stages of this rank run; the model keeps nothing else.

    `shape` is that of a micro-batch [B, T, C]. `tensor_ranks` is the number of ranks that divide the tokens of hidden
    states, and the heads of anchors, among them. `balance` takes the routing of a micro-batch by all mixtures of
    experts, with zeros for those of other stages, and returns their loss when the stage trains.
    """

    def __init__(
        self,
        model: Decoder,
        run: RunConfig,
        mesh: Mesh,
        precision: torch.dtype,
        shape: tuple[int, int, int],
        *,
        stages: int,
        recompute: str,
        balance: Callable[[Routing], Tensor | None],
        tensor_ranks: int = 1,
    ) -> None:
        self.mesh, self.shape, ranks = mesh, shape, mesh.config.pipeline
        self.shares = shares_of(run, stages=stages)
        crossing = boundaries_of(model.config, self.shares, shape, precision, run.parallel.anchors)
        self.boundaries = [_with_all_tokens(items, tensor_ranks) for items in crossing]
        self.routes = plan_routes([list(items) for items in self.boundaries], ranks, run.parallel.transport)
        again = recomputes_anchors(model.config, run.parallel.anchors)
        self.shared = SharedParameters(model, mesh, again, self.shares)
        self._divided = divide_experts(model, mesh, precision, recompute)
        settings = Settings(
            self.shares, model.topology.boundary(), StageCache(), run.train.z_loss, precision, mesh.device.type, again
        )
        self.numbers = range(mesh.pipeline_rank, stages, ranks)
        self.slices = [Slice(model, i, self.routes[i], settings) for i in self.numbers]
        self.mixtures = mixtures(model)
        for module in self.slices:
            inside = mixtures(module)
            first = self.mixtures.index(inside[0]) if inside else 0
            module.balance = partial(_balance_among, balance, first, len(self.mixtures))
        _keep_only(model, self.slices, self.shared.layers)

    @property
    def unsharded(self) -> set[nn.Parameter]:
        """Parameters that FSDP2 must not shard: divided experts, and those that stages share."""
        return self._divided | self.shared.unsharded

    def build_stages(self) -> list[Stage]:
        """The stages of this rank, for a schedule of torch.distributed.pipelining."""
        stages, group = len(self.shares), self.mesh.pipeline
        return [
            Stage(module, i, stages, self.mesh.device, *self._examples(i), group=group)
            for module, i in zip(self.slices, self.numbers, strict=True)
        ]

    def _examples(self, i: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Tensors without memory, in the shapes that stage i receives and returns."""

        def outlines(names: Sequence[str], boundary: int) -> tuple[Tensor, ...]:
            return tuple(torch.empty_like(self.boundaries[boundary][name]).requires_grad_() for name in names)

        tokens = (torch.empty(self.shape[:2], dtype=torch.long, device="meta"),)
        losses = (torch.empty(2, device="meta").requires_grad_(),)
        received = tokens if i == 0 else outlines(self.routes[i].receives, i - 1)
        return received, losses if i == len(self.boundaries) else outlines(self.routes[i].sends, i)


def _with_all_tokens(items: Items, ranks: int) -> Items:
    """The items, with anchors extended to all tokens: ranks divide anchors by heads, not by tokens."""
    return {
        name: item.new_empty((len(item), item.shape[1] * ranks, *item.shape[2:]))
        if name.startswith("anchor.")
        else item
        for name, item in items.items()
    }


def _balance_among(
    balance: Callable[[Routing], Tensor | None], first: int, count: int, routing: Routing
) -> Tensor | None:
    """`balance` of a stage's mixtures, numbered from `first` of `count` in the model, with zeros for the others."""
    after = count - first - len(routing.load)
    return balance(Routing(*(pad(part, (*(0, 0) * (part.dim() - 1), first, after)) for part in routing)))


def _keep_only(model: Decoder, modules: Sequence[Slice], shared: Mapping[str, nn.Module]) -> None:
    """Remove the modules that this rank's stages do not use from the decoder; the others keep their names."""
    layers = dict(shared) | {key: layer for module in modules for key, layer in module.sublayers.items()}
    model.sublayers = nn.ModuleDict(layers)  # type: ignore[assignment]
    for name in ("embed", "places", "norm", "unembed"):
        if all(getattr(module, name) is None for module in modules):
            setattr(model, name, None)


class SharedParameters:
    """Parameters on several ranks: those of the topology, and of layers that several ranks run, are on every rank.

    The head's matrix is on each rank that computes a part of it, and on the first if it is tied to the embedding.
    Every rank has ExoFormer's projections if stages recompute anchors; otherwise only the first stage uses them.
    """

    def __init__(self, model: Decoder, mesh: Mesh, recompute_anchors: bool, shares: Sequence[Share]) -> None:
        self.mesh, self.model = mesh, model
        runs: dict[int, set[int]] = {}
        for number, share in enumerate(shares):
            for k in share.sublayers:
                runs.setdefault(model.order[k], set()).add(number % mesh.config.pipeline)
        self.layers = {str(j): model.sublayers[j] for j, ranks in runs.items() if len(ranks) > 1}
        """Sublayers of a loop that several ranks run, by name."""
        common = [model.topology, *([model.anchors] if recompute_anchors else []), *self.layers.values()]
        for module in common:  # they stay whole, so allocate them now and identify them by it
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
        """Parameters that FSDP2 must keep whole on every rank: shared ones, and a head that a rank uses twice."""
        head = self._head() if self._repeats else None
        return self._known if head is None else self._known | {cast(nn.Parameter, head)}

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds a parameter to the gradient norm; for a shared one, only the first rank does."""
        if parameter in self._known:
            return self.mesh.pipeline_rank == 0
        return parameter is not self._head() or self.mesh.pipeline_rank == self.users[0]

    def complete(self, whole: Sequence[nn.Parameter], ranks: int) -> None:
        """Reduce the gradients of shared parameters over the pipeline, of unsharded (`whole`) ones over the batch."""
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
        """Sum the gradient of the head's matrix over the ranks that have it, adding in the same order on each."""
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
        # look it up each time: sharding replaces the parameter
        module = self.model.embed if self.tied else self.model.unembed
        return None if module is None else module.weight
