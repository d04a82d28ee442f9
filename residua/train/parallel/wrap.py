"""A model made ready for several ranks from outside: replicated by DDP, or cut into shards by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from residua.train.parallel.layers import LayeredLosses
from residua.train.parallel.mesh import Mesh
from residua.train.rewrites import compile_rewritten

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.train.parallel.stage import Slice

Losses = Callable[..., tuple[Tensor, Tensor, Any]]


def whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter stays whole on every rank: FSDP2 cuts along the first axis, which a scalar has not."""
    return parameter.dim() == 0


def shard_losses(model: Decoder, mesh: Mesh, precision: torch.dtype, z_loss: float) -> nn.Module:
    """Cut every parameter into `parallel.shard` pieces of rows, gathered a layer at a time while it computes.

    The layers are gathered in the precision they compute in; what the layers share (embedding, head, topology,
    anchors) stays in the masters' and is gathered once, as the outermost group. With `parallel.unit = "model"` there
    is that group alone: more memory, but one gather and a model that compiles as a whole.

    Returns what computes the losses and is the root of all groups.
    """
    if mesh.config.unit == "layer":
        layered = LayeredLosses(model, z_loss)
        _shard(layered, layered.layers, mesh, precision, set())
        return layered
    _shard(model, (), mesh, precision, set())
    return model


def _shard(
    root: nn.Module, layers: Iterable[nn.Module], mesh: Mesh, precision: torch.dtype, left: set[nn.Parameter]
) -> None:
    narrow = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    # one axis where there are no copies: FSDP2 takes two for copies of shards
    grid = mesh.grid["shard"] if mesh.config.data == 1 else mesh.grid["data", "shard"]
    left = left | {parameter for parameter in root.parameters() if whole(parameter)}
    cut: set[nn.Parameter] = set()
    for layer in layers:
        fully_shard(layer, mesh=grid, mp_policy=narrow, ignored_params=left)
        cut |= set(layer.parameters())
    # the root knows the sublayers by other names as well
    fully_shard(root, mesh=grid, mp_policy=wide, ignored_params=left | cut, reshard_after_forward=False)
    for parameter in left:
        parameter.data = parameter.data.to(mesh.device)


def sharded_entry(root: Any, compiled: bool, z_loss: float) -> Losses:
    """The losses of a sharded model, compiled where no gather happens: in each layer, or the whole model."""
    if isinstance(root, LayeredLosses):
        if compiled:
            root.compile_parts()
        return root
    if compiled:
        root.routed_losses = compile_rewritten(root.routed_losses)
    register_fsdp_forward_method(root, "routed_losses")
    return partial(root.routed_losses, z_loss=z_loss)


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
    _shard(module, module.layers if mesh.config.unit == "layer" else (), mesh, precision, set(shared))
