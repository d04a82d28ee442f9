"""Turn a corpus into a dataset folder: tokenize in threads, write shards, publish the folder with one rename."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from residua.data.corpus import TRAIN, VALIDATION, Corpus, Document
from residua.data.dataset import DESCRIPTION, FORMAT, FORMAT_VERSION, SOURCES, TOKENIZER, Dataset, read_description
from residua.data.overlap import (
    BYTES,
    DROP,
    KEEP,
    REFUSE,
    RULES,
    Fingerprints,
    find_overlap,
    refuse_overlap,
    trained_copies,
)
from residua.data.problems import Problems
from residua.data.readers import DataError
from residua.data.shards import Shard, ShardWriter, dtype_for
from residua.data.tokenizer import Tokenizer
from residua.files import atomic_folder
from residua.machine import available_cores, environment_variable

SHARD_TOKENS = 100_000_000
# More text hardly changes a BPE vocabulary, but costs memory and time.
TOKENIZER_SAMPLE_BYTES = 64_000_000
MAX_SOURCES = 64
"""Most sources of a validation text; with more, the field must hold something else, such as a URL per document."""
BPE = "bpe:"
CHUNK_BYTES = 1 << 18
MAX_IN_FLIGHT_BYTES = 1 << 22
"""Text to encode at once, unless one document is longer; at least one chunk per worker."""


def prepare(
    corpus: Corpus,
    out: str | Path,
    tokenizer: str | Tokenizer = "bpe:8192",
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overlap: str = KEEP,
    progress: bool = False,
) -> Dataset:
    """Tokenize `corpus` into the folder `out` and open it.

    `tokenizer` is a tokenizer, the path of one, `bytes`, or `bpe:N` (trained on the corpus itself). The result does not
    depend on `workers`. `overlap` says how to treat training documents that are also in the validation text: `keep`,
    `drop` or `refuse` (the command line drops them); dataset.json counts them. If the folder already holds this
    dataset, it is opened; any other content is refused.
    """
    out = Path(out)
    for name, value in {"workers": workers, "shard_tokens": shard_tokens}.items():
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}: it must be at least 1")
    if overlap not in RULES:
        raise DataError(f"overlap is {overlap!r}: choose {', '.join(RULES[:-1])} or {RULES[-1]}")
    ready = resolve_tokenizer(tokenizer)
    recipe = {
        "sources": list(corpus.names),
        "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_identity(ready),
        "shard_tokens": shard_tokens,
    }
    if (existing := _same_dataset(out, recipe, overlap)) is not None:
        return existing
    try:
        with atomic_folder(out, unique=True) as folder, progress_bar(progress) as bar:
            chosen = train_tokenizer(corpus, size_of(ready), bar) if isinstance(ready, str) else ready
            problems = Problems(corpus.skip_bad)
            splits = _write_shards(corpus, chosen, folder, workers or available_cores(), shard_tokens, problems, bar)
            _check_splits(corpus, splits)
            findings = _treat_overlap(splits, overlap)
            chosen.save(folder / TOKENIZER)
            splits[VALIDATION].write_sources(folder / SOURCES)
            findings |= {"skipped": problems.summary()} | hub_datasets(corpus)
            _describe(folder, chosen, splits, recipe, findings)
    except OSError as error:
        # Another process was faster: treat its dataset like one that existed before.
        if isinstance(error, FileExistsError) and (faster := _same_dataset(out, recipe, overlap)) is not None:
            return faster
        raise  # readers raise DataError, so this error is from the output disk
    return Dataset.open(out)


def resolve_tokenizer(tokenizer: str | Tokenizer) -> str | Tokenizer:
    """Find the tokenizer for a name or path; `bpe:N` is returned unchanged, since it must be trained first."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer.startswith(BPE):
        size_of(tokenizer)
        return tokenizer
    return Tokenizer.bytes() if tokenizer == "bytes" else Tokenizer.load(tokenizer)


def tokenizer_identity(resolved: str | Tokenizer) -> str:
    """The identity of a resolved tokenizer: its hash, or `bpe:N` if it is not trained yet."""
    return resolved if isinstance(resolved, str) else resolved.hash


