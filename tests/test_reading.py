"""Files that are damaged or foreign: one sentence names the file, the place, the expected content and the fix."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import residua
from residua.reading import (
    Count,
    ReadError,
    Shape,
    check_links,
    counted,
    inside,
    json_lines,
    parse_json,
    parse_toml_value,
    read_json,
    read_json_lines,
    read_text,
    read_toml,
    toml_string,
)

ROOT = Path(residua.__file__).parent
# Who may decode JSON and TOML or open safetensors files, and why.
READERS = {
    "reading.py": "the one place",
    "storage/tensors.py": "the one place for safetensors",
    "data/tokenizer_limits.py": "a part of a tokenizer that is loaded already, no files",
    "distributed/heartbeat.py": "messages between the ranks of a job, no files",
    "distributed/nodes.py": "what the process's own recorder of collectives returns, no files",
    "integrations/torchtitan/compat.py": "what RunConfig.to_toml returned in this job, no files",
    "doctor/kernels.py": "answers of the processes of a self-test through a pipe, no files",
    "train/turns.py": "answers of the processes that take turns through a pipe, no files",
    "study/worker_pool.py": "requests of the study through a pipe, no files",
    "train/compile/precompile.py": "requests of the parent process through a pipe, no files",
}
DECODING = {
    ("json", "load"), ("json", "loads"), ("tomllib", "load"), ("tomllib", "loads"), ("safetensors", "safe_open"),
    ("safetensors.torch", "load_file"), ("safetensors.torch", "load"), ("pickle", "load"), ("pickle", "loads"),
    ("torch", "load"),
}  # fmt: skip


CALLS = {name for _, name in DECODING} | {"model_validate_json"}


class Inner(Shape):
    shards: list[str]
    loss: float | None = None


class Outer(Shape):
    step: Count
    splits: dict[str, Inner]
    name: str = Field("x", max_length=3)


def decoders(tree: ast.Module) -> set[str]:
    """Calls that decode a file, by the module they come from."""
    names = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found = {f"{module}.{name}" for module, name in names.values() if (module, name) in DECODING}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            dotted = ast.unparse(node)
            found |= {dotted for module, name in DECODING if dotted == f"{module}.{name}"}
            if node.attr == "model_validate_json":
                found.add(dotted)
    return found


def test_overlong_file_name_is_refused_with_a_short_message(tmp_path: Path) -> None:
    sentence = r"refers to 'xxx.*\.\.\., a name of 5000 characters: choose a shorter one\.$"
    with pytest.raises(ReadError, match=sentence) as found:
        inside(tmp_path, "x" * 5000)
    assert len(str(found.value)) < 300


@pytest.mark.slow
def test_files_are_decoded_by_one_module() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    calling = re.compile(rf"\b({'|'.join(CALLS)})\b")
    strangers = {name: decoders(ast.parse(text)) for name, text in texts.items() if calling.search(text)}
    assert {name: calls for name, calls in strangers.items() if calls and name not in READERS} == {}
    assert strangers["reading.py"] and strangers["storage/tensors.py"]


@pytest.mark.parametrize(
    "planted", ["import json\njson.load(f)", "from tomllib import loads", "import torch\ntorch.load('x')",
                "Model.model_validate_json(text)"]
)  # fmt: skip
def test_a_planted_decoder_is_found(planted: str) -> None:
    assert decoders(ast.parse(planted))


DEEP = "[" * 100_000
NESTED = "[" * 80 + "]" * 80


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a.json is empty"),
        (b"{", "a.json is not valid JSON (column 2: "),
        (b'{\n"step": 1,\n}', "a.json is not valid JSON (line 3, column 1: "),
        (b'{"step": 1}\n{}', "a.json is not valid JSON (line 2, column 1: extra data)"),
        (b'{"step": 1,\n"x": "\xff"}', "a.json, line 2 is not UTF-8 text"),
        (DEEP.encode(), "a.json is nested too deeply"),
        (NESTED.encode(), "a.json is nested too deeply"),
        (b'{"step": 1, "step": 2, "splits": {}}', "a.json is not valid JSON (it has the key 'step' twice)"),
        (b'{"step": 1' + b"0" * 5000 + b"}", "it contains a number with thousands of digits"),
        (b'{"step": 36893488147419103232}', "holds the number 36893488147419103232, which does not fit in 64 bits"),
        (b"[]", "a.json holds a list of 0 entries, expected an object"),
        (b"null", "a.json holds null, expected an object"),
        (b"{}", "a.json has no key step"),
        (b'{"step": true, "splits": {}}', "a.json: step is True, expected a whole number"),
        (b'{"step": "3", "splits": {}}', "a.json: step is '3', expected a whole number"),
        (b'{"step": 3.5, "splits": {}}', "a.json: step is 3.5, expected a whole number"),
        (b'{"step": -1, "splits": {}}', "a.json: step is -1, expected 0 or more"),
        (b'{"step": 1, "splits": []}', "a.json: splits is a list of 0 entries, expected an object"),
        (b'{"step": 1, "splits": {"a b": 3}}', "a.json: splits.'a b' is 3, expected an object"),
        (b'{"step": 1, "splits": {"t": {}}}', "a.json has no key splits.t.shards"),
        (b'{"step": 1, "splits": {"t": {"shards": ["a", 3]}}}', "a.json: splits.t.shards[1] is 3, expected a text"),
        (b'{"step": 1, "splits": {"t": {"shards": [], "loss": NaN}}}', "splits.t.loss is nan, expected a finite"),
        (b'{"step": 1, "splits": {"t": {"shards": [], "loss": 1e999}}}', "splits.t.loss is inf, expected a finite"),
    ],
)  # fmt: skip
def test_a_damaged_document_gives_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ReadError) as refused:
        read_json(path, Outer, "make it again")
    sentence = str(refused.value)
    assert words in sentence and str(path) in sentence and sentence.endswith(": make it again.")
    assert "\n" not in sentence and len(sentence) < 400


def test_folders_and_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (
        ("missing", "does not exist"), (".", "is a folder, not a file"), ("pipe", "is a device or a pipe, not a file"),
        ("loop", "cannot be read"), ("missing/below", "does not exist"), ("a" * 300, "cannot be read"),
        ("nul\0byte", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ReadError, match=words):
            read_text(tmp_path / name, "make it again")


def test_an_overlong_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ReadError, match=r"a\.json is longer than 256 MiB"):
        read_json(tmp_path / "a.json", dict[str, Any], "make it again")


def test_valid_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'\xef\xbb\xbf{"step": 7, "more": [1], "splits": {"train": {"shards": ["a"], "loss": 3}}}')
    read = read_json(path, Outer, "")
    assert (read.step, read.splits["train"].shards, read.splits["train"].loss) == (7, ["a"], 3.0)
    path.write_bytes(b"\xef\xbb\xbflayers = 3\n")
    assert read_toml(path, "") == {"layers": 3}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a = = 3", "is not valid TOML"),
        ("a = " + DEEP, "is nested too deeply"),
        (".".join("a" * 2000) + " = 1", "is nested too deeply"),
        ("a = 1" + "0" * 5000, "it contains a number with thousands of digits"),
        ("a = 1" + "0" * 30, "which does not fit in 64 bits"),
        ("a = 1\na = 2", "is not valid TOML"),
        ("a = '\0'", "is not valid TOML"),
    ],
)
def test_damaged_toml_gives_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(content)
    with pytest.raises(ReadError, match=words) as refused:
        read_toml(path, "correct it")
    assert str(path) in str(refused.value) and str(refused.value).endswith(": correct it.")


def test_value_that_is_not_toml_becomes_a_string() -> None:
    assert parse_toml_value("3") == 3
    for text in ("word", "1" + "0" * 5000, DEEP):
        assert parse_toml_value(text) == text


@pytest.mark.parametrize("text", ["2024", "a/b c", 'q"u\\o', "w\U0001f600/d", "é\x7f\x01\n", ""])
def test_any_text_survives_as_a_toml_string(text: str) -> None:
    assert parse_toml_value(toml_string(text)) == text and toml_string(Path("a")) == '"a"'


def test_json_lines_are_numbered_and_a_torn_last_one_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a": "\xe2\x82')
    assert [(where, row["a"]) for where, row in read_json_lines(path, "")] == [
        (f"{path}, line 1", 1), (f"{path}, line 3", 2)
    ]  # fmt: skip
    path.write_bytes(b'{"a": 1}\n{"a": \n')
    with pytest.raises(ReadError, match=r"a\.jsonl, line 2 is not valid JSON .*: remove it\.$"):
        list(read_json_lines(path, "remove it"))
    path.write_bytes(b"")
    assert list(read_json_lines(path, "")) == []


def test_lenient_json_accepts_repeated_keys_and_long_numbers() -> None:
    line = '{"a": 1, "a": 36893488147419103232}'
    assert [row for _, row in json_lines([line], Path("x"), "", lenient=True)] == [{"a": 2**65}]
    with pytest.raises(ReadError, match="x is nested too deeply"):
        parse_json(DEEP, "x", "", lenient=True)


@pytest.mark.parametrize("name", ["../b", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b"])
def test_names_that_leave_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ReadError, match="which is not a file inside it"):
        inside(tmp_path, name)


def test_links_that_leave_a_folder_are_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "below").mkdir(parents=True)
    other.mkdir()
    (other / "secret").write_text("x")
    (folder / "file").write_text("x")
    (folder / "within").symlink_to("file")
    (folder / "below" / "up").symlink_to("../file")
    check_links(folder)
    assert inside(folder, "within") == folder / "within"
    assert inside(folder, "not/yet/there") == folder / "not/yet/there"
    (folder / "out").symlink_to(other / "secret")
    (folder / "far").symlink_to(other)
    (folder / "again").symlink_to("out")
    for name in ("out", "far", "far/secret", "again"):
        with pytest.raises(ReadError, match="is a link to a file outside its folder: replace it with a copy of"):
            inside(folder, name)
    with pytest.raises(ReadError, match="to a file outside its folder"):
        check_links(folder)
    (tmp_path / "alias").symlink_to(folder)
    assert inside(tmp_path / "alias", "file") == tmp_path / "alias" / "file"


def test_hugging_face_cache_may_link_only_to_its_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "cafe").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/cafe")
    check_links(snapshot)
    assert read_json(inside(snapshot, "config.json"), dict[str, Any], "") == {}
    (repository / "refs").write_text("x")
    (tmp_path / "secret").write_text("x")
    (repository / "blobs" / "beef").symlink_to(tmp_path / "secret")
    for target in ("../../refs", "../../../secret", "../../blobs/beef", "../../blobs"):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        with pytest.raises(ReadError, match="to a file outside its folder"):
            inside(snapshot, "config.json")
    lookalike = tmp_path / "mine" / "snapshots" / "1"
    lookalike.mkdir(parents=True)
    (tmp_path / "mine" / "blobs").mkdir()
    (tmp_path / "mine" / "blobs" / "cafe").write_text("{}")
    (lookalike / "config.json").symlink_to("../../blobs/cafe")
    with pytest.raises(ReadError, match="to a file outside its folder"):
        inside(lookalike, "config.json")


def test_counts_use_singular_and_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 20_000)] == ["0 steps", "1 step", "2 steps", "20,000 steps"]
    assert counted(2, "entry", "entries") == "2 entries" and counted(1, "entry", "entries") == "1 entry"
