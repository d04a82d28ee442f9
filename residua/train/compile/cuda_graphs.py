"""CUDA graphs of a step: for each micro-batch and for the update, the host launches one graph instead of many kernels.

Two graphs are captured after a few ordinary passes, when everything is compiled. The graph of a step's first
micro-batch writes the gradients; the other graph adds to them. Gradients of working copies are zeroed before the step,
so there both graphs add. The graphs replay the kernels of an ordinary pass, so results are bit-identical. A graph reads
and writes fixed addresses: each batch is copied in, and after every replay the parameters get the graph's gradient
buffers.

A third graph, off by default, clips the gradients and updates the weights (`GraphedUpdate`).

Graphs of micro-batches gain 0.8 % at S (docs/lab/kernels.md, "Gains of single parts"). Small models, where the host is
late, are not measured alone: `residua bench step mini --rounds 5 --compare "prenorm,prenorm train.graphs=off"`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from residua.train.optimizer import Numbers

T = TypeVar("T")

WARM_UP = 2
"""Number of ordinary passes of each kind before its graph is captured."""

Inputs = tuple[Tensor | None, ...]
Pass = Callable[..., tuple[Tensor, Tensor]]
"""Takes the tensors of a micro-batch, writes gradients to the parameters and returns cross-entropy and z-term."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    outputs: tuple[Tensor, Tensor]
    gradients: list[Tensor | None]

    def replay(self, inputs: Inputs, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        for mine, source in zip(self.inputs, inputs, strict=True):
            if mine is not None and source is not None:
                mine.copy_(source, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.outputs


class GraphedPass:
    """`run`, replayed as a graph after the warm-up. Micro-batches of other shapes run without a graph."""

    def __init__(self, run: Pass, parameters: Sequence[nn.Parameter]) -> None:
        self._run = run
        self._parameters = parameters
        self.stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._passes = {True: 0, False: 0}
        self._graphs: dict[bool, _Graph] = {}
        self._refused = False

    def __call__(self, *inputs: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """One micro-batch; `first` if it is the first of its step."""
        if first in self._graphs and self._goes_on(first) and _alike(self._graphs[first].inputs, inputs):
            return self._graphs[first].replay(inputs, self._parameters)
        self._passes[first] += 1
        if self._passes[first] > WARM_UP and not self._refused and self._ready(first):
            captured = self._capture(inputs, first)
            if captured is not None:
                return captured.replay(inputs, self._parameters)
        return self._ordinary(inputs)

    def _ready(self, first: bool) -> bool:
        """Whether to capture now: first the graph of first micro-batches, then the other, which adds to its buffers."""
        return first not in self._graphs and (first or True in self._graphs) and self._goes_on(first)

    def _goes_on(self, first: bool) -> bool:
        """Whether the gradients are in the buffers that the graph adds to; true if the first pass was a replay."""
        if first:
            return True
        pairs = zip(self._parameters, self._graphs[True].gradients, strict=True)
        return all(parameter.grad is gradient for parameter, gradient in pairs)

    def wrote_gradients(self) -> bool:
        """Whether the gradients of all parameters are in the buffers of its graphs."""
        return True in self._graphs and self._goes_on(False)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what the block runs, in the memory and on the stream of all graphs of this step."""
        torch.cuda.synchronize()
        before = torch.cuda.current_stream()
        try:
            # thread_local: the loader's threads keep working during the capture
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                yield
        except RuntimeError:
            torch.cuda.set_stream(before)  # torch stays on the capture's stream if it cannot end the capture
            torch.cuda.synchronize()
            raise

    def _ordinary(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Run without a graph but on the capture stream, so that no state refers to another stream."""
        return _on(self.stream, lambda: self._run(*inputs))

    def _capture(self, inputs: Inputs, first: bool) -> _Graph | None:
        previous = [parameter.grad for parameter in self._parameters]
        static = tuple(None if t is None else t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            with self.capturing(graph):
                outputs = self._run(*static)
        except RuntimeError as error:
            self._refused = True
            for parameter, gradient in zip(self._parameters, previous, strict=True):
                parameter.grad = gradient
            _warn("step", error)
            return None
        gradients = [parameter.grad for parameter in self._parameters]
        self._graphs[first] = _Graph(graph, static, outputs, gradients)
        return self._graphs[first]


class GraphedUpdate:
    """`run`, which clips the gradients and updates the weights, replayed as a graph once the passes are.

    Launched one by one, its some hundred short kernels take the host longer than a pass of a small model takes the GPU.
    Learning rates and bias corrections are copied to the device before each replay. The graph shares the memory of the
    passes, which never run at the same time. A step takes 0.880 times as long with 6 layers of 256 and 8,192 words,
    0.990 times with 8 of 384, and no less with `mini` and S (docs/lab/kernels.md, "The update of small models").
    """

    def __init__(self, run: Callable[[Sequence[Numbers]], Tensor], passes: GraphedPass) -> None:
        self._run, self._passes = run, passes
        self._updates = 0
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self._refused = False
        self._numbers = torch.empty(0)

    def __call__(self, numbers: Sequence[Numbers]) -> Tensor:
        """One update; returns the norm of the gradients before it was clipped."""
        if self._refused or not self._passes.wrote_gradients():
            return self._run(numbers)
        read = self._on_device(numbers)
        self._updates += 1
        if self._updates <= WARM_UP:
            return _on(self._passes.stream, lambda: self._run(read))
        if self._captured is None and not self._capture(read):
            return self._run(numbers)
        assert self._captured is not None
        graph, norm = self._captured
        graph.replay()
        return norm

    def _on_device(self, numbers: Sequence[Numbers]) -> list[Numbers]:
        """The numbers, where the graph reads them."""
        values = torch.tensor([number for group in numbers for number in group], dtype=torch.float64).pin_memory()
        if not self._numbers.numel():
            self._numbers = torch.empty_like(values, device=self._passes.stream.device)
        self._numbers.copy_(values, non_blocking=True)
        return [group.unbind() for group in self._numbers.split([len(group) for group in numbers])]

    def _capture(self, numbers: Sequence[Numbers]) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._passes.capturing(graph):
                norm = self._run(numbers)
        except RuntimeError as error:
            self._refused = True
            _warn("update", error)
            return False
        self._captured = graph, norm
        return True


def _on(stream: torch.cuda.Stream, run: Callable[[], T]) -> T:
    """Run on another stream, in order with this one."""
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        outputs = run()
    before.wait_stream(stream)
    return outputs


def _alike(mine: Inputs, theirs: Inputs) -> bool:
    shapes = [[None if t is None else (t.shape, t.dtype) for t in inputs] for inputs in (mine, theirs)]
    return shapes[0] == shapes[1]


def _warn(part: str, error: RuntimeError) -> None:
    reason = str(error).splitlines()[0]
    warnings.warn(f"this {part} cannot be captured as a CUDA graph, so it runs without one: {reason}", stacklevel=3)