def train_tokenizer(corpus: Corpus, vocab_size: int, bar: Progress) -> Tokenizer:
    """Train a byte-level BPE on up to 64 MB of the corpus's training text, with progress shown on `bar`."""
    task = bar.add_task("training the tokenizer", total=None, note="")
    trained = Tokenizer.train(corpus.sample(TOKENIZER_SAMPLE_BYTES), vocab_size)
    bar.update(task, total=1, completed=1, note=f"{trained.vocab_size:,} entries")
    return trained


def size_of(spec: str) -> int:
    """N of `bpe:N`."""
    digits = spec.removeprefix(BPE)
    if not digits.isdecimal():
        raise DataError(f"tokenizer {spec!r}: give the vocabulary size after the colon, as in bpe:8192")
    return int(digits)


class SplitWriter:
    """Writes the shards of one split; starts a new one when the last is full."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, tokenizer_hash: str, shard_tokens: int) -> None:
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype, self.tokenizer_hash = dtype, tokenizer_hash
        self.shard: ShardWriter | None = None
        self.files: list[str] = []
        self.tokens = self.documents = self.bytes = 0
        self.fingerprints = Fingerprints(folder)
        self.sources: list[int] = []
        self.source_names: dict[str, int] = {}

    def add_source(self, name: str) -> None:
        """Note the source of a document. With too many different names, the table is dropped."""
        if len(self.source_names) <= MAX_SOURCES:
            self.sources.append(self.source_names.setdefault(name, len(self.source_names)))

    def write_sources(self, path: Path) -> None:
        """Write the table of sources, if the documents named any."""
        if any(self.source_names) and len(self.source_names) <= MAX_SOURCES:
            path.write_text(json.dumps({"names": list(self.source_names), "documents": self.sources}) + "\n", "utf-8")

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document."""
        if self.shard is None:
            self.files.append(f"{self.name}-{len(self.files):05d}.bin")
            self.shard = ShardWriter(self.folder / self.files[-1], self.dtype, self.tokenizer_hash)
        self.shard.add(ids)
        self.tokens += len(ids)
        self.documents += 1
        self.bytes += text_bytes
        if self.shard.tokens >= self.shard_tokens:
            self.finish()

    def without(self, validation: SplitWriter) -> SplitWriter:
        """Return this split without the documents in `validation`, as if they had never been read."""
        before = self.folder / "with-overlap"
        before.mkdir()
        written = [(self.folder / name).rename(before / name) for name in self.files]
        ids = (
            shard.ids[start:end]
            for shard in map(Shard, written)
            for start, end in pairwise(chain(map(int, shard.starts), [shard.tokens]))
        )
        fewer = SplitWriter(self.folder, self.name, self.dtype, self.tokenizer_hash, self.shard_tokens)
        for documents, copied in trained_copies(self.fingerprints, validation.fingerprints):
            for size, drop in zip(documents[:, BYTES].tolist(), copied.tolist(), strict=True):
                document = next(ids)
                if not drop:
                    fewer.add(document, size)
        fewer.finish()
        shutil.rmtree(before)
        return fewer

    def finish(self) -> None:
        """Complete the open shard, if any."""
        if self.shard is not None:
            self.shard.finish()
            self.shard = None


