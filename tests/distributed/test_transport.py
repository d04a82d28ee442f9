"""Traffic between stages, and the lifetime of tensors that a rank caches."""

import pytest
import torch

from residua.distributed.pipeline.transport import StageCache, cached_blocks, hold, naive_blocks, plan_routes

GRID = [(2, 1), (2, 2), (3, 2), (4, 1), (4, 3)]


def blocks_of(ranks: int, stages_per_rank: int, per_stage: int) -> list[list[str]]:
    """The finished blocks after each stage but the last."""
    stages = ranks * stages_per_rank
    return [[f"source.{i}" for i in range(per_stage * (stage + 1))] for stage in range(stages - 1)]


@pytest.mark.parametrize(("ranks", "each"), GRID)
def test_naive_transport_traffic_matches_its_formula(ranks: int, each: int) -> None:
    routes = plan_routes(blocks_of(ranks, each, 3), ranks, "naive")
    assert sum(len(route.sends) for route in routes) == naive_blocks(ranks, each, 3)
    assert not any(route.from_cache or route.to_cache for route in routes)


@pytest.mark.parametrize(("ranks", "each"), GRID)
def test_cached_transport_sends_each_block_once_to_each_rank(ranks: int, each: int) -> None:
    """P(P−1)/2·N_p + (V−1)P(P−1)·N_p: the count of the paper, less the blocks a rank made itself."""
    routes = plan_routes(blocks_of(ranks, each, 3), ranks, "cached")
    sent = sum(len(route.sends) for route in routes)
    assert sent == (ranks * (ranks - 1) / 2 + (each - 1) * ranks * (ranks - 1)) * 3
    assert sent <= cached_blocks(ranks, each, 3)
    assert sent < naive_blocks(ranks, each, 3) or each == 1
    for rank in range(ranks):
        received = [name for route in routes[rank::ranks] for name in route.receives]
        assert len(received) == len(set(received))


@pytest.mark.parametrize("transport", ["cached", "naive"])
def test_every_stage_receives_every_tensor_it_needs(transport: str) -> None:
    boundaries = blocks_of(3, 3, 2)
    routes = plan_routes(boundaries, 3, transport)
    for names, route in zip(boundaries, routes[1:], strict=True):
        assert sorted((*route.receives, *route.from_cache)) == sorted(names)


def test_cached_tensors_are_read_as_often_as_planned() -> None:
    routes = plan_routes(blocks_of(2, 3, 1), 2, "cached")
    for rank in range(2):
        own = routes[rank::2]
        put = {name: readers for route in own for name, readers in route.to_cache.items()}
        taken = [name for route in own for name in route.from_cache]
        assert put == {name: taken.count(name) for name in set(taken)}


def test_cached_tensor_is_freed_after_its_last_reader() -> None:
    cache, x = StageCache(), torch.randn(4, requires_grad=True)
    cached = cache.put(0, "a", x * 1.0, readers=2)
    first, second = cache.get(0, "a"), cache.get(0, "a")
    assert first.data_ptr() == second.data_ptr() == cached.data_ptr()
    assert not cache.entries


def test_gradients_of_later_readers_reach_the_first() -> None:
    """y = 2x on the first stage; the later stages of the rank compute 3y and 5y, the next rank 7y."""
    cache, x = StageCache(), torch.ones(3, requires_grad=True)
    cached = cache.put(1, "y", 2 * x, readers=2)
    for factor in (3.0, 5.0):
        (factor * cache.get(1, "y")).sum().backward()
    (7 * cached).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0 * (3 + 5 + 7)))  # type: ignore[arg-type]


def test_a_cache_empties_without_gradients() -> None:
    cache = StageCache()
    with torch.no_grad():
        cache.put(0, "a", torch.ones(2), readers=1)
        assert not cache.get(0, "a").requires_grad
    assert not cache.entries


def test_an_unread_held_tensor_passes_later_gradients_on() -> None:
    """A stage receives y and does not read it; a later stage of the rank computes 3y."""
    cache, x, y = StageCache(), torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    cached = cache.put(0, "y", y, readers=1)
    (3 * cache.get(0, "y")).sum().backward()
    hold(x * 2, [cached]).sum().backward()
    assert torch.equal(y.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "shards"), [(8, 2), (7, 2), (3, 4), (5, 3)])
def test_rows_are_divided_as_by_fully_shard(rows: int, shards: int) -> None:
    from residua.distributed.optimizer import rows_of

    parts = torch.arange(rows).chunk(shards)
    for shard in range(shards):
        start, end = rows_of(rows, shards, shard)
        assert list(range(start, end)) == (parts[shard].tolist() if shard < len(parts) else [])
