import gc
import json
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from residua.data import Batch, DataError, Dataset, Loader, Split, validation_batches, whole_text
from residua.data.loader import Cursor, Order, permute

SEQUENCE = 80


@pytest.fixture(scope="module")
def split(dataset: Dataset) -> Split:
    return dataset.split("train")


def take(loader: Loader, count: int) -> list[Batch]:
    return list(islice(loader, count))


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) for a, b in pairs)


def per_epoch(split: Split) -> int:
    return split.tokens // SEQUENCE


def test_targets_are_the_next_tokens(split: Split) -> None:
    stream = split.read(0, split.tokens).tolist()
    for batch in take(Loader(split, SEQUENCE, 4), 5):
        assert batch.tokens.shape == batch.targets.shape == (4, SEQUENCE)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.segments is None
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            assert tokens[1:] == targets[:-1]
            window = [*tokens, targets[-1]]
            assert any(stream[i : i + len(window)] == window for i in range(len(stream) - SEQUENCE))


def test_seed_determines_the_order(split: Split) -> None:
    first = take(Loader(split, SEQUENCE, 4, seed=1), 10)
    assert same(first, take(Loader(split, SEQUENCE, 4, seed=1), 10))
    assert not same(first, take(Loader(split, SEQUENCE, 4, seed=2), 10))


