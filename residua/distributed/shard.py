"""A model made ready for several ranks from outside: replicated by DDP, or cut into shards by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from residua.distributed.mesh import Mesh
from residua.distributed.units import LayeredLosses
from residua.train.compile.rewrites import compile_rewritten
from residua.train.compile.working_copies import Entry, WorkingCopies

if TYPE_CHECKING:
    from residua.distributed.pipeline.stage import Slice
    from residua.model.decoder import Decoder

Losses = Callable[..., tuple[Tensor, Tensor, Any]]


def whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter stays whole on every rank: FSDP2 cuts along the first axis, which a scalar has not."""
    return parameter.dim() == 0


def shard_losses(model: Decoder, mesh: Mesh, precision: torch.dtype, z_loss: float) -> nn.Module:
    """Cut every parameter into `parallel.shard` pieces of rows, gathered some layers at a time while they compute.

    The layers' matrices are gathered in the precision they compute in. Their vectors, which are small and not rounded
    on one process either, and what the layers share (embedding, head, topology, anchors) stay in the masters' and are
    gathered once, as the outermost group. With `parallel.unit = "model"` there is that group alone: more memory, but
    one gather and a model that compiles as a whole.

    Returns what computes the losses and is the root of all groups.
    """
    if mesh.config.unit == "layer":
        layered = LayeredLosses(model, z_loss)
        _shard(layered, layered.units, mesh, precision, set())
        return layered
    _shard(model, (), mesh, precision, set())
    return model


def gives_back(mesh: Mesh) -> bool:
    """Whether a unit is given back between its passes: a shard of one piece is as large as what is gathered from it."""
    return mesh.config.shard > 1


def kept_modules(root: nn.Module, mesh: Mesh) -> list[Any]:
    """The groups that stay gathered through a step, their gradients whole until its end.

    The outermost one is: needed before the first layer and behind the last, it takes this memory in every micro-batch.
    Units of layers are where that saves nothing.
    """
    return [root] if gives_back(mesh) else [m for m in root.modules() if isinstance(m, FSDPModule)]


def _shard(
    root: nn.Module, units: Iterable[nn.Module], mesh: Mesh, precision: torch.dtype, left: set[nn.Parameter]
) -> None:
    narrow = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    # one axis where there are no copies: FSDP2 takes two for copies of shards
    grid = mesh.grid["shard"] if mesh.config.data == 1 else mesh.grid["data", "shard"]
    left = left | {parameter for parameter in root.parameters() if whole(parameter)}
    roots = left | {parameter for parameter in root.parameters() if parameter.dim() == 1}
    cut: set[nn.Parameter] = set()
    for unit in units:
        fully_shard(unit, mesh=grid, mp_policy=narrow, ignored_params=roots, reshard_after_forward=gives_back(mesh))
        cut |= set(unit.parameters()) - roots
    # the root knows the sublayers by other names as well
    fully_shard(root, mesh=grid, mp_policy=wide, ignored_params=left | cut, reshard_after_forward=False)
    for parameter in left:
        parameter.data = parameter.data.to(mesh.device)


class GatheredCopies(WorkingCopies):
    """Working copies of a model that is gathered as a whole: its masters are what FSDP2 gathers into."""

    def __init__(self, root: Any, dtype: torch.dtype) -> None:
        self._root = root
        root.unshard()
        super().__init__(root, dtype)
        root.reshard()

    def refresh(self) -> None:
        self._root.unshard()
        super().refresh()


def sharded_entry(root: Any, compiled: bool, z_loss: float, copies: WorkingCopies | None) -> Losses:
    """The losses of a sharded model, compiled where no gather happens: in each unit, or the whole model."""
    if isinstance(root, LayeredLosses):
        if compiled:
            root.compile_parts()
        return root
    losses = partial(root.routed_losses, z_loss=z_loss)
    if copies is not None:
        losses = partial(copies.run, Entry(root, losses), "model.")
    root.routed_losses = compile_rewritten(losses) if compiled else losses
    register_fsdp_forward_method(root, "routed_losses")
    return root.routed_losses  # type: ignore[no-any-return]


class _Entry(nn.Module):
    """The losses as a module's forward pass: what DDP can wrap."""

    def __init__(self, model: Decoder, losses: Losses) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        return self.losses(*args, **kwargs)


def replicated_losses(model: Decoder, compiled: bool, mesh: Mesh, z_loss: float) -> DistributedDataParallel:
    """The losses of a model that every rank has a copy of; DDP adds up its gradients while they are computed."""
    losses: Losses = partial(model.routed_losses, z_loss=z_loss)
    entry = _Entry(model, compile_rewritten(losses) if compiled else losses)
    return DistributedDataParallel(entry, process_group=mesh.data, gradient_as_bucket_view=True)


def shard_slice(module: Slice, mesh: Mesh, precision: torch.dtype, shared: Sequence[nn.Parameter]) -> None:
    """As `shard_losses`, for one stage of a pipeline; what several stages share stays whole."""
    _shard(module, module.units if mesh.config.unit == "layer" else (), mesh, precision, set(shared))
