"""Residua's stages, with cached transport, under the pipeline schedules that torchtitan drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.config import TORCH_DTYPE_MAP

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.distributed.experts import divide_experts
from residua.distributed.pipeline.deal import shares_of
from residua.distributed.pipeline.shared_parameters import SharedParameters
from residua.distributed.pipeline.stage import Settings, Slice, Stage
from residua.distributed.pipeline.stage_boundary import boundaries_of, recomputes_anchors
from residua.distributed.pipeline.step import among_all, keep_only
from residua.distributed.pipeline.transport import Route, StageCache, plan_routes
from residua.distributed.shard import shard_slice
from residua.integrations.torchtitan.grid import Grid
from residua.integrations.torchtitan.model import ResiduaModel
from residua.integrations.torchtitan.parallelize import compiles, divide, recompute, shard_divided, sum_gradients
from residua.integrations.torchtitan.refusals import SCHEDULES
from residua.model.moe import Routing, mixtures
from residua.model.topology.base import Items


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

    The part is the decoder without what other ranks hold; the slices that run are views of it.
    """
    run, grid = model.run, Grid(parallel_dims, model.run.parallel, device)
    model.grid = grid
    model.precision, model.device_type = TORCH_DTYPE_MAP[training.mixed_precision_param], device.type
    per_rank = stages_per_rank(run, parallelism)
    stages, ranks = grid.config.pipeline * per_rank, grid.config.pipeline
    precision = model.precision
    shares = shares_of(run, stages=stages)
    tokens = training.seq_len // (grid.tensor_ranks * grid.context_ranks)
    shape = (parallelism.pipeline_parallel_microbatch_size, tokens, run.model.width)
    boundaries = boundaries_of(model.config, shares, shape, precision, run.parallel.anchors)
    boundaries = [_with_all_tokens(items, grid.tensor_ranks) for items in boundaries]
    routes = plan_routes([list(items) for items in boundaries], ranks, run.parallel.transport)
    again = recomputes_anchors(model.config, run.parallel.anchors)
    model.shared = SharedParameters(model, grid, again, shares)
    divide(model)
    recompute(model, ac_config, dump_folder)
    settings = Settings(run.train.z_loss, precision, device.type, again)
    divided = divide_experts(model, grid, precision, "sublayers" if model.recomputes else "none")
    boundary, cache = model.topology.boundary(), StageCache()
    own = range(grid.pipeline_rank, stages, ranks)
    slices = [Slice(model, boundary, shares, i, routes[i], cache, settings) for i in own]
    model.mixtures = mixtures(model)
    for part in slices:
        inside = mixtures(part)
        part.balance = partial(_balance, model, model.mixtures.index(inside[0]) if inside else 0)
    keep_only(model, slices)
    for part in slices if grid.ranks > 1 else ():
        left = divided | model.shared.unsharded
        if grid.tensor_ranks == 1:
            shard_slice(part, grid, precision, left)
        else:
            shard_divided(part, part.units, model, left)
        sum_gradients(part, parallelism, device)
    for part in slices if compiles(compile_config) else ():
        part.compile_parts(whole=grid.ranks == 1)

    made = [
        Stage(part, i, stages, device, *_examples(i, routes[i], boundaries, shape[:2]), group=grid.pipeline)
        for part, i in zip(slices, own, strict=True)
    ]
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = kind(made if per_rank > 1 else made[0], count, loss_fn=_first(loss_fn), scale_grads=False)
    schedule.step = _taking_micro_batches(schedule.step)
    return schedule, [model], 0 in own, stages - 1 in own


def _with_all_tokens(items: Items, ranks: int) -> Items:
    """Anchors are divided by heads, not by tokens."""
    return {
        name: item.new_empty((len(item), item.shape[1] * ranks, *item.shape[2:]))
        if name.startswith("anchor.")
        else item
        for name, item in items.items()
    }


def _balance(model: ResiduaModel, first: int, routing: Routing) -> Tensor:
    """The balance loss of a stage's layers, the mixtures from number `first` on, in one micro-batch."""
    assert model.balancer is not None
    return model.balancer.loss(among_all(routing, first, len(model.mixtures)), model.part)


def stages_per_rank(run: RunConfig, parallelism: Any) -> int:
    """How many stages a rank has: 1, or for the interleaved schedule what the run or torchtitan asks for, by default 2.

    torchtitan counts layers per stage.
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
            f"--parallelism.pipeline_parallel_schedule Interleaved1F1B on {ranks} ranks needs {count * ranks} layers "
            f"or more, and the model has {layers}: use 1F1B or fewer ranks."
        )
    return count


def _examples(i: int, route: Route, boundaries: Sequence[Items], shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Tensors without memory, shaped like what stage i receives and returns."""

    def outlines(names: Sequence[str], boundary: int) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(boundaries[boundary][name]).requires_grad_() for name in names)

    tokens = (torch.empty(shape, dtype=torch.long, device="meta"),)
    losses = (torch.empty(2, device="meta").requires_grad_(),)
    received = tokens if i == 0 else outlines(route.receives, i - 1)
    return received, losses if i == len(boundaries) else outlines(route.sends, i)


def _first(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """torchtitan's losses return metrics besides the loss; a schedule takes the loss alone."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        first: Tensor = loss_fn(*args, **kwargs)[0]
        return first

    return loss


def _taking_micro_batches(run: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan hands a schedule its micro-batches; those of PyTorch up to 2.13 take a whole batch and divide it."""

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
        given = {name: torch.cat([kwargs[name] for kwargs in kwarg_mbs]) for name in kwarg_mbs[0]}
        given["batch"] = torch.arange(len(kwarg_mbs))
        target = None if target_mbs is None else torch.cat(list(target_mbs))
        return run(*tokens, target=target, losses=losses, loss_kwargs=loss_kwargs, **given)

    return step
