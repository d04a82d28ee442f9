"""The multi-gate operator against its equations."""

import pytest
import torch
from torch import Tensor

from residua import ops
from tests.golden import multigate
from tests.golden.compare import agree, close, each_token, random


def junction(n: int, width: int, *, competitive: bool) -> dict[str, Tensor]:
    return {
        "streams": random(2, 3, n, width, seed=1),
        "update": random(2, 3, width, seed=2),
        "gate_query": random(width, seed=3, scale=3.0),
        "gate_bias": random(n + competitive, seed=4),
        "pool_query": random(width, seed=5, scale=3.0),
    }


def golden_junction(j: dict[str, Tensor], competitive: bool) -> list[Tensor]:
    def one(f: Tensor, streams: list[Tensor]) -> list[Tensor]:
        s = multigate.write([*streams[0]], f, j["gate_query"], j["gate_bias"], competitive)
        return [multigate.pool(s, j["pool_query"]), torch.stack(s)]

    return each_token(one, j["update"], [j["streams"]])


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_multi_gate_matches_its_equation(n: int, width: int, competitive: bool) -> None:
    j = junction(n, width, competitive=competitive)
    silent = ("pool_query",) if n == 1 else ()
    agree(ops.multi_gate(**j, competitive=competitive), golden_junction(j, competitive), j, silent=silent)


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
def test_gates_and_pool_weights_are_the_parts_of_multi_gate(competitive: bool) -> None:
    j = junction(4, 7, competitive=competitive)
    beta = ops.gates(j["streams"], j["gate_query"], j["gate_bias"], competitive=competitive)

    def one(_: Tensor, streams: list[Tensor]) -> list[Tensor]:
        return [torch.stack(multigate.gates([*streams[0]], j["gate_query"], j["gate_bias"], competitive))]

    leaves = {k: j[k] for k in ("streams", "gate_query", "gate_bias")}
    agree([beta], each_token(one, j["update"], [j["streams"]]), leaves)
    hidden, after = ops.multi_gate(**j, competitive=competitive)
    weights = ops.pool_weights(after, j["pool_query"])
    close("hidden", (weights[..., None] * after).sum(-2), hidden, 1e-13)
    close("pool", ops.pool(after, j["pool_query"]), hidden, 1e-13)


@pytest.mark.parametrize("competitive", [True, False], ids=["competitive", "independent"])
def test_gates_near_zero_keep_the_streams(competitive: bool) -> None:
    j = junction(4, 7, competitive=competitive)
    bias = torch.zeros(5, dtype=torch.float64) if competitive else torch.full((4,), -800.0, dtype=torch.float64)
    if competitive:
        bias[0] = 800.0
    hidden, after = ops.multi_gate(**{**j, "gate_bias": bias}, competitive=competitive)
    assert torch.equal(after, j["streams"])
    close("hidden", hidden, ops.pool(j["streams"], j["pool_query"]), 1e-14)


def test_gates_at_one_replace_every_stream_by_the_update() -> None:
    j = junction(4, 7, competitive=False)
    bias = torch.full((4,), 800.0, dtype=torch.float64)
    hidden, after = ops.multi_gate(**{**j, "gate_bias": bias}, competitive=False)
    close("streams", after, j["update"][:, :, None].expand_as(after), 1e-14)
    close("hidden", hidden, j["update"], 1e-14)


def test_an_update_or_bias_of_the_wrong_shape_is_refused() -> None:
    j = junction(4, 7, competitive=True)
    with pytest.raises(ValueError, match="without axis N"):
        ops.multi_gate(**{**j, "update": random(2, 3, 8)})
    with pytest.raises(ValueError, match=r"gate_bias has shape \(5,\), independent gates over 4 streams need \(4,\)"):
        ops.multi_gate(**j, competitive=False)
    with pytest.raises(ValueError, match=r"competitive gates over 4 streams need \(5,\)"):
        ops.multi_gate(**{**j, "gate_bias": random(4)})


def test_an_empty_batch_is_accepted() -> None:
    j = junction(2, 7, competitive=True)
    hidden, after = ops.multi_gate(**{**j, "streams": j["streams"][:0], "update": j["update"][:0]})
    assert hidden.shape == (0, 3, 7) and after.shape == (0, 3, 2, 7)