def _write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    workers: int,
    shard_tokens: int,
    problems: Problems,
    bar: Progress,
) -> dict[str, SplitWriter]:
    dtype, name = dtype_for(tokenizer.vocab_size), tokenizer.hash
    splits = {split: SplitWriter(folder, split, dtype, name, shard_tokens) for split in (TRAIN, VALIDATION)}
    task = bar.add_task("tokenising", total=corpus.size, note="")
    try:
        for document, ids in encode_documents(corpus.documents(problems), tokenizer, workers):
            splits[document.split].add(ids, document.bytes)
            splits[document.split].fingerprints.add(document.text, document.bytes)
            if document.split == VALIDATION:
                splits[VALIDATION].add_source(document.source)
            written = sum(split.tokens for split in splits.values())
            bar.update(task, completed=document.position, note=f"{written:,} tokens")
        for split in splits.values():
            split.finish()
    finally:
        for split in splits.values():
            if split.shard is not None:  # unfinished
                split.shard.close()
    bar.update(task, completed=corpus.size)
    return splits


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its ids and the end-of-text token, in order.

    Threads suffice, because the library releases the GIL while it encodes. We disable its own thread pool, so that
    `workers` is the number of threads. Memory stays bounded: few chunks are in flight, and long documents are encoded
    alone.
    """
    dtype = dtype_for(tokenizer.vocab_size)

    def encode(chunk: list[Document]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch([document.text for document in chunk])
        return [np.array([*ids, tokenizer.end_of_text], dtype=dtype) for ids in encoded]

    most = max(MAX_IN_FLIGHT_BYTES, workers * CHUNK_BYTES)
    size = 0
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    quiet = environment_variable("RUST_BACKTRACE", "0")  # a panic in the library becomes one sentence
    single = environment_variable("TOKENIZERS_PARALLELISM", "false")
    with single, quiet, ThreadPoolExecutor(workers) as pool:
        try:
            for chunk in _chunks(documents):
                size += _size(chunk)
                while pending and (len(pending) > 2 * workers or size > most):
                    done, future = pending.popleft()
                    yield from zip(done, future.result(), strict=True)
                    size -= _size(done)
                pending.append((chunk, pool.submit(encode, chunk)))
            while pending:
                done, future = pending.popleft()
                yield from zip(done, future.result(), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(chunk: list[Document]) -> int:
    return sum(document.bytes for document in chunk)


def _check_splits(corpus: Corpus, splits: dict[str, SplitWriter]) -> None:
    source = ", ".join(corpus.names[:3]) + (", …" if len(corpus.names) > 3 else "")
    if not splits[TRAIN].documents:
        if splits[VALIDATION].documents == 1 and corpus.holdout:
            raise DataError(
                f"{source} has a single document, so none can be held out: give --validation FILE, or --holdout 0 "
                "for no validation split"
            )
        raise DataError(f"there is no text to train on in {source}")
    wanted = corpus.holdout > 0 or any(part.split == VALIDATION for part in corpus.parts)
    if wanted and not splits[VALIDATION].documents:
        raise DataError("there is no text in the source given for validation")


def _treat_overlap(splits: dict[str, SplitWriter], rule: str) -> dict[str, Any]:
    """Apply the rule for documents in both splits; return their dataset.json entry, empty without validation."""
    train, validation = splits[TRAIN], splits[VALIDATION]
    if not validation.documents:
        return {}
    overlap = find_overlap(train.fingerprints, validation.fingerprints)
    if rule == REFUSE:
        refuse_overlap(overlap, validation.documents)
    if rule == DROP and overlap.copies:
        if overlap.copies == train.documents:
            raise DataError(
                "every training document is also in the validation text: name other text, or keep them with "
                "--overlap keep"
            )
        splits[TRAIN] = train.without(validation)
    return {"overlap": {"rule": rule, **overlap._asdict()}}


def hub_datasets(corpus: Corpus) -> dict[str, Any]:
    """The Hugging Face datasets in a corpus, by name; model cards list them."""
    names = {part.name.partition(":")[0] for part in corpus.parts if part.size is None}
    return {"hub_datasets": sorted(names)} if names else {}


def _describe(
    folder: Path,
    tokenizer: Tokenizer,
    splits: dict[str, SplitWriter],
    recipe: dict[str, Any],
    findings: dict[str, Any],
) -> None:
    description = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": dtype_for(tokenizer.vocab_size).name,
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "bytes": split.bytes, "shards": split.files}
            for name, split in splits.items()
            if split.documents
        },
        "recipe": recipe,
        **findings,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _same_dataset(out: Path, recipe: dict[str, Any], rule: str) -> Dataset | None:
    """Open the dataset in `out` if it was made by the same recipe; None if there is nothing yet.

    If the splits overlapped, the rule for overlap must be the same too.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if out.is_dir() and (out / DESCRIPTION).exists():
        description = read_description(out)
        overlap = description.get("overlap", {})
        if description.get("recipe") == recipe and (not overlap.get("copies") or overlap.get("rule") == rule):
            return Dataset.open(out)
    raise DataError(
        f"{out} already has a dataset or other files from different sources or settings: name another --out, "
        "or move it elsewhere"
    )


def progress_bar(show: bool) -> Progress:
    """The progress bar of this package's long jobs, on stderr."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
