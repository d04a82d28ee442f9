"""Batches of token windows: shuffled and endless for training, in fixed order for validation.

The order of windows depends only on seed, epoch and window length, not on the number of ranks or the batch size. No
list of windows is stored: the shuffle is a keyed bijection that computes any item of the order directly, so resuming
needs two integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from residua.data.dataset import Split
from residua.data.readers import DataError
from residua.reading import counted

if TYPE_CHECKING:
    import torch

IGNORED = -100
FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Batch:
    """`tokens`, `targets` [B, T] int64; `segments` [B, T] int64 or None: the document of each token.

    `targets[b, t]` is the token after `tokens[b, t]`. Segment ids start at 0 in each row and increase where a document
    begins. With segments, the target at an end-of-text token is -100, so that the model need not predict the first word
    of an unrelated document. The end-of-text token itself is predicted.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        segments = None if self.segments is None else self.segments.to(device, non_blocking=True)
        return Batch(self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), segments)


class Loader:
    """Endless training batches of one rank.

    All ranks follow one global order of windows (see `Order`). Each batch takes the next `batch · world` windows, of
    which rank r gets those at r, r + world, …. So a step has the same windows however they are divided among ranks,
    batches and accumulation steps. `state_dict` is a position in the global order, so rank 0's serves all ranks, even
    after a change of `batch` or `world`.

    With `limit`, only that many tokens from the beginning of the split are read. A thread prepares `prefetch` batches
    ahead (0: no thread); it starts at the first batch and ends at `close`.
    """

    def __init__(
        self,
        split: Split,
        sequence: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        segments: bool = False,
        prefetch: int = 2,
        limit: int | None = None,
    ) -> None:
        _check_size(split, sequence, batch)
        tokens = split.tokens if limit is None else min(limit, split.tokens)
        if tokens <= sequence:
            raise DataError(f"data.limit is {limit}: it must be more than the {sequence} tokens of a sequence")
        if not 0 <= rank < world:
            raise DataError(f"rank is {rank} of {world}: it must be from 0 to the number of ranks minus 1")
        self.split, self.sequence, self.seed, self.prefetch = split, sequence, seed, prefetch
        self._source = _Source(split, Order(tokens, sequence, seed), batch, rank, world, segments)
        self._cursor = Cursor(0, 0)
        self._prefetcher: _Prefetcher | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.prefetch < 1:
            batch, self._cursor = self._source.make(self._cursor)
            return batch
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._source, self._cursor, self.prefetch)
        try:
            batch, self._cursor = self._prefetcher.next()
        except BaseException:
            self.close()
            raise
        return batch

    @property
    def epoch(self) -> float:
        """Passes over the split so far, including the fraction of the current one."""
        return self._cursor.epoch + self._cursor.position / self._source.order.windows(self._cursor.epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch returned, as plain JSON; prefetched batches do not count."""
        return {**self._identity(), "epoch": self._cursor.epoch, "position": self._cursor.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position saved by `state_dict`: the next batch is the one that would have followed."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise DataError(f"the saved data position has {name} = {state.get(name)}, this run has {here}")
        cursor = Cursor(int(state["epoch"]), int(state["position"]))
        if not 0 <= cursor.position < self._source.order.windows(cursor.epoch):
            raise DataError(f"the saved data position {cursor.position} is outside epoch {cursor.epoch}")
        self.close()
        self._cursor = cursor

    def close(self) -> None:
        """End the prefetch thread; the next batch starts a new thread at the right position."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None

    def __del__(self) -> None:
        if getattr(self, "_prefetcher", None) is not None:
            self.close()

    def _identity(self) -> dict[str, Any]:
        """The settings that a position in the order depends on."""
        tokens, tokenizer = self._source.order.tokens, self.split.tokenizer_hash
        return {"seed": self.seed, "sequence": self.sequence, "tokens": tokens, "tokenizer_hash": tokenizer}


@dataclass(frozen=True)
class _Source:
    """Builds the batch at a cursor."""

    split: Split
    order: Order
    batch: int
    rank: int
    world: int
    segments: bool

    def make(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        starts, after = self.order.take(cursor, self.batch * self.world)
        return _windows(self.split, starts[self.rank :: self.world], self.order.sequence, self.segments), after


class _Prefetcher:
    """A thread that fills a short queue of batches. It holds no reference to the loader."""

    def __init__(self, source: _Source, cursor: Cursor, depth: int) -> None:
        self.queue: Queue[tuple[Batch, Cursor] | BaseException] = Queue(depth)
        self.stopped = Event()
        arguments = (source, cursor, self.queue, self.stopped)
        self.thread = Thread(target=_fill, args=arguments, name="residua-loader", daemon=True)
        self.thread.start()

    def next(self) -> tuple[Batch, Cursor]:
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        self.stopped.set()
        while self.thread.is_alive():
            try:
                self.queue.get_nowait()  # the thread may be waiting for room in a full queue
            except Empty:
                self.thread.join(timeout=0.01)


def _fill(source: _Source, cursor: Cursor, queue: Queue[Any], stopped: Event) -> None:
    while not stopped.is_set():
        try:
            item = source.make(cursor)
        except BaseException as error:  # raised in the thread that asks for the batch
            queue.put(error)
            return
        queue.put(item)
        cursor = item[1]


def validation_batches(
    split: Split,
    sequence: int,
    batch: int,
    limit_tokens: int | None = None,
    segments: bool = False,
) -> Iterator[Batch]:
    """Yield the windows of a split in order from its first token, at most `limit_tokens`; they are always the same.

    They do not depend on `batch`; the last batch may be smaller.
    """
    _check_size(split, sequence, batch)
    windows = validated_tokens(split.tokens, sequence, limit_tokens) // sequence
    for first in range(0, windows, batch):
        starts = np.arange(first, min(first + batch, windows)) * sequence
        yield _windows(split, starts, sequence, segments)


def validated_tokens(tokens: int, sequence: int, limit_tokens: int | None = None) -> int:
    """Tokens in the whole windows of a split of `tokens`: at most `limit_tokens`, but at least one window."""
    windows = (tokens - 1) // sequence
    return (windows if limit_tokens is None else min(windows, max(1, limit_tokens // sequence))) * sequence


def whole_text(split: Split, sequence: int, batch: int, segments: bool = False) -> Iterator[Batch]:
    """Yield all windows of a split in order from its first token, then the remainder as a shorter one."""
    windows, rest = divmod(split.tokens - 1, sequence)
    if split.tokens < 2:
        raise DataError(f"the {split.name} split holds {counted(split.tokens, 'token')}, but a loss needs at least two")
    if windows:
        yield from validation_batches(split, sequence, batch, segments=segments)
    if rest:
        yield _windows(split, np.array([windows * sequence]), rest, segments)


def _check_size(split: Split, sequence: int, batch: int) -> None:
    if sequence < 1 or batch < 1:
        raise DataError(f"sequence is {sequence} and batch is {batch}: both must be at least 1")
    if split.tokens <= sequence:
        raise DataError(
            f"the {split.name} split holds {counted(split.tokens, 'token')}, too few for one sequence of "
            f"{sequence} tokens and its targets: shorten the sequence (data.sequence, or model.context if that "
            "is unset) or prepare more text"
        )


def _windows(split: Split, starts: np.ndarray, sequence: int, segments: bool) -> Batch:
    """Build a batch of the windows that begin at `starts` [B]."""
    import torch  # takes 1.4 s, and `residua data` does not need it

    ids = np.stack([split.read(start, sequence + 1) for start in starts])
    tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    if not segments:
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
    begins = np.zeros(ids.shape, np.int64)
    for row, start in enumerate(starts):
        begins[row, split.document_starts(start, start + sequence + 1) - start] = 1
    begins[:, 0] = 0
    targets[begins[:, 1:] == 1] = IGNORED
    number = begins[:, :-1].cumsum(axis=1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(number))


class Cursor(NamedTuple):
    """The next window to visit: `position` in the shuffled order of `epoch`."""

    epoch: int
    position: int


class Order:
    """Windows of `sequence` tokens (plus the next one) in shuffled order, epoch by epoch.

    Epoch e cuts the stream into windows from its own offset o_e < sequence, so window borders differ between epochs.
    The tokens before o_e, and those after the last whole window, are not used in that epoch.
    """

    def __init__(self, tokens: int, sequence: int, seed: int) -> None:
        assert tokens > sequence > 0, (tokens, sequence)
        self.tokens, self.sequence, self.seed = tokens, sequence, seed

    def offset(self, epoch: int) -> int:
        """The first token of the first window of an epoch; at least one window always fits."""
        choices = min(self.sequence, self.tokens - self.sequence)
        return _key(self.seed, epoch, 0) % choices

    def windows(self, epoch: int) -> int:
        """Number of windows in an epoch."""
        return (self.tokens - 1 - self.offset(epoch)) // self.sequence

    def take(self, cursor: Cursor, count: int) -> tuple[np.ndarray, Cursor]:
        """Return the first tokens, int64 [count], of the next `count` windows, and the cursor after them."""
        parts = []
        while count > 0:
            epoch, position = cursor
            windows = self.windows(epoch)
            stop = min(windows, position + count)
            shuffled = permute(np.arange(position, stop), windows, _key(self.seed, epoch, 1))
            parts.append(self.offset(epoch) + shuffled * self.sequence)
            count -= stop - position
            cursor = Cursor(epoch, stop) if stop < windows else Cursor(epoch + 1, 0)
        return np.concatenate(parts), cursor


def permute(items: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map `items` by the pseudo-random bijection of range(size) that `key` selects, int64.

    A Feistel network is a bijection of 2h-bit words for any round function F: (l, r) → (r, l ⊕ F(r)). Words that land
    outside range(size) are mapped again until they are inside ("cycle walking"); 2^2h < 4·size keeps this short. (Luby
    & Rackoff 1988; Black & Rogaway 2002.)
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(_key(key, turn)) for turn in range(FEISTEL_ROUNDS)]
    words = items.astype(np.uint64)
    outside = np.arange(len(words))
    while len(outside):
        left, right = words[outside] >> half, words[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        words[outside] = left << half | right
        outside = outside[words[outside] >= size]
    return words.astype(np.int64)


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): every input bit affects every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


def _key(*parts: int) -> int:
    """Hash several numbers to 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
