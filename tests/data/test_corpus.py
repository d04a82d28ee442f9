from pathlib import Path

import pytest

from residua.data import DataError, open_corpus
from residua.data.corpus import unit_hash

from .texts import some_texts, write_jsonl


def split_of(path: Path, holdout: float) -> dict[str, str]:
    return {document.text: document.split for document in open_corpus([path], holdout=holdout).documents()}


def test_holdout_share_is_met_and_depends_only_on_the_text(tmp_path: Path) -> None:
    texts = some_texts(1000)
    whole = split_of(write_jsonl(tmp_path / "a.jsonl", texts), 0.1)
    assert 60 < list(whole.values()).count("validation") < 140
    half = split_of(write_jsonl(tmp_path / "b.jsonl", texts[500:][::-1]), 0.1)
    assert all(whole[text] == split for text, split in half.items())


def test_small_corpus_still_gets_a_validation_document(tmp_path: Path) -> None:
    texts = some_texts(5)
    splits = split_of(write_jsonl(tmp_path / "a.jsonl", texts), 1e-9)
    lowest = min(texts, key=lambda text: unit_hash(text.encode()))
    assert [text for text, split in splits.items() if split == "validation"] == [lowest]
    assert len(splits) == 5


def test_validation_source_is_the_whole_validation_split(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    other = write_jsonl(tmp_path / "v.jsonl", ["held", "out"])
    documents = list(open_corpus([jsonl], validation=other).documents())
    assert [document.text for document in documents if document.split == "validation"] == ["held", "out"]
    assert [document.text for document in documents if document.split == "train"] == texts


def test_limit_counts_only_training_text_and_stops_reading(tmp_path: Path, jsonl: Path, texts: list[str]) -> None:
    other = write_jsonl(tmp_path / "v.jsonl", ["v" * 5000])
    documents = list(open_corpus([jsonl], validation=other, limit=1000).documents())
    sizes = [document.bytes for document in documents if document.split == "train"]
    assert sum(sizes[:-1]) < 1000 <= sum(sizes)
    assert documents[0].text == "v" * 5000


def test_sample_covers_every_part_and_excludes_validation(tmp_path: Path) -> None:
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in some_texts(300)])
    corpus = open_corpus([tmp_path], holdout=0.2)
    held_out = {document.text for document in corpus.documents() if document.split == "validation"}
    sample = list(corpus.sample(6000))
    assert {text[0] for text in sample} == set("abc")
    assert not held_out & set(sample)
    assert 6000 <= sum(len(text.encode()) for text in sample) < 8000


def test_positions_end_at_the_size_of_the_corpus(jsonl: Path) -> None:
    corpus = open_corpus([jsonl, jsonl], holdout=0)
    assert corpus.size == 2 * jsonl.stat().st_size
    assert max(document.position for document in corpus.documents()) == corpus.size


@pytest.mark.parametrize("holdout", [-0.1, 1.0])
def test_holdout_outside_its_range_is_refused(jsonl: Path, texts: list[str], holdout: float) -> None:
    assert split_of(jsonl, 0) == dict.fromkeys(texts, "train")
    with pytest.raises(DataError, match="holdout is"):
        open_corpus([jsonl], holdout=holdout)


def shares(path: Path, holdout: float | None) -> dict[str, int]:
    """Bytes of text in each split."""
    found = {"train": 0, "validation": 0}
    for document in open_corpus([path], holdout=holdout).documents():
        found[document.split] += document.bytes
        assert document.bytes == len(document.text.encode())
    return found


@pytest.mark.parametrize("count", [1, 3, 9])
def test_few_long_documents_are_cut_to_hold_out_the_share(tmp_path: Path, count: int) -> None:
    texts = ["\n".join(some_texts(400, seed)) for seed in range(count)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    corpus = open_corpus([path], holdout=0.05)
    assert list(corpus.sample(10**9)) == [d.text for d in corpus.documents() if d.split == "train"], "for a tokenizer"
    assert len(list(corpus.sample(10))) == 1
    held = shares(path, 0.05)
    assert held["train"] + held["validation"] == sum(len(text.encode()) for text in texts), "nothing is lost"
    assert 0.04 < held["validation"] / sum(held.values()) < 0.06
    (cut,) = [d.text for d in open_corpus([path], holdout=0.05).documents() if d.split == "validation"]
    (whole,) = [text for text in texts if text.endswith(cut)]
    assert whole[: -len(cut)].endswith("\n"), "the cut is where a line begins"


def test_default_holdout_is_a_tenth_of_small_text_else_32_kib(tmp_path: Path) -> None:
    small = shares(write_jsonl(tmp_path / "a.jsonl", ["\n".join(some_texts(400))]), None)
    assert small["validation"] / sum(small.values()) == pytest.approx(0.1, abs=0.01)
    larger = shares(write_jsonl(tmp_path / "b.jsonl", ["\n".join(some_texts(8000))]), None)
    assert larger["validation"] == pytest.approx(32_768, rel=0.01)


def test_documents_are_held_out_whole_with_their_duplicates(tmp_path: Path) -> None:
    texts = [f"{number} " + "x" * 2000 for number in range(10)] * 2
    for holdout in (0.1, 0.2, 0.3, 0.5):
        documents = list(open_corpus([write_jsonl(tmp_path / "a.jsonl", texts)], holdout=holdout).documents())
        assert sorted(d.text for d in documents) == sorted(texts), "none is cut"
        held = [d.text for d in documents if d.split == "validation"]
        assert all(held.count(text) == 2 for text in held)
        assert holdout / 2 <= len(held) / 20 <= 2 * holdout


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_of_a_divided_document_are_cut_at_the_same_place(tmp_path: Path, copies: int) -> None:
    texts = ["\n".join(some_texts(400, seed)) for seed in range(2)] * copies
    documents = list(open_corpus([write_jsonl(tmp_path / "a.jsonl", texts)], holdout=0.1).documents())
    held = [document.text for document in documents if document.split == "validation"]
    assert len(held) == copies and len(set(held)) == 1
    assert all(held[0] not in document.text for document in documents if document.split == "train")
    assert sum(map(len, held)) / sum(map(len, texts)) == pytest.approx(0.1, abs=0.02), "the share counts every copy"
    assert sum(document.bytes for document in documents) == sum(len(text.encode()) for text in texts)


def test_repeated_text_is_not_held_out_if_other_text_suffices(tmp_path: Path) -> None:
    first, *others = sorted(("\n".join(some_texts(9, seed)) for seed in range(30)), key=lambda t: unit_hash(t.encode()))
    held = shares(write_jsonl(tmp_path / "a.jsonl", [first] * 90 + others), 0.1)
    assert 0.05 < held["validation"] / sum(held.values()) < 0.2


def test_copies_of_a_held_out_document_are_held_out_too(tmp_path: Path) -> None:
    texts = some_texts(700) * 2
    documents = list(open_corpus([write_jsonl(tmp_path / "a.jsonl", texts)], holdout=1e-9).documents())
    assert sorted(document.text for document in documents) == sorted(texts)
    lowest = min(texts, key=lambda text: unit_hash(text.encode()))
    assert [document.text for document in documents if document.split == "validation"] == [lowest] * 2


@pytest.mark.parametrize("count", [2, 8, 3000])
def test_corpus_of_one_repeated_text_holds_out_one_copy(tmp_path: Path, count: int) -> None:
    path = write_jsonl(tmp_path / "same.jsonl", ["again and again"] * count)
    splits = [document.split for document in open_corpus([path], holdout=0.1).documents()]
    assert splits.count("validation") == 1 and len(splits) == count
