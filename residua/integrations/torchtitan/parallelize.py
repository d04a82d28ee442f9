"""Recomputation, FSDP2 and compilation of a model, in the order in which they must be applied.

`Grid` is torchtitan's device mesh under the names that `residua.distributed` uses: pipeline, data, shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, enable_fsdp_symm_mem
from torchtitan.tools.utils import get_local_device

from residua.config.run import ParallelConfig, RunConfig
from residua.config.settings import ConfigError
from residua.distributed.experts import divide_experts
from residua.distributed.mesh import Mesh
from residua.distributed.pipeline.part import Part
from residua.distributed.shard import precisions, shard_model, shard_slice, sharded_losses, whole
from residua.distributed.units import LayeredLosses
from residua.integrations.torchtitan.division import communicate, divide_states
from residua.integrations.torchtitan.model import ResiduaModel
from residua.integrations.torchtitan.refusals import SCHEDULES
from residua.model.anchor_source import ExoSource
from residua.model.moe import Routing, mixtures
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
    """Prepare a model on the meta device for its ranks, and choose the function that computes its losses."""
    device = get_local_device()
    model.grid = grid = Grid(parallel_dims, model.run.parallel, device)
    model.precision, model.device_type = TORCH_DTYPE_MAP[training.mixed_precision_param], device.type
    model.compiled = compiles(compile_config)
    divide(model)
    recompute(model, ac_config, dump_folder)
    if grid.ranks > 1:
        divided = divide_experts(model, grid, model.precision, "sublayers" if model.recomputes else "none")
        root: Any
        if grid.tensor_ranks == 1:
            root = shard_model(model, grid, model.precision, model.run.train.z_loss, divided)
        else:
            root = LayeredLosses(model, model.run.train.z_loss)
            shard_divided(root, root.units, model, set())
        sum_gradients(root, parallelism, device)
        model.compute_with(sharded_losses(root, model.compiled, model.run.train.z_loss, None))
    return model


def divide(model: ResiduaModel) -> None:
    """Make layers communicate if ranks divide heads or tokens; call it before recomputation, which repeats it."""
    grid = model.grid
    if grid.tensor_ranks > 1:
        communicate(model, grid.tensor)
    if grid.context_ranks > 1:
        divide_states(model, grid.context_rank, grid.context_ranks)


def shard_divided(root: nn.Module, units: Iterable[nn.Module], model: ResiduaModel, left: set[nn.Parameter]) -> None:
    """FSDP2 for tensor-parallel ranks, in the groups of `distributed.shard`; parameters in `left` stay whole.

    Divided matrices are sharded over the ranks with the same heads. Everything else is identical on all tensor-parallel
    ranks, sees different tokens on each, and is sharded over all. Divided vectors are small and stay whole.
    """
    grid = model.grid
    narrow, wide = precisions(model.precision)
    split = {parameter for name, parameter in model.named_parameters() if name in model.splits}
    left = left | {p for p in root.parameters() if whole(p) or (p in split and p.dim() == 1)}
    vectors = {p for p in root.parameters() if p.dim() == 1}
    for mixture in mixtures(root):
        fully_shard(mixture, mesh=grid.joined, mp_policy=narrow, ignored_params=left | vectors)
    matrices = split - left
    for unit in units:
        fully_shard(unit, mesh=grid.shards, mp_policy=narrow, ignored_params=set(unit.parameters()) - matrices)
    if isinstance(model.anchors, ExoSource) and model.anchors.project.weight in matrices:
        fully_shard(model.anchors.project, mesh=grid.shards, mp_policy=wide)
    sharded = {p for p in root.parameters() if isinstance(p, DTensor)}
    fully_shard(root, mesh=grid.joined, mp_policy=wide, ignored_params=left | sharded, reshard_after_forward=False)


def compiles(config: Any) -> bool:
    """Whether torchtitan's settings ask for a compiled model."""
    return bool(config.enable) and "model" in config.components


def recompute(model: ResiduaModel, policy: Any, dump_folder: str) -> None:
    """Apply torchtitan's activation checkpointing: "full" recomputes sublayers, the compiler handles a budget."""
    if policy is None:
        return
    if type(policy).__qualname__.startswith("FullAC"):
        model.recomputes = True
        recompute_sublayers(model)
    else:
        policy.build(dump_folder=dump_folder).apply(model)


def sum_gradients(root: nn.Module, parallelism: Any, device: torch.device) -> None:
    """Let FSDP2 sum gradients, not average them: the trainer has divided the loss by the targets of all ranks."""
    disable_fsdp_gradient_division(root)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(root)
    if device.type == "cpu":  # gloo cannot scale while it reduces
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


