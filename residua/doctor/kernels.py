"""Every operator on this machine, by the path that runs here, against its reference in float64: a self-test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.doctor.findings import Finding, fix_of, in_words, quiet
from residua.doctor.helpers import run_beside
from residua.machine import available_cores, free_memory, python_command
from residua.model.decoder import build
from residua.ops._runtime.backend import Operator, backend
from residua.ops._runtime.cases import Case, declared_operators, example_cases
from residua.report.terminal import Progress

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative error of an output or a gradient."""
MODEL_SECONDS = 9
"""To compile the kernels of the small model."""


def checks(device: torch.device) -> dict[str, Callable[[], Finding]]:
    """The self-test by names, in order: every operator on random inputs, outputs and gradients, then a small model."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    operators = {
        name: partial(check, name, operator, case, TOLERANCE[dtype])
        for name, operator, case in example_cases(device, dtype)
    }
    return {**operators, "a small model": partial(_attempt, "a small model", partial(_model, device))}


def self_test(device: torch.device, helpers: int | None = None, progress: Progress | None = None) -> Iterator[Finding]:
    """The findings of all checks: seconds; the first time on a GPU, kernels are compiled by this and other processes.

    `helpers`: how many others; unless given, as many as cores and the GPU's memory allow, and none without a GPU.
    """
    code = "import sys, torch; from residua.doctor import helpers, kernels\n"
    code += "helpers.serve(kernels.checks(torch.device(sys.argv[1])))"
    count = helper_count(device) if helpers is None else helpers
    command, longest = python_command("-c", code, device.type), longest_to_compile()
    return run_beside(checks(device), command, count, first=longest, progress=progress)


def longest_to_compile() -> list[str]:
    """The checks whose kernels take longest to compile: helpers begin with them."""
    seconds = {name: operator.compile_seconds for name, operator in declared_operators().items()}
    seconds["a small model"] = MODEL_SECONDS
    return sorted((name for name in seconds if seconds[name]), key=lambda name: -seconds[name])


def helper_count(device: torch.device) -> int:
    """One for each further core, 7 at most, and a GiB of the GPU for each; none without a GPU or with two cores."""
    cores = available_cores()
    if device.type != "cuda" or cores <= 2:
        return 0
    return min(7, cores - 1, (free_memory(device) or 0) // 2**30)


def check(name: str, operator: Operator[..., Any], case: Case, tolerance: float) -> Finding:
    """Compare the path that runs here with the reference in float64."""

    def compare() -> tuple[float, float, str]:
        path = f"fused{case.note}" if case.is_fused(operator) else "PyTorch reference"
        ours = case.results(operator)
        with backend("reference"):  # also for the operators that a reference is made of
            exact = case.results(operator.reference, torch.float64)
        return _error(ours, exact), tolerance, path

    return _attempt(name, compare)


def _attempt(name: str, compare: Callable[[], tuple[float, float, str]]) -> Finding:
    start = time.perf_counter()
    try:
        with quiet():
            error, tolerance, path = compare()
    except Exception as problem:
        return Finding("self-test", name, "failed", in_words(problem), fix_of(problem))
    words = f"{path}, relative error {error:.1e}, {time.perf_counter() - start:.1f} s"
    if error <= tolerance:
        return Finding("self-test", name, "ok", words)
    return Finding("self-test", name, "failed", f"{words}: more than {tolerance:g}", _REPORT)


_REPORT = "set residua.ops.backend('reference') to do without kernels, and report this with `residua doctor --json`"


def _error(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error; infinite if something is not finite or not there."""
    if len(ours) != len(exact):
        return float("inf")
    errors = [float((a.double() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(ours, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _model(device: torch.device) -> tuple[float, float, str]:
    """A small model's loss and gradients, by the path that runs here and by the references alone, in float32."""
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny").override(["topology=full_attnres", "layers=2", "context=64"])
    model = build(config).to(device)
    tokens = torch.randint(config.vocab_size, (2, 65), device=device)
    results = []
    for choice in ("auto", "reference"):
        with backend(choice):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        results.append([loss.double(), *(g.double() for g in torch.autograd.grad(loss, [*model.parameters()]))])
    return _error(*results), 1e-3, f"loss {float(results[0][0]):.3f} and its gradients on {device.type}"
