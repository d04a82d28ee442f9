"""Learned positions: a vector for each place in a document, added to the embedded tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from residua.errors import UserError
from residua.model.cache import Now
from residua.ops._runtime.numeric import begins


class Places(nn.Embedding):
    """x_t + P_t, with t the place of the token in its document and P [places, C] normal with `std`."""

    def __init__(self, places: int, width: int, *, std: float) -> None:
        self.std = std  # nn.Embedding initialises itself
        super().__init__(places, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def check(self, tokens: int) -> None:
        """Refuse more tokens than there are places."""
        if tokens > len(self.weight):
            raise UserError(
                f"the model has learned_positions = {len(self.weight)} and no place for {tokens} tokens: use fewer."
            )

    def forward(  # type: ignore[override]
        self, x: Tensor, segments: Tensor | None = None, now: Now | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Add them to x [B, T, C]; the other arguments are those of `Decoder._run`."""
        if positions is not None:
            raise UserError(
                "learned_positions count the tokens of a document, and ranks that divide its tokens do not see all of "
                "them: divide the model in another way."
            )
        self.check(x.shape[1])
        places = torch.arange(x.shape[1], device=x.device)
        if now is not None:
            places = now.positions
        elif segments is not None:
            places = places - (places * begins(segments, segments)).cummax(1).values
        return x + embedding(places, self.weight)
