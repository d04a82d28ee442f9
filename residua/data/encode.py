"""Documents to token ids, in threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from residua.data.corpus import Document
from residua.data.shards import dtype_for
from residua.data.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 18
IN_FLIGHT_BYTES = 1 << 22
"""Text that is encoded at once, if one document alone is not longer; at least a chunk for each worker."""


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids and the end-of-text token, in order.

    Threads suffice, because the library releases the GIL while it encodes. Its own thread pool is switched off, so that
    `workers` is the number of threads. Few chunks are in flight, and a long document alone, so memory stays bounded.
    """
    dtype = dtype_for(tokenizer.vocab_size)

    def encode(chunk: list[Document]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch([document.text for document in chunk])
        return [np.array([*ids, tokenizer.end_of_text], dtype=dtype) for ids in encoded]

    most = max(IN_FLIGHT_BYTES, workers * CHUNK_BYTES)
    size = 0
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    quiet = _environment("RUST_BACKTRACE", "0")  # of a panic in the library, which becomes one sentence
    with _environment("TOKENIZERS_PARALLELISM", "false"), quiet, ThreadPoolExecutor(workers) as pool:
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


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
