"""Tensor files of strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from residua.reading import ReadError
from residua.storage.tensors import check_header, read_tensors


def header_only(path: Path, header: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize("read", [check_header, read_tensors])
def test_headers_that_take_long_are_refused_unread(
    tmp_path: Path, read: Callable[[Path, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("residua.storage.tensors.safe_open", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr("residua.storage.tensors.load_file", lambda *_, **__: pytest.fail("opened"))
    empty = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    many = "{" + ",".join(f'"{number}":{empty}' for number in range(100_001)) + "}"
    with pytest.raises(
        ReadError, match=r"many\.safetensors holds 100,001 tensors, and 100,000 are the most: restore it"
    ):
        read(header_only(tmp_path / "many.safetensors", many.encode()), "restore it")
    with pytest.raises(ReadError, match="has a header of 33 MiB, and 32 MiB are the most"):
        read(header_only(tmp_path / "long.safetensors", b" " * (33 << 20)), "restore it")
