"""One decoding step, run in one of three ways: op by op, as a replayed CUDA graph, or compiled and then replayed.

All three call the model's forward pass on one token per row; the last two fuse the junctions. On a GPU, a step of a
small model is a few hundred short kernels. Launched individually from Python, they wait for the host; replayed as a
graph, they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from residua import ops
from residua.errors import UserError
from residua.generate.whole_step import whole_step
from residua.model.inference import InferenceDecoder
from residua.model.moe import Experts, expert_biases, mixtures

if TYPE_CHECKING:
    from residua.model.cache import Cache
    from residua.model.decoder import Decoder

ENGINES = ("auto", "eager", "graph", "compile")
WARM_UP = 3

Step = Callable[[Tensor], Tensor]
"""Takes tokens [B] and returns the logits [B, V] of the next tokens; the cache grows by one token per row."""


def resolve_engine(name: str, device: torch.device, among: Sequence[str] = ENGINES) -> str:
    """Resolve `auto` to `graph` on a GPU and `eager` elsewhere; refuse an engine that the device cannot run."""
    if name not in among:
        what = "is for decoding" if name in ENGINES else "does not exist"
        raise UserError(f"engine {name} {what}: choose {', '.join(among[:-1])} or {among[-1]}.")
    if name == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if name == "graph" and device.type != "cuda":
        others = " or ".join(other for other in among if other not in ("auto", "graph"))
        raise UserError(f"engine graph replays CUDA graphs, but this device is a CPU: use {others}.")
    return name


def engine_for(model: Decoder, name: str) -> str:
    """`resolve_engine` for a model: experts that run in a loop need the host in every step, so they need `eager`."""
    engine = resolve_engine(name, model.embed.weight.device)
    if engine == "eager" or all(_in_one_product(m.experts, model.embed.weight) for m in mixtures(model)):
        return engine
    if name == "auto":
        return "eager"
    raise UserError(
        f"engine {name} needs all experts in one product, which requires a GPU with Triton, widths that are "
        "multiples of 8, no biases and an activation other than 'clamped_swiglu': use eager."
    )


def _in_one_product(experts: nn.Module, like: Tensor) -> bool:
    """Whether all experts run in one matrix product. Quantized experts, which compute in fp32, do not."""
    if not isinstance(experts, Experts):
        return False
    ends = like.new_empty(experts.count, dtype=torch.int32)
    return ops.expert_ffn.fuses(like[:1], *experts.stacks(), ends, experts.kind, **expert_biases(experts))


def build_step(model: Decoder, cache: Cache, engine: str) -> Step:
    """The decoding step of a model on a cache. All engines except `eager` need a filled, static cache."""
    step = launched_step(model, cache, engine)
    return Replay(step, cache) if engine != "eager" and cache.lengths.is_cuda else step


def launched_step(model: Decoder, cache: Cache, engine: str) -> Step:
    """The step of an engine before graph capture, with kernels launched from the host."""
    assert cache.static or engine == "eager"
    if engine == "graph" and (whole := whole_step(model, cache)) is not None:
        return whole
    stepped = model if engine == "eager" else InferenceDecoder(model, cache.capacity)

    def step(tokens: Tensor) -> Tensor:
        return stepped.logits(stepped.hidden(tokens[:, None], cache=cache)[:, -1])

    return torch.compile(step, dynamic=False, fullgraph=True) if engine == "compile" else step


class Replay:
    """A step captured as a CUDA graph. Capture leaves the cache unchanged, but needs one free slot in it."""

    def __init__(self, step: Step, cache: Cache) -> None:
        self._step = step  # keep alive the tensors whose addresses the graph uses
        self._tokens = torch.zeros_like(cache.lengths)
        # a step writes its token to a free slot, which the next step overwrites; everything else is restored
        changed = [cache.lengths, *cache.recurrent()]
        before = [tensor.clone() for tensor in changed]

        def restore() -> None:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step(self._tokens)
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step(self._tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits
