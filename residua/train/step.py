"""One whole optimizer step: micro-batches forward and backward, clip, update. Training and benchmarks run this.

Nothing here waits for the GPU: losses and norms add up on the device, and `take_totals` reads them when asked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from residua.config.run import TrainConfig
from residua.data.loader import IGNORED, Batch
from residua.train.balance import Balancer, build_balancer
from residua.train.compile.graphs import GraphedPass
from residua.train.compile.layers import LayeredCopies, compile_sublayers
from residua.train.compile.precompile import Helpers
from residua.train.compile.rewrites import compile_rewritten
from residua.train.compile.working_copies import Entry, WorkingCopies
from residua.train.optimizer import HybridOptimizer, build_optimizer, orthogonal_updates
from residua.train.polar import working_dtype

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

LOG = logging.getLogger(__name__)


class Totals(NamedTuple):
    """Sums over the `steps` since they were last taken."""

    loss: float
    z: float
    grad_norm: float
    steps: float


@contextmanager
def arithmetic(config: TrainConfig) -> Iterator[None]:
    """Inside, a configuration that asks for exact repetition gets PyTorch's deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.determinism == "exact":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Step:
    """A model, its optimizer and its loss, ready to train; the parameters stay fp32, the masters."""

    ranks = 1
    """Processes that a step's micro-batches are divided among."""

    capturable = True
    """Whether a micro-batch may be replayed as a CUDA graph, and the machine is this process's own."""

    copying = True
    """Whether micro-batches may run on working copies of the weights."""

    def __init__(self, model: Decoder, config: TrainConfig, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.precision, self.compiled = resolve(config, device)
        self.optimizer = self._build_optimizer(config)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._clip_norm = config.clip_norm
        self._totals = torch.zeros(4, device=device)
        self.balancer = self._build_balancer(config)
        if config.recompute == "sublayers":
            recompute_sublayers(model)
        self._copies = self._build_copies(config)
        self._layered = config.compile == "layers"
        self._helpers = Helpers.start(device) if self._layered and self.capturable else None
        self._losses = self._entry(config)
        graphs = self.compiled and device.type == "cuda" and config.graphs == "auto" and self.balancer is None
        self._graphed = GraphedPass(self._pass, self._parameters) if graphs and self.capturable else None

    def __call__(self, batches: Sequence[Batch], rate: float = 1.0) -> None:
        """Train on the micro-batches of one step at `rate` of the peak learning rate.

        The loss is the mean over all targets of the step, so the split into micro-batches changes nothing.
        """
        helpers, self._helpers = self._helpers, None
        if helpers is not None:
            with helpers.listening():
                self._rehearse(batches[0])
                self(batches, rate)
            return
        counts = [(batch.targets != IGNORED).sum() for batch in batches]
        total = self._over_ranks(torch.stack(counts).sum())
        sizes = [batch.tokens.numel() for batch in batches]
        parts = [size / (sum(sizes) * self.ranks) for size in sizes]
        if self._copies is not None:
            self._copies.begin()
        if self.balancer is not None:
            self.balancer.begin(batches, parts, lambda batch: self._forward(*self._moved(batch))[2])
        for i, (batch, count, part) in enumerate(zip(batches, counts, parts, strict=True), 1):
            self._begin(last=i == len(batches))
            share = self._move(count / total)
            ce, z = self._learn(*self._moved(batch), share, part, first=i == 1)
            self._totals[0] += ce * share
            self._totals[1] += z * share
        self._totals[2] += self._clip()
        self._totals[3] += 1
        if self.balancer is not None:
            self.balancer.end()
        self.optimizer.set_rate(rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean cross-entropy over the targets of all batches, in nats, and how many there were."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        targets = 0
        if self._copies is not None:
            self._copies.refresh()
        for batch in batches:
            count = int((batch.targets != IGNORED).sum())
            total += self._forward(*self._moved(batch))[0].double() * count
            targets += count
        return float(total) / targets, targets

    def totals(self) -> Totals:
        """Read the sums; waits for the device."""
        return Totals(*self._totals.tolist())

    def set_totals(self, totals: Sequence[float]) -> None:
        """Go on from sums that were read before; zeros start a new interval."""
        self._totals = torch.tensor(totals, device=self.device, dtype=torch.float32)

    def notice(self) -> str | None:
        """What a person should know once a step has been done."""
        return None

    def _forward(self, tokens: Tensor, targets: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        with self._autocast():
            return self._losses(tokens, targets, segments=segments)

    def _learn(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None, share: Tensor, part: float, *, first: bool
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a micro-batch; its cross-entropy and z-term."""
        if self._graphed is not None:
            return self._graphed(tokens, targets, segments, share, first=first)
        return self._pass(tokens, targets, segments, share, part)

    def _pass(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None, share: Tensor, part: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        ce, z, routing = self._forward(tokens, targets, segments)
        loss = (ce + z) * share
        if self.balancer is not None:
            loss = loss + self.balancer.loss(routing, part)
        self._backward(loss)
        return ce.detach(), z.detach()

    def _build_optimizer(self, config: TrainConfig) -> HybridOptimizer:
        return build_optimizer(self.model, config.optimizer)

    def _build_balancer(self, config: TrainConfig) -> Balancer | None:
        return build_balancer(self.model, config.balance, self.device)

    def _build_copies(self, config: TrainConfig) -> WorkingCopies | None:
        """None where autocast rounds nothing, and where sublayers run again after the call, on the masters."""
        rounded = self.precision is not torch.float32 and config.recompute == "none"
        kind = LayeredCopies if config.compile == "layers" else WorkingCopies
        return kind(self.model, self.precision) if rounded and self.copying else None

    def _entry(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor, Any]]:
        """What the losses of a micro-batch are computed by."""
        losses: Callable[..., Any] = partial(self.model.routed_losses, z_loss=config.z_loss)
        if self._copies is not None:
            losses = partial(self._copies.run, Entry(self.model, losses), "model.")
        if not self.compiled:
            return losses
        if not self._layered:
            return compile_rewritten(losses)
        compile_sublayers(self.model)
        return losses

    def _rehearse(self, batch: Batch) -> None:
        """Run what no compiler traces on tensors without memory, so that helpers hear of its kernels before a launch.

        What cannot be run without data is not heard, and compiled when it is launched.
        """
        try:
            self._run_without_data(batch)
        except Exception:
            LOG.debug("the first step was not rehearsed: its kernels are compiled when launched", exc_info=True)

    def _run_without_data(self, batch: Batch) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
            for group in self.optimizer.param_groups:
                matrices = [torch.empty_like(p, dtype=working_dtype(p)) for p in group["params"] if "parts" in group]
                list(orthogonal_updates(matrices, group.get("parts", ())))
            tokens, targets = (torch.empty_like(t, device=self.device) for t in (batch.tokens, batch.targets))
            segments = None if batch.segments is None else torch.empty_like(tokens)
            ce, z, _ = self._forward(tokens, targets, segments)
            torch.autograd.grad(ce + z, self.model.embed.weight)

    def _over_ranks(self, count: Tensor) -> Tensor:
        """A count of this process, summed over all that share the step."""
        return count

    def _begin(self, *, last: bool) -> None:
        """A micro-batch begins; after the `last` one the gradients are complete."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _clip(self) -> Tensor:
        """Bring the norm of all gradients together down to the configured one; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm, foreach=True)

    def _moved(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        segments = None if batch.segments is None else self._move(batch.segments)
        return self._move(batch.tokens), self._move(batch.targets), segments

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda" and not tensor.is_cuda:
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _autocast(self) -> AbstractContextManager[object]:
        if self.precision is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)


def build_step(model: Decoder, config: TrainConfig, device: torch.device) -> Step:
    """Move a model to the device and make it ready to train exactly as `residua train` does."""
    return Step(model.to(device), config, device)


def resolve(config: TrainConfig, device: torch.device) -> tuple[torch.dtype, bool]:
    """Precision and compilation, where `auto` asks for what suits the device."""
    on_gpu = device.type == "cuda"
    precisions = {"auto": torch.bfloat16 if on_gpu else torch.float32, "bfloat16": torch.bfloat16}
    compiled = {"auto": on_gpu, "on": True, "layers": True, "off": False}[config.compile]
    return precisions.get(config.precision, torch.float32), compiled


def recompute_sublayers(model: Decoder) -> None:
    """Activation checkpointing from outside: each sublayer keeps its inputs only and runs again in the backward."""
    for sublayer in model.sublayers:
        sublayer.forward = partial(checkpoint, sublayer.forward, use_reentrant=False, preserve_rng_state=False)
