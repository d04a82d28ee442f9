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
from residua.distributed.pipeline.part import Part
from residua.distributed.shard import shard_slice
from residua.integrations.torchtitan.model import ResiduaModel
from residua.integrations.torchtitan.parallelize import Grid, compiles, divide, recompute, shard_divided, sum_gradients
from residua.integrations.torchtitan.refusals import SCHEDULES
from residua.model.moe import Routing


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

    built = part.build_stages()
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = kind(built if per_rank > 1 else built[0], count, loss_fn=_first(loss_fn), scale_grads=False)
    schedule.step = _taking_micro_batches(schedule.step)
    return schedule, [model], 0 in part.numbers, stages - 1 in part.numbers


def _balance(model: ResiduaModel, routing: Routing) -> Tensor:
    """The balance loss of a stage's layers in one micro-batch."""
    assert model.balancer is not None
    return model.balancer.loss(routing, model.part)


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
        inputs = {name: torch.cat([kwargs[name] for kwargs in kwarg_mbs]) for name in kwarg_mbs[0]}
        inputs["batch"] = torch.arange(len(kwarg_mbs))
        target = None if target_mbs is None else torch.cat(list(target_mbs))
        return run(*tokens, target=target, losses=losses, loss_kwargs=loss_kwargs, **inputs)

    return step
