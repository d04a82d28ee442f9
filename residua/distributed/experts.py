"""Expert parallelism: tokens travel to the ranks that have their experts, instead of weights to the tokens.

The stacked matrices of the experts are sharded by rows over `parallel.shard` ranks, as FSDP2 shards every matrix. With
`parallel.experts` = N they are not gathered over all these ranks. The shard ranks form groups of N; the ranks of a
group have different experts, E/N each. The shard/N ranks that have the same experts gather only the rows of these.
A mixture then runs in four steps:

1. Every rank routes its own tokens and sorts their slots by expert, as on one process.
2. All-to-all: each slot goes to the rank of its group that has its expert. No token is dropped, so the sizes differ
   from rank to rank; a first all-to-all exchanges the counts, and the host reads them (on a GPU, it waits for them).
3. The rank applies its experts to the slots it received.
4. All-to-all back. The results return to the slots' places, and the rank weights and adds them.

The backward pass reverses these exchanges. The gradient of an expert is complete within its group; it is summed over
the ranks that have the same expert, and over the copies of the model (`data`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard

from residua.distributed.mesh import Mesh
from residua.model.moe import Experts, mixtures
from residua.ops.expert_slots import Slots, dispatch, sort_slots
from residua.storage.shard_files import local

# the name since PyTorch 2.13, where the older name gives a warning
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def divide_experts(model: nn.Module, mesh: Mesh, precision: torch.dtype, recompute: str) -> set[nn.Parameter]:
    """Divide the experts of a model on the meta device among the ranks of `mesh`; returns the experts' matrices.

    `recompute` is `train.recompute`: recomputed sublayers already gather their experts again.
    """
    again = recompute == "none"
    divided: set[nn.Parameter] = set()
    for mixture in mixtures(model) if mesh.config.experts > 1 else ():
        mixture.experts = DividedExperts(mixture.experts, mesh, precision, again)  # type: ignore[assignment]
        divided |= set(mixture.experts.parameters())
    return divided


def expert_matrices(model: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """The matrices that `divide_experts` divided; allocating their memory replaces these objects."""
    layers = mixtures(model) if mesh.config.experts > 1 else ()
    return [parameter for mixture in layers for parameter in (mixture.experts.up, mixture.experts.out)]


@torch.no_grad()
def complete_expert_gradients(matrices: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Sum the experts' gradients over the copies of the model; each rank had multiplied its loss by the rank count."""
    for parameter in matrices:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if mesh.config.data > 1:
            dist.all_reduce(gradient, group=mesh.data)
        gradient.div_(mesh.config.batch_ranks)


def _sharded(whole: Tensor, mesh: Mesh) -> DTensor:
    """A matrix without memory, its rows divided over the shard ranks as FSDP2 would divide them."""
    rows = whole.new_empty((len(whole) // mesh.config.shard, *whole.shape[1:]))
    placements = (Replicate(), Shard(0)) if mesh.config.data > 1 else (Shard(0),)
    return DTensor.from_local(rows, mesh.shards, placements, run_check=False, shape=whole.shape, stride=whole.stride())


class DividedExperts(nn.Module):
    """The experts of a mixture, divided among the ranks; replaces `Experts` in the model.

    `again`: the backward pass gathers and rounds the matrices again, so only one layer's are in memory at a time.
    """

    def __init__(self, experts: Experts, mesh: Mesh, precision: torch.dtype, again: bool = True) -> None:
        super().__init__()
        self.mesh, self.precision, self.again = mesh, precision, again
        self.count, self.hidden_matrices, self._run = experts.count, experts.hidden_matrices, experts.run
        self.up, self.out = (nn.Parameter(_sharded(whole, mesh)) for whole in (experts.up, experts.out))

    @torch._disable_dynamo  # group sizes are data, so every new split would cause a recompilation
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert, on this rank or another, to its rows of x [slots, C], which end at `ends` [E]."""
        trip = self._plan(ends)
        arrived = _Exchange.apply(x, trip.sent, trip.received, self.mesh.experts)
        rows = [cast(DTensor, parameter).to_local() for parameter in (self.up, self.out)]
        weights = [_Gather.apply(part, self.precision, self._group) for part in rows]
        with self._made_again(rows, weights):
            y = self._run(dispatch(arrived, trip.slots), trip.slots.ends, *weights)
        back = dispatch(y, trip.slots._replace(order=trip.slots.place, place=trip.slots.order))
        returned: Tensor = _Exchange.apply(back, trip.received, trip.sent, self.mesh.experts)
        return returned

    def _plan(self, ends: Tensor) -> _Trip:
        ranks = self.mesh.config.experts
        counts = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
        arriving = torch.empty_like(counts)  # [ranks, own experts]
        dist.all_to_all_single(arriving, counts, group=self.mesh.experts)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        local_experts = torch.arange(counts.shape[1], device=ends.device).expand_as(arriving).flatten()
        of = local_experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        return _Trip(sent, received, sort_slots(of[:, None], counts.shape[1]))

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same experts; None if this is the only one."""
        return self.mesh.slices if self.mesh.config.slices > 1 else None

    def _made_again(self, rows: list[Tensor], weights: list[Tensor]) -> AbstractContextManager[None]:
        """Inside the block, autograd saves this rank's rows instead of the weights gathered from them."""
        sources = {w.untyped_storage().data_ptr(): r.detach() for w, r in zip(weights, rows, strict=True) if w is not r}

        def pack(saved: Tensor) -> Any:
            source = sources.get(saved.untyped_storage().data_ptr())
            return saved if source is None else (source, saved.size(), saved.stride(), saved.storage_offset())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            source, *view = packed
            return _gathered(source, self.precision, self._group).as_strided(*view)

        hooks: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
        return hooks if self.again and torch.is_grad_enabled() else nullcontext()


class _Trip(NamedTuple):
    """Row counts sent to and received from each rank of the group, and the received rows sorted by expert."""

    sent: list[int]
    received: list[int]
    slots: Slots


class _Exchange(torch.autograd.Function):
    """All-to-all over rows; its backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    rows = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
    return rows


class _Gather(torch.autograd.Function):
    """The rows of all ranks of a group, rounded to a precision; the backward pass sums gradients in the rows' dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, precision: torch.dtype, group: dist.ProcessGroup | None) -> Tensor:
        ctx.dtype, ctx.group = rows.dtype, group
        return _gathered(rows, precision, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        wide = gradient.to(ctx.dtype)
        if ctx.group is None:
            return wide, None, None
        local_grad = wide.new_empty((len(wide) // ctx.group.size(), *wide.shape[1:]))
        _reduce_scatter(local_grad, wide.contiguous(), group=ctx.group)
        return local_grad, None, None


def _gathered(rows: Tensor, precision: torch.dtype, group: dist.ProcessGroup | None) -> Tensor:
    rounded = rows.to(precision)
    if group is None:
        return rounded
    gathered = rounded.new_empty((len(rows) * group.size(), *rows.shape[1:]))
    _all_gather(gathered, rounded, group=group)
    return gathered
