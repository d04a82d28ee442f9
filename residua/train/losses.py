"""How the losses of a micro-batch are computed: up to three layers around `Decoder.routed_losses`.

From the inside out, each calls the one before it:

1. `Losses`: the model as written. Tokens in; cross-entropy, z-term and expert routing out.
2. `eager_losses`: the same on working copies of the weights, in the precision of the products (`working_copies.py`).
3. Compiled: the whole model as one graph with our rewrites (`rewrites/`), or each sublayer by itself (`layers.py`).

Only `build_losses` composes them for one process. A CUDA graph is not one of these layers: it holds forward and
backward together, so `Step` wraps it around both (`cuda_graphs.py`). All these files are in `compile/`. On several
ranks, `distributed.shard` composes the losses differently, with DDP or FSDP2 between the model and the compiler.
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
"""(tokens, targets, segments=None) → cross-entropy, z-term, expert routing (None without experts)."""


class Losses(nn.Module):
    """A model's losses as the forward pass of a module, so that DDP can wrap it and copies can replace its weights."""

    def __init__(self, model: Decoder, z_loss: float) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self._routed_losses = model.routed_losses  # the current method: FSDP2 replaces it later

    def forward(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        return self._routed_losses(tokens, targets, self.z_loss, segments, positions)


def build_losses(model: Decoder, config: TrainConfig, copies: WorkingCopies | None, compiled: bool) -> LossFunction:
    """The loss function of a micro-batch on one process."""
    losses = eager_losses(model, config.z_loss, copies)
    if not compiled:
        return losses
    if config.compile == "layers":
        compile_sublayers(model)
        return losses
    return compile_rewritten(losses)


def eager_losses(model: Decoder, z_loss: float, copies: WorkingCopies | None) -> LossFunction:
    """The uncompiled losses, on copies if there are any."""
    losses = Losses(model, z_loss)
    if copies is None:
        return losses.forward

    def on_copies(tokens: Tensor, targets: Tensor, segments: Tensor | None = None) -> Any:
        return copies.run(losses, "model.", tokens, targets, segments=segments)

    return on_copies
