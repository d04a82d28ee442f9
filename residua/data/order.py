"""The order in which windows of a token stream are visited: a function of seed, epoch and window length alone.

It does not depend on the number of ranks or the batch size, and no list of windows is stored: the shuffle is a keyed
bijection that computes any item of the order directly, so resuming needs two integers.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

ROUNDS = 6


class Cursor(NamedTuple):
    """The next window to visit: `position` in the shuffled order of `epoch`."""

    epoch: int
    position: int


class Order:
    """Windows of `sequence` tokens (and the one after) in shuffled order, epoch after epoch.

    Epoch e cuts the stream into windows from its own offset o_e < sequence, so window borders differ between epochs.
    The tokens before o_e, and those after the last whole window, are not used in that epoch.
    """

    def __init__(self, tokens: int, sequence: int, seed: int) -> None:
        assert tokens > sequence > 0, (tokens, sequence)
        self.tokens, self.sequence, self.seed = tokens, sequence, seed

    def offset(self, epoch: int) -> int:
        """First token of the first window of an epoch; at least one window always fits."""
        choices = min(self.sequence, self.tokens - self.sequence)
        return _key(self.seed, epoch, 0) % choices

    def windows(self, epoch: int) -> int:
        """Number of windows in an epoch."""
        return (self.tokens - 1 - self.offset(epoch)) // self.sequence

    def take(self, cursor: Cursor, count: int) -> tuple[np.ndarray, Cursor]:
        """First tokens, int64 [count], of the next `count` windows, and the cursor after them."""
        taken = []
        while count > 0:
            epoch, position = cursor
            windows = self.windows(epoch)
            stop = min(windows, position + count)
            shuffled = permute(np.arange(position, stop), windows, _key(self.seed, epoch, 1))
            taken.append(self.offset(epoch) + shuffled * self.sequence)
            count -= stop - position
            cursor = Cursor(epoch, stop) if stop < windows else Cursor(epoch + 1, 0)
        return np.concatenate(taken), cursor


def permute(items: np.ndarray, size: int, key: int) -> np.ndarray:
    """Images of `items` under the pseudo-random bijection of range(size) that `key` selects, int64.

    A Feistel network is a bijection of 2h-bit words whatever its round function F: (l, r) → (r, l ⊕ F(r)). Words
    that land outside range(size) go through again until they are inside ("cycle walking"); 2^2h < 4·size keeps
    that short. (Luby & Rackoff 1988; Black & Rogaway 2002.)
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(_key(key, turn)) for turn in range(ROUNDS)]
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
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


def _key(*parts: int) -> int:
    """Hash several numbers into one of 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