class Grid(Mesh):
    """The place of this rank in a mesh that torchtitan made, with its groups."""

    def __init__(self, dims: Any, parallel: ParallelConfig, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        axes = {"pipeline": "pp", "data": "dp_replicate", "shard": "fsdp", "tensor": "tp", "context": "cp"}
        meshes = {name: dims.get_optional_mesh(axis, include_singleton_axes=True) for name, axis in axes.items()}
        self.pipeline, self.data, self.shard, self.tensor, self.context = (meshes[n].get_group() for n in axes)
        places = (meshes[name].get_local_rank() for name in axes)
        self.pipeline_rank, self.data_rank, self.shard_rank, self.tensor_rank, self.context_rank = places
        self.tensor_ranks: int = meshes["tensor"].size()
        self.context_ranks: int = meshes["context"].size()
        sizes = {name: meshes[name].size() for name in ("pipeline", "data", "shard")} | {"experts": dims.ep}
        self.config = parallel.model_copy(update=sizes)
        grid: dict[Any, Any] = {"shard": meshes["shard"]}
        if self.config.data > 1:
            grid["data", "shard"] = dims.get_mesh(["dp_replicate", "fsdp"])
        self.grid = grid  # type: ignore[assignment]
        if self.config.experts > 1:
            self._divide_experts()
        if self.tensor_ranks > 1:
            self._join_tokens()

    def _join_tokens(self) -> None:
        """Join the ranks of a model copy that have different tokens along one axis: shard × tensor."""
        sizes = (self.config.pipeline, self.config.data, self.config.shard * self.tensor_ranks)
        joined = init_device_mesh(self.device.type, sizes, mesh_dim_names=("stage", "copy", "token"))
        self.tokens, self.tokens_rank = joined.get_group("token"), joined.get_local_rank("token")
        self.joined = joined["token"] if self.config.data == 1 else joined["copy", "token"]

    @property
    def ranks(self) -> int:
        """How many ranks hold different tokens of a step."""
        return self.config.data * self.config.shard * self.tensor_ranks

    def over_batch(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        super().over_batch(tensor, operation)
        if self.tensor_ranks > 1:
            dist.all_reduce(tensor, operation, group=self.tensor)
        return tensor

    def over_copies(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that have the same heads and different sequences, in place."""
        return super().over_batch(tensor)


def pipeline(
    model: ResiduaModel,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> tuple[Any, list[nn.Module], bool, bool]:
    """The schedule, the one model part of this rank, and whether the rank has the first and the last stage.

    The part is the decoder without the modules of other ranks; the slices that run are views of it.
    """
    run, grid = model.run, Grid(parallel_dims, model.run.parallel, device)
    model.grid = grid
    model.precision, model.device_type = TORCH_DTYPE_MAP[training.mixed_precision_param], device.type
    per_rank = stages_per_rank(run, parallelism)
    stages = grid.config.pipeline * per_rank
    tokens = training.seq_len // (grid.tensor_ranks * grid.context_ranks)
    divide(model)
    recompute(model, ac_config, dump_folder)
    part = Part(
        model,
        run,
        grid,
        model.precision,
        (parallelism.pipeline_parallel_microbatch_size, tokens, run.model.width),
        stages=stages,
        recompute="sublayers" if model.recomputes else "none",
        balance=partial(_balance, model),
        tensor_ranks=grid.tensor_ranks,
    )
    model.shared, model.mixtures = part.shared, part.mixtures
    for module in part.slices if grid.ranks > 1 else ():
        if grid.tensor_ranks == 1:
            shard_slice(module, grid, model.precision, part.unsharded)
        else:
            shard_divided(module, module.units, model, part.unsharded)
        sum_gradients(module, parallelism, device)
    for module in part.slices if compiles(compile_config) else ():
        module.compile_parts(whole=grid.ranks == 1)

    def trained(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(*args, **kwargs)[0]  # a schedule takes the loss alone, without torchtitan's metrics

    built = part.build_stages()
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = kind(built if per_rank > 1 else built[0], count, loss_fn=trained, scale_grads=False)
    schedule.step = _taking_micro_batches(schedule.step)
    return schedule, [model], 0 in part.numbers, stages - 1 in part.numbers


def _balance(model: ResiduaModel, routing: Routing) -> Tensor:
    """The balance loss of a stage's layers in one micro-batch."""
    assert model.balancer is not None
    return model.balancer.loss(routing, model.part)


def stages_per_rank(run: RunConfig, parallelism: Any) -> int:
    """Stages per rank: 1 or, for the interleaved schedule, the number set by the run or torchtitan, by default 2.

    torchtitan sets layers per stage.
    """
    if SCHEDULES[parallelism.pipeline_parallel_schedule] != "interleaved":
        return 1
    layers, ranks = run.model.layers, int(parallelism.pipeline_parallel_degree)
    per_stage: int | None = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        return max(2, round(layers / (per_stage * ranks)))
    count = max(2, run.parallel.stages_per_rank)
    if count * ranks > layers:
        raise ConfigError(
            f"--parallelism.pipeline_parallel_schedule Interleaved1F1B on {ranks} ranks needs {count * ranks} "
            f"layers or more, but the model has {layers}: use 1F1B or fewer ranks."
        )
    return count


def _taking_micro_batches(run: Callable[..., Any]) -> Callable[..., Any]:
    """Accept the micro-batches that torchtitan passes; PyTorch's schedules up to 2.13 take and split a whole batch."""

    def step(
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None,
        kwarg_mbs: Sequence[dict[str, Tensor]],
        target_mbs: Sequence[Tensor] | None,
        losses: list[Tensor] | None,
        loss_kwargs: dict[str, Any],
        return_outputs: bool,
    ) -> Any:
        tokens = () if arg_mbs is None else (torch.cat([first for (first,) in arg_mbs]),)
        inputs = {name: torch.cat([kwargs[name] for kwargs in kwarg_mbs]) for name in kwarg_mbs[0]}
        inputs["batch"] = torch.arange(len(kwarg_mbs))
        target = None if target_mbs is None else torch.cat(list(target_mbs))
        return run(*tokens, target=target, losses=losses, loss_kwargs=loss_kwargs, **inputs)

    return step