def test_prefetching_changes_nothing(split: Split) -> None:
    ahead, direct = Loader(split, SEQUENCE, 4, prefetch=3), Loader(split, SEQUENCE, 4, prefetch=0)
    for _ in range(50):
        assert same([next(ahead)], [next(direct)])
        assert ahead.state_dict() == direct.state_dict()
    ahead.close()


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("before", [0, 1, 13, "epoch end", 150])
def test_resumed_loader_continues_exactly(split: Split, before: int | str, prefetch: int) -> None:
    count = per_epoch(split) // 3 if before == "epoch end" else int(before)
    loader = Loader(split, SEQUENCE, 3, seed=5, prefetch=prefetch)
    take(loader, count)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = take(loader, 2 * per_epoch(split) // 3 + 2)
    resumed = Loader(split, SEQUENCE, 3, seed=5, prefetch=prefetch)
    take(resumed, 7)
    resumed.load_state_dict(state)
    assert same(take(resumed, len(expected)), expected)
    assert resumed.epoch > 2


def test_resume_across_an_epoch_boundary_keeps_the_position(split: Split) -> None:
    """A batch that takes its windows from two epochs is followed by the right one."""
    loader = Loader(split, SEQUENCE, 7, prefetch=0)
    windows = loader._source.order.windows(0)
    assert windows % 7, "the batch must straddle the epoch end"
    take(loader, windows // 7 + 1)
    assert loader.state_dict()["epoch"] == 1
    assert loader.state_dict()["position"] == 7 - windows % 7


def test_ranks_share_one_order_without_overlap(split: Split) -> None:
    """Union over ranks = what one process sees, rank r holding items r, r + world, ..."""
    alone = rows(take(Loader(split, SEQUENCE, 12, prefetch=0), 10))
    for world in (2, 3, 4):
        loaders = [Loader(split, SEQUENCE, 12 // world, rank=rank, world=world, prefetch=0) for rank in range(world)]
        parts = [rows(take(loader, 10)) for loader in loaders]
        assert [parts[item % world][item // world] for item in range(len(alone))] == alone
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1


def test_accumulation_sees_the_same_windows_as_one_large_batch(split: Split) -> None:
    large = rows(take(Loader(split, SEQUENCE, 8, prefetch=0), 6))
    small = rows(take(Loader(split, SEQUENCE, 2, prefetch=0), 24))
    assert large == small


def test_one_epoch_over_all_ranks_covers_the_stream_once(split: Split) -> None:
    order = Loader(split, SEQUENCE, 1)._source.order
    windows, offset, world = order.windows(0), order.offset(0), 3
    loaders = [Loader(split, SEQUENCE, 1, rank=rank, world=world, prefetch=0) for rank in range(world)]
    seen = [rows(take(loader, windows // world)) for loader in loaders]
    flat = [row for part in seen for row in part]
    cut = split.read(offset, windows * SEQUENCE).reshape(windows, SEQUENCE)
    everything = [tuple(row) for row in cut.tolist()]
    assert len(flat) == windows // world * world
    assert set(flat) <= set(everything)
    assert len(set(everything) - set(flat)) <= windows % world


def test_state_resumes_with_another_number_of_ranks(split: Split) -> None:
    loader = Loader(split, SEQUENCE, 8, prefetch=0)
    take(loader, 3)
    state, expected = loader.state_dict(), rows(take(loader, 2))
    halves = [Loader(split, SEQUENCE, 4, rank=rank, world=2, prefetch=0) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    parts = [rows(take(half, 2)) for half in halves]
    assert [parts[item % 2][item // 2] for item in range(16)] == expected


@pytest.mark.parametrize(("name", "value"), [("seed", 9), ("sequence", 16), ("tokens", 5), ("tokenizer_hash", "other")])
def test_state_of_other_data_is_refused(split: Split, name: str, value: object) -> None:
    loader = Loader(split, SEQUENCE, 4)
    with pytest.raises(DataError, match=f"the saved data position has {name} = {value}"):
        loader.load_state_dict({**loader.state_dict(), name: value})


def test_a_limit_repeats_the_first_tokens(split: Split) -> None:
    limit = 10 * SEQUENCE + 1
    loader = Loader(split, SEQUENCE, 5, prefetch=0, limit=limit)
    seen = [row for batch in take(loader, 8) for row in batch.tokens]
    beginning = split.read(0, limit).tolist()
    assert all(any(beginning[i : i + SEQUENCE] == row.tolist() for i in range(limit)) for row in seen)
    assert loader.epoch >= 4 and loader.state_dict()["tokens"] == limit
    with pytest.raises(DataError, match=r"data\.limit is 3: it must be more than"):
        Loader(split, SEQUENCE, 5, limit=3)


def test_segments_change_at_document_starts(split: Split, dataset: Dataset) -> None:
    end = dataset.tokenizer.end_of_text
    borders = 0
    for batch in take(Loader(split, 200, 4, segments=True, prefetch=0), 10):
        assert batch.segments is not None and batch.segments.shape == batch.tokens.shape
        for tokens, targets, segments in zip(batch.tokens, batch.targets, batch.segments, strict=True):
            after_end = np.cumsum([0, *(tokens[:-1] == end).tolist()])
            assert segments.tolist() == after_end.tolist()
            assert torch.equal(targets == -100, tokens == end)
            kept = targets != -100
            assert torch.equal(targets[:-1][kept[:-1]], tokens[1:][kept[:-1]])
            borders += int((tokens == end).sum())
    assert borders > 20
    assert any((batch.targets == end).any() for batch in take(Loader(split, 200, 4, segments=True), 3))
    plain, masked = (Loader(split, SEQUENCE, 4, segments=segments, prefetch=0) for segments in (False, True))
    assert rows(take(plain, 20)) == rows(take(masked, 20))


def test_a_closed_loader_ends_its_thread_and_can_be_read_again(split: Split) -> None:
    loader, reference = Loader(split, SEQUENCE, 2), Loader(split, SEQUENCE, 2, prefetch=0)
    before = loader_threads()
    first = take(loader, 3)
    assert loader_threads() == before + 1
    loader.close()
    loader.close()
    assert loader_threads() == before
    assert same(first + take(loader, 3), take(reference, 6))
    del loader
    gc.collect()
    assert loader_threads() == before, "a forgotten loader leaves none"


def test_error_while_prefetching_reaches_the_caller(split: Split, monkeypatch) -> None:
    before = loader_threads()
    loader = Loader(split, SEQUENCE, 2)
    next(loader)
    monkeypatch.setattr(Split, "read", lambda *_: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        take(loader, 10)
    assert loader_threads() == before


def test_impossible_batch_and_rank_sizes_are_refused(split: Split) -> None:
    with pytest.raises(DataError, match=f"holds {split.tokens:,} tokens, too few for one sequence of {split.tokens}"):
        Loader(split, split.tokens, 1)
    assert next(Loader(split, split.tokens - 1, 1)).tokens.shape == (1, split.tokens - 1)
    with pytest.raises(DataError, match="batch is 0"):
        Loader(split, SEQUENCE, 0)
    with pytest.raises(DataError, match="rank is 2 of 2"):
        Loader(split, SEQUENCE, 1, rank=2, world=2)


def test_validation_order_does_not_depend_on_the_batch_size(split: Split) -> None:
    batches = list(validation_batches(split, SEQUENCE, 4, limit_tokens=SEQUENCE * 10))
    assert [len(batch.tokens) for batch in batches] == [4, 4, 2]
    flat = torch.cat([batch.tokens.flatten() for batch in batches])
    assert flat.tolist() == split.read(0, SEQUENCE * 10).tolist()
    assert same(batches, list(validation_batches(split, SEQUENCE, 4, limit_tokens=SEQUENCE * 10)))
    (small,) = validation_batches(split, SEQUENCE, 8, limit_tokens=3 * SEQUENCE, segments=True)
    assert small.tokens.shape == (3, SEQUENCE) and small.segments[:, 0].tolist() == [0, 0, 0]
    whole = [torch.cat([b.targets for b in validation_batches(split, SEQUENCE, batch)]) for batch in (1, 3, 8)]
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])
    assert len(whole[0]) == (split.tokens - 1) // SEQUENCE, "without a limit, all of the split"


def loader_threads() -> int:
    return sum(thread.name == "residua-loader" for thread in threading.enumerate())


@pytest.mark.parametrize("sequence", [SEQUENCE, 7, 10_000_000])
def test_whole_text_covers_every_token_with_a_short_last_window(split: Split, sequence: int) -> None:
    batches = list(whole_text(split, sequence, 4))
    assert torch.cat([b.tokens.flatten() for b in batches]).tolist() == split.read(0, split.tokens - 1).tolist()
    assert torch.cat([b.targets.flatten() for b in batches]).tolist() == split.read(1, split.tokens - 1).tolist()
    assert all(b.tokens.shape[1] == sequence for b in batches[:-1])


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 5000])
def test_permutation_is_a_bijection(size: int) -> None:
    assert sorted(permute(np.arange(size), size, key=7).tolist()) == list(range(size))


def test_permutation_is_close_to_random() -> None:
    size = 20_000
    shuffled = permute(np.arange(size), size, key=1).astype(float)
    others = permute(np.arange(size), size, key=2).astype(float)
    for other in (np.arange(size), np.roll(shuffled, 1), others):
        assert abs(np.corrcoef(shuffled, other)[0, 1]) < 0.03


def test_data_order_never_changes() -> None:
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


def test_epochs_and_seeds_give_different_orders() -> None:
    order = Order(5000, 16, seed=0)
    first, second = (order.take(Cursor(epoch, 0), 100)[0].tolist() for epoch in (0, 1))
    other = Order(5000, 16, seed=1).take(Cursor(0, 0), 100)[0].tolist()
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert len({order.offset(epoch) for epoch in range(20)}) > 5


def test_data_order_does_not_depend_on_step_sizes() -> None:
    order = Order(1000, 16, seed=0)
    whole, end = order.take(Cursor(0, 0), 200)
    pieces, cursor = [], Cursor(0, 0)
    for count in (1, 7, 60, 61, 71):
        piece, cursor = order.take(cursor, count)
        pieces.append(piece)
    assert np.array_equal(np.concatenate(pieces), whole)
    assert cursor == end
