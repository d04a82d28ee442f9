"""The operators of whole sequences against their references in float64, in the Triton interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops import prefill
from residua.ops.depth_attention.launch import parts
from residua.ops.mix_projection.reference import Mixing

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
PRECISIONS = [(torch.float32, 3e-6), (torch.bfloat16, 6e-3)]


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in flat(part)]


def double(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double()
    if isinstance(x, prefill.Queries):
        return prefill.Queries(x.u.double(), x.parts)
    if isinstance(x, prefill.Streams):
        return prefill.Streams(*map(double, x))
    return type(x)(double(y) for y in x) if isinstance(x, tuple | list) else x


def compare(operator: Any, *inputs: Any, tolerance: float, **settings: Any) -> None:
    """Fused in the inputs' own precision against the reference in float64, every output."""
    with ops.backend("triton"):
        got = flat(operator(*inputs, **settings))
    with ops.backend("reference"):
        exact = flat(operator(*double(inputs), **settings))
    for a, b in zip(got, exact, strict=True):
        a = a[..., : b.shape[-1]]  # rows of scores are padded
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert relative(a, b) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("device", DEVICES)
def test_heads_are_normed_and_rotated_alone_or_into_a_cache(
    device: str, heads: int, kv_heads: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    width, length = 24, 37
    projected = draw(2, length, (heads + 2 * kv_heads) * width + 5, device=device, dtype=dtype)
    gains = (draw(width, device=device), draw(width, device=device)) if norm else None
    angles = draw(length, width // 2, device=device)
    table = (angles.cos(), angles.sin())
    compare(prefill.turn_heads, projected, heads, kv_heads, gains, *table, tolerance=tolerance)
    caches = [torch.zeros(2, 2, length + 3, kv_heads, width, device=device, dtype=dtype) for _ in range(2)]
    with ops.backend("triton"):
        q = prefill.enter_heads(projected, heads, gains, *table, *(c[:, :length] for c in caches[0]))
    with ops.backend("reference"):
        exact = double(caches[1])
        wanted = prefill.enter_heads(*double((projected, heads, gains, *table)), *(c[:, :length] for c in exact))
    assert relative(q, wanted) < tolerance
    assert relative(caches[0], exact) < tolerance
    assert (caches[0][:, :, length:] == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("device", DEVICES)
def test_values_enter_a_cache_mixed_with_an_anchor(
    device: str, granularity: str, dtype: torch.dtype, tolerance: float
) -> None:
    """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V; the anchor is a part of another layer's projection."""
    heads, kv_heads, width, length = 4, 2, 24, 37
    mine, first = (draw(2, length, (heads + 2 * kv_heads) * width, device=device, dtype=dtype) for _ in range(2))
    anchor = first[..., -kv_heads * width :].unflatten(-1, (kv_heads, width))
    sizes = {"elementwise": (kv_heads, width), "headwise": (kv_heads, 1), "scalar": (1, 1)}
    scales = [draw(*sizes[granularity], device=device).expand(kv_heads, width) for _ in range(2)]
    angles = draw(length, width // 2, device=device)
    caches = torch.zeros(2, 2, length + 3, kv_heads, width, device=device, dtype=dtype)
    with ops.backend("triton"):
        prefill.enter_heads(
            mine, heads, None, angles.cos(), angles.sin(), *(c[:, :length] for c in caches),
            Mixing(anchor, *scales),
        )  # fmt: skip
    own = mine[..., -kv_heads * width :].unflatten(-1, (kv_heads, width))
    wanted = scales[0].double() * anchor.double() + scales[1].double() * own.double()
    assert relative(caches[1, :, :length], wanted) < tolerance
    assert (caches[:, :, length:] == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_a_read_of_known_and_new_sources_with_its_norm(
    device: str, count: int, grows: bool, dtype: torch.dtype, tolerance: float
) -> None:
    tokens, width = 19, 40
    others = [draw(tokens, width, device=device, dtype=dtype) * (i + 1) for i in range(count)]
    scores = [draw(i + 2, 32, device=device) for i in range(count)]
    y, base = (draw(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weights = draw(width, device=device), draw(width, device=device)
    rows = [i % 2 for i in range(count)]
    compare(prefill.read_norm, others, scores, rows, y, base if grows else None, *weights, tolerance=tolerance)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_a_source_and_a_group_of_reads(device: str, grows: bool) -> None:
    tokens, width = 19, 40
    queries = draw(6, width, device=device)
    both = prefill.Queries(queries, parts(queries))
    y, base = (draw(tokens, width, device=device) for _ in range(2))
    compare(prefill.source_scores, y, base if grows else None, both, 2, 3, tolerance=3e-6)
    sources, scores = [draw(tokens, width, device=device) for _ in range(3)], [draw(4, 32, device=device)] * 3
    compare(prefill.read_group, sources, scores, [0, 1, 1], 3, tolerance=3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(
    ("streams", "past", "competitive"),
    [
        (2, 0, True),
        (3, 1, False),
        (4, 2, True),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [(2, 0, False), (3, 1, True), (4, 2, False)]),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_write_pool_and_norm(
    device: str, streams: int, past: int, competitive: bool, dtype: torch.dtype, tolerance: float
) -> None:
    tokens, width = 5, 40
    held = draw(tokens, streams, width, device=device, dtype=dtype)
    given = tuple(s.contiguous() for s in held.unbind(1))
    vectors = [draw(size, device=device) for size in (width, streams + competitive, width, width)]
    y = draw(tokens, width, device=device, dtype=dtype)
    updates = tuple(draw(tokens, width, device=device, dtype=dtype) for _ in range(past))
    betas = tuple(draw(tokens, streams, device=device).sigmoid() for _ in range(past))
    before = prefill.Streams(given, updates, betas)
    for store in (False, True):
        compare(prefill.gate_norm, before, y, *vectors, store=store, competitive=competitive, tolerance=tolerance)
