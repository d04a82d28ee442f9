"""What a rank does in the tests of equality: trains each case and leaves rank 0 with everything there is to compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import residua
from residua.train.parallel import layers
from residua.train.parallel.mesh import Mesh, Processes
from residua.train.parallel.step import build_ranked_step
from residua.train.step import Step
from tests.parallel.cases import ACCUMULATE, STEPS, batches, perturb, run_config


def trace(step: Step, rank: int, ranks: int) -> dict[str, Tensor]:
    """Losses, clipped gradients and weights of the first steps, the validation loss after them."""
    seen: dict[str, Tensor] = {}
    update = step.optimizer.step

    def record() -> None:
        for group in step.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    seen[f"{number}/gradient/{name}"] = whole(parameter.grad)
        update()

    step.optimizer.step = record  # type: ignore[method-assign, assignment]
    for number in range(STEPS):
        step(batches(number)[rank::ranks])
        seen[f"{number}/totals"] = torch.tensor(step.totals())
        step.set_totals([0.0] * 4)
    validation = batches(99)[: ACCUMULATE - 1]
    loss, targets = step.evaluate(validation)
    seen["validation"] = torch.tensor([loss, float(targets)])
    for group in step.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            seen[f"weight/{name}"] = whole(parameter)
    return seen


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def single(model: str, **train: Any) -> dict[str, Tensor]:
    """The same on one process, without any of the parallel code."""
    from residua.train.step import build_step

    config = run_config(model, **train)
    return trace(build_step(make(config), config.train, torch.device("cpu")), 0, 1)


def make(config: Any) -> Any:
    torch.manual_seed(0)
    model = residua.build(config.model)
    perturb(model)
    return model


def ranked(model: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    way = parallel.pop("way", None)
    layers.SMALLEST_UNIT = parallel.pop("smallest_unit", 1)
    precision = parallel.pop("precision", "float32")
    config = run_config(model, parallel, precision=precision)
    mesh = Mesh(config.parallel, torch.device("cpu"))
    step = build_ranked_step(make(config), config, mesh, way)
    seen = trace(step, mesh.batch_rank, config.parallel.batch_ranks)
    gathered: list[Any] = [None] * mesh.size
    dist.all_gather_object(gathered, seen)
    together = {key: value for rank in reversed(gathered) for key, value in rank.items()}
    together |= {f"bytes/{key}": torch.tensor(value) for key, value in getattr(step, "traffic", dict)().items()}
    return together


def main(out: Path, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    processes = Processes.start(torch.device("cpu"), patience=60)
    for name, model, parallel in cases:
        seen = ranked(model, dict(parallel))
        if dist.get_rank() == 0:
            save_file({key: value.contiguous() for key, value in seen.items()}, out / f"{name}.safetensors")
    processes.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
