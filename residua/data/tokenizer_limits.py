"""Limits on a tokenizer's memory: people share tokenizers, and a small file can demand any amount."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tokenizers

from residua.data.readers import DOCUMENT_CHARACTERS, MAX_DOCUMENT_BYTES, DataError, cut
from residua.reading import reason

T = TypeVar("T")

MAX_IDS = 1 << 24
"""The largest vocabulary; published ones have at most a million entries."""
MAX_GROWTH = 256
"""The largest factor by which a tokenizer's replacements may lengthen a text."""
MAX_TRAINED_BYTES = 7_000_000
"""Bytes of different words to train a BPE on: the trainer takes up to 110 times this memory."""
WORD_BYTES = 4
"""Bytes that each word costs the trainer, in addition to its letters."""
_SLICE_CHARACTERS = 256
_WORDS = re.compile(r"\w+|[^\w\s]+")
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_CHANGE = "use another tokenizer"


def check_size(backend: tokenizers.Tokenizer, where: str) -> int:
    """Return the largest id plus one; refuse a vocabulary that is too large for our tables."""
    token, largest = max(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    if largest >= MAX_IDS:
        named = f"{where} gives the token {token[:40]!r} the id {largest}"
        raise DataError(f"{named}, and ids must be below {MAX_IDS:,}: {_CHANGE}")
    return int(largest) + 1


def growth_of(backend: tokenizers.Tokenizer, where: str) -> float:
    """Return the factor by which the normalizer can lengthen a text; refuse parts that exceed `MAX_GROWTH`."""
    growths = {name: _growth(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
    repeats = _growth(backend.post_processor) > 1
    if worst := "post_processor" if repeats else next((n for n, g in growths.items() if g > MAX_GROWTH), None):
        raise DataError(f"the {worst} of {where} can make a text many times longer: {_CHANGE}")
    return growths["normalizer"]


def _growth(part: Any) -> float:
    return 1.0 if part is None else _factor(json.loads(part.__getstate__()))


def _factor(state: dict[str, Any]) -> float:
    inner = next((state[name] for name in _LISTS if name in state), None)
    if inner is not None:
        product, bytes_to_letters = 1.0, 0
        for part in inner:
            product = min(product * _factor(part), 1e9)
            bytes_to_letters += part.get("type") == "ByteLevel"
        return product * 2.0 ** min(max(0, bytes_to_letters - 1), 30)  # each turns a non-ASCII letter into two
    kind = state.get("type")
    if kind == "Replace":
        content = len(state["content"])
        literal = state["pattern"].get("String")
        # a regular expression may match the empty string at every position
        return max(1.0, content / max(1, len(literal)) if literal is not None else 1.0 + content)
    if kind == "Precompiled":
        return float(_longest_replacement(base64.b64decode(state["precompiled_charsmap"] or "")))
    if kind == "TemplateProcessing":
        return max(1.0, sum("Sequence" in piece for piece in state["single"]))
    return 1.0


def _longest_replacement(table: bytes) -> int:
    """Bytes of the longest entry in SentencePiece's table: the length of a trie, the trie, zero-terminated texts."""
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=1) or 1


def check_growth(backend: tokenizers.Tokenizer, growth: float, texts: Sequence[str], where: str) -> None:
    """Refuse texts that a normalizer would lengthen too much to encode."""
    most, size = 2 * MAX_DOCUMENT_BYTES, sum(map(len, texts))
    if growth * size <= most:
        return
    normalize, total = backend.normalizer.normalize_str, 0
    for text in texts:
        for low in range(0, len(text), _SLICE_CHARACTERS):
            total += len(normalize(text[low : low + _SLICE_CHARACTERS]))
            if total > most:
                raise DataError(f"the normalizer of {where} can make a text far longer: {_CHANGE}")


def without_panic(encode: Callable[[], T], where: str) -> T:
    """Call a function of the library; turn a panic, as at a regular expression's limit, into a one-sentence error."""
    try:
        return encode()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{where} cannot encode this text ({reason(error)}): {_CHANGE}") from None


def trainable(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts to train a BPE on, in pieces with the same words, up to `MAX_TRAINED_BYTES` of different words."""
    words: set[str] = set()
    size = 0
    for text in texts:
        for piece in _between_words(text):
            yield piece
            added = set(_WORDS.findall(piece)) - words
            words |= added
            size += sum(len(word.encode()) + WORD_BYTES for word in added)
            if size > MAX_TRAINED_BYTES:
                return


def _between_words(text: str) -> Iterator[str]:
    """Split a long text before single spaces; no word of GPT-2's rule spans such a place."""
    if len(text) <= 2 * DOCUMENT_CHARACTERS:
        yield text
        return
    low = 0
    for border in re.finditer(r"\S(?= \S)", text):
        if border.end() - low >= DOCUMENT_CHARACTERS:
            yield from cut(text[low : border.end()])
            low = border.end()
    yield from cut(text[low:])
