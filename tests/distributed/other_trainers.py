"""A rank of third-party trainers: an export, and a plain GPT with our modules, under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.docs.test_documentation import python_blocks

STEPS, RATE = 3, 0.1


class Case(NamedTuple):
    """A model, its loss as users of it write it, and the parts that FSDP2 gathers in turn."""

    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    parts: nn.ModuleList


def cases(export: Path | None) -> Iterator[tuple[str, Case]]:
    """An exported model, or else the GPTs of docs/use-in-your-model.md, in float64."""
    if export is not None:
        from tests.export.exported import in_transformers

        model: Any = in_transformers(export).double()
        yield "export", Case(model, lambda m, tokens: m(tokens, labels=tokens).loss, model.model.decoder.sublayers)
        return
    for name in ("block", "mgr"):
        torch.manual_seed(0)
        scope: dict[str, Any] = {}
        exec(python_blocks("use-in-your-model.md")[0], scope)
        gpt = scope[name].double()
        yield name, Case(gpt, scope["loss"], gpt.sublayers)


def wrap(way: str, case: Case) -> nn.Module:
    """The model as a trainer holds it."""
    if way == "ddp":
        return DistributedDataParallel(case.model)
    if way == "fsdp":
        for part in case.parts:
            fully_shard(part)
        fully_shard(case.model)
    return case.model


def train(case: Case, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The losses and, by name, the whole weights after some steps on these tokens."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model.train(), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    named = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named.items()}
    return weights | {"losses": torch.stack(losses)}


def batch() -> Tensor:
    return torch.randint(250, (4, 9), generator=torch.Generator().manual_seed(3))


def main(export: Path | None, out: Path) -> None:
    """Train each case in each way on this rank's half of the batch; rank 0 writes the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for turn in range(2):  # in turn: transformers copies the code of the folder
        if turn == rank:
            opened = dict(cases(export))
        dist.barrier()
    for way in ("ddp", "fsdp"):
        for name, case in deepcopy(opened).items():
            trained = train(case, wrap(way, case), batch().chunk(2)[rank])
            dist.all_reduce(trained["losses"])
            trained["losses"] /= 2
            if rank == 0:
                save_file({key: t.contiguous() for key, t in trained.items()}, out / f"{name}-{way}.safetensors")
    dist.destroy_process_group()
