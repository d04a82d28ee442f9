"""The operators of inference against their references in float64, in the Triton interpreter and on a GPU."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from residua import ops
from residua.ops import inference
from residua.ops.inference import Streams
from residua.ops.mix_projection.reference import Mixing
from tests.nightly import only_nightly
from tests.ops.harness import relative

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PRECISIONS = [(torch.float32, 3e-6), (torch.bfloat16, 6e-3)]
precisions = pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def double(x: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, x)


def compare(operator: Any, *inputs: Any, tolerance: float, **settings: Any) -> None:
    """Fused in the inputs' own precision against the reference in float64, every output."""
    with ops.backend("triton"):
        outputs = tree_leaves(operator(*inputs, **settings))
    with ops.backend("reference"):
        exact = tree_leaves(operator(*double(inputs), **settings))
    for a, b in zip(outputs, exact, strict=True):
        a = a[..., : b.shape[-1]]  # rows of scores are padded
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        assert a.numel() == 0 or relative(a, b) < tolerance


@precisions
@pytest.mark.parametrize("size", only_nightly(product((3, 257), (1, 24, 96)), [(3, 1), (3, 24), (3, 96), (257, 24)]))
@devices
def test_fused_sum_and_norm_match_reference(
    device: str, size: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    rows, width = size
    base, y = (draw(rows, width, device=device, dtype=dtype) for _ in range(2))
    compare(inference.add_norm, base, y, draw(width, device=device), tolerance=tolerance)


@precisions
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("count", only_nightly([0, 1, 3, 5, 7, 8, 19, 33, 72, 128], but=[0, 1, 7, 19, 128]))
@devices
def test_reads_of_finished_sources_match_reference(
    device: str, count: int, grows: bool, dtype: torch.dtype, tolerance: float
) -> None:
    width = 24
    sources = [draw(2, width, device=device, dtype=dtype) * (i + 1) for i in range(count)]
    y, base = (draw(2, width, device=device, dtype=dtype) for _ in range(2))
    queries, weight = draw(3, width, device=device), draw(width, device=device)
    compare(inference.read_sources, sources, y, base if grows else None, queries, weight, tolerance=tolerance)


@precisions
@pytest.mark.parametrize("grows", [False, True])
@devices
def test_partial_sum_merges_into_a_read(device: str, grows: bool, dtype: torch.dtype, tolerance: float) -> None:
    width = 24
    o = draw(3, width, device=device)
    finished = (o, draw(3, device=device), o.square().sum(-1))
    y, base = (draw(3, width, device=device, dtype=dtype) for _ in range(2))
    query, weight = draw(width, device=device), draw(width, device=device)
    compare(inference.read_partial, finished, y, base if grows else None, query, weight, tolerance=tolerance)


@precisions
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("count", [1, 5])
@devices
def test_fused_read_and_norm_match_reference(
    device: str, count: int, grows: bool, dtype: torch.dtype, tolerance: float
) -> None:
    tokens, width = 19, 40
    others = [draw(tokens, width, device=device, dtype=dtype) * (i + 1) for i in range(count)]
    scores = [draw(i + 2, 32, device=device) for i in range(count)]
    y, base = (draw(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weights = draw(width, device=device), draw(width, device=device)
    rows = [i % 2 for i in range(count)]
    compare(inference.read_norm, others, scores, rows, y, base if grows else None, *weights, tolerance=tolerance)


@pytest.mark.parametrize("grows", [False, True])
@devices
def test_grouped_source_scores_match_reference(device: str, grows: bool) -> None:
    tokens, width = 19, 40
    queries = inference.Queries.of(draw(6, width, device=device))
    y, base = (draw(tokens, width, device=device) for _ in range(2))
    compare(inference.source_scores, y, base if grows else None, queries, 2, 3, tolerance=3e-6)
    sources, scores = [draw(tokens, width, device=device) for _ in range(3)], [draw(4, 32, device=device)] * 3
    compare(inference.read_group, sources, scores, [0, 1, 1], 3, tolerance=3e-6)


MORE_STREAMS = [(2, 24, 0, False), (3, 24, 0, False), (4, 24, 0, True), (3, 40, 1, True), (4, 40, 2, False)]
MORE_STREAMS += [(n, width, 0, gate) for n, width in ((5, 24), (6, 17), (7, 24)) for gate in (True, False)]
STREAMS = [(2, 24, 0, True), (3, 33, 0, True), (4, 5, 0, False), (8, 40, 0, True), (3, 40, 1, False), (4, 40, 2, True)]


@precisions
@pytest.mark.parametrize(
    ("streams", "width", "past", "competitive"),
    [*STREAMS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_STREAMS)],
)
@devices
def test_gated_write_pool_and_norm_match_reference(
    device: str, streams: int, width: int, past: int, competitive: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """After some writes that were not stored, and after none."""
    rows = 5
    stored = tuple(draw(rows, width, device=device, dtype=dtype) for _ in range(streams))
    updates = tuple(draw(rows, width, device=device, dtype=dtype) for _ in range(past))
    held = Streams(stored, updates, tuple(draw(rows, streams, device=device).sigmoid() for _ in range(past)))
    y = draw(rows, width, device=device, dtype=dtype)
    vectors = [draw(size, device=device) for size in (width, streams + competitive, width, width)]
    for store in (False, True):
        compare(inference.gate_norm, held, y, *vectors, store=store, competitive=competitive, tolerance=tolerance)


@precisions
@pytest.mark.parametrize("kind", ["relu2", "gelu", "swiglu", "glu"])
@pytest.mark.parametrize("width", [2, 70, 2100])
@devices
def test_activations_match_reference(device: str, width: int, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    compare(inference.activate, draw(3, width, device=device, dtype=dtype), kind, tolerance=tolerance)


@precisions
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("slots", "heads", "kv_heads", "width"), [(5, 2, 2, 8), (300, 2, 1, 6), (200, 1, 1, 16)])
@devices
def test_cached_attention_matches_reference(
    device: str, slots: int, heads: int, kv_heads: int, width: int, sink: bool, dtype: torch.dtype, tolerance: float
) -> None:
    q = draw(3, heads, width, device=device, dtype=dtype)
    keys, values = (draw(3, slots, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
    until = torch.tensor([0, slots // 2, slots - 1], device=device)
    keys[0, 1:], values[1, slots // 2 + 1 :] = float("nan"), float("nan")
    logits = draw(heads, device=device) if sink else None
    with ops.backend("triton"):
        assert torch.isfinite(inference.decode_attention(q, keys, values, until, logits)).all()
    known = (t.nan_to_num() for t in (keys, values))
    compare(inference.decode_attention, q, *known, until, logits, tolerance=tolerance)


def entered(
    projected: Tensor, heads: int, gains: Any, slots: int, positions: Tensor | None, mixing: Any, choice: str
) -> list[Tensor]:
    """Queries, and a cache of `slots` slots; prompts fill its first ones."""
    dtype, device = (torch.float64, projected.device) if choice == "reference" else (projected.dtype, projected.device)
    kv_heads, width = 2, 24
    keys, values = torch.zeros(2, len(projected), slots, kv_heads, width, device=device, dtype=dtype)
    angles = torch.linspace(0, 3, slots * width // 2, device=device).view(slots, width // 2)
    table, places = (angles.cos(), angles.sin()), (keys, values)
    if positions is None:
        length = projected.shape[1]
        table, places = tuple(t[:length] for t in table), tuple(t[:, :length] for t in places)
    with ops.backend(choice):
        inputs = (projected, heads, gains, *table)
        inputs = double(inputs) if choice == "reference" else inputs
        q = inference.enter_cache(*inputs, *places, positions, mixing)
    return [q, keys, values]


@precisions
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "extra"), [(2, 0), (4, 5)])
@pytest.mark.parametrize("length", [37, 1])
@devices
def test_heads_are_normed_rotated_and_written_to_slots(
    device: str, length: int, heads: int, extra: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Of prompts, and of one token per row; a gate may follow the values."""
    projected = draw(3, length, (heads + 4) * 24 + extra, device=device, dtype=dtype)
    gains = (draw(24, device=device), draw(24, device=device)) if norm else None
    positions = torch.tensor([0, 39, 2], device=device) if length == 1 else None
    outputs, exact = (
        entered(projected, heads, gains, 40, positions, None, choice) for choice in ("triton", "reference")
    )
    for a, b in zip(outputs, exact, strict=True):
        assert relative(a, b) < tolerance
        assert a.count_nonzero() == b.count_nonzero()


@precisions
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@devices
def test_heads_are_normed_and_rotated_without_a_cache(
    device: str, heads: int, kv_heads: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    width, length = 24, 37
    projected = draw(2, length, (heads + 2 * kv_heads) * width + 5, device=device, dtype=dtype)
    gains = (draw(width, device=device), draw(width, device=device)) if norm else None
    angles = draw(length, width // 2, device=device)
    table = (angles.cos(), angles.sin())
    compare(inference.turn_heads, projected, heads, kv_heads, gains, *table, tolerance=tolerance)


@precisions
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("length", [37, 1])
@devices
def test_values_are_mixed_with_an_anchor_when_cached(
    device: str, length: int, granularity: str, dtype: torch.dtype, tolerance: float
) -> None:
    """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V; the anchor is a part of another layer's projection."""
    mine, first = (draw(3, length, 8 * 24, device=device, dtype=dtype) for _ in range(2))
    own, anchor = (x[..., -2 * 24 :].unflatten(-1, (2, 24)) for x in (mine, first))
    sizes = {"elementwise": (2, 24), "headwise": (2, 1), "scalar": (1, 1)}
    scales = [draw(*sizes[granularity], device=device).expand(2, 24) for _ in range(2)]
    positions = torch.tensor([0, 39, 2], device=device) if length == 1 else None
    *_, values = entered(mine, 4, None, 40, positions, Mixing(anchor, *scales), "triton")
    wanted = scales[0].double() * anchor.double() + scales[1].double() * own.double()
    stored = values[:, :length] if positions is None else values[torch.arange(3), positions][:, None]
    assert relative(stored, wanted) < tolerance
    assert values.count_nonzero() == wanted.count_nonzero()


def test_split_heads_are_merged_and_counters_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.ops.inference import launch

    monkeypatch.setattr(launch, "_splits", lambda keys, heads: 4)
    width = 256  # heads so wide that a tile has 16 slots, and 70 slots make four shares
    q, *cache = (draw(2, *shape, width, device="cpu") for shape in ((3,), (70, 3), (70, 3)))
    for until in ([69, 3], [40, 0]):
        compare(inference.decode_attention, q, *cache, torch.tensor(until), draw(3, device="cpu"), tolerance=3e-6)
        assert (cache[0].device, 6, cache[0].data_ptr()) in launch._COUNTERS
        assert not launch._counters(cache[0], 6).any()


@devices
def test_empty_input_gives_empty_output(device: str) -> None:
    nothing, (w1, bias, w2, weight) = draw(0, 8, device=device), (draw(n, device=device) for n in (8, 3, 8, 8))
    with ops.backend("triton"):
        normed, h = inference.add_norm(nothing, nothing, weight)
        written, after = inference.gate_norm(Streams((nothing, nothing)), nothing, w1, bias, w2, weight)
    assert normed.shape == h.shape == written.shape == after.stored[1].shape == (0, 8)


@devices
def test_scattered_rows_are_copied_to_dense_memory(device: str) -> None:
    y, weight, scattered = draw(3, 8, device=device), draw(8, device=device), draw(8, 3, device=device).T
    compare(inference.add_norm, scattered, y, weight, tolerance=3e-6)
    held, vectors = Streams((y, scattered)), (weight, weight[:3], weight, weight)
    compare(inference.gate_norm, held, scattered, *vectors, tolerance=3e-6)
