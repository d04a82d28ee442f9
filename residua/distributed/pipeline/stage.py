"""A slice of a decoder as one stage of a pipeline.

Several stages may share the head: each multiplies by some rows of the vocabulary and sends on two numbers per token.
With the logits ℓ_v = w_v·h of its rows, a stage updates the numbers it received for every token,

    lse ← log(exp(lse) + Σ_v exp ℓ_v),     picked ← picked + ℓ_target, if the target is one of its rows,

and the last one computes the loss, mean(lse − picked), and the z-term from them. Gradients return along the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from residua import ops
from residua.data.loader import IGNORED
from residua.distributed.pipeline.shares import EMBEDDING, HIDDEN, LSE, PICKED, Share, anchors_after
from residua.distributed.pipeline.transport import Route, StageCache, hold, with_loss
from residua.distributed.units import Unit, divide, pass_through
from residua.model.context import Context, Input, one_read
from residua.model.moe import Routing
from residua.model.topology.base import Boundary, Items
from residua.ops.linear_cross_entropy import head_piece
from residua.train.compile.rewrites import compile_rewritten
from residua.train.step import autocast

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.train.timing import Stopwatch

META = torch.device("meta")


@dataclass(frozen=True)
class Settings:
    """Settings that all slices of a rank share."""

    shares: Sequence[Share]
    boundary: Boundary
    cache: StageCache
    z_loss: float
    precision: torch.dtype
    device: str
    recompute_anchors: bool


class Slice(nn.Module):
    """The sublayers of one stage and the junctions after them; the first also embeds, the last has norm and head.

    The last stages may share the head, and may have no sublayers. A slice uses the decoder's own modules, so parameters
    keep their names.
    """

    def __init__(self, model: Decoder, number: int, route: Route, settings: Settings) -> None:
        super().__init__()
        self.config = model.config
        self.share, self.boundary, self.cache = settings.shares[number], settings.boundary, settings.cache
        self.range, self.route, self.settings = self.share.sublayers, route, settings
        self.first, self.last = number == 0, number == len(settings.shares) - 1
        self.heads = bool(self.share.head)
        indices = [model.order[k] for k in self.range]
        self.sublayers = nn.ModuleDict({str(j): model.sublayers[j] for j in indices})
        layers, count = [model.sublayers[j] for j in indices], len(indices)
        self.units = nn.ModuleList(
            Unit(self.range[k.start], layers[k.start : k.stop], model.topology, closed=self.heads or k.stop < count)
            for k in divide(layers)
        )
        self.topology, self.anchors, self.reads_tokens = model.topology, model.anchors, bool(model.token_readers)
        self.embed = model.embed if self.first or (self.heads and model.unembed is None) else None
        self.places = model.places if self.first else None
        self.norm = model.norm if self.heads and self.share.head.start == 0 else None
        self.unembed = model.unembed if self.heads else None
        # methods of the decoder that only read its configuration
        self._rotary, self._context = model._rotary, model._context
        self.body = self._body
        self.balance: Callable[[Routing], Tensor | None] = lambda routing: None
        """Takes the routing of a micro-batch by the stage's mixtures; returns their loss when the stage trains."""

    def forward(self, *received: Tensor, batch: Tensor, **inputs: Tensor) -> Any:
        """One micro-batch, number `batch`: received tensors in, tensors to send out.

        The first stage takes tokens [B, T], the last returns the losses. `inputs`: segments and targets [B, T], if any;
        positions [B, T] unless they are 0, 1, … in all rows; tokens [B, T] if a part of the model reads ids.
        """
        number = int(batch)
        ids = inputs.pop("tokens", None)
        tokens = received[0] if self.first else ids
        items: Items = {} if self.first else dict(zip(self.route.receives, received, strict=True))
        items = {name: self._cached(number, name, value) for name, value in items.items()}
        items |= {name: self.cache.get(number, name) for name in self.route.from_cache}
        outputs, routed = self.body(items, tokens, **inputs)
        loss = self.balance(Routing.stack(routed)) if routed else None
        if self.last:
            return with_loss(hold(outputs["losses"], items.values()), loss)
        outputs = {name: x if name in items else self._cached(number, name, x) for name, x in outputs.items()}
        sent = [outputs[name].contiguous() for name in self.route.sends]
        return (with_loss(hold(sent[0], items.values()), loss), *sent[1:])

    def compile_parts(self, *, whole: bool) -> None:
        """Compile the `whole` computation, or each unit separately if FSDP2 gathers them one at a time."""
        if whole:
            self.body = compile_rewritten(self._body)
            return
        for unit in self.units:
            unit.compile_parts()  # type: ignore[operator]

    def _cached(self, batch: int, name: str, value: Tensor) -> Tensor:
        """The value, which is also cached if later stages of this rank read it."""
        readers = self.route.to_cache.get(name, 0)
        return self.cache.put(batch, name, value, readers) if readers else value

    def _body(
        self,
        items: Items,
        tokens: Tensor | None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Items, list[Routing]]:
        """The computation itself, without communication, so that it can be compiled."""
        with autocast(self.settings.device, self.settings.precision):
            if self.share.head.start > 0:
                return self._headed(items[HIDDEN], targets, items), []
            tokens_read = Context(None, None, tokens=tokens if self.reads_tokens else None)
            row = None if positions is None else positions[0]
            h, state, anchors, constant = self._begin(items, tokens, tokens_read, segments, row)
            context = self._context(self._rotary(one_read(h)[..., 0], positions=row), segments, positions=row)
            context = context._replace(tokens=tokens_read.tokens)
            h, state, anchors, routed = pass_through(self.units, h, state, anchors, context)
            if self.norm is not None:
                return self._headed(self.norm(one_read(h)), targets, items), routed
            ids = context.ids_for(self.topology)
            return self.boundary.close(self.range.stop - 1, h, state, *ids) | self._onward(anchors, constant), routed

    def _begin(
        self,
        items: Items,
        tokens: Tensor | None,
        context: Context,
        segments: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Input, Any, tuple[Tensor, ...], Tensor | None]:
        """The input of the first sublayer, the state, the anchors, and the embedding if it must be sent on."""
        if self.first:
            assert self.embed is not None
            x, ids = self.embed(tokens), context.ids_for(self.topology)
            x = (x if self.places is None else self.places(x, segments, None, positions)).to(self.settings.precision)
            h, state = self.topology.open(x, *ids) if self.heads else self.boundary.begin(x, *ids)
            return h, state, self.anchors.open(x, context), x
        h, state = self.boundary.enter(self.range.start - 1, items)
        if self.settings.recompute_anchors:
            x = items[self.boundary.embedding() or EMBEDDING]
            return h, state, self.anchors.open(x, context), x
        return h, state, tuple(items[name] for name in anchors_after(self.config, self.range.start - 1)), None

    def _onward(self, anchors: Sequence[Tensor], embedding: Tensor | None) -> Items:
        """The tensors for the anchors of later stages, in addition to the topology's state."""
        if not self.settings.recompute_anchors:
            return dict(zip(anchors_after(self.config, self.range.stop - 1), anchors, strict=True))
        assert embedding is not None
        return {} if self.boundary.embedding() else {EMBEDDING: embedding}

    def _headed(self, hidden: Tensor, targets: Tensor | None, items: Items) -> Items:
        """The losses or, if the next stage has more pieces of the head, the tensors it needs for them."""
        head = self.unembed if self.unembed is not None else self.embed
        assert head is not None and targets is not None
        if len(self.share.head) == self.share.pieces:
            ce, z = ops.training_cross_entropy(
                hidden, head.weight, targets, z_loss=self.settings.z_loss, softcap=self.config.logit_softcap
            )
            return {"losses": torch.stack([ce, z])}
        before, after = self.share.head.start, self.share.head.stop
        start, stop = self.share.rows(len(head.weight))
        lse, picked = piece_of_head(hidden, head.weight[start:stop], targets, start, self.config.logit_softcap)
        if before > 0:
            lse = torch.logaddexp(items[f"{LSE}.{before}"], lse)
            picked = items[f"{PICKED}.{before}"] + picked
        if not self.last:
            return {HIDDEN: hidden, f"{LSE}.{after}": lse, f"{PICKED}.{after}": picked}
        return {"losses": torch.stack(losses_of(lse, picked, targets, self.settings.z_loss))}


