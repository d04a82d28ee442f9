"""Documents in both splits: found, counted, and dropped, kept or refused."""

from pathlib import Path

import pytest

from residua.data import DataError, Dataset, open_corpus, prepare
from residua.data.overlap import letters_and_digits, overlap_notice

from .texts import some_texts, write_jsonl

TEXTS = some_texts(120)
NEAR = [f"  {text.upper().replace(' ', ' — ')}!\n" for text in TEXTS[3:8]]


def files_of(dataset: Dataset) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dataset.path.iterdir() if path.name != "dataset.json"}


def test_normalised_text_keeps_letters_and_digits_only() -> None:
    assert letters_and_digits("The “Straße”, 2 × 3_4…\n") == b"thestrasse234"
    assert letters_and_digits("ÉTÉ 世界!") == "été世界".encode()
    assert letters_and_digits("--- \n") == b""


def test_copies_of_validation_text_are_dropped_and_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("residua.data.overlap.BLOCK_DOCUMENTS", 7)
    held = write_jsonl(tmp_path / "held.jsonl", TEXTS[:10])
    clean = write_jsonl(tmp_path / "clean.jsonl", TEXTS[10:])
    leaky = write_jsonl(tmp_path / "leaky.jsonl", [*TEXTS[10:50], *TEXTS[:3], *NEAR, TEXTS[0], *TEXTS[50:]])

    def made(source: Path, out: str, overlap: str = "drop") -> Dataset:
        corpus = open_corpus([source], validation=held)
        return prepare(corpus, tmp_path / out, "bytes", shard_tokens=1000, overlap=overlap)

    dropped = made(leaky, "dropped")
    assert dropped.description["overlap"] == {"rule": "drop", "exact": 3, "near": 5, "copies": 9}
    said = overlap_notice(dropped.description["overlap"], 10)
    assert said.endswith("; 9 training documents were dropped from training (--overlap keep keeps them)")
    expected = made(clean, "clean")
    assert expected.description["overlap"] == {"rule": "drop", "exact": 0, "near": 0, "copies": 0}
    assert files_of(dropped) == files_of(expected), "as if they had never been read"
    assert dropped.description["splits"] == expected.description["splits"]
    kept = made(leaky, "kept", "keep")
    assert kept.split("train").documents == 119 and kept.description["overlap"]["copies"] == 9
    said = overlap_notice(kept.description["overlap"], 10)
    assert said.startswith("8 of 10 validation documents are in the training text (3 verbatim, 5 up to case")
    with pytest.raises(DataError, match=r"8 of 10 validation documents .* with --overlap drop, or keep them with"):
        made(leaky, "refused", "refuse")
    with pytest.raises(DataError, match="different sources or settings"):
        made(leaky, "kept", "drop")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["clean", "dropped", "kept"]


def test_near_copies_of_held_out_documents_are_dropped(tmp_path: Path) -> None:
    twins = [text.title().replace(" ", "\n") for text in TEXTS]
    corpus = open_corpus([write_jsonl(tmp_path / "a.jsonl", [*TEXTS, *twins])], holdout=0.2)
    train, held = (
        {letters_and_digits(d.text) for d in corpus.documents() if d.split == split}
        for split in ("train", "validation")
    )
    shared = len(train & held)
    dataset = prepare(corpus, tmp_path / "out", "bytes", overlap="drop")
    assert shared > 10
    assert dataset.description["overlap"] == {"rule": "drop", "exact": 0, "near": shared, "copies": shared}
    assert sum(split.documents for split in dataset.splits.values()) == 240 - shared


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    with pytest.raises(DataError, match=r"every training document is also in the validation text: .* --overlap keep"):
        prepare(open_corpus([source], validation=source), tmp_path / "out", "bytes", overlap="drop")
    with pytest.raises(DataError, match="overlap is 'ignore': choose drop, keep or refuse"):
        prepare(open_corpus([source]), tmp_path / "out", "bytes", overlap="ignore")
