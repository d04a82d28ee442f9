"""Files and folders that are whole or absent."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from residua import files
from residua.files import atomic_folder, refuse_used, write_atomically
from residua.reading import ReadError
from residua.storage.tensors import read_tensors, save_tensors, stored_shapes


def test_a_folder_appears_whole_and_may_replace_an_empty_one(tmp_path: Path) -> None:
    for name in ("out", ".unfinished-out"):  # the second is the leftover of a killed writer
        (tmp_path / name).mkdir()
    (tmp_path / ".unfinished-out" / "half").write_text("half")
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "text").write_text("all")
        assert not any((tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "below" / "text").read_text() == "all"
    assert [p.name for folder in (tmp_path, tmp_path / "out") for p in folder.iterdir()] == ["out", "below"]


@pytest.mark.parametrize("unique", [False, True])
def test_a_failure_leaves_no_folder(tmp_path: Path, unique: bool) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out", unique=unique) as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def test_the_second_of_two_writers_does_not_replace_the_first(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "out", unique=True) as slow:
        (slow / "text").write_text("slow")
        with atomic_folder(tmp_path / "out", unique=True) as fast:
            (fast / "text").write_text("fast")
    assert [(p.name, p.read_text()) for p in (tmp_path / "out").iterdir()] == [("text", "fast")]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("noticed", [True, False])
def test_only_leftovers_of_dead_local_processes_are_removed(tmp_path: Path, noticed: bool) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert dead.stdout is not None and not dead.stdout.read(), "ends when the process does"
    if noticed:
        dead.wait()
    else:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    own = files.unfinished(tmp_path / "other", unique=True).name
    gone = own.replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    elsewhere = f".unfinished-{dead.pid}-{'0' * 14}-other"
    for name in (own, gone, elsewhere):
        (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / gone.replace("other", "file")).write_text("half")
    with atomic_folder(tmp_path / "out", unique=True):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", own, elsewhere}
    dead.wait()


def test_leftover_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    left = files.unfinished(tmp_path / "other.json", unique=True)
    left.touch()
    monkeypatch.setattr(files, "_is_running", lambda process: False)
    monkeypatch.setattr(Path, "unlink", denied)
    with atomic_folder(tmp_path / "made"):
        pass
    assert (tmp_path / "made").is_dir() and left.exists()


def test_a_failed_file_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "text", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "text", "\ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("text", "old")]


def test_flush_syncs_files_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "text").touch()
    for path in (tmp_path / "text", tmp_path):
        files.flush(path)
    assert flushed == [str(tmp_path / "text"), str(tmp_path)]


def test_files_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of flushing and renaming, which otherwise only a power cut would reveal."""
    done: list[str] = []
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, lambda path, to: done.append(f"named {to.name}") or os.rename(path, to))
    monkeypatch.setattr(files, "flush", lambda path: done.append(path.name))
    write_atomically(tmp_path / "text", "all")
    assert len(done) == 2 and done[0].endswith("text") and done[1] == "named text"
    done.clear()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "inside").touch()
    assert done == ["inside", ".unfinished-out", "named out", tmp_path.name]


def test_used_folders_and_the_working_directory_are_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="exists and is not an empty folder: choose another --engine"):
        refuse_used(tmp_path, "--engine")
    with pytest.raises(ValueError, match="file is a file: choose another --engine"):
        refuse_used(tmp_path / "file", "--engine")
    with pytest.raises(ValueError, match=r"file is a file, so .*file/inside cannot be created: choose another --out"):
        refuse_used(tmp_path / "file" / "inside")
    (tmp_path / "empty").mkdir()
    refuse_used(tmp_path / "empty")
    refuse_used(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="is the working directory: choose a new folder for --out"):
        refuse_used(Path())


def test_weights_have_the_same_permissions_as_other_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    save_tensors({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def header_only(path: Path, header: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize("read", [stored_shapes, read_tensors])
def test_oversized_headers_are_refused_unread(tmp_path, read: Callable[[Path, str], object], monkeypatch) -> None:
    monkeypatch.setattr("residua.storage.tensors.safe_open", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr("residua.storage.tensors.load_file", lambda *_, **__: pytest.fail("opened"))
    empty = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    many = "{" + ",".join(f'"{number}":{empty}' for number in range(100_001)) + "}"
    words = r"many\.safetensors holds 100,001 tensors, but at most 100,000 are supported: restore it"
    with pytest.raises(ReadError, match=words):
        read(header_only(tmp_path / "many.safetensors", many.encode()), "restore it")
    with pytest.raises(ReadError, match="has a header of 33 MiB, but at most 32 MiB are supported"):
        read(header_only(tmp_path / "long.safetensors", b" " * (33 << 20)), "restore it")
