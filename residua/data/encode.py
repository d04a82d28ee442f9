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


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids and the end-of-text token, in order.

    Threads suffice, because the library releases the GIL while it encodes. Its own thread pool is switched off, so that
    `workers` is the number of threads. Few chunks are in flight, so memory stays bounded.
    """
    dtype = dtype_for(tokenizer.vocab_size)

    def encode(chunk: list[Document]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch([document.text for document in chunk])
        return [np.array([*ids, tokenizer.end_of_text], dtype=dtype) for ids in encoded]

    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    with _environment("TOKENIZERS_PARALLELISM", "false"), ThreadPoolExecutor(workers) as pool:
        try:
            for chunk in _chunks(documents):
                pending.append((chunk, pool.submit(encode, chunk)))
                if len(pending) > 2 * workers:
                    done, future = pending.popleft()
                    yield from zip(done, future.result(), strict=True)
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
