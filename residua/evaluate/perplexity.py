"""Validation loss, perplexity by token and by word, and bits per byte of a model on prepared text."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from residua import ops
from residua.data import Dataset, validation_batches, whole_text
from residua.data.loader import IGNORED
from residua.generate.transfer import Arrival, send
from residua.model.forward import Forward
from residua.storage.tensors import overflowed

if TYPE_CHECKING:
    from residua.data.tokenizer import Tokenizer
    from residua.model.decoder import Decoder
    from residua.report.terminal import Progress


@dataclass(frozen=True)
class TextScore:
    """The loss in nats per scored token, and the UTF-8 bytes and the words of exactly these tokens.

    Words are what white space separates. If the tokenizer is not byte-level, `exact_bytes` is False and bytes are
    estimated by the split's mean per token.
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
        """e^loss; infinite where that is too large for a float."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """e^(nats per word), which does not depend on the tokenizer; infinite as above, or without a word."""
        return _exp(self.loss * self.tokens / self.words) if self.words else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per UTF-8 byte."""
        return self.loss * self.tokens / math.log(2) / self.bytes


class WordCount:
    """Counts the words of a stream of tokens, document by document: some tokens only decode beside their neighbours."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = 0
        self._open: list[np.ndarray] = []

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens of the stream; an end-of-text token ends a document."""
        *whole, rest = np.split(tokens, np.flatnonzero(tokens == self.tokenizer.end_of_text))
        if whole:
            self._count([np.concatenate([*self._open, whole[0]]), *whole[1:]])
            self._open = []
        self._open.append(rest)

    def close(self) -> int:
        """End the document, and return the words up to here."""
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
"""Batches that the device is given before the host waits for the first of them."""


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
    """Score a split in windows of `sequence` (default: the model's context); with `tokens`, the first of so many.

    The validation split is scored as in training, in whole windows. Of another one without `tokens`, and of one that
    is shorter than a window, every token is scored.
    With `segments`, attention stays inside documents and the first token of a document is not scored, as in training
    with `data.masking = "documents"`.
    """
    dataset.require_known(model.config.vocab_size, "prepare text without it, with the model's own tokenizer")
    device = model.embed.weight.device
    sequence = sequence or model.config.context
    rows = max(1, (batch_tokens or (65_536 if device.type == "cuda" else 4096)) // sequence)
    part = dataset.split(split)
    total = min(part.tokens - 1, tokens or part.tokens)
    loss, count, size, words = 0.0, 0, 0.0, WordCount(dataset.tokenizer)
    forward, running = Forward(model), deque[tuple[Arrival, np.ndarray]]()

    def finish() -> None:
        """Read the text of the oldest batch that the device works on, and add up its loss."""
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
        ce, _ = ops.linear_cross_entropy(hidden, model.head_weight, send(batch.targets, device))
        running.append((Arrival(ce), batch.targets[batch.targets != IGNORED].numpy()))
        if len(running) > AHEAD:
            finish()
    while running:
        finish()
    exact = dataset.tokenizer.byte_lengths is not None
    return TextScore(str(dataset.path), split, count, size, exact, loss / count, words.close())
