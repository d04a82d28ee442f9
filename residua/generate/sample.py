"""Choose the next token from logits: greedy, or sampled with temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from residua.errors import UserError

COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. Temperature 0 is greedy: always the most likely token.

    top_k keeps the k most likely tokens; of these, top_p keeps the fewest whose total probability reaches p. Both apply
    after the temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: use 0 (greedy) or a positive number.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k is {self.top_k}: use at least 1.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}: use a number above 0 and at most 1.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}: use a whole number from 0 to 2**63 - 1.")

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely token. Also true if dividing by the temperature could overflow."""
        return self.temperature < COLDEST


class Sampler:
    """Draws one token per row per step, by inverting the cumulative distribution at a uniform random number.

    Row i's random numbers depend only on `seeds[i]`, so a prompt gets the same text alone and in any batch. All of them
    are drawn in advance, so a step needs nothing from the host.
    """

    def __init__(
        self, sampling: Sampling, seeds: Sequence[int], steps: int, vocabulary: int, device: torch.device
    ) -> None:
        self.sampling, self.vocabulary = sampling, vocabulary
        self._uniform = None if sampling.greedy else _uniform(seeds, steps).to(device)

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Tokens [B] from logits [B, V]; padding ids beyond the tokenizer's vocabulary are never drawn."""
        logits = logits[:, : self.vocabulary].float()
        if self._uniform is None:
            return logits.argmax(-1)
        probabilities, ids = candidates(logits, self.sampling)
        cumulated = probabilities.cumsum(-1)
        threshold = self._uniform[:, step, None] * cumulated[:, -1:]
        place = torch.searchsorted(cumulated, threshold, right=True)
        # rounding may push the number past the last token with nonzero probability
        last = (probabilities > 0).sum(-1, keepdim=True) - 1 if ids is not None else logits.shape[-1] - 1
        place = place.clamp(max=last)
        return (place if ids is None else ids.gather(-1, place))[:, 0]


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Unnormalised probabilities [B, K] of the tokens to draw from, and their ids; None means ids 0 to K − 1.

    Candidates excluded by top-p have probability 0 and come last.
    """
    scaled = logits / sampling.temperature
    if sampling.top_k is None and sampling.top_p == 1:
        return scaled.double().softmax(-1), None
    values, ids = scaled.topk(min(sampling.top_k or scaled.shape[-1], scaled.shape[-1]), sorted=True)
    probabilities = values.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill(before >= sampling.top_p, 0), ids


def _uniform(seeds: Sequence[int], steps: int) -> Tensor:
    rows = [torch.rand(steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)
