"""Log-likelihoods of continuations after contexts, batched by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from residua.storage.finite import overflowed

if TYPE_CHECKING:
    from residua.data.tokenizer import Tokenizer
    from residua.model.decoder import Decoder
    from residua.report.terminal import Progress

POSITIONS = 2048
"""Positions whose logits are in memory at once."""


class Pair(NamedTuple):
    """A continuation to score after a context, both as tokens; the context is not empty."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """Σ log p of a continuation's tokens in nats, and whether each was the likeliest."""

    log: float
    greedy: bool


class Scorer:
    """A model with its tokenizer, ready to score. A pair longer than the model's context is cut at its beginning.

    Rows of a batch are padded on the right, where causal attention never looks; `batch_tokens` limits rows × length.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, batch_tokens: int | None = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.device = model.embed.weight.device
        self.batch_tokens = batch_tokens or (65_536 if self.device.type == "cuda" else 4096)

    def pair(self, context: str, continuation: str) -> Pair:
        """Tokenize a context and a continuation like lm-evaluation-harness.

        Spaces at the end of the context move to the continuation, the two are encoded together, and an empty context
        becomes the end-of-text token.
        """
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        if not context:
            return Pair([self.tokenizer.end_of_text], self.tokenizer.encode(continuation))
        whole, first = self.tokenizer.encode_batch([context + continuation, context])
        return Pair(first, whole[len(first) :])

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[Likelihood]:
        """The likelihoods of pairs, in their order. Long ones go first, so that a lack of memory shows early."""
        done = 0
        results: list[Likelihood | None] = [None] * len(pairs)
        for indices in self._batches(pairs):
            for i, likelihood in zip(indices, self._score([pairs[i] for i in indices]), strict=True):
                results[i] = likelihood
            done += len(indices)
            if progress is not None:
                progress(done, len(pairs))
        return [likelihood for likelihood in results if likelihood is not None]

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[int]]:
        order = sorted(range(len(pairs)), key=lambda i: (-self._length(pairs[i]), i))
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) + 1) * self._length(pairs[batch[0]]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _length(self, pair: Pair) -> int:
        """Tokens that the model reads: all but the last, at most its context."""
        return min(self.model.config.context, len(pair.context) + len(pair.continuation) - 1)

    def _score(self, pairs: list[Pair]) -> list[Likelihood]:
        longest = self._length(pairs[0])
        inputs = torch.zeros(len(pairs), longest, dtype=torch.int64)
        rows: list[int] = []
        places: list[int] = []
        targets: list[int] = []
        for row, pair in enumerate(pairs):
            tokens = [*pair.context, *pair.continuation][-(self.model.config.context + 1) :]
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            scored = min(len(pair.continuation), len(tokens) - 1)
            rows += [row] * scored
            places += range(len(tokens) - 1 - scored, len(tokens) - 1)
            targets += tokens[len(tokens) - scored :]
        hidden = self.model.hidden(inputs.to(self.device))
        hidden = hidden[torch.tensor(rows, device=self.device), torch.tensor(places, device=self.device)]
        logs, best = self._log_probabilities(hidden, torch.tensor(targets, device=self.device))
        if not torch.isfinite(logs).all():
            raise overflowed("a log-likelihood", self.model)
        totals = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, torch.tensor(rows), logs)
        wrong = torch.zeros(len(pairs), dtype=torch.int64).index_add_(0, torch.tensor(rows), (~best).long())
        return [Likelihood(float(t), int(w) == 0) for t, w in zip(totals, wrong, strict=True)]

    def _log_probabilities(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """log p [N] of targets [N] after final states [N, C], and whether they are the likeliest, on the CPU."""
        logs, best = [], []
        for h, target in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
            logits = self.model.logits(h).float()
            logs.append(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0].double().cpu())
            best.append((logits.argmax(-1) == target).cpu())
        return torch.cat(logs), torch.cat(best)


def windows(tokens: Sequence[int], prefix: int, context: int) -> list[Pair]:
    """Cut a long text into pairs that score each token once.

    The first window begins with `prefix`. The last one starts earlier than needed, so that it fills the context.
    """
    text = [prefix, *tokens]
    pairs = []
    for start in range(1, len(text), context):
        stop = min(start + context, len(text))
        first = max(0, stop - 1 - context)
        pairs.append(Pair(text[first:start], text[start:stop]))
    return pairs
