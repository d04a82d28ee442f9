"""Damages files at random: bytes for any format, values for the formats that have a structure."""

import json
import random
import struct
import tomllib
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

RAW = "\N{SNOWMAN}raw\N{SNOWMAN}"
"""Stands for text that no writer of the format would write; it is put in after writing."""

Mutation = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, chance: random.Random) -> bytes:
    """Change a few bytes."""
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    """Keep the beginning, as a full disk or a broken copy does; often nothing at all."""
    return content[: chance.choice((0, chance.randrange(len(content) + 1), max(0, len(content) - 1)))]


def repeat(content: bytes, chance: random.Random) -> bytes:
    """Some bytes twice."""
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((1, 16, len(content))))
    return content[:stop] + content[start:]


def blank(content: bytes, chance: random.Random) -> bytes:
    """A stretch of zeros, as file systems leave after a power cut."""
    start = chance.randrange(len(content) + 1)
    length = min(len(content) - start, chance.choice((8, 512, len(content))))
    return content[:start] + bytes(length) + content[start + length :]


def foreign(content: bytes, chance: random.Random) -> bytes:
    """A completely different file."""
    return chance.choice(
        (
            b"\x89PNG\r\n\x1a\n" + bytes(64),
            b"\x80\x04\x95\x10\x00\x00\x00",  # a pickle
            b"PK\x03\x04" + bytes(40),
            b"\xef\xbb\xbf" + content,
            b"\xff\xfe" + content[:100].decode("latin-1").encode("utf-16-le"),
            b"[" * 100_000,
            b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            b"<html><body>404</body></html>",
            b"null",
            b"[]",
            b"{}",
            b'"text"',
            b"3",
            b"\n\n\n",
        )
    )


BYTES: tuple[Mutation, ...] = (flip, cut, repeat, blank, foreign)
VALUES = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, "", "text", "0", "\0", "../../x",
    "/etc/hostname", "é\N{SNOWMAN}", "a" * 3000, [], [None], [[]], ["x", 3], {}, {"a": 1}, {"": None},
)  # fmt: skip
JSON_TEXTS = ("NaN", "-Infinity", "1e999", "1" * 400, "[" * 300 + "]" * 300, "1" * 5000, '{"a":1,"a":2}')
TOML_TEXTS = ("nan", "-inf", "1e999", "1" * 400, "[" * 300 + "]" * 300, "1979-05-27", "0x10", "{a = 1}", "07:32:00")


def in_json(content: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in the tree."""
    raw, tree = swap(json.loads(content), chance, JSON_TEXTS)
    return json.dumps(tree, indent=chance.choice((None, 1))).replace(json.dumps(RAW), raw).encode()


def in_lines(content: bytes, chance: random.Random) -> bytes:
    """One line of JSON changed, duplicated, removed or moved."""
    lines = content.split(b"\n")[:-1]
    number = chance.randrange(len(lines))
    match chance.randrange(6):
        case 0:
            lines.pop(number)
        case 1:
            lines.insert(number, foreign(lines[number], chance))
        case 2:
            lines.insert(chance.randrange(len(lines)), lines[number])
        case 3:
            lines[number] = chance.choice(BYTES)(lines[number], chance)
        case _:
            lines[number] = in_json(lines[number], chance)
    return b"\n".join([*lines, b""])


def in_toml(content: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in the tables."""
    for _ in range(100):
        raw, tree = swap(tomllib.loads(content.decode()), chance, TOML_TEXTS)
        try:
            return tomli_w.dumps(tree).replace(f'"{RAW}"', raw).encode()
        except (AttributeError, TypeError, ValueError):  # TOML has no null, and no other root than a table
            continue
    raise AssertionError("nothing in this file can be changed")


def in_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Another header, another header length, or other numbers."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    match chance.randrange(5):
        case 0:
            wrong = chance.choice((0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1))
            return wrong.to_bytes(8, "little") + header + data
        case 1:
            value = struct.pack("<f", chance.choice((float("nan"), float("inf"), 1e38)))
            place = chance.randrange(max(1, len(data) // 4)) * 4
            data = data[:place] + value + data[place + 4 :]
        case 2:
            header = chance.choice(BYTES)(header, chance)
        case _:
            header = in_json(header, chance)
    return len(header).to_bytes(8, "little") + header + data


def in_shard(content: bytes, chance: random.Random) -> bytes:
    """Another number in the header, its checksum corrected, or other tokens."""
    from residua.data.shards import CHECKSUM, FIELDS, HEADER_BYTES

    if chance.random() < 0.5:
        place = chance.randrange(HEADER_BYTES, len(content) - 8)
        return content[:place] + chance.choice((b"\xff\xff", b"\xff" * 8, b"\0" * 8)) + content[place + 2 :]
    fields = list(FIELDS.unpack_from(content))
    number = chance.randrange(1, len(fields) - 1)
    fields[number] = chance.choice((0, 1, 2, 4, 2**31, 2**32 - 1, fields[number] + 1, max(0, fields[number] - 1)))
    packed = FIELDS.pack(*fields)
    return packed + CHECKSUM.pack(zlib.crc32(packed)) + content[FIELDS.size + CHECKSUM.size :]


STRUCTURED: dict[str, Mutation] = {
    ".json": in_json,
    ".jsonl": in_lines,
    ".toml": in_toml,
    ".safetensors": in_safetensors,
    ".bin": in_shard,
}


def mutate(path: Path, chance: random.Random) -> str:
    """Damage a file in place; returns a description."""
    if chance.random() < 0.04:
        path.unlink()
        if chance.random() < 0.5:
            path.mkdir()
            return "a folder in its place"
        return "missing"
    content = path.read_bytes()
    structured = STRUCTURED.get(path.suffix)
    for _ in range(20):
        mutation = structured if structured and chance.random() < 0.7 else chance.choice(BYTES)
        changed = mutation(content, chance)
        if changed != content:
            path.write_bytes(changed)
            return mutation.__name__
    raise AssertionError(f"{path} could not be changed")


def swap(tree: Any, chance: random.Random, texts: tuple[str, ...]) -> tuple[str, Any]:
    """Change the tree at a random place; returns the text that RAW stands for, and the tree."""
    raw = chance.choice(texts)
    places = list(_places(tree))
    if not places or chance.random() < 0.03:
        return raw, chance.choice((*VALUES, RAW))
    parent, key = chance.choice(places)
    value = parent[key]
    match chance.randrange(10):
        case 0 | 1:
            del parent[key]
        case 2:
            parent[key] = RAW
        case 3:
            other, there = chance.choice(places)
            parent[key] = deepcopy(other[there])
        case 4 if isinstance(parent, dict):
            parent[chance.choice(("", "kind", "../x", key + "x"))] = parent.pop(key)
        case 5 if isinstance(parent, list):
            parent += parent * chance.choice((1, 50))
        case 6 if isinstance(value, int | float):
            parent[key] = chance.choice((value + 1, -value, value * 1000, float(value), str(value)))
        case 6 if isinstance(value, str):
            parent[key] = chance.choice((value + "x", value[:-1], value * 50, [value], f"../{value}", value.upper()))
        case _:
            parent[key] = chance.choice(VALUES)
    return raw, tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every key of every table and every index of every list."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
