"""A prepared dataset: `dataset.json`, the tokenizer and the shards of each split, all checked on opening."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from residua.data.corpus import TRAIN, VALIDATION
from residua.data.readers import DataError
from residua.data.shards import Shard
from residua.data.tokenizer import SETTINGS, Tokenizer, hash_of
from residua.reading import Count, Shape, check, counted, inside, read_json, read_text, shown

FORMAT = "residua-dataset"
FORMAT_VERSION = 1
DESCRIPTION = "dataset.json"
TOKENIZER = "tokenizer.json"
SOURCES = "validation-sources.json"
"""The source of each validation document; the file exists only if the text names its sources."""
FINGERPRINT_TOKENS = 65_536
"""Number of tokens at each end of a split that enter a dataset's fingerprint."""
AGAIN = "prepare the data again"


class _SplitFacts(Shape):
    tokens: Count
    documents: Count
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    shards: list[str] = Field(min_length=1)


class _Facts(Shape):
    """The keys of dataset.json that are used."""

    tokenizer_hash: str
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, _SplitFacts]


class _Settings(Shape):
    """The key of tokenizer_config.json that is used."""

    eos_token: str


class Sources(Shape):
    """The names of sources, and for each validation document the index of its source; "" means unknown."""

    names: list[str] = Field(min_length=1)
    documents: list[Count] = Field(min_length=1)


READ_TOKENS = 1 << 24
"""Tokens in memory at once when a whole split is read."""
SAMPLED_PLACES = 64
"""Number of places at which a sample of a split is read."""


