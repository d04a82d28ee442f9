"""CUDA graphs of a micro-batch's forward and backward pass: the host launches one graph instead of a thousand kernels.

Two graphs are captured after a few ordinary passes, when everything is compiled. The graph of a step's first
micro-batch writes the gradients; the other graph adds to them. Gradients of working copies are zeroed before the step,
so there both graphs add. The graphs replay the kernels of an ordinary pass, so results are bit-identical. A graph reads
and writes fixed addresses: each batch is copied in, and after every replay the parameters get the graph's gradient
buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
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

    def _ordinary(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Run without a graph but on the capture stream, so that no state refers to another stream."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            outputs = self._run(*inputs)
        before.wait_stream(self._stream)
        return outputs

    def _capture(self, inputs: Inputs, first: bool) -> _Graph | None:
        previous = [parameter.grad for parameter in self._parameters]
        static = tuple(None if t is None else t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            # thread_local: the loader's threads keep working during the capture
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self._run(*static)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self._refused = True
            for parameter, gradient in zip(self._parameters, previous, strict=True):
                parameter.grad = gradient
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"this step cannot be captured as a CUDA graph, so it runs without one: {reason}", stacklevel=2
            )
            return None
        gradients = [parameter.grad for parameter in self._parameters]
        self._graphs[first] = _Graph(graph, static, outputs, gradients)
        return self._graphs[first]


def _alike(mine: Inputs, theirs: Inputs) -> bool:
    shapes = [[None if t is None else (t.shape, t.dtype) for t in inputs] for inputs in (mine, theirs)]
    return shapes[0] == shapes[1]
