"""The configuration of a run: model, data, training and parallelism.

It is written to the run's folder and read back from it. This file does not import torch, so that `residua train` can
refuse an invalid configuration immediately.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from residua.config import presets
from residua.config.model import ModelConfig
from residua.config.schedule import LinearDecay, Schedule
from residua.config.settings import (
    ConfigError,
    Frozen,
    Positive,
    Seed,
    WholeConfig,
    apply_overrides,
    flat,
    key_for_alias,
    merge,
    of_file,
    override_key,
    read_toml,
)
from residua.errors import UserError

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
DecayRule = Literal["cautious", "plain"]
"""`cautious` decays a weight only where the update moves it towards zero (arXiv 2510.12402), `plain` always (AdamW)."""


class AdamW(Frozen):
    """AdamW. As the optimizer of the whole model, it decays only the hidden matrices."""

    kind: Literal["adamw"] = "adamw"
    lr: Rate = 3e-3
    """The peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: Decay = 0.0
    """Weight decay of the hidden matrices, if this optimizes the whole model."""
    decay: DecayRule = "cautious"
    """Decay a weight always, or only where the update moves it towards zero (arXiv 2510.12402)."""


class Muon(Frozen):
    """Muon with Polar Express for the hidden matrices, `rest` for everything else (embedding, head, gains, queries).

    `embedding_decay` is the weight decay of embedding and head, by the rule `decay`; the default is that of `rest`.
    """

    kind: Literal["muon"] = "muon"
    lr: Rate = 1e-2
    """The peak learning rate of the hidden matrices."""
    momentum: Beta = 0.95
    """Decay of the momentum."""
    weight_decay: Decay = 0.1
    """Weight decay of the hidden matrices."""
    decay: DecayRule = "cautious"
    embedding_decay: Decay | None = None
    rest: AdamW = AdamW()


Optimizer = Annotated[Muon | AdamW, Field(discriminator="kind")]


class DataConfig(Frozen):
    """The prepared text or, without `path`, the embedded corpus, tokenized by `tokenizer`.

    `sequence` defaults to the model's context. `masking = "documents"` restricts attention to each document.
    `validation_tokens` limits the size of the fixed validation set. `limit` restricts training to the first tokens of
    the text, which are repeated.
    """

    path: str | None = None
    tokenizer: str = "bpe:1024"
    sequence: Positive | None = None
    seed: Seed = 0
    """Seed for the order of the training text."""
    masking: Literal["none", "documents"] = "none"
    validation_tokens: Positive = 262_144
    limit: Positive | None = None


class Balance(Frozen):
    """Load balancing of experts: `weight` · E·Σ f_e P_e + `router_z` · mean(lse²), summed over layers.

    f_e and P_e cover the whole step: all micro-batches and ranks. The gradient needs every f_e before the first
    backward pass: `previous_step` uses those of the last step; `same_step` uses those of the current step, which takes
    one more forward pass over its micro-batches if there are several (`train/balance.py`). After each step, the bias of
    a sigmoid router moves by `bias_rate` towards an equal load.
    """

    weight: Decay = 0.01
    router_z: Decay = 1e-3
    load: Literal["previous_step", "same_step"] = "previous_step"
    """Which step's f_e the gradient uses."""
    bias_rate: Decay = 1e-3


class LowPrecision(Frozen):
    """Which matrices use a low `train.precision`: those of these `sublayers` with at least `smallest` rows and columns.

    The last layers, a fraction `spared` of all, stay in high precision. By default, `smallest` is 1024 for `fp8` and 16
    for emulations, and `spared` is 0.15 for NVFP4 and 0 for FP8. The range of a tensor in FP8 is its largest magnitude
    in the last `history` steps.
    """

    sublayers: Literal["all", "attention", "feed-forward"] = "all"
    """The sublayers whose matrices multiply in low precision."""
    smallest: Positive | None = None
    """Minimum number of rows and columns of such a matrix."""
    spared: float | None = Field(None, ge=0, le=1)
    """Fraction of layers, the last ones, that stay in high precision."""
    history: Positive = 16
    """Number of steps over which the range of a tensor in FP8 is measured."""
    head: bool = False
    """Whether the head multiplies in FP8 too, whatever its size. Off, because it has never run on a GPU."""


LOW_PRECISIONS = ("fp8", "fp8_emulated", "nvfp4_emulated")


