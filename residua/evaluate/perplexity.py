"""Validation loss, perplexity and bits per byte of a model on prepared text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from residua.data import Dataset, validation_batches
from residua.data.loader import IGNORED
from residua.storage.finite import overflowed

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.report.terminal import Progress


@dataclass(frozen=True)
class TextScore:
    """The loss in nats per scored token, and the UTF-8 bytes of exactly these tokens.

    If the tokenizer is not byte-level, `exact_bytes` is False and bytes are estimated by the split's mean per token.
    """

    data: str
    split: str
    tokens: int
    bytes: float
    exact_bytes: bool
    loss: float

    @property
    def perplexity(self) -> float:
        """e^loss; infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per UTF-8 byte."""
        return self.loss * self.tokens / math.log(2) / self.bytes


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
    """Score the first `tokens` of a split (default: all) in windows of `sequence` (default: the model's context).

    With `segments`, attention stays inside documents and the first token of a document is not scored, as in training
    with `data.masking = "documents"`.
    """
    if dataset.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{dataset.path} has {dataset.vocab_size} token ids, but the model has {model.config.vocab_size}: "
            "prepare the data with the model's own tokenizer."
        )
    device = model.embed.weight.device
    sequence = sequence or model.config.context
    rows = max(1, (batch_tokens or (65_536 if device.type == "cuda" else 4096)) // sequence)
    part = dataset.split(split)
    total = min(part.tokens - 1, tokens or part.tokens)
    loss, count, size = 0.0, 0, 0.0
    for batch in validation_batches(part, sequence, rows, limit_tokens=tokens, segments=segments):
        moved = batch.to(device)
        scored = batch.targets[batch.targets != IGNORED]
        ce, _ = model.losses(moved.tokens, moved.targets, segments=moved.segments)
        value = float(ce)
        if not math.isfinite(value):
            raise overflowed(f"the loss on {dataset.path}", model)
        loss += value * len(scored)
        count += len(scored)
        size += dataset.bytes_of(scored.numpy(), split)
        if progress is not None:
            progress(min(count, total), total)
    exact = dataset.tokenizer.byte_lengths is not None
    return TextScore(str(dataset.path), split, count, size, exact, loss / count)
