"""One optimizer step: forward and backward of each micro-batch, clip, update. Training and benchmarks run this.

The order of `Step.__call__` on one process:

1. `WorkingCopies.begin` rounds the fp32 masters to the precision of the products, once for all micro-batches, and
   zeroes the gradient buffers (only where autocast would round them in every micro-batch).
2. For every micro-batch, `_learn` replays its CUDA graph if one is captured; otherwise it calls `_pass`, which runs
   - `_forward`: autocast around `self._losses`: the model as written, on copies, compiled (`losses.py` composes them);
   - the loss, (cross-entropy + z-term) × the micro-batch's share of the step's targets, + balance of the experts;
   - `_backward`: adds its gradients to those of earlier micro-batches.
   In FP8, weights are rounded before the first micro-batch; before the first step, extra passes measure the ranges.
3. `_update` clips the norm of all gradients together, sets the learning rate, lets the optimizer (Muon and AdamW)
   update the masters, and drops the gradients. Where passes replay CUDA graphs, so does the update.

`distributed.step` overrides the methods with a leading underscore for several ranks. Nothing here waits for the GPU:
losses and norms are summed on the device, and `totals` reads the sums when asked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from residua.config.run import TrainConfig
from residua.data.loader import IGNORED, Batch
from residua.model import taps
from residua.train.balance import Balancer, build_balancer
from residua.train.compile.cuda_graphs import GraphedPass, GraphedUpdate
from residua.train.compile.layers import LayeredCopies
from residua.train.compile.precompile import Helpers
from residua.train.compile.rewrites import allow_recompiling
from residua.train.compile.working_copies import WorkingCopies
from residua.train.losses import LossFunction, build_losses
from residua.train.low_precision import build_low_precision
from residua.train.optimizer import HybridOptimizer, Numbers, build_optimizer, orthogonal_updates, working_dtype

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

LOG = logging.getLogger(__name__)
LOGITS = 1024
"""Tokens whose logits are in memory at once when per-token losses are computed."""


class Totals(NamedTuple):
    """Sums over the `steps` since the last reset."""

    loss: float
    z: float
    grad_norm: float
    steps: float


@contextmanager
def arithmetic(config: TrainConfig) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the block if `train.determinism = "exact"`."""
    if config.determinism != "exact":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Step:
    """A model, its optimizer and its loss, ready to train. The model's parameters are the masters and stay fp32."""

    ranks, place = 1, 0
    """How many processes share the micro-batches of a step, and the index of this one."""

    capturable = True
    """Whether this process may capture CUDA graphs and use all of the machine's cores to compile kernels."""

    copying = True
    """Whether micro-batches may run on working copies of the weights."""

    has_whole_weights = True
    """Whether this process has all of every weight."""

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
        self.low_precision = build_low_precision(model, config, device, self.has_whole_weights)
        self._copies = self._build_copies(config)
        self._helpers = Helpers.start(device) if self.compiled and self.capturable else None
        self._traced = config.compile != "layers"
        self._losses = self._build_losses(config)
        graphs = self.compiled and device.type == "cuda" and config.graphs == "auto"
        self._captures = graphs and self.capturable
        self._graphed, self._graphed_update = self._build_graphed()

    def __call__(self, batches: Sequence[Batch], rate: float = 1.0) -> None:
        """Train on the micro-batches of one step at `rate` of the peak learning rate.

        The loss is the mean over all targets of the step, so it does not depend on the split into micro-batches.
        """
        helpers, self._helpers = self._helpers, None
        if helpers is None:
            self._train(batches, rate)
            return
        with helpers.listening():  # in the first step, helper processes compile kernels before their launch
            self._rehearse(batches[0])
            self._train(batches, rate)

    def _train(self, batches: Sequence[Batch], rate: float) -> None:
        counts = [(batch.targets != IGNORED).sum() for batch in batches]
        total = self._over_ranks(torch.stack(counts).sum())
        if self._copies is not None:
            self._copies.begin()
        with self._encoded_weights():
            if self.low_precision is not None and not self.low_precision.knows_ranges:
                self._find_ranges(batches, total)
            self._train_on(batches, counts, total)
        self._update(rate)

    def _train_on(self, batches: Sequence[Batch], counts: Sequence[Tensor], total: Tensor) -> None:
        """Forward and backward of each micro-batch; `counts` are their numbers of targets, `total` that of the step."""
        sizes = [batch.tokens.numel() for batch in batches]
        parts = [size / (sum(sizes) * self.ranks) for size in sizes]
        if self.balancer is not None:
            self.balancer.begin(batches, parts, lambda batch: self._forward(*self._moved(batch))[2])
        for i, (batch, count, part) in enumerate(zip(batches, counts, parts, strict=True), 1):
            self._begin_micro_batch(last=i == len(batches))
            share = self._move(count / total)
            balanced = None if self.balancer is None else self._move(torch.tensor(part, dtype=torch.float64))
            ce, z = self._learn(*self._moved(batch), share, balanced, first=i == 1)
            self._totals[0] += ce * share
            self._totals[1] += z * share

    def _find_ranges(self, batches: Sequence[Batch], total: Tensor) -> None:
        """Measure the magnitudes of FP8 products in a pass over the first sequence of each micro-batch.

        The gradients are dropped. All ranks together process the same sequences as one process would.
        """
        assert self.low_precision is not None
        for i, batch in enumerate(batches, 1):
            segments = None if batch.segments is None else batch.segments[:1]
            first = Batch(batch.tokens[:1], batch.targets[:1], segments)
            share = (first.targets != IGNORED).sum() / total
            self._begin_micro_batch(last=i == len(batches))
            with torch.compiler.set_stance("force_eager"):  # runs once, not worth compiling
                self._pass(*self._moved(first), self._move(share))
        self.low_precision.end_step(self._largest_over_ranks)
        self.optimizer.zero_grad(set_to_none=True)
        if self._copies is not None:
            self._copies.begin()

    def _encoded_weights(self) -> AbstractContextManager[object]:
        return nullcontext() if self.low_precision is None else self.low_precision.encoded_weights()

    @torch.no_grad()
    def restart(self, model: Decoder, config: TrainConfig) -> None:
        """Start another run with the weights of `model`; compiled code, CUDA graphs of passes and buffers stay in use.

        `model` and `config` must compute the same graph as before (`world.graph_of`).
        """
        fresh = _tensors(model)
        for name, tensor in _tensors(self.model).items():
            tensor.copy_(fresh[name])
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer = self._build_optimizer(config)
        if self.balancer is not None:
            self.balancer.restart()
        if self.low_precision is not None:
            self.low_precision.restart()
        self._clip_norm = config.clip_norm
        self._graphed_update = self._build_graphed_update(self._graphed)
        self.keep_streams(())
        self.set_totals([0.0] * 4)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean cross-entropy over the targets of all batches, in nats, and the number of targets.

        Batches are dealt to the processes; idle ones rerun batch 0 with weight 0, so that collectives match.
        """
        total, targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        if self._copies is not None:
            self._copies.refresh()
        with self._encoded_weights():
            for mine in range(self.place, -(-len(batches) // self.ranks) * self.ranks, self.ranks):
                batch = batches[mine] if mine < len(batches) else batches[0]
                count = int((batch.targets != IGNORED).sum()) if mine < len(batches) else 0
                total += self._forward(*self._moved(batch))[0].double() * count
                targets += count
        loss, scored = self._over_ranks(torch.stack([total, total.new_tensor(targets)])).tolist()
        return loss / scored, int(scored)

    @torch.no_grad()
    def observe(self, batch: Batch, into: dict[str, Tensor]) -> None:
        """Write the taps of a forward pass over a batch to `into`, in the training precision.

        The model runs eagerly as written, without working copies, compiled code or CUDA graphs.
        """
        tokens, _, segments = self._moved(batch)
        with self._autocast(), taps.record(into):
            hidden = self.model.hidden(tokens, segments)
            if self.low_precision is not None:
                self.low_precision.tap_head(hidden)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """The cross-entropy of each target [B, T] in nats, 0 if ignored. The model runs as in `observe`."""
        tokens, targets, segments = self._moved(batch)
        with self._autocast():
            hidden = self.model.hidden(tokens, segments).flatten(0, 1)
            parts = zip(hidden.split(LOGITS), targets.flatten().split(LOGITS), strict=True)
            losses = [
                cross_entropy(self.model.logits(part).float(), wanted, reduction="none") for part, wanted in parts
            ]
        return torch.cat(losses).view_as(targets)

    def keep_streams(self, junctions: Sequence[int]) -> None:
        """Make exactly these junctions store the streams that their backward pass would recover inexactly.

        This changes the graph, so the model is compiled again and CUDA graphs are captured again.
        """
        recovery = self.model.topology.recovery()
        if recovery is None or tuple(junctions) == recovery.kept:
            return
        recovery.kept = tuple(junctions)
        if self.compiled:
            allow_recompiling(len(self.model.sublayers))
        self._graphed, self._graphed_update = self._build_graphed()

    def totals(self) -> Totals:
        """Read the sums; waits for the device."""
        return Totals(*self._totals.tolist())

    def set_totals(self, totals: Sequence[float]) -> None:
        """Continue from sums that were read before; zeros start a new interval."""
        self._totals = torch.tensor(totals, device=self.device, dtype=torch.float32)

    def notice(self) -> str | None:
        """A remark for the user, printed after the first step."""
        return None

    def _forward(self, tokens: Tensor, targets: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        with self._autocast():
            return self._losses(tokens, targets, segments=segments)

    def _learn(self, *inputs: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """`_pass`, as a CUDA graph if there is one."""
        return self._pass(*inputs) if self._graphed is None else self._graphed(*inputs, first=first)  # type: ignore[arg-type]

    def _pass(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None, share: Tensor, part: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a micro-batch without a CUDA graph; returns its cross-entropy and z-term.

        `share` is its share of the step's targets; `part`, for the balancer, its share of the step's tokens.
        """
        ce, z, routing = self._forward(tokens, targets, segments)
        loss = (ce + z) * share
        if self.balancer is not None and part is not None:
            loss = loss + self.balancer.loss(routing, part)
        self._backward(loss)
        return ce.detach(), z.detach()

    def _update(self, rate: float) -> None:
        """Clip the gradients of the step, update the parameters, and drop the gradients."""
        self._complete_gradients()
        if self.balancer is not None:
            self.balancer.end()
        if self.low_precision is not None:
            self.low_precision.end_step(self._largest_over_ranks)
        self.optimizer.set_rate(rate)
        numbers = self.optimizer.advance()
        self._totals[2] += (self._descend if self._graphed_update is None else self._graphed_update)(numbers)
        self._totals[3] += 1
        self.optimizer.zero_grad(set_to_none=True)

    def _descend(self, numbers: Sequence[Numbers]) -> Tensor:
        norm = self._clip()
        self.optimizer.update(numbers)
        return norm

    def _build_optimizer(self, config: TrainConfig) -> HybridOptimizer:
        return build_optimizer(self.model, config.optimizer)

    def _build_balancer(self, config: TrainConfig) -> Balancer | None:
        return build_balancer(self.model, config.balance, self.device)

    def _build_copies(self, config: TrainConfig) -> WorkingCopies | None:
        """Copies; None if autocast rounds nothing, or if sublayers are recomputed: they would read the masters."""
        rounded = self.precision is not torch.float32 and config.recompute == "none"
        kind = LayeredCopies if config.compile == "layers" else WorkingCopies
        unread = () if self.low_precision is None else self.low_precision.encoded
        return kind(self.model, self.precision, unread) if rounded and self.copying else None

    def _build_graphed(self) -> tuple[GraphedPass | None, GraphedUpdate | None]:
        passes = GraphedPass(self._pass, self._parameters) if self._captures else None
        return passes, self._build_graphed_update(passes)

    def _build_graphed_update(self, passes: GraphedPass | None) -> GraphedUpdate | None:
        return GraphedUpdate(self._descend, passes) if passes is not None else None

    def _build_losses(self, config: TrainConfig) -> LossFunction:
        """The loss function of a micro-batch."""
        return build_losses(self.model, config, self._copies, self.compiled)

    def _rehearse(self, batch: Batch) -> None:
        """Run the untraced parts of the step on tensors without memory, so that helpers can compile their kernels now.

        A part that needs real data fails here harmlessly; its kernels are compiled at their first launch.
        """
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
                for group in (group for group in self.optimizer.param_groups if "parts" in group):
                    matrices = [torch.empty_like(p, dtype=working_dtype(p)) for p in group["params"]]
                    list(orthogonal_updates(matrices, group["parts"]))
                if self._traced:
                    return  # tracing the whole graph sends its calls to the helpers
                tokens, targets = (torch.empty_like(t, device=self.device) for t in (batch.tokens, batch.targets))
                segments = None if batch.segments is None else torch.empty_like(tokens)
                ce, z, _ = self._forward(tokens, targets, segments)
                torch.autograd.grad(ce + z, self.model.embed.weight)
        except Exception:
            LOG.debug("the warm-up of the first step failed: its kernels are compiled when launched", exc_info=True)

    def _over_ranks(self, count: Tensor) -> Tensor:
        """The sum of a count over all processes that share the step."""
        return count

    def _largest_over_ranks(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all processes that share the step."""
        return values

    def _begin_micro_batch(self, *, last: bool) -> None:
        """Runs before each micro-batch; after the `last` one, the gradients are complete."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _complete_gradients(self) -> None:
        """Before the update, reduce the gradients over the processes that the backward pass left on each."""

    def _clip(self) -> Tensor:
        """Scale all gradients to a common norm of at most `train.clip_norm`; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm, foreach=True)

    def _moved(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        segments = None if batch.segments is None else self._move(batch.segments)
        return self._move(batch.tokens), self._move(batch.targets), segments

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda" and not tensor.is_cuda:
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.device.type, self.precision)


def autocast(device: str, precision: torch.dtype) -> AbstractContextManager[object]:
    """Compute products in this precision inside the block; does nothing for float32."""
    return nullcontext() if precision is torch.float32 else torch.autocast(device, dtype=precision)


def _tensors(model: Decoder) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def build_step(model: Decoder, config: TrainConfig, device: torch.device) -> Step:
    """Move a model to the device and prepare it for training, exactly as `residua train` does."""
    return Step(model.to(device), config, device)


def resolve(config: TrainConfig, device: torch.device) -> tuple[torch.dtype, bool]:
    """The precision, and whether to compile; `auto` means bf16 and compiled on a GPU, fp32 and eager on a CPU.

    With FP8 or NVFP4 (`low_precision.py`), it is the precision of everything else.
    """
    on_gpu = device.type == "cuda"
    usual = torch.bfloat16 if on_gpu else torch.float32
    precisions = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    compiled = {"auto": on_gpu, "on": True, "layers": True, "off": False}[config.compile]
    return precisions.get(config.precision, usual), compiled


def recompute_sublayers(model: Decoder) -> None:
    """Activation checkpointing: each sublayer keeps only its inputs and is recomputed in the backward pass."""
    model.anchors.shares_gradient = False
    for sublayer in model.sublayers:
        sublayer.forward = partial(checkpoint, sublayer.forward, use_reentrant=False, preserve_rng_state=False)
