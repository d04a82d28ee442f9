"""A rank in the tests of equality: trains each case and gathers the compared values on rank 0."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import residua
import residua.train.optimizer
import residua.train.step
from residua.distributed import optimizer, units
from residua.distributed.mesh import Mesh, Processes
from residua.distributed.pipeline import part, stage
from residua.distributed.pipeline.shares import cut, shares_of
from residua.distributed.pipeline.step import PipelinedStep
from residua.distributed.world import build_ranked_step
from residua.model.moe import mixtures
from residua.train.step import Step
from tests.distributed.cases import ACCUMULATE, STEPS, batches, deep_config, perturb, run_config
from tests.distributed.live import constructed


def trace(step: Step, rank: int, ranks: int) -> dict[str, Tensor]:
    """Losses, clipped gradients and weights of the first steps, the validation loss after them."""
    seen: dict[str, Tensor] = {}
    update = step.optimizer.update

    def record(numbers: Any) -> None:
        for group in step.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    seen[f"{number}/gradient/{name}"] = whole(parameter.grad)
        update(numbers)

    step.optimizer.update = record  # type: ignore[method-assign]
    for number in range(STEPS):
        step(batches(number)[rank::ranks])
        seen[f"{number}/totals"] = torch.tensor(step.totals())
        step.set_totals([0.0] * 4)
    assert any("/gradient/" in name for name in seen)
    validation = batches(99)[: ACCUMULATE - 1]
    loss, targets = step.evaluate(validation)
    seen["validation"] = torch.tensor([loss, float(targets)])
    for group in step.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            seen[f"weight/{name}"] = whole(parameter)
    for name, buffer in step.model.named_buffers():
        seen[f"buffer/{name}"] = buffer.clone()
    if step.balancer is not None:
        seen["load"] = torch.tensor(step.balancer.state()["load"])
    return seen


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def single(model: str, *, crowded: bool = False, **train: Any) -> dict[str, Tensor]:
    """The same on one process, without any distributed code."""
    from residua.train.step import build_step

    config = run_config(model, **train)
    return trace(build_step(make(config, crowded), config.train, torch.device("cpu")), 0, 1)


def make(config: Any, crowded: bool = False) -> Any:
    """A model with parameters away from zero; `crowded`: its routers first send every token to the same experts."""
    torch.manual_seed(0)
    model = residua.build(config.model)
    perturb(model)
    for mixture in mixtures(model) if crowded else ():
        mixture.router.weight.data.zero_()
    return model


def made(config: Any, crowded: bool = False) -> Any:
    """The same as parts, as ranks take them."""
    return {"": make(config, crowded)}.items()


@contextmanager
def counting(module: Any, name: str, size: Callable[[Any], int]) -> Iterator[list[int]]:
    """Record the calls of a module's function, by the size of their first argument."""
    function, seen = getattr(module, name), []

    def count(first: Any, *rest: Any, **settings: Any) -> Any:
        seen.append(size(first))
        return function(first, *rest, **settings)

    setattr(module, name, count)
    yield seen
    setattr(module, name, function)


def orthogonalised() -> AbstractContextManager[list[int]]:
    """Record the matrices that this process orthogonalises, in batches."""
    return counting(residua.train.optimizer, "_orthogonal", len)


def ranked(model: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    """Train a case; rank 0 returns the records of all.

    `parallel` has keys of `[parallel]` and a few that belong elsewhere, which are popped here.
    """
    way, crowded = parallel.pop("way", None), parallel.pop("crowded", False)
    units.SMALLEST_UNIT = parallel.pop("smallest_unit", 1)
    optimizer.TURN_ELEMENTS = parallel.pop("turn", 1 << 24)
    compiler = partial(torch.compile, dynamic=False, backend=parallel.pop("backend", None))
    stage.compile_rewritten = units.compile_rewritten = compiler
    cuts, pieces = parallel.pop("cuts", None), parallel.pop("pieces", 1)
    part.shares_of = shares_of if cuts is None else lambda config, **_: cut(cuts, config.model.sublayers, pieces)
    names = ("layers", "precision", "low_precision", "recompute", "compile", "balance")
    recipe = {key: parallel.pop(key) for key in names if key in parallel}
    config = run_config(model, parallel, **recipe)
    mesh = Mesh(config.parallel, torch.device("cpu"))
    counters["stats"].clear()
    with (
        orthogonalised() as matrices,
        counting(optimizer, "_Turn", lambda _: 1) as turns,
        counting(residua.train.step, "checkpoint", lambda _: 1) as checkpointed,
    ):
        step = build_ranked_step(made(config, crowded), config, mesh, way)
        seen = trace(step, mesh.batch_rank, config.parallel.batch_ranks)
    together = gathered(seen)
    together["turns"] = torch.tensor(len(turns))
    counts = {
        "matrices": sum(matrices),
        "checkpointed": len(checkpointed),
        "graphs": counters["stats"]["unique_graphs"],
    }
    together |= {key: mesh.over_all(torch.tensor(count)) for key, count in counts.items()}
    return together | (of_pipeline(step) if isinstance(step, PipelinedStep) else {})


def gathered(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """The records of all ranks, on rank 0; under the same name, those of the first."""
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(seen, ranks)
    return {key: value for rank in reversed(ranks or []) for key, value in rank.items()}


def built(model: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a deep model as ranks build it, and the bytes that each rank held."""
    config = deep_config(model, parallel)
    mesh = Mesh(config.parallel, torch.device("cpu"))
    made, held = constructed(config, mesh)
    weights = {f"weight/{name}": whole(parameter) for name, parameter in made.named_parameters()}
    return gathered(weights | {f"{key}/{mesh.rank}": value for key, value in held.items()})


def of_pipeline(step: PipelinedStep) -> dict[str, Tensor]:
    """The bytes sent, the sentence about them, and how many cached or received tensors are still there."""
    kept = len(step.part.slices[0].cache.entries)
    chunks = [way for one in step.stages for way in (one.args_recv_info, one.grad_recv_info)]
    buffers = [getattr(info, "buffer", None) for way in chunks for infos in way.values() for info in infos]
    kept += sum(buffer is not None and not buffer.is_meta for buffer in buffers)
    sent = {f"bytes/{way}": torch.tensor(size) for way, size in step.traffic().items()}
    notice = torch.tensor(list(step.notice().encode()), dtype=torch.uint8)
    return {**sent, "notice": notice, "kept": step.mesh.over_all(torch.tensor(kept))}


def main(out: Path, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    processes = Processes.start(torch.device("cpu"), patience=60)
    for name, model, parallel in cases:
        settings = dict(parallel)
        seen = built(model, settings) if settings.pop("built", False) else ranked(model, settings)
        if dist.get_rank() == 0:
            save_file({key: value.contiguous() for key, value in seen.items()}, out / f"{name}.safetensors")
    processes.stop()
