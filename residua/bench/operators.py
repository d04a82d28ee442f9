"""Times operators, forward and forward + backward: ours, the plain reference, and installed peers.

Results are compared with two ceilings of the device: its copy bandwidth and its matrix product rate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residua import ops
from residua.bench.cases import Case, Function
from residua.errors import UserError
from residua.train.timing import Sample, release_memory

FLUSH_BYTES = 2**28


@dataclass(frozen=True)
class OpResult:
    """One implementation of one case; if it has a `problem`, it has no timings.

    Bytes are the minimum that the case must move, in the forward pass and in both. Shares are of the copy bandwidth, or
    of the matrix product rate where arithmetic is the limit. Memory excludes the inputs and covers both passes.
    """

    case: str
    implementation: str
    forward_bytes: int
    both_bytes: int
    problem: str | None = None
    forward: Sample | None = None
    both: Sample | None = None
    forward_share: float | None = None
    both_share: float | None = None
    memory_gib: float | None = None


def implementations(device: torch.device, names: Sequence[str]) -> dict[str, Callable[[Function], Function]]:
    """The ways to run a case: the fused path (on a GPU), the reference, the compiled reference."""
    known: dict[str, Callable[[Function], Function]] = {
        "fused": lambda function: function,
        "reference": _reference,
        "compiled": lambda function: _reference(torch.compile(function, dynamic=False)),
    }
    for name in names:
        if name not in known:
            raise UserError(f"implementation {name!r} does not exist: choose from {', '.join(known)}.")
    usable = [name for name in names if name != "fused" or device.type == "cuda"]
    if not usable:
        raise UserError("--implementations fused needs a GPU, and PyTorch sees none: choose reference or compiled.")
    return {name: known[name] for name in usable}


def bench_operator(
    case: Case,
    functions: dict[str, Function],
    device: torch.device,
    ceilings: Ceilings,
    repeats: int,
    peers: dict[str, Function],
    tell: Callable[[str], object] = lambda text: None,
) -> Iterator[OpResult]:
    """Time the implementations of a case on the same inputs, one per iteration; `tell` gets the name of each.

    An exception in a peer becomes the `problem` of its result; an exception in our code is raised.
    """
    for name, function in [*functions.items(), *peers.items()]:
        tell(f"{case.name}: {name}")
        bare = OpResult(case.name, name, case.forward_bytes, case.forward_bytes + case.backward_bytes)
        try:
            result = _measured(bare, case, function, device, ceilings, repeats)
        except torch.OutOfMemoryError:
            result = replace(bare, problem="out of memory")
        except Exception as error:
            if name not in peers:
                raise
            result = replace(bare, problem=_first_line(error))
        release_memory(device)
        yield result


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _measured(
    bare: OpResult, case: Case, function: Function, device: torch.device, ceilings: Ceilings, repeats: int
) -> OpResult:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in case.inputs]
    wanted = [t for t in leaves if t.requires_grad]
    outputs = function(*leaves)
    probes = [torch.randn_like(y) for y in outputs]
    del outputs

    def forward() -> None:
        function(*leaves)

    def both() -> Sequence[Tensor | None]:
        return torch.autograd.grad(function(*leaves), wanted, probes, allow_unused=True)

    memory = _memory(both, device)
    samples = [_time(_captured(work, device), device, repeats) for work in (forward, both)]
    return replace(
        bare,
        forward=samples[0],
        both=samples[1],
        forward_share=_share(bare.forward_bytes, case.flops / 3, samples[0], ceilings),
        both_share=_share(bare.both_bytes, case.flops, samples[1], ceilings),
        memory_gib=memory,
    )


def _share(bytes_moved: int, flops: float, sample: Sample, ceilings: Ceilings) -> float:
    if flops:
        return flops / sample.median / ceilings.matmul_flops_per_second
    return bytes_moved / sample.median / ceilings.copy_bytes_per_second


def _time(work: Callable[[], object], device: torch.device, repeats: int) -> Sample:
    """Time repeated runs, each from a cold cache."""
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    return Sample.measure(work, repeats, device, before=flush.zero_)


def _captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as a CUDA graph, to exclude launch overhead; unchanged if it cannot be captured."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work

    def replay(_results: object = results) -> None:
        graph.replay()

    return replay


def _memory(work: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        work()
        return None
    work()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def _reference(function: Function) -> Function:
    def run(*inputs: Tensor) -> Sequence[Tensor]:
        with ops.backend("reference"):
            return function(*inputs)

    return run


@dataclass(frozen=True)
class Ceilings:
    """Copy bandwidth (bytes read plus written per second), and the FLOP/s of a large matrix product in `dtype`."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    dtype: str


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a copy much larger than any cache, and the product of two square random matrices; takes medians.

    The product is in the training precision: bf16 on a GPU, fp32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    elements, side, repeats = (2**30, 8192, 20) if on_gpu else (2**24, 512, 5)

    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = Sample.measure(lambda: target.copy_(source), repeats, device).median
    bytes_moved = 2 * source.numel() * source.element_size()

    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = Sample.measure(lambda: torch.mm(a, b, out=product), repeats, device).median
    return Ceilings(bytes_moved / copy, 2 * side**3 / matmul, str(dtype).removeprefix("torch."))
