"""The final validation of a run: the whole text, and the loss of each document."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import residua
from residua.config import presets
from residua.config.run import DataConfig, RunConfig
from residua.data import DataError, Dataset, open_corpus, prepare, validation_batches
from residua.data.dataset import SOURCES
from residua.train.result import (
    FINAL_LIMIT,
    GROUPS,
    TOY_FACTOR,
    FinalValidation,
    by_document,
    final_batches,
    final_tokens,
)
from residua.train.step import build_step
from residua.train.trainer import train
from tests.train.conftest import small_run

pytestmark = pytest.mark.slow


def longer(config: RunConfig, steps: int = 60) -> RunConfig:
    """The run with so many steps that it is trained on more tokens than the validation text has."""
    seldom = (f"train.{key}={steps}" for key in ("steps", "log_every", "validate_every", "save_every"))
    return config.override(list(seldom))


def test_the_final_validation_reads_the_whole_text(config: RunConfig, tmp_path: Path) -> None:
    run = longer(config).override(["data.validation_tokens=64"])
    result = train(run, tmp_path / "run")
    final = FinalValidation(**json.loads((tmp_path / "run" / "validation.json").read_text()))
    split = Dataset.open(str(run.data.path)).split("validation")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = [row for row in rows if row["kind"] == "validation"]
    assert final.tokens == (split.tokens - 1) // 16 * 16 > 4 * run.data.validation_tokens
    assert {row["tokens"] for row in validated} == {run.data.validation_tokens}  # while it trains, a part
    assert result.validation_tokens == final.tokens and result.validation_loss == pytest.approx(final.loss, abs=1e-6)
    assert sum(final.document_losses) / sum(final.document_tokens) == pytest.approx(final.loss, abs=1e-5)
    assert len(final.document_tokens) == split.documents and sum(final.document_tokens) == final.tokens
    assert abs(final.loss - validated[-1]["loss"]) < 0.3


@pytest.mark.parametrize(("part", "tokens"), [(128, 16_384), (16_384, FINAL_LIMIT), (4_194_304, 4_194_304)])
def test_short_and_long_runs_have_the_same_final_validation(config: RunConfig, part: int, tokens: int) -> None:
    runs = [longer(config, steps).override([f"data.validation_tokens={part}"]) for steps in (3, 60_000)]
    assert [final_tokens(run, 10_000_000) for run in runs] == [tokens, tokens]
    assert [final_tokens(run, 10_001) for run in runs] == [10_000, 10_000]


def test_all_presets_have_the_same_final_validation_limit() -> None:
    parts = [DataConfig(**presets.load(name).get("data", {})).validation_tokens for name in presets.names()]
    assert TOY_FACTOR * min(parts) >= FINAL_LIMIT >= max(parts)


@pytest.mark.parametrize("masking", ["none", "documents"])
def test_document_losses_add_up_to_the_loss(config: RunConfig, masking: str) -> None:
    run = longer(config).override([f"data.masking={masking}"])
    dataset = Dataset.open(str(run.data.path))
    step = build_step(residua.build(run.model), run.train, torch.device("cpu"))
    found = by_document(final_batches(run, dataset), step.token_losses, run, dataset)
    batches = list(validation_batches(dataset.split("validation"), 16, 3, segments=masking == "documents"))
    loss, targets = step.evaluate(batches)
    assert (found.loss, found.tokens) == (pytest.approx(loss, rel=1e-6), targets)
    starts = dataset.split("validation").document_starts(0, found.tokens + 1)
    inside = dataset.split("validation").read(0, starts[1])  # the first document alone, from its own first token
    if masking == "documents":
        alone = step.model.losses(torch.tensor(inside[None, :16]), torch.tensor(inside[None, 1:17]))[0]
        first = step.token_losses(batches[0])[0]
        assert float(alone.detach()) == pytest.approx(float(first.mean()), rel=1e-5)
    assert found.document_tokens[0] == len(inside) - 1


def validated_on(records: list[dict[str, str]], folder: Path) -> Dataset:
    """A dataset whose validation text is that of the records."""
    (folder / "held.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "train.txt").write_text("something else " * 50)
    corpus = open_corpus([folder / "train.txt"], validation=folder / "held.jsonl")
    return prepare(corpus, folder / "dataset", "bytes", workers=1)


def test_bits_per_byte_are_kept_by_source(tmp_path: Path) -> None:
    texts = {"wiki": ["depth " * 20] * 3, "books": ["streams and gates " * 9] * 2, "": ["anchors " * 30]}
    lines = [
        {"text": f"{i} {t}", **({"source": s} if s else {})} for s, many in texts.items() for i, t in enumerate(many)
    ]
    dataset = validated_on(lines, tmp_path)
    assert dataset.sources is not None and dataset.sources.names == ["wiki", "books", ""]
    run = longer(small_run(tmp_path / "dataset"), 500)
    found = by_document(final_batches(run, dataset), lambda batch: batch.targets / 100.0, run, dataset)
    starts = [*dataset.split("validation").document_starts(0, found.tokens + 1), found.tokens + 1]
    ids = dataset.split("validation").read(0, found.tokens + 1)
    for name, numbers in {"wiki": range(3), "books": (3, 4), "other": (5,)}.items():
        own = np.concatenate([ids[max(starts[n], 1) : starts[n + 1]] for n in numbers])
        bits = own.sum() / 100 / math.log(2) / dataset.bytes_of(own, "validation")
        assert found.sources[name].tokens == len(own)
        assert found.sources[name].bits_per_byte == pytest.approx(bits)
    (dataset.path / SOURCES).unlink()  # as prepared by an older version
    assert Dataset.open(dataset.path).sources is None
    (dataset.path / SOURCES).write_text('{"names": ["a"], "documents": [0]}')
    with pytest.raises(DataError, match="does not match the 6 validation documents"):
        assert Dataset.open(dataset.path).sources


def test_urls_in_place_of_source_names_are_not_kept(tmp_path: Path) -> None:
    lines = [{"text": f"text {i}", "source": f"https://{i}"} for i in range(80)]
    assert validated_on(lines, tmp_path).sources is None


def test_losses_of_many_documents_are_grouped(tmp_path: Path) -> None:
    for number in range(700):
        (tmp_path / f"{number}.txt").write_text("depth " * (1 + number % 3))
    prepare(open_corpus([tmp_path], holdout=0.5), tmp_path / "dataset", "bytes", workers=1)
    run, dataset = longer(small_run(tmp_path / "dataset"), 500), Dataset.open(tmp_path / "dataset")
    found = by_document(final_batches(run, dataset), lambda batch: torch.ones(batch.targets.shape), run, dataset)
    assert dataset.split("validation").documents > GROUPS >= len(found.document_tokens) > GROUPS // 2
    assert found.loss == 1.0 and sum(found.document_tokens) == found.tokens
    assert found.document_losses == tuple(map(float, found.document_tokens))
    assert found.bits_per_byte == pytest.approx(found.tokens / math.log(2) / _bytes(dataset, found.tokens))


def _bytes(dataset: Dataset, tokens: int) -> float:
    return dataset.bytes_of(dataset.split("validation").read(1, tokens), "validation")
