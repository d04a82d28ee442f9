"""How the losses of a micro-batch are computed: up to three layers around `Decoder.routed_losses`.

From the inside out, each calls the one before it:

1. `Losses`: the model as written. Tokens in; cross-entropy, z-term and routing of the experts out.
2. `CopiedLosses`: the same on working copies of the weights, in the precision of the products (`working_copies.py`).
3. Compiled: the whole as one graph with our rewrites (`rewrites/`), or each sublayer by itself (`layers.py`).

`build_losses` is the only place that composes them for one process. A CUDA graph is not a layer of these: it holds
forward and backward together, so `Step` puts it around both (`cuda_graphs.py`). All these files are in `compile/`. On
several ranks `distributed.shard` has its own composition, with DDP or FSDP2 between the model and the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from residua.config.run import TrainConfig
from residua.train.compile.layers import compile_sublayers
from residua.train.compile.rewrites import compile_rewritten
from residua.train.compile.working_copies import WorkingCopies

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

LossFunction = Callable[..., tuple[Tensor, Tensor, Any]]
"""(tokens, targets, segments=None) → cross-entropy, z-term, routing of the experts (None without experts)."""


class Losses(nn.Module):
    """A model's losses as the forward pass of a module, which is what DDP wraps and what copies can be put into."""

    def __init__(self, model: Decoder, z_loss: float) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self._routed_losses = model.routed_losses  # as it is now: FSDP2 replaces the method later

    def forward(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        return self._routed_losses(tokens, targets, self.z_loss, segments, positions)


class CopiedLosses:
    """The same losses, computed on working copies of the model's weights."""

    def __init__(self, losses: Losses, copies: WorkingCopies) -> None:
        self.losses, self.copies = losses, copies

    def __call__(self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
        losses: tuple[Tensor, Tensor, Any] = self.copies.run(self.losses, "model.", tokens, targets, segments=segments)
        return losses


def build_losses(model: Decoder, config: TrainConfig, copies: WorkingCopies | None, compiled: bool) -> LossFunction:
    """The function that computes the losses of a micro-batch on one process."""
    losses = eager_losses(model, config.z_loss, copies)
    if not compiled:
        return losses
    if config.compile == "layers":
        compile_sublayers(model)
        return losses
    return compile_rewritten(losses)


def eager_losses(model: Decoder, z_loss: float, copies: WorkingCopies | None) -> LossFunction:
    """The losses without a compiler, on copies if there are any."""
    losses = Losses(model, z_loss)
    return losses.forward if copies is None else CopiedLosses(losses, copies)
