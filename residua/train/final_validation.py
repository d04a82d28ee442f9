"""The last validation of a run: on all of the validation text, with the loss of each document.

While a run trains, it is validated on a fixed part of the text (`data.validation_tokens`). The loss that counts in the
end is on all of it, or on its first two million tokens. How long a run trains does not change that, so the budgets and
trials of a study are measured on the same text. Two models that read the same documents can be paired by them, which
gives the error from sampling text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.data.loader import IGNORED, Batch, validated_tokens, validation_batches

if TYPE_CHECKING:
    from torch import Tensor

    from residua.data import Dataset

FINAL = "validation.json"
FINAL_LIMIT = 2_097_152
"""The last validation reads at most so many tokens."""
TOY_FACTOR = 128
"""It reads at most so many times `data.validation_tokens`: a toy stays one, and every preset reaches FINAL_LIMIT."""
GROUPS = 256
"""Documents are put together, in order, into at most so many groups of about as many tokens."""


class FinalValidation(Frozen):
    """The content of validation.json: `loss` in nats per token over `tokens` targets.

    `document_tokens` and `document_losses` are, for each document or group of documents, its targets and the sum of
    their losses; empty where no process had the whole model.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    document_tokens: tuple[int, ...] = ()
    document_losses: tuple[float, ...] = ()


def final_tokens(config: RunConfig, tokens: int) -> int:
    """How many of the `tokens` of a validation text the last validation of a run reads."""
    part = config.data.validation_tokens
    limit = max(part, min(FINAL_LIMIT, TOY_FACTOR * part))
    return validated_tokens(tokens, config.sequence, limit)


def final_batches(config: RunConfig, dataset: Dataset) -> Iterator[Batch]:
    """The batches of the last validation, as large as those of training, so that they need no more memory."""
    split, segments = dataset.split("validation"), config.data.masking == "documents"
    limit = final_tokens(config, split.tokens)
    return validation_batches(split, config.sequence, config.train.micro_batch, limit, segments)


def by_document(
    batches: Iterator[Batch], losses_of: Callable[[Batch], Tensor], config: RunConfig, dataset: Dataset
) -> FinalValidation:
    """The validation of a model whose loss of each target `losses_of` gives, [B, T]."""
    split = dataset.split("validation")
    read = final_tokens(config, split.tokens) + 1
    begins = np.zeros(read, np.int64)
    begins[split.document_starts(0, read)] = 1
    document = begins.cumsum() - begins[0]  # of each token
    sums, counts, size, place = np.zeros(document[-1] + 1), np.zeros(document[-1] + 1, np.int64), 0.0, 1
    for batch in batches:
        targets = batch.targets.numpy().ravel()
        owner, known = document[place : place + len(targets)], targets != IGNORED
        sums += np.bincount(owner, losses_of(batch).double().cpu().numpy().ravel() * known, len(sums))
        counts += np.bincount(owner, known, len(sums)).astype(np.int64)
        size += dataset.bytes_of(targets[known], "validation")
        place += len(targets)
    total, tokens = float(sums.sum()), int(counts.sum())
    group = np.minimum(counts.cumsum() * GROUPS // max(tokens + 1, 1), GROUPS - 1) if len(sums) > GROUPS else None
    if group is not None:
        sums, counts = np.bincount(group, sums), np.bincount(group, counts).astype(np.int64)
    kept = counts > 0
    return FinalValidation(
        loss=total / tokens,
        bits_per_byte=total / math.log(2) / size,
        tokens=tokens,
        document_tokens=tuple(counts[kept].tolist()),
        document_losses=tuple(round(value, 3) for value in sums[kept].tolist()),
    )


def without_documents(batches: list[Batch], loss: float, tokens: int, dataset: Dataset) -> FinalValidation:
    """The validation of a model that no process has as a whole."""
    scored = (batch.targets[batch.targets != IGNORED].numpy() for batch in batches)
    size = math.fsum(dataset.bytes_of(targets, "validation") for targets in scored)
    return FinalValidation(loss=loss, bits_per_byte=loss * tokens / math.log(2) / size, tokens=tokens)
