"""The operators of decoding against their references in float64, in the Triton interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops import decode
from residua.ops.mix_projection.reference import Mixing
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def compare(operator: Any, *inputs: Any, tolerance: float, **settings: Any) -> None:
    """Fused in the inputs' own precision against the reference in float64, every output."""
    with ops.backend("triton"):
        got = operator(*inputs, **settings)
    with ops.backend("reference"):
        exact = operator(*_double(inputs), **settings)
    for a, b in zip(_flat(got), _flat(exact), strict=True):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert a.numel() == 0 or relative(a, b) < tolerance


def _double(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    return type(x)(_double(y) for y in x) if isinstance(x, tuple | list) else x


def _flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in _flat(part)]


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


PRECISIONS = [(torch.float32, 3e-6), (torch.bfloat16, 6e-3)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("width", [1, 24, 96])
@pytest.mark.parametrize("device", DEVICES)
def test_sum_and_norm(device: str, width: int, dtype: torch.dtype, tolerance: float) -> None:
    base, y = (draw(3, width, device=device, dtype=dtype) for _ in range(2))
    compare(decode.add_norm, base, y, draw(width, device=device), tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("count", only_nightly([0, 1, 3, 5, 7, 8, 19, 33, 72, 128], but=[0, 1, 7, 19, 128]))
@pytest.mark.parametrize("device", DEVICES)
def test_reads_of_finished_sources(device: str, count: int, grows: bool, dtype: torch.dtype, tolerance: float) -> None:
    width = 24
    sources = [draw(2, width, device=device, dtype=dtype) * (i + 1) for i in range(count)]
    y, base = (draw(2, width, device=device, dtype=dtype) for _ in range(2))
    queries, weight = draw(3, width, device=device), draw(width, device=device)
    compare(decode.read_sources, sources, y, base if grows else None, queries, weight, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_partial_sum_merged_into_a_read(device: str, grows: bool, dtype: torch.dtype, tolerance: float) -> None:
    width = 24
    o = draw(3, width, device=device)
    finished = (o, draw(3, device=device), o.square().sum(-1))
    y, base = (draw(3, width, device=device, dtype=dtype) for _ in range(2))
    query, weight = draw(width, device=device), draw(width, device=device)
    compare(decode.read_partial, finished, y, base if grows else None, query, weight, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("competitive", [True, False])
@pytest.mark.parametrize("streams", [2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_gated_write_pool_and_norm(
    device: str, streams: int, competitive: bool, dtype: torch.dtype, tolerance: float
) -> None:
    width = 24
    *s, f = (draw(3, width, device=device, dtype=dtype) for _ in range(streams + 1))
    w1, w2, weight = (draw(width, device=device) for _ in range(3))
    bias = draw(streams + competitive, device=device)
    compare(decode.gate_norm, s, f, w1, bias, w2, weight, competitive=competitive, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("kind", ["relu2", "gelu", "swiglu", "glu"])
@pytest.mark.parametrize("width", [2, 70, 2100])
@pytest.mark.parametrize("device", DEVICES)
def test_activations(device: str, width: int, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    compare(decode.activate, draw(3, width, device=device, dtype=dtype), kind, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("slots", "heads", "kv_heads", "width"), [(5, 2, 2, 8), (300, 2, 1, 6), (200, 1, 1, 16)])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_to_a_cache(
    device: str, slots: int, heads: int, kv_heads: int, width: int, sink: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q = draw(3, heads, width, device=device, dtype=dtype)
    keys, values = (draw(3, slots, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
    until = torch.tensor([0, slots // 2, slots - 1], device=device)
    keys[0, 1:], values[1, slots // 2 + 1 :] = float("nan"), float("nan")
    with ops.backend("triton"):
        got = decode.decode_attention(q, keys, values, until, draw(heads, device=device) if sink else None)
    assert torch.isfinite(got).all()
    keys, values = (t.nan_to_num() for t in (keys, values))
    compare(
        decode.decode_attention, q, keys, values, until, draw(heads, device=device) if sink else None,
        tolerance=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "gate"), [(2, 2, 8, 0), (4, 1, 6, 5)])
@pytest.mark.parametrize("device", DEVICES)
def test_heads_enter_the_cache(
    device: str, heads: int, kv_heads: int, width: int, gate: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    projected = draw(3, (heads + 2 * kv_heads) * width + gate, device=device, dtype=dtype)
    gains = (draw(width, device=device), draw(width, device=device)) if norm else None
    angles = draw(5, width // 2, device=device)
    positions = torch.tensor([0, 4, 2], device=device)
    results = []
    for choice, kind in (("triton", dtype), ("reference", torch.float64)):
        keys, values = (torch.zeros(3, 5, kv_heads, width, device=device, dtype=kind) for _ in range(2))
        table = (angles.cos(), angles.sin())
        with ops.backend(choice):
            q = decode.enter_cache(projected.to(kind), heads, gains, *table, keys, values, positions)
        results.append((q, keys, values))
    for got, exact in zip(*results, strict=True):
        assert relative(got, exact) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("device", DEVICES)
def test_values_enter_the_cache_mixed_with_an_anchor(
    device: str, granularity: str, dtype: torch.dtype, tolerance: float
) -> None:
    """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V; the anchor is a part of another layer's projection."""
    heads, kv_heads, width = 4, 2, 6
    mine, first = (draw(3, (heads + 2 * kv_heads) * width, device=device, dtype=dtype) for _ in range(2))
    own, anchor = (x[:, -kv_heads * width :].unflatten(-1, (kv_heads, width)) for x in (mine, first))
    sizes = {"elementwise": (kv_heads, width), "headwise": (kv_heads, 1), "scalar": (1, 1)}
    scales = [draw(*sizes[granularity], device=device).expand(kv_heads, width) for _ in range(2)]
    angles = draw(5, width // 2, device=device)
    positions = torch.tensor([0, 4, 2], device=device)
    keys, values = (torch.zeros(3, 5, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
    with ops.backend("triton"):
        table = (angles.cos(), angles.sin())
        decode.enter_cache(mine, heads, None, *table, keys, values, positions, Mixing(anchor, *scales))
    wanted = scales[0].double() * anchor.double() + scales[1].double() * own.double()
    assert relative(values[torch.arange(3), positions], wanted) < tolerance
    assert values.count_nonzero() == wanted.count_nonzero()


def test_shares_of_a_head_are_merged_and_counters_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.ops.decode import launch

    monkeypatch.setattr(launch, "_splits", lambda keys, heads: 4)
    width = 256  # heads so wide that a tile has 16 slots, and 70 slots make four shares
    q, *cache = (draw(2, *shape, width, device="cpu") for shape in ((3,), (70, 3), (70, 3)))
    for until in ([69, 3], [40, 0]):
        compare(decode.decode_attention, q, *cache, torch.tensor(until), draw(3, device="cpu"), tolerance=3e-6)
        assert (cache[0].device, 6, cache[0].data_ptr()) in launch._COUNTERS
        assert not launch._counters(cache[0], 6).any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_give_no_rows(device: str) -> None:
    nothing = draw(0, 8, device=device)
    with ops.backend("triton"):
        normed, h = decode.add_norm(nothing, nothing, draw(8, device=device))
        w1, bias, w2, weight = (draw(size, device=device) for size in (8, 3, 8, 8))
        written, after = decode.gate_norm([nothing] * 2, nothing, w1, bias, w2, weight)
    assert normed.shape == h.shape == written.shape == after[1].shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_scattered_rows_are_made_dense(device: str) -> None:
    y, weight = draw(3, 8, device=device), draw(8, device=device)
    scattered = draw(8, 3, device=device).T
    compare(decode.add_norm, scattered, y, weight, tolerance=3e-6)
    compare(decode.gate_norm, [y, scattered], scattered, weight, weight[:3], weight, weight, tolerance=3e-6)