class TrainConfig(Frozen):
    """How to train. A step has `accumulate` micro-batches of `micro_batch` sequences each.

    `z_loss` and `balance` are minimized, but not part of any reported loss. `auto` means: on a GPU compiled, with bf16
    autocast, each micro-batch replayed as a CUDA graph; on a CPU plain fp32. `compile = "layers"` compiles each kind of
    sublayer once instead of the whole model, so that a single process starts sooner. `recompute = "sublayers"` saves
    activation memory for a third more compute. `precision = "fp8"` multiplies large matrices in FP8 if the device
    supports it; `fp8_emulated` and `nvfp4_emulated` emulate its rounding on any device, without a gain in speed. A run
    whose loss stays `divergence_margin` nats above its first loss for `divergence_patience` log lines in a row is
    stopped. `keep` checkpoints stay on disk, and the best one. A CPU run always repeats bit for bit;
    `determinism = "exact"` makes a GPU run do so too, at some cost in speed. `start` is a run or a Hugging Face model
    folder that provides the initial weights (`--from`). `telemetry` measures the peaks, gates and mixtures of every
    layer every `telemetry_every` steps (default: about twenty times in a run, and at least with every tenth log line),
    on at most `telemetry_tokens` tokens of the validation text. `profile` lists steps to trace; each process writes its
    traces into the run's folder.
    """

    start: str | None = None
    steps: Positive = 1000
    """Optimizer steps."""
    micro_batch: Positive = 8
    accumulate: Positive = 1
    seed: Seed = 0
    """Seed for the initial weights."""
    optimizer: Optimizer = Muon()
    schedule: Schedule = LinearDecay()
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm; larger gradients are clipped."""
    z_loss: Decay = 1e-5
    balance: Balance = Balance()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    precision: Literal["auto", "bfloat16", "float32", "fp8", "fp8_emulated", "nvfp4_emulated"] = "auto"
    """Precision of matrix products; weights and optimizer state stay in fp32."""
    low_precision: LowPrecision = LowPrecision()
    """Which products use a low `precision`."""
    compile: Literal["auto", "on", "layers", "off"] = "auto"
    graphs: Literal["auto", "off"] = "auto"
    """Whether micro-batches are replayed as CUDA graphs."""
    recompute: Literal["none", "sublayers"] = "none"
    determinism: Literal["fast", "exact"] = "fast"
    log_every: Positive = 10
    """Steps between log lines."""
    validate_every: Positive = 250
    """Steps between validations."""
    save_every: Positive = 1000
    """Steps between checkpoints."""
    keep: Positive = 2
    divergence_margin: float = Field(1.0, gt=0)
    divergence_patience: Positive = 3
    telemetry: Literal["on", "off"] = "on"
    telemetry_every: Positive | None = None
    telemetry_tokens: Positive = 1024
    profile: tuple[Positive, ...] = ()
    track: Literal["tensorboard", "wandb"] = "tensorboard"
    """TensorBoard logs are written if it is installed; `wandb` adds Weights & Biases."""

    @model_validator(mode="after")
    def _warm_up_fits(self) -> Self:
        if self.schedule.warmup >= self.steps:
            raise UserError(
                f"train.schedule.warmup = {self.schedule.warmup} must be less than train.steps = {self.steps}: "
                "lower the warmup or raise the steps."
            )
        return self


SMALLEST_UNIT = 25_000_000
"""Minimum number of parameters that FSDP2 gathers at a time. Each unit costs the host milliseconds, during which the
GPU needs enough work."""


class ParallelConfig(Frozen):
    """How a run is divided among the `data` × `shard` × `pipeline` processes that torchrun starts.

    data: replicas of the model, each with its share of a step's micro-batches. shard: the number of shards of weights,
    gradients and optimizer state (FSDP2), gathered one `unit` at a time; each rank also has its own micro-batches.
    experts: groups of this many shard ranks divide the experts among themselves and exchange tokens. pipeline: ranks
    along depth, each with `stages_per_rank` slices of the layers (several for the interleaved schedule). `split`:
    whether stages have equal work, including the head, or equal numbers of layers. `anchors`: whether stages send
    ExoFormer's anchors on or recompute them from the embedding; `auto` sends fewer bytes. A rank that is silent for
    `patience` seconds is considered dead and ends the run. The number of ranks changes the speed, not the batch or the
    result.
    """

    data: Positive = 1
    shard: Positive = 1
    pipeline: Positive = 1
    experts: Positive = 1
    unit: Literal["layer", "model"] = "layer"
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """The order of micro-batches in a pipeline."""
    stages_per_rank: Positive = 1
    split: Literal["work", "layers"] = "work"
    transport: Literal["cached", "naive"] = "cached"
    """Send a tensor to each rank once, or at every hop (for comparison)."""
    anchors: Literal["auto", "send", "recompute"] = "auto"
    patience: int = Field(60, ge=5, le=2**31 - 1)

    @property
    def ranks(self) -> int:
        return self.data * self.shard * self.pipeline

    @property
    def batch_ranks(self) -> int:
        """The number of ranks that share the micro-batches of a step."""
        return self.data * self.shard

    @property
    def slices(self) -> int:
        """The number of shard ranks that have the same experts."""
        return self.shard // self.experts

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    def command_on(self, nodes: int = 1) -> str:
        """The command that starts such a run; for several nodes, run it on each, where HOST is one of them."""
        if self.ranks == 1:
            return "residua train"
        meeting = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
        return f"torchrun {meeting}--nproc-per-node {self.ranks // nodes} --no-python residua train"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.shard % self.experts:
            raise UserError(
                f"parallel.experts = {self.experts} does not divide parallel.shard = {self.shard}, whose ranks "
                "hold the experts: use a divisor of it, or raise parallel.shard."
            )
        if self.experts > 1 and self.unit == "model":
            raise UserError(
                f"parallel.experts = {self.experts} cannot be combined with parallel.unit = 'model', which "
                "gathers every expert: use parallel.unit = 'layer'."
            )
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved"):
            raise UserError(
                f"parallel.stages_per_rank = {self.stages_per_rank} does not fit parallel.schedule = "
                f"'{self.schedule}': use at least 2 stages per rank for the interleaved schedule and 1 for the others."
            )
        return self


class RunConfig(WholeConfig):
    """The complete configuration of a run. Sections of its TOML: `[model]`, `[data]`, `[train]`, `[parallel]`."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()

    @classmethod
    def from_toml(cls, path: str | Path) -> RunConfig:
        """Read a run's TOML file; `extends = "PRESET"` at the top level makes it override that preset."""
        data = read_toml(path)
        with of_file(path):
            tables = merge(presets.load(data.pop("extends")), data) if "extends" in data else data
            tables.pop("summary", None)
            return cls(**tables)

    @classmethod
    def find(cls, source: str) -> RunConfig:
        """The run that a preset's name or a TOML file's path describes."""
        if source.endswith(".toml"):
            return cls.from_toml(source)
        if source not in presets.names() and Path(source).exists():
            raise ConfigError(f"{source!r} is neither a preset (`residua presets` lists them) nor a .toml file.")
        return cls(**{key: table for key, table in presets.load(source).items() if key != "summary"})

    def override(self, changes: list[str]) -> RunConfig:
        """Apply `section.key=value` changes, for example `train.steps=500`. A new `kind` drops the old kind's keys."""
        for change in changes:
            section = override_key(change).partition(".")[0].strip()
            if section and section not in RunConfig.model_fields:
                raise ConfigError(f"override {change!r} has no known section: {self._place(change)}")
        return RunConfig(**apply_overrides(self.model_dump(exclude_none=True), changes))

    def _place(self, change: str) -> str:
        """Advice for a key without a section: the least nested keys of that name, or the nearest spelling."""
        key = override_key(change)
        first = key.partition(".")[0]
        keys = [path.split(".") for path in flat(self.model_dump())]
        places = list(dict.fromkeys(".".join(parts[:depth]) for parts in keys for depth in range(1, len(parts) + 1)))
        fitting = [place for place in places if place.endswith(f".{first}")]
        if fitting:
            depth = min(place.count(".") for place in fitting)
            written = (f"{p}{change.removeprefix(first)}" for p in fitting if p.count(".") == depth)
            return f"write {' or '.join(written)}."
        if alias := key_for_alias(f"model.{key}"):
            return f"did you mean {alias}?"
        spelt = {place if "." in key else place.partition(".")[2]: place for place in reversed(places)}
        near = get_close_matches(key, spelt, n=1, cutoff=0.75)
        if near:
            return f"did you mean {spelt[near[0]]}?"
        return "start with model, data, train or parallel, as in train.steps=500."

    @model_validator(mode="after")
    def _mesh_fits(self) -> Self:
        check_mesh(self)
        return self

    @property
    def sequence(self) -> int:
        """Tokens in one training sequence."""
        return self.data.sequence or self.model.context

    @property
    def tokens_per_step(self) -> int:
        return self.train.accumulate * self.train.micro_batch * self.sequence

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.train.steps * self.tokens_per_step


