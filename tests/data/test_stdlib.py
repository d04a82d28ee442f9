import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from residua.data import DataError, Dataset, embedded, standard_library
from residua.data.stdlib import cache_folder


@pytest.fixture
def small(monkeypatch, tmp_path: Path) -> Path:
    """A separate cache, and a standard library of a few modules: tokenising the real one takes seconds."""
    root = tmp_path / "lib"
    (root / "package" / "tests").mkdir(parents=True)
    (root / "site-packages").mkdir()
    for number in range(40):
        (root / f"module{number}.py").write_text(f"def function_{number}():\n    return {number}\n" * 5)
    (root / "package" / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    for excluded in ("package/tests/a.py", "site-packages/b.py", "_sysconfigdata_x.py"):
        (root / excluded).write_text("excluded = True\n")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", SimpleNamespace(topics={"with": "The with statement"}))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    monkeypatch.setenv("RESIDUA_CACHE", str(tmp_path / "cache"))
    return root


def test_real_library_has_sources_and_prose_and_no_tests() -> None:
    corpus = standard_library()
    names = [part.name for part in corpus.parts]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert any(name.startswith("topics/") for name in names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    train, held = (sum(p.size or 0 for p in corpus.parts if p.split == split) for split in ("train", "validation"))
    assert train > 4_000_000 and 0.03 < held / train < 0.2


def test_split_depends_on_file_paths_not_contents(small: Path) -> None:
    splits = {part.name: part.split for part in standard_library().parts}
    (small / "module0.py").write_text("changed = 1\n")
    assert {part.name: part.split for part in standard_library().parts} == splits
    assert set(splits.values()) == {"train", "validation"}
    texts = [document.text for document in standard_library().documents()]
    assert any("name = 'é'" in text for text in texts), "declared encodings hold"
    assert not any("excluded" in text for text in texts)


def test_embedded_corpus_is_prepared_once(small: Path, monkeypatch) -> None:
    first = embedded("bpe:300")
    assert first.path.is_relative_to(small.parent / "cache")
    assert first.vocab_size == 300
    monkeypatch.setattr("residua.data.pipeline._write_shards", lambda *_: pytest.fail("made again"))
    assert embedded("bpe:300").tokenizer_hash == first.tokenizer_hash


def test_each_tokenizer_and_source_has_its_own_folder(small: Path) -> None:
    paths = {embedded(tokenizer).path for tokenizer in ("bytes", "bpe:300")}
    (small / "module0.py").write_text("changed = 1\n")
    paths.add(embedded("bytes").path)
    assert len(paths) == 3
    assert all(Dataset.open(path).splits for path in paths)


def test_damaged_cache_error_names_the_folder_to_delete(small: Path) -> None:
    path = embedded("bytes").path
    shard = path / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"truncated.*this is the cached corpus: delete {path}"):
        embedded("bytes")


@pytest.mark.slow
def test_two_concurrent_processes_both_get_the_dataset(small: Path) -> None:
    program = (
        "import sysconfig, sys; sysconfig.get_path = lambda name: sys.argv[1]\n"
        "from residua.data import embedded\n"
        "print(embedded('bytes').split('train').tokens)"
    )
    command = [sys.executable, "-c", program, str(small)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert len(list((small.parent / "cache" / "datasets").iterdir())) == 1


def test_missing_library_sources_are_refused(small: Path, monkeypatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(small / "nowhere"))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="no sources of the Python standard library"):
        standard_library()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"RESIDUA_CACHE": "/c"}, "/c"), ({"XDG_CACHE_HOME": "/x"}, "/x/residua"), ({"HOME": "/h"}, "/h/.cache/residua")],
)
def test_cache_folder_follows_the_environment(monkeypatch, environment: dict[str, str], expected: str) -> None:
    for name in ("RESIDUA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == expected
