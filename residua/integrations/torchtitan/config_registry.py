"""torchtitan's configuration of a run. torchtitan looks up `--config NAME` as a function of this module.

This module accepts as a name any preset or path of a TOML file; in quotes, changes may follow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec

from residua.config.run import ParallelConfig
from residua.integrations.torchtitan import compat
from residua.integrations.torchtitan.compat import find_run
from residua.integrations.torchtitan.model import OwnNames, ResiduaModel
from residua.integrations.torchtitan.optimizer import ResiduaOptimizers, ResiduaSchedule, schedule_fields
from residua.integrations.torchtitan.parallelize import parallelize, pipeline
from residua.integrations.torchtitan.refusals import SCHEDULES, plainly, refuse_run
from residua.integrations.torchtitan.trainer import NoTokenizer, PreparedText, ResiduaLoss, ResiduaTrainer

compat.prepare()


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(trainer_config, name)


def trainer_config(name: str) -> Any:
    """The configuration with which torchtitan trains the run of `residua train NAME`; its flags may change it."""
    with plainly():
        run = find_run(name)
        refuse_run(run)
    text, recipe = run.to_toml(), run.train
    on_gpu = torch.accelerator.is_available()
    rounded = recipe.precision == "bfloat16" or (recipe.precision == "auto" and on_gpu)
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    graphs = on_gpu and alone and recipe.graphs == "auto" and not run.model.ffn.mixture
    return ResiduaTrainer.Config(
        run=text,
        model_spec=ModelSpec(
            name="residua",
            flavor=name,
            model=ResiduaModel.Config(run=text),
            parallelize_fn=parallelize,
            pipelining_fn=pipeline,
            post_optimizer_build_fn=None,
            state_dict_adapter=OwnNames,
        ),
        hf_assets_path=".",
        tokenizer=NoTokenizer.Config(),
        dataloader=PreparedText.Config(run=text),
        loss=ResiduaLoss.Config(),
        optimizer=ResiduaOptimizers.Config(run=text),
        lr_scheduler=ResiduaSchedule.Config(**schedule_fields(recipe.schedule)),
        training=TrainingConfig(
            steps=recipe.steps,
            seq_len=run.sequence,
            local_batch_size=recipe.micro_batch,
            global_batch_size=recipe.micro_batch * recipe.accumulate,
            max_norm=recipe.clip_norm,
            mixed_precision_param="bfloat16" if rounded else "float32",
            disable_cuda_graphs=not graphs,
        ),
        parallelism=ParallelismConfig(**_degrees(run.parallel), pipeline_parallel_microbatch_size=recipe.micro_batch),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=recipe.save_every, keep_latest_k=max(2, recipe.keep), last_save_model_only=False
        ),
        activation_checkpoint=FullAC.Config() if recipe.recompute == "sublayers" else None,
        compile=CompileConfig(enable=recipe.compile == "on" or (recipe.compile == "auto" and on_gpu)),
        metrics=MetricsProcessor.Config(log_freq=recipe.log_every),
        debug=DebugConfig(seed=recipe.seed, deterministic=recipe.determinism == "exact"),
    )


def _degrees(parallel: ParallelConfig) -> dict[str, Any]:
    """The mesh of a run; without a `[parallel]` table, the weights are sharded over all processes."""
    names = {schedule: name for name, schedule in SCHEDULES.items()}
    return {
        "spmd_backend": "partial_dtensor",
        "data_parallel_replicate_degree": parallel.data,
        "data_parallel_shard_degree": parallel.shard if parallel.ranks > 1 else -1,
        "expert_parallel_degree": parallel.experts,
        "pipeline_parallel_degree": parallel.pipeline,
        "pipeline_parallel_schedule": names[parallel.schedule],
    }
