"""Any input is read in little memory."""

import io
import json
import lzma
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from residua.data import DataError, Tokenizer, open_corpus, prepare
from residua.data.corpus import Document
from residua.data.pipeline import encode_documents
from residua.data.readers import DOCUMENT_CHARACTERS, MAX_DOCUMENT_BYTES, SEPARATOR, cut, plain_documents, plain_lines

from .texts import write_jsonl

pytestmark = pytest.mark.slow


def documents_in(text: str) -> list[str]:
    return [document for document in plain_documents(plain_lines(io.StringIO(text))) if document]


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Assert that Python allocates at most so many bytes inside at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_line_of_4_mib_is_kept_whole_and_a_longer_one_cut() -> None:
    line = "word " * (MAX_DOCUMENT_BYTES // 5)
    assert documents_in(line) == [line]
    longer = line * 2 + "end"
    pieces = documents_in(longer)
    assert "".join(pieces) == longer and len(pieces) > 60
    assert all(piece.endswith(" ") for piece in pieces[:-1]), "each begins with a word"
    assert max(map(len, pieces)) <= 2 * DOCUMENT_CHARACTERS


@pytest.mark.parametrize("inside", [1, 7, len(SEPARATOR) - 1])
def test_separator_split_between_read_pieces_ends_a_document(inside: int) -> None:
    before = "x" * (MAX_DOCUMENT_BYTES + len(SEPARATOR) - inside)
    pieces = documents_in(before + SEPARATOR + "after")
    assert pieces[-1] == "after" and "".join(pieces[:-1]) == before


def test_long_text_is_cut_at_lines_then_at_words() -> None:
    size = 2 * DOCUMENT_CHARACTERS
    for text, end in (("some words\n" * size, "\n"), ("words " * size, " "), ("x" * 3 * size, "x")):
        pieces = list(cut(text))
        assert "".join(pieces) == text and all(piece.endswith(end) and len(piece) <= size for piece in pieces[:-1])


def test_limit_holds_for_text_without_line_ends(tmp_path: Path) -> None:
    (tmp_path / "text8.txt").write_text("some words " * 500_000)
    options = {"holdout": 0, "limit": 300_000}
    dataset = prepare(open_corpus([tmp_path / "text8.txt"], **options), tmp_path / "out", "bytes")
    assert 300_000 <= dataset.split("train").bytes <= 300_000 + 2 * DOCUMENT_CHARACTERS


@pytest.mark.parametrize("name", ["a.txt.xz", "a.jsonl.xz"])
def test_a_file_that_expands_a_lot_is_read_in_little_memory(name: str, tmp_path: Path) -> None:
    one = lzma.compress(bytes(1 << 23), preset=0)
    (tmp_path / name).write_bytes(one * 12)
    corpus = open_corpus([tmp_path / name], holdout=0.1, skip_bad=True)
    with at_most(64_000_000):
        read = sum(document.bytes for document in corpus.documents())
    assert read == (12 << 23 if ".txt" in name else 0)


def test_xz_file_that_needs_too_much_memory_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("residua.data.readers.MAX_XZ_MEMORY", 1 << 20)
    small, large = lzma.compress(b"one\n", preset=0), lzma.compress(b"two\n", preset=9)
    for number, data in enumerate((large, small + large)):
        path = tmp_path / f"{number}.txt.xz"
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"cannot read .*\.xz \(Memory usage limit"):
            list(open_corpus([path], holdout=0).documents())
    path.write_bytes(lzma.compress(b"one\n", preset=0, check=lzma.CHECK_NONE) + b"\0\0\0\0" + b"rest")
    monkeypatch.undo()
    assert [document.text for document in open_corpus([path], holdout=0).documents()] == ["one\n"]


def test_overlong_json_line_is_skipped_and_the_next_is_read(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * (16 << 20)})
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n')
    assert [d.text for d in open_corpus([path], holdout=0, skip_bad=True).documents()] == ["two", "one"]
    with pytest.raises(DataError, match="line 2 is longer than 16 million characters: split it"):
        list(open_corpus([path], holdout=0).documents())


def test_overlong_json_document_is_cut(tmp_path: Path) -> None:
    text = "some words\n" * 500_000
    path = write_jsonl(tmp_path / "a.jsonl", [text, "short"])
    documents = [document.text for document in open_corpus([path], holdout=0).documents()]
    assert len("".join(documents)) == len(text + "short") and len(documents) > 40


def test_repeated_text_is_kept_in_memory_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["again"] * 5000)
    with at_most(300_000):
        assert sum(1 for _ in open_corpus([path], holdout=0).documents()) == 5000


def test_a_long_document_is_encoded_in_a_batch_of_one() -> None:
    together: list[int] = []
    lock, now = threading.Lock(), 0

    class Watched(Tokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            nonlocal now
            size = sum(map(len, texts))
            with lock:
                now += size
                together.append(now)
            threading.Event().wait(0.002)
            with lock:
                now -= size
            return [[0] for _ in texts]

    sizes = [300_000] * 30 + [4_000_000] * 4 + [300_000] * 30
    documents = [Document("x" * size, size, "train", 0) for size in sizes]
    done = list(encode_documents(documents, Watched(Tokenizer.bytes().backend), 4))
    assert [document.bytes for document, _ in done] == sizes
    assert max(together) <= 4_300_000


def test_search_for_further_problems_stops_at_a_limit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("residua.data.corpus.MAX_SEARCHED_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" + '{"text": "some words"}\n' * 1000 + "{\n")
    with pytest.raises(DataError, match=r"line 1 is not valid JSON"):
        list(islice(open_corpus([path], holdout=0).documents(), 1))
    with pytest.raises(DataError, match=r"line 1 is not valid JSON"):
        next(open_corpus([path]).sample(1000))