class Split:
    """One split of a dataset as a single stream of tokens: its shards, end to end.

    Every id is checked on reading not to exceed `largest`, because files can be damaged after opening.
    """

    def __init__(self, name: str, bytes: int, shards: list[Shard], tokenizer_hash: str) -> None:
        self.name = name
        self.bytes = bytes
        self.shards = shards
        self.tokenizer_hash = tokenizer_hash
        self.largest = max(shard.largest for shard in shards)
        self.tokens: int = sum(shard.tokens for shard in shards)
        self.documents: int = sum(shard.documents for shard in shards)
        self._first = np.cumsum([0, *(shard.tokens for shard in shards)])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count` of the stream, int64 [count]."""
        overlap = self._overlap(start, start + count)
        pieces = [shard.read(low, high) for shard, low, high, _ in overlap]
        return np.concatenate(pieces).astype(np.int64)

    def check(self) -> None:
        """Read every id and document table, and refuse damaged ones."""
        for shard in self.shards:
            shard.documents_between(0, shard.tokens)
            for low in range(0, shard.tokens, READ_TOKENS):
                shard.read(low, min(low + READ_TOKENS, shard.tokens))

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the stream at which a document begins."""
        starts = [np.empty(0, np.int64)]
        for shard, low, high, first in self._overlap(start, stop):
            starts.append(shard.documents_between(low, high) + first)
        return np.concatenate(starts)

    def counts(self, vocab_size: int, sample: int | None = None) -> np.ndarray:
        """Count each token, int64 [vocab_size]; with `sample`, among about that many tokens spread over the split."""
        total = np.zeros(vocab_size, np.int64)
        every = chunk = READ_TOKENS
        if sample is not None and sample < self.tokens:
            every, chunk = -(-self.tokens // SAMPLED_PLACES), max(1, sample // SAMPLED_PLACES)
        for start in range(0, self.tokens, every):
            ids = self.read(start, min(chunk, self.tokens - start))
            total += np.bincount(ids, minlength=vocab_size)
        return total

    def _overlap(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        index = int(np.searchsorted(self._first, start, side="right")) - 1
        while index < len(self.shards) and self._first[index] < stop:
            shard, first = self.shards[index], int(self._first[index])
            yield shard, max(0, start - first), min(shard.tokens, stop - first), first
            index += 1


TINY_VALIDATION = 10_000
"""With fewer tokens, the loss varies by a few hundredths of a nat between validation texts."""


@dataclass(frozen=True)
class Dataset:
    """A folder written by `prepare`. `description` is the content of its `dataset.json`."""

    path: Path
    description: dict[str, Any]
    splits: dict[str, Split]

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open and check a dataset; raises `ValueError` if anything is wrong with it."""
        path = Path(path)
        description = read_description(path)
        facts = check(description, _Facts, path / DESCRIPTION, AGAIN)
        tokenizer = inside(path, TOKENIZER)
        settings = inside(path, SETTINGS)  # exists if tokenizer.json does not name the end-of-text token
        stated = read_json(settings, _Settings, AGAIN).eos_token if settings.exists() else None
        stored = hash_of(read_text(tokenizer, AGAIN), tokenizer, stated)
        if stored != facts.tokenizer_hash:
            raise _mismatch(tokenizer, stored, "the dataset", facts.tokenizer_hash)
        splits = {name: _open_split(path, name, about, facts) for name, about in facts.splits.items()}
        return cls(path, description, splits)

    @property
    def vocab_size(self) -> int:
        """Number of ids: the tokenizer's largest id plus one."""
        return int(self.description["vocab_size"])

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 that identifies the tokenizer."""
        return str(self.description["tokenizer_hash"])

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the text as a model sees it, regardless of the folder's location. It covers the tokenizer, the
        counts in dataset.json, and the first and last tokens of each split."""
        digest = hashlib.sha256(self.tokenizer_hash.encode())
        for name, split in sorted(self.splits.items()):
            digest.update(repr((name, split.tokens, split.documents, split.bytes)).encode())
            some = min(FINGERPRINT_TOKENS, split.tokens)
            for start in (0, split.tokens - some):
                digest.update(split.read(start, some).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the dataset was made with."""
        tokenizer = Tokenizer.load(self.path / TOKENIZER)
        if tokenizer.vocab_size != self.vocab_size:
            raise DataError(
                f"{self.path / DESCRIPTION} says vocab_size = {self.vocab_size}, but the tokenizer next to it has "
                f"{tokenizer.vocab_size} ids: {AGAIN}"
            )
        return tokenizer

    def split(self, name: str) -> Split:
        """Return the split with this name, `train` or `validation`."""
        if name not in self.splits:
            advice = f": {AGAIN}, with --holdout above 0 or --validation SOURCE" if name == VALIDATION else ""
            raise DataError(f"the dataset {self.path} has no split {name!r}, only {', '.join(self.splits)}{advice}")
        return self.splits[name]

    @cached_property
    def sources(self) -> Sources | None:
        """The sources of the validation text; None if it names none or an older version prepared it."""
        file = inside(self.path, SOURCES)
        if not file.exists():
            return None
        sources = read_json(file, Sources, AGAIN)
        documents = self.split(VALIDATION).documents
        if len(sources.documents) != documents or max(sources.documents) >= len(sources.names):
            raise DataError(f"{file} does not match the {counted(documents, 'validation document')}: {AGAIN}")
        return sources

    def tiny_validation(self) -> str | None:
        """A notice if the validation split is so small that its losses are uncertain, else None."""
        split = self.splits.get("validation")
        if split is None or split.tokens >= TINY_VALIDATION:
            return None
        return f"validation is tiny ({counted(split.tokens, 'token')}), so losses on it are uncertain"

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text per token, counting end-of-text tokens: bits per byte = nats / (ln 2 · this)."""
        chosen = self.split(split)
        return chosen.bytes / chosen.tokens

    def bytes_of(self, ids: np.ndarray, split: str) -> float:
        """UTF-8 bytes of the tokens' text: exact for byte-level tokenizers, else estimated from the split's mean."""
        lengths = self.tokenizer.byte_lengths
        return float(lengths[ids].sum()) if lengths is not None else len(ids) * self.bytes_per_token(split)

    def require_tokenizer(self, tokenizer_hash: str, owner: str) -> None:
        """Raise `DataError` unless the dataset uses the tokenizer of `owner`, such as a checkpoint."""
        if self.tokenizer_hash != tokenizer_hash:
            raise _mismatch(self.path, self.tokenizer_hash, owner, tokenizer_hash)

    def require_known(self, vocab_size: int, advice: str) -> None:
        """Raise `DataError` if the dataset contains tokens outside a model's `vocab_size` ids.

        The tokenizer may have added tokens above these ids, as long as no text uses them; `advice` ends the error.
        """
        if self.vocab_size > vocab_size:
            largest = max(split.largest for split in self.splits.values())
            self.tokenizer.require_known([largest], vocab_size, f"{self.path} contains", advice)
            self.tokenizer.require_model(vocab_size, self.path)


def unigram_entropy(dataset: Dataset, *, limit_tokens: int | None = None, sample: int | None = None) -> float:
    """Nats per token of a model that only knows the frequencies of training tokens (all, or about `sample` of them).

    H = −Σ_v q(v) ln p(v), with p(v) = (n(v) + 1) / (N + V) and q the frequencies in the validation text, or in its
    first `limit_tokens`. A model with a validation loss well below this has learned something about order.
    """
    fitted = dataset.split(TRAIN).counts(dataset.vocab_size, sample) + 1
    split = dataset.split(VALIDATION)
    if limit_tokens is None or limit_tokens >= split.tokens:
        evaluated = split.counts(dataset.vocab_size)
    else:
        evaluated = np.bincount(split.read(0, limit_tokens), minlength=dataset.vocab_size)
    log_p = np.log(fitted) - math.log(fitted.sum())
    return float(-(evaluated * log_p).sum() / evaluated.sum())


def read_description(path: Path) -> dict[str, Any]:
    """Read `dataset.json` in a folder and check its format and version."""
    file = path / DESCRIPTION
    if not path.exists():
        raise DataError(f"{path} does not exist: name a folder made by residua data prepare")
    if not file.exists():
        raise DataError(
            f"{path} is not a prepared dataset (it has no {DESCRIPTION}): make one with residua data prepare"
        )
    description = read_json(inside(path, DESCRIPTION), dict[str, Any], AGAIN)
    if description.get("format") != FORMAT:
        raise DataError(f"{file} does not describe a Residua dataset: name a folder made by residua data prepare")
    if description.get("version") != FORMAT_VERSION:
        version = shown(description.get("version"))
        raise DataError(f"{file} has version {version}, this Residua reads {FORMAT_VERSION}: {AGAIN}")
    return description


def _open_split(path: Path, name: str, about: _SplitFacts, facts: _Facts) -> Split:
    shards = [Shard(inside(path, file)) for file in about.shards]
    for shard in shards:
        if shard.dtype.name != facts.dtype:
            raise DataError(f"shard {shard.path} holds {shard.dtype.name}, {DESCRIPTION} says {facts.dtype}: {AGAIN}")
        if shard.tokenizer_hash != facts.tokenizer_hash:
            raise _mismatch(shard.path, shard.tokenizer_hash, "the dataset", facts.tokenizer_hash)
        if shard.largest >= facts.vocab_size:
            outside = f"outside the vocabulary of {facts.vocab_size}"
            raise DataError(f"shard {shard.path} holds token {shard.largest}, {outside}: {AGAIN}")
    split = Split(name, about.bytes, shards, facts.tokenizer_hash)
    if (split.tokens, split.documents) != (about.tokens, about.documents):
        raise DataError(
            f"the {name} shards in {path} hold {counted(split.tokens, 'token')} in "
            f"{counted(split.documents, 'document')}, {DESCRIPTION} says {about.tokens} in {about.documents}: {AGAIN}"
        )
    return split


def _mismatch(path: Path, actual: str, owner: str, expected: str) -> DataError:
    return DataError(
        f"{path} belongs to the tokenizer {actual[:12]}…, but {owner} uses {expected[:12]}…: "
        "prepare the data with the same tokenizer"
    )
