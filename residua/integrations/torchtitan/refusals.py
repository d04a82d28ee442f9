"""Refuses combinations that Residua's runs and torchtitan do not support, in one sentence that names both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.integrations.torchtitan.division import narrow, refuse_mixers
from residua.report.failure import describe, show
from residua.train.start import check_model

SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved"}
"""torchtitan's name → Residua's name, for each schedule that Residua's stages support."""


@contextmanager
def plainly() -> Iterator[None]:
    """Let a refusal end the process with its sentence on rank 0 instead of a traceback on every rank."""
    try:
        yield
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            show(describe(error))
        sys.exit(1)


def refuse_run(run: RunConfig) -> None:
    """Refuse a run that cannot learn, or that has a setting without a counterpart in torchtitan."""
    check_model(run)
    recipe = run.train
    if run.model.repeats:
        raise ConfigError(
            f"model.order.kind = '{run.model.order.kind}' runs a layer several times, but torchtitan's stages "
            "and shards hold each layer once: use `residua train`."
        )
    if run.model.ffn.mixture and recipe.balance.load == "same_step":
        raise ConfigError(
            "train.balance.load = 'same_step' needs a second forward pass over a step, which torchtitan's trainer does "
            "not make: set train.balance.load=previous_step."
        )
    if recipe.compile == "layers":
        raise ConfigError(
            "train.compile = 'layers' is for a single process of `residua train`, while torchtitan compiles "
            "the model or its layers itself: set train.compile=auto."
        )
    if run.parallel.transport != "cached" and run.parallel.pipeline == 1:
        raise ConfigError("parallel.transport is for a pipeline: set parallel.pipeline, or leave it out.")


def refuse_engine(config: Any, run: RunConfig) -> None:
    """After torchtitan has read its command line, refuse settings of it that cannot train this run."""
    _refuse_mesh(config, run)
    if config.parallelism.pipeline_parallel_degree > 1:
        _refuse_pipeline(config.parallelism)
    _refuse_features(config)
    if config.training.steps < 1 and not config.lr_scheduler.total_steps:
        raise ConfigError(
            f"--training.steps {config.training.steps} leaves Residua's schedule without steps: train at least "
            "one step."
        )
    if run.model.context < config.training.seq_len:
        raise ConfigError(
            f"--training.seq_len {config.training.seq_len} is longer than model.context = {run.model.context}: raise "
            "model.context, or use shorter sequences."
        )


def _refuse_mesh(config: Any, run: RunConfig) -> None:
    parallelism = config.parallelism
    if parallelism.spmd_backend != "partial_dtensor":
        raise ConfigError(
            f"--parallelism.spmd_backend {parallelism.spmd_backend} rewrites torchtitan's own modules, but "
            "Residua's are plain PyTorch: use partial_dtensor."
        )
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    if tensor > 1:
        _refuse_tensor(config, run)
    if context > 1:
        refuse_mixers(narrow(run.model, tensor), context)
    experts = parallelism.expert_parallel_degree
    ffn = run.model.ffn
    if experts > 1 and (not ffn.mixture or ffn.experts % experts):
        raise ConfigError(
            f"--parallelism.expert_parallel_degree {experts} needs model.ffn.kind = 'moe' with a multiple of {experts} "
            "experts: leave it out, or choose a divisor."
        )


def _refuse_tensor(config: Any, run: RunConfig) -> None:
    degree = config.parallelism.tensor_parallel_degree
    narrow(run.model, degree)
    if run.model.anchors.reads_tokens:
        raise ConfigError(
            f"--parallelism.tensor_parallel_degree {degree} gives a rank the ids of its own tokens, but attention with "
            f"model.anchors.kind = {run.model.anchors.kind!r} looks up those of all tokens: shard the model in "
            "another way."
        )
    if not config.parallelism.enable_sequence_parallel:
        raise ConfigError(
            f"--parallelism.tensor_parallel_degree {degree} without enable_sequence_parallel would replicate "
            "the state of Residua's topology on every rank: leave it on."
        )
    if config.parallelism.expert_parallel_degree > 1:
        raise ConfigError(
            f"--parallelism.tensor_parallel_degree {degree} cannot be combined with expert_parallel_degree, "
            "since Residua divides experts among the ranks of data_parallel_shard_degree: use one of the two."
        )
    if getattr(config.checkpoint, "async_mode", "disabled") != "disabled":
        raise ConfigError(
            f"--parallelism.tensor_parallel_degree {degree} cannot be combined with --checkpoint.async_mode "
            f"{config.checkpoint.async_mode}, which cannot copy the shards of Residua's projections: use disabled."
        )


def _refuse_pipeline(parallelism: Any) -> None:
    schedule = parallelism.pipeline_parallel_schedule
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"--parallelism.pipeline_parallel_schedule {schedule} splits the backward pass, which Residua's cached "
            f"stages cannot: use {', '.join(SCHEDULES)}."
        )
    if parallelism.module_fqns_per_model_part or parallelism.pipeline_parallel_schedule_csv:
        raise ConfigError(
            "--parallelism.module_fqns_per_model_part and pipeline_parallel_schedule_csv name torchtitan's "
            "own layers, but Residua splits its layers itself: leave them out."
        )


def _refuse_features(config: Any) -> None:
    policy = type(config.activation_checkpoint).__qualname__
    if policy.startswith("SelectiveAC"):
        raise ConfigError(
            "selective activation checkpointing looks for torchtitan's own layers, but Residua recomputes "
            "whole sublayers: choose activation-checkpoint:full or none."
        )
    if config.compile.enable and config.compile.backend != "inductor":
        raise ConfigError(
            f"--compile.backend {config.compile.backend}: Residua's graph rewrites need inductor: leave it out."
        )
    if config.validator.enable:
        raise ConfigError(
            "--validator.enable reads torchtitan's own datasets: convert a checkpoint (docs/torchtitan.md) and use "
            "residua eval."
        )
    if config.checkpoint.create_seed_checkpoint:
        raise ConfigError(
            "--checkpoint.create_seed_checkpoint is not needed: a Residua run starts with the same weights on any mesh."
        )
    if config.training.enable_cpu_offload:
        raise ConfigError("--training.enable_cpu_offload does not work with Residua's Muon: leave it out.")

    if config.training.dtype != "float32":
        raise ConfigError(
            f"--training.dtype {config.training.dtype} would round the weights, but Residua's optimizer keeps "
            "them in float32: use --training.mixed_precision_param."
        )
