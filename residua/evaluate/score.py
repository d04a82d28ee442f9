"""Log-likelihoods of continuations after contexts, batched by length; loss and perplexity of a model on text."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from residua import ops
from residua.data import Dataset, validation_batches, whole_text
from residua.data.loader import IGNORED
from residua.generate.transfer import Arrival, integers, padded, send
from residua.model.inference import Forward
from residua.ops.linear_cross_entropy import token_likelihoods
from residua.storage.tensors import overflowed

if TYPE_CHECKING:
    from residua.data.tokenizer import Tokenizer
    from residua.model.decoder import Decoder
    from residua.report.terminal import Progress

POSITIONS = 2048
"""How many positions' logits are in memory at once."""
AT_ONCE = 1024
"""Texts tokenized together: before conversion to lists of ids, a tokenizer's results take 100 bytes per token."""


class Pair(NamedTuple):
    """A continuation to score after a context, both as tokens; the context is not empty."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """Σ log p of a continuation's tokens in nats, and whether each was the most likely one."""

    log: float
    greedy: bool


class _Batch(NamedTuple):
    """Pairs being scored on the device: their indices, and each scored token's row, log p and whether it is greedy."""

    indices: list[int]
    rows: Tensor
    logs: Arrival
    best: Arrival


class Scorer:
    """A model with its tokenizer, ready to score. A pair longer than the model's context is truncated at the left.

    Rows of a batch are padded on the right, which causal attention never sees; `batch_tokens` limits rows × length.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, batch_tokens: int | None = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self._forward = Forward(model)
        self.device = model.embed.weight.device
        self.batch_tokens = batch_tokens or (65_536 if self.device.type == "cuda" else 4096)

    def pairs(self, texts: Iterable[tuple[str, str]]) -> list[Pair]:
        """Tokenize contexts and their continuations like lm-evaluation-harness, many in one call of the tokenizer.

        Spaces at the end of the context move to the continuation, the two are encoded together, and an empty context
        becomes the end-of-text token.
        """
        each, pairs = iter(texts), list[Pair]()
        while some := list(islice(each, AT_ONCE)):
            pairs += self._some_pairs(some)
        return pairs

    def _some_pairs(self, texts: list[tuple[str, str]]) -> list[Pair]:
        texts_to_encode = [(context.rstrip(), context + continuation) for context, continuation in texts]
        contexts = list(dict.fromkeys(context for context, _ in texts_to_encode))  # a question's choices share one
        encoded = self.tokenizer.encode_batch([*contexts, *(whole for _, whole in texts_to_encode)])
        known = dict(zip(contexts, encoded, strict=False))
        wholes = zip(texts_to_encode, encoded[len(contexts) :], strict=True)
        return [
            Pair(known[context] or [self.tokenizer.end_of_text], whole[len(known[context]) :])
            for (context, _), whole in wholes
        ]

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[Likelihood]:
        """The likelihoods of pairs, in their order. Long pairs run first, so that running out of memory shows early.

        While the device works on a batch, the host prepares the next one and reads the results of the previous one.
        """
        known = self.model.config.vocab_size
        for pair in pairs:
            self.tokenizer.require_known(chain(*pair), known, "a text to score contains", "leave it out")
        results: dict[int, Likelihood] = {}
        started = (self._start(indices, [pairs[i] for i in indices]) for indices in self._batches(pairs))
        for batch, _ in pairwise(chain(started, [None])):  # the next one is started before this one is read
            assert batch is not None
            results.update(zip(batch.indices, self._likelihoods(batch), strict=True))
            if progress is not None:
                progress(len(results), len(pairs))
        return [results[i] for i in range(len(pairs))]

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
        """How many tokens the model reads: all but the last, at most its context."""
        return min(self.model.config.context, len(pair.context) + len(pair.continuation) - 1)

    def _start(self, indices: list[int], pairs: list[Pair]) -> _Batch:
        """Launch the forward pass of a batch; the first pair is the longest."""
        longest = self._length(pairs[0])
        inputs: list[list[int]] = []
        rows, places, targets = array("q"), array("q"), array("q")
        for row, pair in enumerate(pairs):
            tokens = [*pair.context, *pair.continuation][-(self.model.config.context + 1) :]
            inputs.append(tokens[:-1])
            scored = min(len(pair.continuation), len(tokens) - 1)
            rows.extend(repeat(row, scored))
            places.extend(range(len(tokens) - 1 - scored, len(tokens) - 1))
            targets.extend(tokens[len(tokens) - scored :])
        each, at, target = map(integers, (rows, places, targets))
        hidden = self._forward.hidden(send(padded(inputs, longest), self.device))
        hidden = hidden.flatten(0, 1)[send(each * longest + at, self.device)]
        logs, best = self._log_probabilities(hidden, send(target, self.device))
        return _Batch(indices, each, Arrival(logs), Arrival(best))

    def _likelihoods(self, batch: _Batch) -> list[Likelihood]:
        logs, best = batch.logs.wait(), batch.best.wait()
        if not torch.isfinite(logs).all():
            raise overflowed("a log-likelihood", self.model)
        count = len(batch.indices)
        totals = torch.zeros(count, dtype=torch.float64).index_add_(0, batch.rows, logs)
        wrong = torch.zeros(count, dtype=torch.int64).index_add_(0, batch.rows, (~best).long())
        return [Likelihood(float(t), int(w) == 0) for t, w in zip(totals, wrong, strict=True)]

    def _log_probabilities(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """log p [N] of targets [N] after final states [N, C], and whether they are the most likely ones."""
        logs, best = [], []
        for h, target in zip(hidden.split(POSITIONS), targets.split(POSITIONS), strict=True):
            log, likeliest = token_likelihoods(h, self.model.head_weight, target, self.model.config.logit_softcap)
            logs.append(log.double())
            best.append(likeliest)
        return torch.cat(logs), torch.cat(best)


def windows(tokens: Sequence[int], prefix: int, context: int) -> list[Pair]:
    """Cut a long text into pairs that score each token once.

    The first window begins with `prefix`. The last one starts early enough to fill the context.
    """
    text = [prefix, *tokens]
    pairs = []
    for start in range(1, len(text), context):
        stop = min(start + context, len(text))
        first = max(0, stop - 1 - context)
        pairs.append(Pair(text[first:start], text[start:stop]))
    return pairs


@dataclass(frozen=True)
class TextScore:
    """The loss in nats per scored token, and the number of UTF-8 bytes and words in exactly these tokens.

    Words are separated by whitespace. If the tokenizer is not byte-level, `exact_bytes` is False and bytes are
    estimated from the split's mean per token.
    """

    data: str
    split: str
    tokens: int
    bytes: float
    exact_bytes: bool
    loss: float
    words: int

    @property
    def perplexity(self) -> float:
        """e^loss; infinite if too large for a float."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """e^(nats per word), which does not depend on the tokenizer; infinite as above, or if there are no words."""
        return _exp(self.loss * self.tokens / self.words) if self.words else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per UTF-8 byte."""
        return self.loss * self.tokens / math.log(2) / self.bytes


