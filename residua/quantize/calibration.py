"""The text that a model is calibrated and evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.data import Dataset, Loader, validation_batches
from residua.data.loader import Batch
from residua.data.source import open_data
from residua.storage.model_folder import open_text

SEQUENCES_AT_ONCE = 16
CALIBRATION_SEQUENCES = 4096


@dataclass(frozen=True)
class CalibrationText:
    """Prepared text as a run sees it: shuffled training windows, and the fixed validation set."""

    dataset: Dataset
    sequence: int
    documents: bool
    validation_tokens: int

    @classmethod
    def of_run(cls, config: RunConfig) -> CalibrationText:
        """The text that a run was trained and validated on."""
        return cls._with(open_data(config), config)

    @classmethod
    def of_folder(cls, folder: Path, model: ModelConfig, data: Path | None) -> CalibrationText:
        """The text of the model in a folder, or the prepared folder `data`, in the model's tokens."""
        dataset, config = open_text(folder, model, data)
        return cls._with(dataset, config)

    @classmethod
    def _with(cls, dataset: Dataset, config: RunConfig) -> CalibrationText:
        data = config.data
        return cls(dataset, config.sequence, data.masking == "documents", data.validation_tokens)

    def validation(self, tokens: int | None = None) -> list[Batch]:
        """The run's validation set, or the first `tokens` of it."""
        limit = min(tokens or self.validation_tokens, self.validation_tokens)
        split = self.dataset.split("validation")
        return list(
            validation_batches(split, self.sequence, SEQUENCES_AT_ONCE, limit_tokens=limit, segments=self.documents)
        )

    def calibration(self, sequences: int) -> Iterator[Batch]:
        """The first `sequences` training windows, always the same ones."""
        size = min(SEQUENCES_AT_ONCE, sequences)
        loader = Loader(self.dataset.split("train"), self.sequence, size, segments=self.documents, prefetch=0)
        for start, batch in zip(range(0, sequences, size), loader, strict=False):
            yield _first(batch, sequences - start)


def _first(batch: Batch, rows: int) -> Batch:
    segments = None if batch.segments is None else batch.segments[:rows]
    return Batch(batch.tokens[:rows], batch.targets[:rows], segments)
