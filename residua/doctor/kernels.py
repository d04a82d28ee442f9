"""Self-test: compare every operator, on the path that this machine runs, with its reference in float64.

Several processes run the checks: on a GPU, the first check of each operator compiles kernels for seconds on one core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.doctor.findings import Finding, fix_of, in_words, quiet
from residua.machine import available_cores, free_memory, python_command, python_environment, start_helpers
from residua.model.decoder import build
from residua.ops._runtime.backend import Operator, backend
from residua.ops._runtime.cases import Case, declared_operators, example_cases
from residua.report.terminal import Progress

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative error of an output or a gradient."""
MODEL_SECONDS = 9
"""Time to compile the kernels of the small model."""


def checks(device: torch.device) -> dict[str, Callable[[], Finding]]:
    """The checks by name, in order: outputs and gradients of every operator on random inputs, then a small model."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    operators = {
        name: partial(check, name, operator, case, TOLERANCE[dtype])
        for name, operator, case in example_cases(device, dtype)
    }
    return {**operators, "a small model": partial(_attempt, "a small model", partial(_model, device))}


def self_test(device: torch.device, helpers: int | None = None, progress: Progress | None = None) -> Iterator[Finding]:
    """Run all checks, which takes seconds. On its first run on a GPU, this and other processes compile kernels.

    `helpers` is the number of other processes; by default as many as cores and GPU memory allow, none without a GPU.
    """
    code = "import sys, torch; from residua.doctor import kernels\n"
    code += "kernels.serve(kernels.checks(torch.device(sys.argv[1])))"
    count = helper_count(device) if helpers is None else helpers
    command, longest = python_command("-c", code, device.type), longest_to_compile()
    return run_beside(checks(device), command, count, first=longest, progress=progress)


def longest_to_compile() -> list[str]:
    """The checks that compile kernels, slowest first: helpers begin with them."""
    seconds = {name: operator.compile_seconds for name, operator in declared_operators().items()}
    seconds["a small model"] = MODEL_SECONDS
    return sorted((name for name in seconds if seconds[name]), key=lambda name: -seconds[name])


def helper_count(device: torch.device) -> int:
    """One per extra core and per free GiB of GPU memory, at most 7; none without a GPU or with at most two cores."""
    cores = available_cores()
    if device.type != "cuda" or cores <= 2:
        return 0
    return min(7, cores - 1, (free_memory(device) or 0) // 2**30)


def check(name: str, operator: Operator[..., Any], case: Case, tolerance: float) -> Finding:
    """Compare the path that this machine runs with the reference in float64."""

    def compare() -> tuple[float, float, str]:
        path = f"fused{case.note}" if case.is_fused(operator) else "PyTorch reference"
        ours = case.results(operator)
        with backend("reference"):  # operators inside a reference use references too
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


_REPORT = "set residua.ops.backend('reference') to run without kernels, and report this with `residua doctor --json`"


def _error(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error; infinite if a tensor is missing or not finite."""
    if len(ours) != len(exact):
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(ours, exact, strict=True)]
    errors = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs]
    return max(error if error == error else float("inf") for error in errors)


def _model(device: torch.device) -> tuple[float, float, str]:
    """Compare a small model's loss and gradients, in float32, between this machine's path and the references."""
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


Waiting = SimpleQueue[tuple[str, "Future[Finding]"]]
_READY = b"ready\n"


def run_beside(
    checks: Mapping[str, Callable[[], Finding]],
    command: list[str],
    count: int,
    *,
    first: Sequence[str] = (),
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """The findings of checks, in order. `count` helpers begin with `first`; this process runs checks not yet begun.

    A helper is a process that `command` starts and that calls `serve`. If it does not start, the others do its share.
    """
    findings: dict[str, Future[Finding]] = {name: Future() for name in checks}
    waiting: Waiting = SimpleQueue()
    for name in sorted(checks, key=lambda name: first.index(name) if name in first else len(first)):
        waiting.put((name, findings[name]))
    pipes: dict[str, Any] = {"bufsize": 0, "stdout": subprocess.PIPE}
    helpers = list(start_helpers(command, count, env=python_environment(), **pipes))
    threads = [Thread(target=_distribute, args=(waiting, helper), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    try:
        for name, check in checks.items():
            # a check that can be cancelled has not begun
            yield check() if findings[name].cancel() else findings[name].result()
            if progress is not None:
                progress(sum(finding.done() for finding in findings.values()), len(checks))
    finally:
        for finding in findings.values():
            finding.cancel()
        for helper in helpers:
            helper.kill()
        for thread in threads:
            thread.join()
        for helper in helpers:
            with helper:  # closes its pipes
                pass


def serve(checks: Mapping[str, Callable[[], Finding]]) -> None:
    """Act as a helper: run the checks named on standard input, one per line, and answer each with a line of JSON."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keep library output out of the answers
    os.write(answers, _READY)
    for line in sys.stdin:
        os.write(answers, json.dumps(asdict(checks[line.rstrip("\n")]())).encode() + b"\n")


def _distribute(waiting: Waiting, helper: subprocess.Popen[bytes]) -> None:
    """Give a helper one check at a time until none is waiting or the helper dies."""
    assert helper.stdin is not None and helper.stdout is not None
    if helper.stdout.readline() != _READY:
        return
    with suppress(Empty):
        while helper.poll() is None:
            name, finding = waiting.get_nowait()
            if finding.set_running_or_notify_cancel():
                answer = b""
                with suppress(OSError):
                    helper.stdin.write(name.encode() + b"\n")
                    answer = helper.stdout.readline()
                finding.set_result(Finding(**json.loads(answer)) if answer else _died(name, helper.wait()))


def _died(name: str, status: int) -> Finding:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    words = f"the process of this check {how}"
    return Finding("self-test", name, "failed", words, "report this with `residua doctor --json`")