def check_mesh(config: RunConfig) -> None:
    """Refuse a mesh that cannot train the run."""
    accumulate, ranks = config.train.accumulate, config.parallel.batch_ranks
    if accumulate % ranks:
        raise UserError(
            f"train.accumulate = {accumulate} micro-batches cannot be divided among parallel.data × "
            f"parallel.shard = {ranks} ranks: use a multiple of {ranks} (to keep the batch size, lower "
            "train.micro_batch accordingly)."
        )
    _check_experts(config)
    _check_stages(config)
    _check_low_precision(config)
    if config.train.compile == "layers" and config.parallel.ranks > 1:
        raise UserError(
            f"train.compile = 'layers' supports one process, but parallel asks for {config.parallel.ranks}: use "
            "train.compile = 'auto' or 'on'."
        )


def _check_low_precision(config: RunConfig) -> None:
    recipe, parallel = config.train, config.parallel
    if recipe.precision not in LOW_PRECISIONS:
        return
    if recipe.compile == "layers":
        raise UserError(
            f"train.precision = '{recipe.precision}' keeps ranges per layer, but train.compile = 'layers' shares "
            "code between layers: use train.compile = 'auto' or 'on'."
        )
    if parallel.pipeline > 1:
        raise UserError(
            f"train.precision = '{recipe.precision}' does not support parallel.pipeline = {parallel.pipeline}: use "
            "parallel.data or parallel.shard."
        )
    if recipe.low_precision.head:
        _check_low_precision_head(config)
    if recipe.precision == "nvfp4_emulated" and parallel.ranks > 1:
        raise UserError(
            "train.precision = 'nvfp4_emulated' uses random numbers that can be restored for one process only: "
            "train with one process."
        )


