"""Prepares a model for several ranks from outside: replicated by DDP, or sharded by FSDP2.

`replicated_losses` returns the loss function of a replicated model, `sharded_losses` that of a model that `shard_model`
has sharded. `shard_slice` shards one stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from residua.distributed.mesh import Mesh
from residua.distributed.units import LayeredLosses
from residua.storage.shard_files import local
from residua.train.compile.rewrites import compile_rewritten
from residua.train.compile.working_copies import WorkingCopies
from residua.train.losses import Losses, LossFunction, eager_losses

if TYPE_CHECKING:
    from residua.distributed.pipeline.stage import Slice
    from residua.model.decoder import Decoder


def whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter stays whole on every rank: FSDP2 shards the first axis, and a scalar has none."""
    return parameter.dim() == 0


def shard_model(
    model: Decoder, mesh: Mesh, precision: torch.dtype, z_loss: float, divided: set[nn.Parameter]
) -> nn.Module:
    """Shard the rows of every parameter over `parallel.shard` ranks; layers are gathered a few at a time.

    FSDP2 gathers in groups. The matrices of the layers are gathered one unit (see `units`) at a time, in the precision
    they compute in. One root group holds the rest in float32 and is gathered once per step: the vectors of the layers,
    which are small and not rounded on one process either, and the modules that layers share (embedding, head, topology,
    anchors). With `parallel.unit = "model"` the root group holds everything: this takes more memory, but needs one
    gather, and the model compiles as a whole. Experts that are already `divided` among the ranks are left alone.

    Returns the module that computes the losses, which is the root of all groups.
    """
    if mesh.config.unit == "layer":
        layered = LayeredLosses(model, z_loss)
        _shard(layered, layered.units, mesh, precision, divided)
        return layered
    _shard(model, (), mesh, precision, divided)
    return model


def reshards(mesh: Mesh) -> bool:
    """Whether a unit is resharded after each pass. With one shard that saves nothing: the shard is the whole unit."""
    return mesh.config.shard > 1


def gathered_modules(root: nn.Module, mesh: Mesh) -> list[Any]:
    """The groups that stay gathered for a whole step; their gradients are reduced at its end.

    The root group always stays gathered: it is needed before the first layer and after the last, so every micro-batch
    needs its memory anyway. Units of layers stay gathered if resharding them saves nothing.
    """
    return [root] if reshards(mesh) else [m for m in root.modules() if isinstance(m, FSDPModule)]


def precisions(compute: torch.dtype) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The precisions in which FSDP2 gathers matrices and everything else; it reduces gradients in float32."""
    narrow = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return narrow, MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard(
    root: nn.Module, units: Iterable[nn.Module], mesh: Mesh, precision: torch.dtype, left: set[nn.Parameter]
) -> None:
    (narrow, wide), grid = precisions(precision), mesh.shards
    left = left | {parameter for parameter in root.parameters() if whole(parameter)}
    roots = left | {parameter for parameter in root.parameters() if parameter.dim() == 1}
    sharded: set[nn.Parameter] = set()
    for unit in units:
        fully_shard(
            unit, mesh=mesh.shards, mp_policy=narrow, ignored_params=roots, reshard_after_forward=reshards(mesh)
        )
        sharded |= set(unit.parameters()) - roots
    # the root also holds the sublayers, under other names
    fully_shard(root, mesh=grid, mp_policy=wide, ignored_params=left | sharded, reshard_after_forward=False)


class GatheredCopies(WorkingCopies):
    """Working copies for a model that is gathered as a whole; their masters are FSDP2's gathered parameters."""

    def __init__(self, root: Any, dtype: torch.dtype) -> None:
        self._root = root
        root.unshard()
        super().__init__(root, dtype)
        root.reshard()

    def refresh(self) -> None:
        self._root.unshard()
        super().refresh()


def sharded_losses(root: Any, compiled: bool, z_loss: float, copies: WorkingCopies | None) -> LossFunction:
    """The loss function of a sharded model, compiled between gathers: each unit, or the whole model."""
    if isinstance(root, LayeredLosses):
        if compiled:
            root.compile_parts()
        return root
    losses = eager_losses(root, z_loss, copies)
    root.routed_losses = compile_rewritten(losses) if compiled else losses
    register_fsdp_forward_method(root, "routed_losses")
    return root.routed_losses  # type: ignore[no-any-return]


def replicated_losses(model: Decoder, compiled: bool, mesh: Mesh, z_loss: float) -> DistributedDataParallel:
    """The loss function of a replicated model; DDP reduces gradients while the backward pass runs."""
    losses = Losses(model, z_loss)
    if compiled:
        losses.forward = compile_rewritten(losses.forward)  # type: ignore[method-assign]
    return DistributedDataParallel(losses, process_group=mesh.data, gradient_as_bucket_view=True)


def shard_slice(module: Slice, mesh: Mesh, precision: torch.dtype, left: set[nn.Parameter]) -> None:
    """Like `shard_model`, for one stage of a pipeline; leaves divided experts and shared parameters (`left`) alone."""
    _shard(module, module.units if mesh.config.unit == "layer" else (), mesh, precision, left)


Parts = Iterable[tuple[str, nn.Module]]
"""Named pieces of a model with weights; a whole model has an empty name."""


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give memory on the device to every tensor that has none; its values are undefined until `fill`."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                owner._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def fill(places: dict[str, Tensor], parts: Parts, copy: Callable[[Tensor, Tensor], None]) -> None:
    """Call `copy(place, value)` for every place of a divided model. Each part is freed before the next is requested."""
    for prefix, part in parts:
        for name, value in chain(part.named_parameters(prefix), part.named_buffers(prefix)):
            if (place := places.pop(name, None)) is not None:
                copy(place, value)
            del value
        del part
    assert not places, f"no part has {sorted(places)[:3]}"


def construct(model: nn.Module, parts: Parts, mesh: Mesh) -> None:
    """Give a divided model on the meta device its memory and its weights."""

    def copy(place: Tensor, value: Tensor) -> None:
        if isinstance(place, DTensor):
            value = value[slice(*rows_of(len(value), mesh.config.shard, mesh.shard_rank))]
        local(place).copy_(value)

    materialise(model, mesh.device)
    fill(dict(chain(model.named_parameters(), model.named_buffers())), parts, copy)


def rows_of(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """The rows [start, end) of a shard. FSDP2 divides rows as `torch.chunk` does."""
    size = -(-rows // shards)
    return min(rows, shard * size), min(rows, (shard + 1) * size)
