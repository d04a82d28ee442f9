import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from residua.data import DataError, Dataset, Tokenizer
from residua.data.shards import CHECKSUM, FIELDS, Shard, ShardWriter, dtype_for

HASH = "ab" * 32
DOCUMENTS = [[5, 6, 7, 0], [0], [65535, 1, 0]]


def write_shard(path: Path, dtype: str = "<u2") -> Path:
    writer = ShardWriter(path, np.dtype(dtype), HASH)
    for ids in DOCUMENTS:
        writer.add(np.array(ids))
    writer.finish()
    return path


def change_header(path: Path, position: int, value: bytes) -> None:
    """Overwrite header bytes and make the checksum right again."""
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    content[FIELDS.size : FIELDS.size + CHECKSUM.size] = CHECKSUM.pack(zlib.crc32(bytes(content[: FIELDS.size])))
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_shard_returns_tokens_and_document_starts(tmp_path: Path, dtype: str) -> None:
    shard = Shard(write_shard(tmp_path / "a.bin", dtype))
    assert shard.ids.tolist() == [token for ids in DOCUMENTS for token in ids]
    assert shard.starts.tolist() == [0, 4, 5]
    assert (shard.tokens, shard.documents, shard.largest, shard.tokenizer_hash) == (8, 3, 65535, HASH)
    assert isinstance(shard.ids.base, np.memmap)


def test_dtype_is_the_smallest_that_holds_the_vocabulary() -> None:
    assert dtype_for(65536).itemsize == 2
    assert dtype_for(65537).itemsize == 4


def test_unfinished_shard_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.bin", np.dtype("<u2"), HASH)
    writer.add(np.array([1, 2, 3]))
    writer.file.close()
    with pytest.raises(DataError, match="not a Residua shard"):
        Shard(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((lambda content, kept=kept: content[:kept], r"a\.bin is truncated") for kept in (-1, -20, 130, 100, 12)),
        (lambda content: content + b"x", "longer than its header says"),
        (lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:], "checksum"),
    ],
)
def test_damaged_shard_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    path = write_shard(tmp_path / "a.bin")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        Shard(path)


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, b"RESIDUE\0", "not a Residua shard"),
        (8, struct.pack("<I", 99), "format version 99, this Residua reads 1"),
        (12, struct.pack("<I", 3), "claims 8 tokens of 3 bytes"),
        (12, struct.pack("<I", 4), "truncated"),
        (16, struct.pack("<Q", 0), "claims 0 tokens"),
        (16, struct.pack("<Q", 100), "truncated"),
        (24, struct.pack("<Q", 1), "longer than its header says"),
    ],
)
def test_wrong_header_is_refused(tmp_path: Path, position: int, value: bytes, words: str) -> None:
    path = write_shard(tmp_path / "a.bin")
    change_header(path, position, value)
    with pytest.raises(DataError, match=words):
        Shard(path)


@pytest.fixture
def copy(dataset: Dataset, tmp_path: Path) -> Path:
    return shutil.copytree(dataset.path, tmp_path / "copy")


def change_description(folder: Path, **changes: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def one_token_more(folder: Path) -> None:
    splits = json.loads((folder / "dataset.json").read_text())["splits"]
    splits["train"]["tokens"] += 1
    change_description(folder, splits=splits)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda at: change_header(at / "train-00001.bin", 40, bytes(32)), r"train-00001\.bin belongs .*000…, but the"),
        (lambda at: Tokenizer.train(["other text"], 300).save(at / "tokenizer.json"), r"tokenizer\.json belongs to"),
        (lambda at: (at / "train-00000.bin").unlink(), r"train-00000\.bin does not exist: prepare the dataset again"),
        (lambda at: (at / "tokenizer.json").unlink(), r"tokenizer\.json does not exist: prepare the data again"),
        (one_token_more, r"train shards in .* hold"),
        (lambda at: change_description(at, dtype="uint32"), "holds uint16, dataset.json says uint32"),
        (lambda at: change_description(at, vocab_size=50), "outside the vocabulary of 50"),
        (
            lambda at: change_description(at, vocab_size=300),
            "says vocab_size = 300, but the tokenizer next to it has 257 ids",
        ),
        (lambda at: change_description(at, version=7), "has version 7"),
        (lambda at: change_description(at, format="other"), "does not describe a Residua dataset"),
        (lambda at: change_description(at, splits={"train": {}}), r"dataset\.json has no key splits\.train\.tokens"),
        (lambda at: change_description(at, splits=["train"]), "splits is a list of 1 entry, expected an object"),
        (lambda at: (at / "dataset.json").write_text("{"), r"dataset\.json is not valid JSON .*: prepare the data"),
        (lambda at: (at / "dataset.json").unlink(), "is not a prepared dataset"),
        (lambda at: at.rename(at.with_name("moved")), "copy does not exist: name a folder made by residua"),
    ],
)
def test_damaged_dataset_is_refused(copy: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(copy)
    with pytest.raises(DataError, match=words):
        _ = Dataset.open(copy).tokenizer


def test_id_above_the_recorded_largest_is_refused_when_read(copy: Path) -> None:
    """The header keeps the largest id that was written; a file can be damaged afterwards."""
    opened = Dataset.open(copy)
    first = opened.split("train").shards[0].tokens
    path = copy / "train-00001.bin"
    ids = np.memmap(path, np.dtype("<u2"), "r+", 128, (20,))
    ids[5] = 257
    ids.flush()
    split = Dataset.open(copy).split("train")
    split.read(0, first + 5)
    sentence = r"train-00001\.bin holds id 257 at token 5, but the largest id in its header is 256: the file is"
    for read in (lambda: split.read(first - 3, 20), lambda: split.counts(257)):
        with pytest.raises(DataError, match=sentence):
            read()


def test_a_damaged_table_of_documents_is_named(copy: Path) -> None:
    shard = Dataset.open(copy).split("train").shards[0]
    with shard.path.open("r+b") as file:
        file.seek(-8 * (shard.documents - 1), 2)
        file.write((2**63).to_bytes(8, "little"))
    split = Dataset.open(copy).split("train")
    with pytest.raises(DataError, match=r"table of documents at the end of shard .*train-00000\.bin is damaged"):
        split.document_starts(0, split.shards[0].tokens)
