import bz2
import gzip
import json
import logging
import lzma
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from residua.data import DataError, open_corpus, readers
from residua.data.parquet_pages import PageHeader, _header, largest_page
from residua.data.problems import Problem
from residua.data.readers import DOCUMENT_CHARACTERS, plain_documents, read_file

TEXTS = ["first\ndocument", "zweites Dokument äöü", "第三"]


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def read(*sources: Path | str, field: str = "text") -> list[str]:
    return [document.text for document in open_corpus(sources, field=field, holdout=0).documents()]


def zst(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress), (".zst", zst)],
)
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_every_compression_reads_as_the_plain_file(
    tmp_path: Path, kind: str, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.{kind}{suffix}"
    data = lines(TEXTS) if kind == "jsonl" else "<|endoftext|>".join(TEXTS).encode()
    path.write_bytes(compress(data))
    assert sorted(read(path)) == sorted(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", [None, "PLAIN", "DELTA_BYTE_ARRAY"])
def test_parquet_page_size_is_read_from_headers(version: str, encoding: str | None, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, text = tmp_path / "a.parquet", "x" * 100_000
    table = pyarrow.table({"id": list(range(300)), "text": [text] * 300})
    how = {"use_dictionary": encoding is None, "column_encoding": {"text": encoding} if encoding else None}
    parquet.write_table(table, path, compression="zstd", data_page_version=version, row_group_size=100, **how)
    page = largest_page(path, parquet.read_metadata(path), "text")
    assert len(text) <= page <= 300 * len(text)
    assert largest_page(path, parquet.read_metadata(path), "id") < 10_000


@pytest.mark.slow
def test_repeated_parquet_value_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["x" * 1_000_000] * 256}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(readers, "MAX_PAGE_BYTES", 4_000_000)
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - before for _ in read_file(path, "text")]
    assert len(held) == 256 and max(held) < 20_000_000
    monkeypatch.setattr(readers, "MAX_PAGE_BYTES", 500_000)
    ((problem, _),) = read_file(path, "text")
    assert isinstance(problem, Problem) and "has a page of 1,000,004 bytes" in problem.what


@pytest.mark.parametrize(
    "header", [b"", b"\x15\x00\x00", b"\x19\x00", b"\x15\x00\x15\x01\x15\x02\x00", b"\x18\xff\x7f"]
)
def test_a_damaged_page_header_is_refused(header: bytes) -> None:
    with pytest.raises((ValueError, EOFError), match="a page"):
        PageHeader(header)


def test_parquet_long_statistics_and_dotted_names_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, texts = tmp_path / "a.parquet", [letter * 150_000 for letter in "ab"]
    how = {"use_dictionary": False, "write_page_index": False, "write_statistics": True, "compression": "zstd"}
    parquet.write_table(pyarrow.table({"a.text": texts}), path, **how)
    assert largest_page(path, parquet.read_metadata(path), "a.text") >= 300_000
    # field 5, a struct whose field 1 is 100,000 bytes; then the two sizes
    header = b"\x5c\x18" + bytes([0xA0, 0x8D, 0x06]) + b"x" * 100_000 + b"\x00\x05\x04\x0a\x15\x0c\x00"
    (tmp_path / "page").write_bytes(header)
    with (tmp_path / "page").open("rb") as file:
        assert _header(file, 0).sizes == {2: 5, 3: 6}


def test_parquet_reads_the_named_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "body": [*TEXTS, None]}), path)
    assert sorted(read(path, field="body")) == sorted(TEXTS)
    with pytest.raises(DataError, match="has no field 'text': name one of id, body"):
        read(path)


