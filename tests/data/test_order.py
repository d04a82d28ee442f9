from __future__ import annotations

import numpy as np
import pytest

from residua.data.loader import Cursor, Order, permute


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 5000])
def test_permutation_is_a_bijection(size: int) -> None:
    assert sorted(permute(np.arange(size), size, key=7).tolist()) == list(range(size))


def test_permutation_looks_random() -> None:
    size = 20_000
    shuffled = permute(np.arange(size), size, key=1).astype(float)
    others = permute(np.arange(size), size, key=2).astype(float)
    for other in (np.arange(size), np.roll(shuffled, 1), others):
        assert abs(np.corrcoef(shuffled, other)[0, 1]) < 0.03


def test_order_is_the_same_for_ever() -> None:
    """A change here would silently change the data of every resumed run and every study."""
    starts, _ = Order(10_000, 16, seed=3).take(Cursor(0, 0), 6)
    assert starts.tolist() == [2659, 51, 5347, 7555, 8147, 9683]


@pytest.mark.parametrize(("tokens", "sequence"), [(1000, 16), (17, 16), (18, 16), (33, 16), (50, 1)])
def test_epoch_visits_every_window_once_and_stays_inside(tokens: int, sequence: int) -> None:
    order = Order(tokens, sequence, seed=1)
    cursor = Cursor(0, 0)
    for epoch in range(5):
        starts, cursor = order.take(cursor, order.windows(epoch))
        assert cursor == Cursor(epoch + 1, 0)
        assert np.array_equal(np.sort(starts), order.offset(epoch) + sequence * np.arange(len(starts)))
        assert starts.min() < sequence
        assert starts.max() + sequence + 1 <= tokens < starts.max() + 2 * sequence + 1


def test_epochs_and_seeds_differ() -> None:
    order = Order(5000, 16, seed=0)
    first, second = (order.take(Cursor(epoch, 0), 100)[0].tolist() for epoch in (0, 1))
    other = Order(5000, 16, seed=1).take(Cursor(0, 0), 100)[0].tolist()
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert len({order.offset(epoch) for epoch in range(20)}) > 5


def test_any_division_into_steps_gives_one_order() -> None:
    order = Order(1000, 16, seed=0)
    whole, end = order.take(Cursor(0, 0), 200)
    pieces, cursor = [], Cursor(0, 0)
    for count in (1, 7, 60, 61, 71):
        piece, cursor = order.take(cursor, count)
        pieces.append(piece)
    assert np.array_equal(np.concatenate(pieces), whole)
    assert cursor == end
