"""Recomputation, FSDP2 and compilation of a model, in the order in which they must be applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, enable_fsdp_symm_mem
from torchtitan.tools.utils import get_local_device

from residua.distributed.experts import divide_experts
from residua.distributed.shard import shard_model, sharded_losses, whole
from residua.distributed.units import LayeredLosses
from residua.integrations.torchtitan.context import divide_states
from residua.integrations.torchtitan.grid import Grid
from residua.integrations.torchtitan.model import ResiduaModel
from residua.integrations.torchtitan.tensor import communicate
from residua.model.anchor_source import ExoSource
from residua.model.moe import mixtures
from residua.train.step import recompute_sublayers


def parallelize(
    model: ResiduaModel,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> ResiduaModel:
    """Make a model on the meta device ready for its ranks, and choose what computes its losses."""
    device = get_local_device()
    model.grid = grid = Grid(parallel_dims, model.run.parallel, device)
    model.precision, model.device_type = TORCH_DTYPE_MAP[training.mixed_precision_param], device.type
    model.compiled = compiles(compile_config)
    divide(model)
    recompute(model, ac_config, dump_folder)
    if grid.ranks > 1:
        divided = divide_experts(model, grid, model.precision, "sublayers" if model.recomputes else "none")
        root = (
            shard_model(model, grid, model.precision, model.run.train.z_loss, divided)
            if grid.tensor_ranks == 1
            else _layered(model)
        )
        sum_gradients(root, parallelism, device)
        model.compute_with(sharded_losses(root, model.compiled, model.run.train.z_loss, None))
    return model


def divide(model: ResiduaModel) -> None:
    """Let layers communicate where ranks divide heads or tokens among them; before recomputation, which repeats it."""
    grid = model.grid
    if grid.tensor_ranks > 1:
        communicate(model, grid.tensor)
    if grid.context_ranks > 1:
        divide_states(model, grid.context_rank, grid.context_ranks)


def _layered(model: ResiduaModel) -> nn.Module:
    root = LayeredLosses(model, model.run.train.z_loss)
    shard_divided(root, root.units, model, set())
    return root


def shard_divided(root: nn.Module, units: Iterable[nn.Module], model: ResiduaModel, left: set[nn.Parameter]) -> None:
    """FSDP2 for tensor-parallel ranks, in the groups of `distributed.shard`; `left` stays whole.

    Matrices that the ranks divide are sharded over the ranks with the same heads; everything else is alike on
    them, sees other tokens on each, and is sharded over all. Vectors that the ranks divide are small and stay whole.
    """
    grid = model.grid
    narrow = MixedPrecisionPolicy(param_dtype=model.precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    split = {parameter for name, parameter in model.named_parameters() if name in model.splits}
    left = left | {p for p in root.parameters() if whole(p) or (p in split and p.dim() == 1)}
    vectors = {p for p in root.parameters() if p.dim() == 1}
    for mixture in mixtures(root):
        fully_shard(mixture, mesh=grid.joined, mp_policy=narrow, ignored_params=left | vectors)
    own = grid.grid["shard"] if grid.config.data == 1 else grid.grid["data", "shard"]
    matrices = split - left
    for unit in units:
        fully_shard(unit, mesh=own, mp_policy=narrow, ignored_params=set(unit.parameters()) - matrices)
    if isinstance(model.anchors, ExoSource) and model.anchors.project.weight in matrices:
        fully_shard(model.anchors.project, mesh=own, mp_policy=wide)
    sharded = {p for p in root.parameters() if isinstance(p, DTensor)}
    fully_shard(root, mesh=grid.joined, mp_policy=wide, ignored_params=left | sharded, reshard_after_forward=False)


def compiles(config: Any) -> bool:
    """Whether torchtitan's settings ask for a compiled model."""
    return bool(config.enable) and "model" in config.components


def recompute(model: ResiduaModel, policy: Any, dump_folder: str) -> None:
    """Apply torchtitan's choice of activation checkpointing: full recomputes sublayers, a budget is the compiler's."""
    if policy is None:
        return
    if type(policy).__qualname__.startswith("FullAC"):
        model.recomputes = True
        recompute_sublayers(model)
    else:
        policy.build(dump_folder=dump_folder).apply(model)


def sum_gradients(root: nn.Module, parallelism: Any, device: torch.device) -> None:
    """Let FSDP2 add gradients up, not average them: the trainer has divided the loss by the targets of all ranks."""
    disable_fsdp_gradient_division(root)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(root)
    if device.type == "cpu":  # gloo cannot scale while it adds
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
