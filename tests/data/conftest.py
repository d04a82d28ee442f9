from pathlib import Path

import pytest

from residua.data import Dataset, open_corpus, prepare

from .texts import some_texts, write_jsonl


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return some_texts(200)


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory, texts: list[str]) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("source") / "corpus.jsonl", texts)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, jsonl: Path) -> Dataset:
    """200 documents as bytes in several shards; do not change it."""
    out = tmp_path_factory.mktemp("data") / "set"
    return prepare(open_corpus([jsonl], holdout=0.1), out, "bytes", shard_tokens=3000)