class WordCount:
    """Counts the words in a token stream, per document, since some tokens decode only with their neighbours."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = 0
        self._open: list[np.ndarray] = []

    def add(self, tokens: np.ndarray) -> None:
        """Add the next tokens of the stream; an end-of-text token ends a document."""
        *whole, rest = np.split(tokens, np.flatnonzero(tokens == self.tokenizer.end_of_text))
        if whole:
            self._count([np.concatenate([*self._open, whole[0]]), *whole[1:]])
            self._open = []
        self._open.append(rest)

    def close(self) -> int:
        """End the document, and return the number of words so far."""
        if self._open:
            self._count([np.concatenate(self._open)])
        self._open = []
        return self.words

    def _count(self, documents: list[np.ndarray]) -> None:
        texts = self.tokenizer.decode_batch([ids[ids != self.tokenizer.end_of_text] for ids in documents])
        self.words += sum(len(text.split()) for text in texts)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


AHEAD = 2
"""Batches queued on the device before the host waits for the first of them."""


@torch.inference_mode()
def score_text(
    model: Decoder,
    dataset: Dataset,
    *,
    split: str = "validation",
    tokens: int | None = None,
    sequence: int | None = None,
    segments: bool = False,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Score a split in windows of `sequence` (default: the model's context); with `tokens`, only its first tokens.

    The validation split is scored as in training, in whole windows. Every token is scored for other splits without
    `tokens`, and for splits shorter than a window. With `segments`, attention stays inside documents and the first
    token of a document is not scored, as in training with `data.masking = "documents"`.
    """
    dataset.require_known(model.config.vocab_size, "prepare the text without it, using the model's own tokenizer")
    device = model.embed.weight.device
    sequence = sequence or model.config.context
    rows = max(1, (batch_tokens or (65_536 if device.type == "cuda" else 4096)) // sequence)
    part = dataset.split(split)
    total = min(part.tokens - 1, tokens or part.tokens)
    loss, count, size, words = 0.0, 0, 0.0, WordCount(dataset.tokenizer)
    forward, running = Forward(model), deque[tuple[Arrival, np.ndarray]]()

    def finish() -> None:
        """Count the text of the oldest batch on the device, and add its loss to the total."""
        nonlocal loss, count, size
        arrival, scored = running.popleft()
        size += dataset.bytes_of(scored, split)
        words.add(scored)
        value = float(arrival.wait())
        if not math.isfinite(value):
            raise overflowed(f"the loss on {dataset.path}", model)
        loss += value * len(scored)
        count += len(scored)
        if progress is not None:
            progress(min(count, total), total)

    whole = part.tokens <= sequence or (tokens is None and split != "validation")
    batches = whole_text if whole else partial(validation_batches, limit_tokens=tokens)
    for batch in batches(part, sequence, rows, segments=segments):
        documents = None if batch.segments is None else send(batch.segments, device)
        hidden = forward.hidden(send(batch.tokens, device), documents)
        targets, cap = send(batch.targets, device), model.config.logit_softcap
        ce, _ = ops.linear_cross_entropy(hidden, model.head_weight, targets, softcap=cap)
        running.append((Arrival(ce), batch.targets[batch.targets != IGNORED].numpy()))
        if len(running) > AHEAD:
            finish()
    while running:
        finish()
    exact = dataset.tokenizer.byte_lengths is not None
    return TextScore(str(dataset.path), split, count, size, exact, loss / count, words.close())
