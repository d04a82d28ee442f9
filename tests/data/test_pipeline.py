import errno
import hashlib
import json
import lzma
import math
import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from residua.data import Corpus, DataError, Dataset, Tokenizer, open_corpus, prepare, unigram_entropy
from residua.data.parts import Part
from residua.data.shards import ShardWriter

from .texts import some_texts, write_jsonl


def documents_of(dataset: Dataset, split: str) -> list[str]:
    """Every document of a split, by its document table."""
    part = dataset.split(split)
    starts = [*part.document_starts(0, part.tokens).tolist(), part.tokens]
    ids = [part.read(start, stop - start) for start, stop in pairwise(starts)]
    assert all(document[-1] == dataset.tokenizer.end_of_text for document in ids)
    return [dataset.tokenizer.decode(document[:-1]) for document in ids]


def test_every_document_survives_a_round_trip(dataset: Dataset, texts: list[str]) -> None:
    train, validation = documents_of(dataset, "train"), documents_of(dataset, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert len(dataset.split("train").shards) > 2
    assert validation


def test_description_counts_match_the_text(dataset: Dataset, texts: list[str]) -> None:
    splits = dataset.splits.values()
    size = sum(len(text.encode()) for text in texts)
    assert sum(split.bytes for split in splits) == size
    assert sum(split.tokens for split in splits) == size + len(texts)
    validation = documents_of(dataset, "validation")
    expected = sum(len(text.encode()) for text in validation) / sum(len(text.encode()) + 1 for text in validation)
    assert dataset.bytes_per_token("validation") == pytest.approx(expected)
    assert (dataset.vocab_size, dataset.tokenizer_hash) == (257, Tokenizer.bytes().hash)


def test_reading_across_shards_equals_the_concatenation(dataset: Dataset) -> None:
    split = dataset.split("train")
    whole = np.concatenate([shard.ids for shard in split.shards])
    assert np.array_equal(split.read(0, split.tokens), whole)
    for border in np.cumsum([shard.tokens for shard in split.shards])[:-1]:
        assert np.array_equal(split.read(border - 3, 7), whole[border - 3 : border + 4])
        assert border in split.document_starts(border - 3, border + 4)
        assert border not in split.document_starts(border - 3, border)


def test_number_of_workers_does_not_change_the_files(jsonl: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("residua.data.pipeline.CHUNK_BYTES", 500)
    corpus = open_corpus([jsonl], holdout=0.1)
    for workers in (1, 3):
        prepare(corpus, tmp_path / str(workers), "bpe:300", workers=workers, shard_tokens=2000)
    one, three = sorted((tmp_path / "1").iterdir()), sorted((tmp_path / "3").iterdir())
    assert [file.name for file in one] == [file.name for file in three]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, three, strict=True))


