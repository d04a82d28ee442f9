from __future__ import annotations

from pathlib import Path

import pytest

from residua.data import DataError, open_corpus
from residua.data.corpus import unit_hash

from .texts import some_texts, write_jsonl


def split_of(path: Path, holdout: float) -> dict[str, str]:
    return {document.text: document.split for document in open_corpus([path], holdout=holdout).documents()}


def test_holdout_is_about_its_share_and_depends_on_the_document_alone(tmp_path: Path) -> None:
    texts = some_texts(1000)
    whole = split_of(write_jsonl(tmp_path / "a.jsonl", texts), 0.1)
    assert 60 < list(whole.values()).count("validation") < 140
    half = split_of(write_jsonl(tmp_path / "b.jsonl", texts[500:][::-1]), 0.1)
    assert all(whole[text] == split for text, split in half.items())


def test_small_corpus_still_has_a_validation_document(tmp_path: Path) -> None:
    texts = some_texts(5)
    splits = split_of(write_jsonl(tmp_path / "a.jsonl", texts), 1e-9)
    lowest = min(texts, key=lambda text: unit_hash(text.encode()))
    assert [text for text, split in splits.items() if split == "validation"] == [lowest]
    assert len(splits) == 5


def test_holdout_zero_keeps_everything_for_training(jsonl: Path, texts: list[str]) -> None:
    assert split_of(jsonl, 0) == dict.fromkeys(texts, "train")


def test_validation_source_is_the_whole_validation_split(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    other = write_jsonl(tmp_path / "v.jsonl", ["held", "out"])
    documents = list(open_corpus([jsonl], validation=other).documents())
    assert [document.text for document in documents if document.split == "validation"] == ["held", "out"]
    assert [document.text for document in documents if document.split == "train"] == texts


def test_limit_counts_training_text_and_ends_the_reading(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    other = write_jsonl(tmp_path / "v.jsonl", ["v" * 5000])
    documents = list(open_corpus([jsonl], validation=other, limit=1000).documents())
    sizes = [document.bytes for document in documents if document.split == "train"]
    assert sum(sizes[:-1]) < 1000 <= sum(sizes)
    assert documents[0].text == "v" * 5000


def test_sample_takes_from_every_part_and_never_from_validation(tmp_path: Path) -> None:
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in some_texts(300)])
    corpus = open_corpus([tmp_path], holdout=0.2)
    held_out = {document.text for document in corpus.documents() if document.split == "validation"}
    sample = list(corpus.sample(6000))
    assert {text[0] for text in sample} == set("abc")
    assert not held_out & set(sample)
    assert 6000 <= sum(len(text.encode()) for text in sample) < 8000


def test_positions_reach_the_size_of_the_corpus(jsonl: Path) -> None:
    corpus = open_corpus([jsonl, jsonl], holdout=0)
    assert corpus.size == 2 * jsonl.stat().st_size
    assert max(document.position for document in corpus.documents()) == corpus.size


@pytest.mark.parametrize("holdout", [-0.1, 1.0])
def test_holdout_outside_its_range_is_refused(jsonl: Path, holdout: float) -> None:
    with pytest.raises(DataError, match="holdout is"):
        open_corpus([jsonl], holdout=holdout)