def test_folder_skips_hidden_and_unsupported_files(tmp_path: Path) -> None:
    (tmp_path / "below" / ".git").mkdir(parents=True)
    wanted = {"a.txt": "one", "below/b.md": "two", "below/c.py": "three", "below/d.rst": "four"}
    for name, text in {**wanted, "below/.git/e.txt": "hidden", "f.bin": "binary", "setting.json": "{}"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(lines(["five"])))
    assert sorted(read(tmp_path)) == sorted([*wanted.values(), "five"])


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (lines(["x", " \n", ""]) + b"\n\n" + lines(["y"]), ["x", "y"]),  # blank documents and lines
        (b'{"text": "x"}\n{"text": null}\n{"text": "y"}\n', ["x", "y"]),  # null is dropped like a blank one
        (b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n', ["a\ufffdb", "\U0001f600"]),  # half a surrogate pair
    ],
)
def test_unusual_json_lines_are_dropped_or_repaired(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert sorted(read(tmp_path / "a.jsonl")) == texts


def test_line_ends_become_newlines_except_inside_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one\\r\\ntwo"}\r\n')
    assert read(tmp_path / "a.txt", tmp_path / "b.jsonl") == ["one\r\ntwo", "one\ntwo\nthree\n"]


def test_long_text_is_cut_at_blank_lines_and_nothing_is_lost() -> None:
    paragraph = ["word " * 20 + "\n"] * 50 + ["\n"]
    text = paragraph * 40
    documents = list(plain_documents(text))
    assert len(documents) > 2
    assert "".join(documents) == "".join(text)
    assert all(document.endswith("\n\n") for document in documents if document)
    assert max(map(len, documents)) < DOCUMENT_CHARACTERS + 6000
    without = list(plain_documents(["0123456789\n"] * 30_000))
    assert max(map(len, without)) <= 2 * DOCUMENT_CHARACTERS + 11


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1 has no field 'text': name it with --field body"),
        ("a.jsonl", b"{}\n", r"line 1 has no field 'text': correct or remove it\.$"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "y"}\n', r"line 3 has no field .* earlier lines have: correct"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: field 'text' holds int, not text"),
        ("a.json", b'[{"text": "x"}, {"text": "y"}]\n', r"line 1 holds a list of 2 entries, .*: write one object"),
        ("a.json", b'[\n  {"text": "x"}\n]\n', r"line 1 is not valid JSON .*: write one object per line, such as"),
        ("a.txt", b"\xff\xfe\x00", r"a\.txt is not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(lines(TEXTS), mtime=0)[:-9], r"cannot read .*\.jsonl\.gz \(Compressed file ended"),
        ("a.jsonl.xz", b"not xz at all", r"cannot read .*a\.jsonl\.xz"),
        ("a.parquet", b"not parquet", r"cannot read .*a\.parquet"),
    ],
)
def test_bad_files_are_reported_in_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_running_out_of_memory_is_not_skipped_as_a_bad_file(tmp_path: Path, monkeypatch) -> None:
    def full(lines: object) -> None:
        raise MemoryError

    monkeypatch.setattr("residua.data.readers.plain_documents", full)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(MemoryError):
        list(open_corpus([tmp_path / "a.txt"], holdout=0, skip_bad=True).documents())


def test_missing_files_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        read(tmp_path / "missing.txt")
    with pytest.raises(DataError, match=r"no file or folder data/missing\.jsonl"):
        read("data/missing.jsonl")
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("package", "file"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet"), ("datasets", "org/name")]
)
def test_missing_package_names_the_extra(monkeypatch, tmp_path: Path, package: str, file: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    if package != "datasets":
        Path(file).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"needs the package {package}: pip install 'residua\[data\]'"):
        read(file)


def test_dataset_name_is_streamed_with_its_config(monkeypatch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(*names: str | None, **options: object) -> list[dict[str, str]]:
        asked.append((names, options))
        return [{"text": text} for text in TEXTS]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert sorted(read("org/name:sample")) == sorted(TEXTS)
    assert asked == [(("org/name", "sample"), {"split": "train", "streaming": True})]


def test_a_missing_path_is_not_looked_up_on_the_hub(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    for name in ("./nofile", "../nofile", "~/nofile"):
        with pytest.raises(DataError, match=rf"^there is no file or folder {name}$"):
            read(name)
    with pytest.raises(DataError, match=r"^there is no file or folder corpus/nofile .* write corpus/nofile:CONFIG"):
        read("corpus/nofile")
    with pytest.raises(DataError, match="needs the package datasets"):
        read("corpus/nofile:default")


def test_unreachable_hub_is_reported_in_one_sentence(
    monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("huggingface_hub")
    before = logger.level

    def load_dataset(*names: str | None, **options: object) -> None:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"no file or folder org/name, .* as a Hugging Face dataset: Couldn't reach"):
        read("org/name")
    assert not caplog.records and logger.level == before
