"""Time a training step in bf16, in FP8, and with the float8 of torchao on the same matrices, in one run on one GPU.

    python tools/bench_fp8_training.py mgr-l-prenorm train.accumulate=2

torchao is no dependency: its recipes are timed if it can be imported, by their names there. They replace the same
products as ours does, in the same compiled step, on the same working copies of the weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from residua.bench.step import Case, build_case
from residua.config.run import RunConfig
from residua.model.decoder import Decoder
from residua.model.projection import Projection
from residua.train.low_precision import chosen_products
from residua.train.timing import Sample, release_memory, time_step

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
DEVICE = torch.device("cuda")


def with_torchao(model: Decoder, chosen: list[Projection], recipe: str) -> None:
    """Let projections multiply as `torchao.float8.Float8Linear` does."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    for projection in chosen:
        theirs: Any = Float8Linear.from_float(projection, config)
        projection.forward = forward_of(theirs, projection)  # type: ignore[assignment, method-assign]


def forward_of(theirs: Any, projection: Projection) -> Callable[[Tensor], Tensor]:
    """Their product with a projection's weight as it is when called: a working copy, in a step."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def forward(x: Tensor) -> Tensor:
        y: Tensor = matmul_with_hp_or_float8_args.apply(
            x, projection.weight.t(), theirs.linear_mm_config, theirs.config
        )
        return y if projection.bias is None else y + projection.bias.to(y.dtype)

    return forward


def main() -> None:
    """Time all cases, one after the other, and print ratios to bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    base = RunConfig.find(given.preset).override(given.overrides)
    low = base.override(["train.precision=fp8"])
    cases = {"bf16": base, "fp8": low}
    if find_spec("torchao") is not None:
        cases |= {f"torchao {recipe}": base for recipe in RECIPES}
    first = None
    for name, config in cases.items():
        try:
            with ExitStack() as stack:
                step = build_case(Case(name, config), DEVICE, stack)
                if name.startswith("torchao"):
                    chosen = [projection for _, projection in chosen_products(step.model, low.train)]
                    with_torchao(step.model, chosen, name.split()[1])
                timed = time_step(step, config, steps=given.steps, warmup=3)
        except Exception as error:  # a peer may not run with this version of torch: the others still count
            print(f"{name:28s} failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            release_memory(DEVICE)
        sample = Sample.of(timed.seconds)
        if not math.isfinite(timed.loss):  # products of NaN draw less power, so they run faster
            print(f"{name:28s} not timed: the loss is {timed.loss}", flush=True)
            continue
        first = first or sample.median
        print(
            f"{name:28s} {sample.median * 1e3:9.2f} ms ({sample.p10 * 1e3:.2f} to {sample.p90 * 1e3:.2f})"
            f"  speed {first / sample.median:.3f}  memory {timed.memory_gib:.2f} GiB  loss {timed.loss:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
