"""The training step on a pipeline: stages of the model on different ranks.

A step, on every rank at the same time (compare `distributed.step`):

1. Count the targets of the step and sum the count over the ranks with other micro-batches.
2. `_flow` gives all micro-batches to the schedule of torch.distributed.pipelining (GPipe, 1F1B or interleaved 1F1B). It
   runs the forward and backward passes of this rank's stages and sends activations and gradients between ranks. The
   first stage is given the tokens, the last stage computes the losses, and `_loss` weighs them.
3. Reduce the gradients of shared parameters over the pipeline, then clip by one norm over all ranks.
4. Update the parameters of this rank's stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from residua.config.run import RunConfig, TrainConfig
from residua.data.loader import IGNORED, Batch
from residua.distributed.mesh import Mesh
from residua.distributed.pipeline.part import Part
from residua.distributed.pipeline.shares import head_ranks
from residua.distributed.pipeline.transport import cached_blocks, hop_bytes, mib, naive_blocks, plan_routes
from residua.distributed.shard import Parts, construct, shard_slice
from residua.distributed.step import RankedStep
from residua.model.moe import Routing
from residua.train.balance import Balancer
from residua.train.step import recompute_sublayers, resolve

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelinedStep(RankedStep):
    """A part of the layers on every rank; each part may also be replicated (data) or sharded.

    Parameters that several stages use (see `part`) are on each of their ranks, and their gradients are summed.
    """

    def __init__(self, model: Decoder, parts: Parts, config: RunConfig, mesh: Mesh) -> None:
        self.config = config
        parallel, recipe = config.parallel, config.train
        self.flowing = recipe.accumulate // parallel.batch_ranks
        precision, _ = resolve(recipe, mesh.device)
        shape = (recipe.micro_batch, config.sequence, config.model.width)
        self.element_bytes = torch.empty(0, dtype=precision).element_size()
        self.blocks = model.topology.boundary().blocks
        if recipe.recompute == "sublayers":
            recompute_sublayers(model)
        self.part = Part(
            model, config, mesh, precision, shape, stages=parallel.stages, recompute=recipe.recompute,
            balance=self._balance,
        )  # fmt: skip
        self.heads = mesh.pipeline_rank in head_ranks(self.part.shares, parallel.pipeline)
        for module in self.part.slices if parallel.shard > 1 else ():
            shard_slice(module, mesh, precision, self.part.unsharded)
        construct(model, parts, mesh)
        # recomputation was applied before the model was divided and sharded
        plain = recipe.model_copy(update={"recompute": "none"})
        super().__init__(model, config.model_copy(update={"train": plain}), mesh)

    def _build_losses(self, config: TrainConfig) -> Callable[..., Any]:
        """Build the stages and their schedule, which runs in place of the returned function."""
        for module in self.part.slices if self.compiled else ():
            module.compile_parts(whole=self.parallel.shard == 1 or self.parallel.unit == "model")
        self.stages = self.part.build_stages()
        for stage in self.stages:
            stage.watch = self.watch
        several = self.parallel.schedule == "interleaved"
        kind = ScheduleInterleaved1F1B if several else SCHEDULES[self.parallel.schedule]
        driven: Any = self.stages if several else self.stages[0]
        self.schedule = kind(driven, self.flowing, loss_fn=self._loss, scale_grads=False)
        self._validation: Tensor | None = None
        return lambda *_, **__: None

    def __call__(self, batches: Sequence[Batch], rate: float = 1.0) -> None:
        counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
        total = self._over_ranks(counts.sum())
        if self.balancer is not None:
            routed = cache(lambda: self._routing(batches))  # of all micro-batches at once, computed on demand
            self.balancer.begin(batches, [self._share] * len(batches), lambda _: routed())
        for stage in self.stages:
            stage.sent_forward = stage.sent_backward = 0
        self._flow(batches, self._move(counts) / total, self.schedule.step)
        self._sent = [(stage.sent_forward, stage.sent_backward) for stage in self.stages]
        self._update(rate)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean cross-entropy over all batches, as on one process, in groups that fill the pipeline.

        The last group is filled up with batch 0 at weight 0.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._validation = sums[0]
        for first in range(0, len(batches), self.flowing * self.ranks):
            mine = range(first + self.mesh.batch_rank, first + self.flowing * self.ranks, self.ranks)
            group = [self._filled(batches[i] if i < len(batches) else batches[0]) for i in mine]
            tokens = [int((b.targets != IGNORED).sum()) * (i < len(batches)) for i, b in zip(mine, group, strict=True)]
            counts = torch.tensor(tokens, dtype=torch.float64, device=self.device)
            self._flow(group, counts, self.schedule.eval)
            sums[1] += counts.sum() * self._ends_here()
        self._validation = None
        total, targets = self.mesh.over_all(sums).tolist()
        return total / targets, int(targets)

    def traffic(self) -> dict[str, int]:
        """Total bytes that all ranks sent between stages in the last step. Every rank must call it."""
        totals = self.mesh.over_all(torch.tensor(self._sent, device=self.device).sum(0)).tolist()
        return {"forward": totals[0], "backward": totals[1]}

    def notice(self) -> str:
        """A sentence on the bytes sent in a step, with and without the cache."""
        sent = self.traffic()
        pipelines = self.flowing * self.ranks
        every = plan_routes([list(items) for items in self.part.boundaries], self.parallel.pipeline, "naive")
        words = (
            f"pipeline sent {mib(sent['forward'])} forward and {mib(sent['backward'])} backward per step; "
            f"sending every tensor at every hop would be {mib(sum(hop_bytes(self.part.boundaries, every)) * pipelines)}"
        )
        if self.blocks is None:  # other topologies than Attention Residuals
            return words + "."
        hidden = self.config.train.micro_batch * self.config.sequence * self.config.model.width * self.element_bytes
        division = self.parallel.pipeline, self.parallel.stages_per_rank, self.blocks / self.parallel.stages
        naive, cached = (mib(count(*division) * hidden * pipelines) for count in (naive_blocks, cached_blocks))
        return (
            f"{words}; formulas of arXiv 2603.15031, for blocks without the embedding: naive {naive}, cached {cached}."
        )

    def _flow(self, batches: Sequence[Batch], shares: Tensor, run: Callable[..., Any]) -> None:
        """Run all micro-batches through the stages; `shares` [micro-batches] are the weights of their losses."""
        whole = {
            "targets": torch.cat([b.targets for b in batches]) if self.heads else None,
            "segments": None if batches[0].segments is None else torch.cat([cast(Tensor, b.segments) for b in batches]),
        }
        if self.model.token_readers:
            whole["tokens"] = torch.cat([b.tokens for b in batches])
        inputs = {name: self._move(tensor) for name, tensor in whole.items() if tensor is not None}
        inputs["batch"] = torch.arange(len(batches))
        tokens = (self._move(torch.cat([b.tokens for b in batches])),) if self.mesh.pipeline_rank == 0 else ()
        run(*tokens, target=shares if self._ends_here() else None, **inputs)

    def _build_balancer(self, config: TrainConfig) -> Balancer | None:
        """A balancer of all layers on every rank: each rank adds the load of its own layers and gets that of all."""
        self._share = 1 / (self.flowing * self.ranks)
        self._measured: Tensor | None = None
        if not self.part.mixtures:
            return None
        return Balancer(config.balance, self.part.mixtures, self.device, lambda t: self.mesh.over_all(t.clone()))

    def _balance(self, routing: Routing) -> Tensor | None:
        """The balance loss of a stage's layers in one micro-batch."""
        assert self.balancer is not None
        if torch.is_grad_enabled():
            return self.balancer.loss(routing, self._share) * self.ranks
        if self._measured is not None:
            self._measured += routing.load
        return None

    @torch.no_grad()
    def _routing(self, batches: Sequence[Batch]) -> Routing:
        """The mean load of the experts of this rank's layers over its micro-batches; zero for other layers."""
        self._measured = torch.zeros(len(self.part.mixtures), self.part.mixtures[0].count, device=self.device)
        self._flow(batches, torch.ones(len(batches), device=self.device), self.schedule.eval)
        load, self._measured = self._measured / len(batches), None
        return Routing(load, torch.zeros_like(load), torch.zeros_like(load[:, 0]))

    def _loss(self, losses: Tensor, share: Tensor) -> Tensor:
        """A micro-batch's part of the step's loss; `losses` are the cross-entropy and z-term of the last stage."""
        share = share.squeeze()
        if self._validation is not None:
            self._validation += losses[0].double() * share
        elif torch.is_grad_enabled():
            self._totals[:2] += losses.detach() * share
        return losses.sum() * share * self.ranks

    def _ends_here(self) -> bool:
        return self.mesh.pipeline_rank == self.parallel.pipeline - 1

    def _filled(self, batch: Batch) -> Batch:
        """The batch, padded to the size that stages are built for; padding rows have no targets."""
        missing = self.config.train.micro_batch - len(batch.tokens)
        if missing == 0:
            return batch
        rows = (0, 0, 0, missing)
        segments = None if batch.segments is None else pad(batch.segments, rows)
        return Batch(pad(batch.tokens, rows), pad(batch.targets, rows, value=IGNORED), segments)

    def _complete_gradients(self) -> None:
        whole = [p for p in self._parameters if not isinstance(p, DTensor)]
        self.part.shared.complete(whole, self.ranks)

    def _counts(self, parameter: nn.Parameter) -> bool:
        return super()._counts(parameter) and self.part.shared.counts(parameter)