class Stage(PipelineStage):
    """PyTorch's stage, which also counts bytes, times forward passes, frees receive buffers, and sends zeros.

    PyTorch's own stage keeps a buffer per micro-batch and tensor for the whole run. In 2.11 and 2.12 it fails if the
    stage did not read a received tensor, which then has no gradient.
    """

    sent_forward = sent_backward = 0
    watch: Stopwatch | None = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._remake(self.args_recv_info[fwd_chunk_id], self.device, self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._remake(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.watch is None else self.watch.measure():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._remake(self.args_recv_info[fwd_chunk_id], META)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = self._complete(self.bwd_cache[bwd_chunk_id], bwd_chunk_id)
        if self.has_backward and not self.is_last:
            self._remake(self.grad_recv_info[bwd_chunk_id], META)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops_list = super().get_fwd_send_ops(fwd_chunk_id)
        self.sent_forward += _bytes(ops_list)
        return ops_list

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops_list = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent_backward += _bytes(ops_list)
        return ops_list

    def _complete(self, gradients: Sequence[Tensor | None], chunk: int) -> tuple[Tensor, ...]:
        """The gradients of received tensors, zero for those that the stage did not read: the sender waits for each."""
        infos: Sequence[Any] = self.args_recv_info[chunk]
        return tuple(
            torch.zeros_like(info.buffer, device=self.device) if gradient is None else gradient
            for gradient, info in zip(gradients, infos, strict=False)  # PyTorch 2.11 lists those of keywords, too
        )

    def _remake(self, infos: Sequence[Any], device: torch.device, requires_grad: bool = False) -> None:
        """Move the buffers. Dropping them leaves tensors without memory, which PyTorch 2.11 needs to clear them.

        PyTorch 2.11 would give received tensors no gradient for the whole run if a stage first runs without backward.
        """
        for info in infos:
            old = getattr(info, "buffer", None)  # the first stage has none: its tokens are arguments
            if old is None:
                continue
            if old.device.type != device.type:
                info.buffer = torch.empty(old.shape, dtype=old.dtype, device=device)
            info.buffer.requires_grad_(requires_grad)


def _bytes(operations: Sequence[dist.P2POp]) -> int:
    return sum(operation.tensor.numel() * operation.tensor.element_size() for operation in operations)


def piece_of_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, start: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """lse and picked of one piece of the head, [...] each, at least in float32.

    hidden [..., C], weight [R, C] (rows `start` … of the head), targets [...].
    """
    lse, picked = head_piece(hidden.flatten(0, -2), weight, (targets - start).flatten(), softcap)
    return lse.view(targets.shape), picked.view(targets.shape)


def losses_of(lse: Tensor, picked: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-term, as `ops.linear_cross_entropy` returns them."""
    counted = targets != IGNORED
    count = counted.sum().clamp(min=1)
    loss = (lse - picked).where(counted, 0).sum() / count
    return loss, z_loss * lse.square().where(counted, 0).sum() / count