def _check_low_precision_head(config: RunConfig) -> None:
    model = config.model
    problems = {
        f"train.precision = '{config.train.precision}'": config.train.precision == "nvfp4_emulated",
        f"model.logit_softcap = {model.logit_softcap}": model.logit_softcap is not None,
        f"model.vocab_size = {model.vocab_size}, not a multiple of 16": model.vocab_size % 16 > 0,
        f"model.width = {model.width}, not a multiple of 16": model.width % 16 > 0,
    }
    for problem, exists in problems.items():
        if exists:
            raise UserError(
                f"train.low_precision.head = true does not support {problem}: change that, or leave the head out."
            )


def _check_experts(config: RunConfig) -> None:
    parallel, ffn = config.parallel, config.model.ffn
    if parallel.experts == 1:
        return
    if not ffn.mixture:
        raise UserError(
            f"parallel.experts = {parallel.experts} cannot be combined with model.ffn.kind = '{ffn.kind}', "
            "which has no experts: use parallel.experts = 1."
        )
    if ffn.bias:
        raise UserError(
            f"parallel.experts = {parallel.experts} divides the matrices of experts but not their biases "
            "(ffn.bias = true): use parallel.experts = 1."
        )
    if ffn.experts % parallel.experts:
        raise UserError(
            f"model.ffn.experts = {ffn.experts} cannot be divided equally among parallel.experts = "
            f"{parallel.experts} ranks: use a divisor."
        )
    for name, rows in {"model.ffn.hidden": ffn.hidden, "model.width": config.model.width}.items():
        if ffn.experts // parallel.experts * rows % parallel.slices:
            raise UserError(
                f"the {ffn.experts // parallel.experts} experts of a rank, with {name} = {rows} rows each, cannot be "
                f"sharded equally by parallel.shard / parallel.experts = {parallel.slices} ranks: use fewer."
            )


def _check_repeats(config: RunConfig) -> None:
    parallel = config.parallel
    if config.model.repeats and parallel.shard > 1 and (parallel.unit == "layer" or parallel.pipeline > 1):
        raise UserError(
            f"model.order.kind = '{config.model.order.kind}' runs a layer several times, but parallel.shard = "
            f"{parallel.shard} gathers each layer once: set parallel.unit=model without a pipeline, or use "
            "parallel.data."
        )


def _check_stages(config: RunConfig) -> None:
    parallel = config.parallel
    _check_repeats(config)
    if parallel.stages > len(config.model.executed):
        raise UserError(
            f"parallel.pipeline × parallel.stages_per_rank = {parallel.stages} stages are more than the "
            f"{len(config.model.executed)} layers that the model runs: use fewer."
        )
    flowing = config.train.accumulate // parallel.batch_ranks
    if parallel.schedule == "1f1b" and flowing < parallel.pipeline:
        raise UserError(
            f"train.accumulate = {config.train.accumulate} gives each pipeline {flowing} micro-batches, but the "
            f"1f1b schedule needs at least parallel.pipeline = {parallel.pipeline}: raise train.accumulate."
        )
    if parallel.schedule == "interleaved" and flowing % parallel.pipeline:
        raise UserError(
            f"train.accumulate = {config.train.accumulate} gives each pipeline {flowing} micro-batches, but the "
            f"interleaved schedule needs a multiple of parallel.pipeline = {parallel.pipeline}: change "
            "train.accumulate."
        )


def settings(config: RunConfig, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every key of a run with its value, `train.steps` → 1000, except keys that begin with one of `without`."""
    return {key: value for key, value in flat(config.model_dump()).items() if not key.startswith(without)}


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The keys that differ between two runs: `train.steps` → (old, new)."""
    before, after = flat(old.model_dump()), flat(new.model_dump())
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
