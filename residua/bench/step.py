"""Times the whole training step as `residua train` runs it: micro-batches forward and backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from residua import ops
from residua.config import variants
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.machine import choose_device
from residua.model.decoder import build_parts
from residua.model.size import build_if_it_fits, measure
from residua.train.step import Step, build_step
from residua.train.timing import Sample, TimedStep, mfu, release_memory, time_step
from residua.train.turns import no_memory

BACKEND = "backend="
WAY = "parallel="
WAYS = ("replicate", "shard", "pipeline")


@dataclass(frozen=True)
class Case:
    """A named configuration to time, with the operators' backend.

    With `way`, it is timed as one rank of a parallel run: replicate, shard or pipeline.
    """

    name: str
    config: RunConfig
    backend: str = "auto"
    way: str | None = None


@dataclass(frozen=True)
class StepResult:
    """The timings of one case. `first_step` includes compilation; memory is the peak of all later steps.

    A case with a `problem` (such as out of memory) has no timings. On a CPU, memory and MFU are not measured.
    """

    name: str
    parameters: int
    flops_per_token: int
    tokens: int
    problem: str | None = None
    first_step: float | None = None
    step: Sample | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    loss: float | None = None


def read_cases(base: RunConfig, compare: Sequence[str]) -> list[Case]:
    """The cases of a comparison; without any, only the base.

    A case consists of words separated by spaces: known variants (`prenorm`, `mgr+exoformer`), overrides
    (`model.topology.streams=8`), `backend=reference` and `parallel=shard`. Its name is this text.
    """
    cases = []
    for text in compare or ["base"]:
        words = text.split()
        if not words:
            raise ConfigError("--compare has an empty entry: separate cases by single commas.")
        backend = ([word.removeprefix(BACKEND) for word in words if word.startswith(BACKEND)] or ["auto"])[-1]
        way = next((word.removeprefix(WAY) for word in words if word.startswith(WAY)), None)
        if way is not None and way not in WAYS:
            raise ConfigError(f"parallel={way} does not exist: choose one of {', '.join(WAYS)}.")
        with ops.backend(backend):
            pass  # refuse an unknown backend before anything is timed
        if any(word.startswith("train.device=") for word in words):
            raise ConfigError("train.device applies to all cases: give it after the preset.")
        changes = variants.overrides([word for word in words if not word.startswith((BACKEND, WAY))], base.model)
        cases.append(Case(" ".join(words), base.override(changes), backend, way))
    return cases


def read_models(presets: Sequence[str], compare: Sequence[str]) -> dict[str, list[Case]]:
    """The same cases for each model, by model name."""
    models = {Path(preset).stem: RunConfig.find(preset) for preset in presets}
    return {name: read_cases(base, compare) for name, base in models.items()}


def bench_step(
    cases: Sequence[Case],
    device: torch.device,
    *,
    steps: int,
    warmup: int,
    tell: Callable[[str], object] = lambda text: None,
) -> list[StepResult]:
    """Time each case in turn on the same random tokens; `tell` gets a line about what is running."""
    results = []
    for case in cases:
        tell(f"{case.name}: first step")
        results.append(_run(case, device, steps, warmup, tell))
        release_memory(device)
    return results


def _run(case: Case, device: torch.device, steps: int, warmup: int, tell: Callable[[str], object]) -> StepResult:
    timed: list[TimedStep] = []
    with no_memory() as problem, ops.backend(case.backend), ExitStack() as open_ranks:
        trained = build_case(case, device, open_ranks)
        started = partial(tell, f"{case.name}: timing")
        timed.append(time_step(trained, case.config, steps=steps, warmup=warmup, started=started))
    return describe(case, problem[0] if problem else timed[0])


def describe(case: Case, timed: TimedStep | str) -> StepResult:
    """The result of a case that was timed or that had a problem."""
    config = case.config
    # Count attention FLOPs at the sequence length of the run, not at the model's context.
    size = measure(config.model.override([f"context={config.sequence}"]))
    counted = (case.name, size.parameters, size.flops_per_token, config.tokens_per_step)
    if isinstance(timed, str):
        return StepResult(*counted, problem=timed)
    sample = Sample.of(timed.seconds)
    speed = config.tokens_per_step / sample.median
    device = choose_device(config.train.device, "train.device")
    return StepResult(
        *counted,
        first_step=timed.first,
        step=sample,
        tokens_per_second=speed,
        mfu=mfu(speed, size.flops_per_token, device),
        peak_memory_gib=timed.memory_gib,
        loss=timed.loss,
    )


def build_case(case: Case, device: torch.device, open_ranks: ExitStack) -> Step:
    """The step of a case, as `residua train` builds it; `open_ranks` keeps a rank's process group open."""
    torch.manual_seed(case.config.train.seed)
    if case.way is None:
        return build_step(build_if_it_fits(case.config.model, case.name), case.config.train, device)
    from residua.distributed.mesh import one_rank
    from residua.distributed.world import build_ranked_step

    mesh = open_ranks.enter_context(one_rank(device, case.config.parallel))
    return build_ranked_step(build_parts(case.config.model), case.config, mesh, case.way)  # type: ignore[arg-type]