def test_repeated_request_opens_the_existing_dataset(jsonl: Path, tmp_path: Path, monkeypatch) -> None:
    first = prepare(open_corpus([jsonl]), tmp_path / "out", "bpe:300")
    monkeypatch.setattr("residua.data.pipeline._write_shards", lambda *_: pytest.fail("tokenised again"))
    monkeypatch.setattr("residua.data.pipeline.train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert prepare(open_corpus([jsonl]), tmp_path / "out", "bpe:300").description == first.description


def test_existing_content_is_never_overwritten(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(open_corpus([jsonl]), out, "bytes")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = write_jsonl(tmp_path / "other.jsonl", some_texts(20, seed=1))
    (tmp_path / "new").mkdir()  # an empty folder may be filled
    prepare(open_corpus([other]), tmp_path / "new", "bytes")
    write_jsonl(other, some_texts(21, seed=1))
    for source, folder, tokenizer in (
        (other, out, "bytes"),
        (jsonl, out, "bpe:300"),
        (other, tmp_path / "new", "bytes"),
    ):
        with pytest.raises(DataError, match="from different sources or settings"):
            prepare(open_corpus([source]), folder, tokenizer)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="already has a dataset"):
        prepare(open_corpus([jsonl]), tmp_path / "mine", "bytes")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_interrupted_preparation_leaves_nothing(jsonl: Path, tmp_path: Path, monkeypatch) -> None:
    whole = ShardWriter.add

    def add(self: ShardWriter, ids: np.ndarray) -> None:
        if self.tokens > 1000:
            raise KeyboardInterrupt
        whole(self, ids)

    monkeypatch.setattr(ShardWriter, "add", add)
    with pytest.raises(KeyboardInterrupt):
        prepare(open_corpus([jsonl]), tmp_path / "below" / "out", "bytes")
    assert not (tmp_path / "below").exists()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_full_disk_gives_one_sentence_and_leaves_nothing(jsonl: Path, tmp_path: Path, monkeypatch) -> None:
    def add(self: ShardWriter, ids: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add", add)
    with pytest.raises(
        OSError, match=r"could not write .*out: No space left on device; the partial output was removed"
    ):
        prepare(open_corpus([jsonl]), tmp_path / "out", "bytes")
    assert list(tmp_path.iterdir()) == []


def test_losing_writer_opens_the_dataset_of_the_winner(jsonl: Path, tmp_path: Path, monkeypatch) -> None:
    out, corpus = tmp_path / "out", open_corpus([jsonl])
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        prepare(corpus, out, "bytes")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    assert prepare(corpus, out, "bytes").split("train").documents > 100
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("texts", "holdout", "message"),
    [
        ([" ", "\n"], 0.1, "no text to train on"),
        ([], 0.0, "no text to train on"),
        (["alone"], 0.1, "has a single document, so none can be held out: give --validation FILE"),
    ],
)
def test_empty_corpus_is_refused(tmp_path: Path, texts: list[str], holdout: float, message: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(DataError, match=message):
        prepare(open_corpus([source], holdout=holdout), tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()
    empty, text = (write_jsonl(tmp_path / f"{name}.jsonl", some) for name, some in (("v", []), ("t", ["a", "b"])))
    with pytest.raises(DataError, match="source given for validation"):
        prepare(open_corpus([text], validation=empty), tmp_path / "out", "bytes")


def test_dataset_without_validation_is_reported(tmp_path: Path, jsonl: Path) -> None:
    dataset = prepare(open_corpus([jsonl], holdout=0), tmp_path / "out", "bytes")
    with pytest.raises(DataError, match="only train: prepare the data again, with --holdout above 0 or --validation"):
        dataset.split("validation")


@pytest.mark.parametrize("tokenizer", ["bpe:", "bpe:many", "bpe:100"])
def test_impossible_tokenizer_sizes_are_refused(tmp_path: Path, jsonl: Path, tokenizer: str) -> None:
    with pytest.raises(DataError, match=r"give the vocabulary size|at least 257"):
        prepare(open_corpus([jsonl]), tmp_path / "out", tokenizer)


def test_dataset_refuses_a_checkpoint_of_another_tokenizer(dataset: Dataset) -> None:
    dataset.require_tokenizer(dataset.tokenizer_hash, "step-10")
    with pytest.raises(DataError, match="but step-10 uses 123"):
        dataset.require_tokenizer("123", "step-10")


def test_unigram_entropy_is_the_cross_entropy_of_smoothed_counts(dataset: Dataset) -> None:
    train, validation = (dataset.split(name).read(0, dataset.split(name).tokens) for name in ("train", "validation"))
    counts = Counter(train.tolist())
    nats = [-math.log((counts[token] + 1) / (len(train) + 257)) for token in validation.tolist()]
    assert unigram_entropy(dataset) == pytest.approx(sum(nats) / len(nats), rel=1e-12)


def ordinary(folder: Path) -> Path:
    """Lines of JSON, plain text with blank lines, with separators, with one long line, and compressed."""
    chance = random.Random(0)
    words = ["depth", "Weights", "mix,", "what", "each", "layer", "wrote", "into", "the", "stream.", "é", "世界"]

    def text(count: int) -> str:
        return " ".join(chance.choices(words, k=count))

    folder.mkdir()
    records = [json.dumps({"text": f"{n}: {text(chance.randint(1, 90))}"}) + "\n" for n in range(300)]
    (folder / "a.jsonl").write_text("".join(records), "utf-8")
    lines = [text(12) + "\n" * (chance.random() < 0.1) for _ in range(4000)]
    (folder / "b.txt").write_text("\n".join(lines), "utf-8")
    separated = "<|endoftext|>".join(text(30) + "\r\n" for _ in range(40))
    (folder / "c.md").write_text(separated + text(60_000), "utf-8")
    (folder / "d.txt.xz").write_bytes(lzma.compress(text(3000).encode()))
    return folder


@pytest.mark.slow
def test_shards_are_identical_to_those_of_an_earlier_version(tmp_path: Path, monkeypatch) -> None:
    """Digests of files that an earlier version wrote: documents end at the same places, splits are the same."""
    folder = ordinary(tmp_path / "in")
    for out, options, digest, fingerprint in (
        ("share", {}, "5efa4ba9c2937856a73827d6a31b40a3", "cfed03d5813c5eb7"),
        ("none", {"holdout": 0}, "b1b1ee84b966488836971dbaf2b7681e", "1a17c65435a2d32a"),
        ("limit", {"limit": 150_000, "holdout": 0.1}, "104278f3d863b0801355fc753d4731ba", "8336777399b8177e"),
    ):
        monkeypatch.setattr("residua.data.corpus._MAX_MEMORY_BYTES", 1000)
        dataset = prepare(open_corpus([folder], **options), tmp_path / out, "bytes", shard_tokens=200_000)
        total = hashlib.sha256()
        for file in sorted(set(dataset.path.iterdir()) - {dataset.path / "dataset.json"}):
            total.update(file.name.encode() + file.read_bytes())
        total.update(json.dumps(dataset.description["splits"], sort_keys=True).encode())
        assert (total.hexdigest()[:32], dataset.fingerprint) == (digest, fingerprint)
    few = prepare(open_corpus([folder / "c.md"], holdout=0.05), tmp_path / "few", "bytes")
    assert few.fingerprint == "2ce66dab166f70a5"
    part = Part("a", 3, lambda: iter(()), None, "v")
    assert Corpus(("a",), (part,), 0.1, 5, 7).fingerprint.startswith("e493478adcee9d31")


def test_dataset_of_an_older_version_opens(jsonl: Path, tmp_path: Path) -> None:
    prepare(open_corpus([jsonl]), tmp_path / "out", "bytes")
    file = tmp_path / "out" / "dataset.json"
    old = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("overlap", "skipped")}
    file.write_text(json.dumps(old))
    for rule in ("drop", "keep"):
        assert prepare(open_corpus([jsonl]), tmp_path / "out", "bytes", overlap=rule).description == old
