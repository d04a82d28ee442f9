"""The fused junction, alone and with the norm after it, against float64; and chains that keep few streams."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.multi_gate import multi_gate_chain, reference
from residua.ops.rms_norm.reference import rms_norm
from tests.nightly import only_nightly
from tests.ops.harness import assert_close, assert_equal, assert_one_graph, choose, interpreter, on_gpu, results

pytestmark = pytest.mark.slow

FP32, BF16 = torch.float32, torch.bfloat16
EPS, NORM_EPS = 1e-6, 1e-3


def junction(tokens: int, n: int, width: int, competitive: bool, device: str = "cpu") -> list[Tensor]:
    """streams, update, gate_query, gate_bias, pool_query, none of them near a special value."""
    shapes = ((tokens, n, width), (tokens, width), (width,), (n + competitive,), (width,))
    return [torch.randn(shape, device=device) for shape in shapes]


triton = choose("triton", ops.multi_gate)


SIZES = {
    "odd width, shared programs": (4, 4, 33),
    "width of several tiles": (2, 2, 300),
    "padded streams": (3, 3, 100),
    "eight streams": (2, 8, 40),
    "sixteen streams": (1, 16, 8),
    "one token": (1, 2, 16),
}


GATES = [*product(SIZES, (True,)), ("padded streams", False)]
"""Gates differ in one function, whatever the size: `make test` has one case of independent ones."""


@interpreter
@pytest.mark.parametrize("case", only_nightly(product(SIZES, (True, False)), but=GATES), ids=str)
def test_the_kernels_equal_the_reference_in_every_gradient(case):
    size, competitive = case
    inputs = junction(*SIZES[size], competitive)
    exact = results(partial(reference.multi_gate, competitive=competitive), inputs, torch.float64)
    assert_close(results(partial(triton, competitive=competitive), inputs), exact, 5e-6)


@interpreter
def test_non_contiguous_and_batched_inputs_are_accepted():
    streams, update, *rest = junction(6, 3, 10, True)
    leaf = streams.transpose(1, 2).contiguous().requires_grad_()
    batched = leaf.transpose(1, 2).reshape(2, 3, 3, 10)
    h, s = triton(batched, update.reshape(3, 2, 10).transpose(0, 1), *rest)
    exact = (t.double() for t in (batched, update.reshape(3, 2, 10).transpose(0, 1), *rest))
    want_h, want_s = reference.multi_gate(*exact)
    assert h.shape == (2, 3, 10) and torch.allclose(h.double(), want_h, atol=1e-5)
    assert torch.allclose(s.double(), want_s, atol=1e-5)
    (g,) = torch.autograd.grad(h.sum() + s.square().sum(), leaf)
    (want,) = torch.autograd.grad(want_h.sum() + want_s.square().sum(), leaf)
    assert torch.allclose(g, want, atol=1e-5)


def chain(
    weights: list[list[Tensor]], streams: Tensor | tuple[Tensor, ...], updates: list[Tensor], **settings: int
) -> list[Tensor]:
    """Every h of a chain of junctions, and the last streams."""
    state, hidden = streams if isinstance(streams, tuple) else (streams,), []
    with ops.backend("triton"):
        for update, (gate_query, gate_bias, pool_query) in zip(updates, weights, strict=True):
            # The sublayer between two junctions: whatever is written depends on what was read.
            update = update + 0.1 * hidden[-1] if hidden else update
            h, state = multi_gate_chain(state, update, gate_query, gate_bias, pool_query, **settings)
            hidden.append(h)
    return [*hidden, state[0]]


def chain_with_gradients(
    weights: list[list[Tensor]], streams: Tensor, updates: list[Tensor], apart: bool = False, **settings: int
) -> list[Tensor]:
    """`chain`, of one tensor of streams or of n, and the gradients of all its inputs."""
    outputs = chain(weights, streams.unbind(-2) if apart else streams, updates, **settings)
    leaves = [streams, *updates, *(w for ws in weights for w in ws)]
    return [*outputs, *torch.autograd.grad(sum(y.float().square().sum() for y in outputs), leaves)]


def chain_inputs(junctions: int, dtype: torch.dtype) -> tuple[list[list[Tensor]], Tensor, list[Tensor]]:
    drawn = [junction(1, 3, 10, True) for _ in range(junctions)]
    weights = [[t.requires_grad_() for t in d[2:]] for d in drawn]
    return weights, drawn[0][0].to(dtype).requires_grad_(), [d[1].to(dtype).requires_grad_() for d in drawn]


@interpreter
@pytest.mark.parametrize("dtype", only_nightly([FP32, BF16], but=[BF16]), ids=str)
def test_recomputed_streams_are_bit_identical(dtype):
    inputs = chain_inputs(4, dtype)
    for one, other in pairwise(chain_with_gradients(*inputs, segment=segment) for segment in (1, 3, 4)):
        assert_equal(one, other)


@interpreter
def test_a_chain_keeps_its_streams_once_per_segment():
    weights, streams, updates = chain_inputs(6, torch.float32)
    kept: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        if t.dim() == 3:
            kept.add(t.data_ptr())
        return t

    for segment, expected in ((1, 6), (3, 2), (6, 1)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            held = chain(weights, streams, updates, segment=segment)
        assert len(kept) == expected
        del held


@interpreter
def test_a_chain_can_be_restarted_from_its_streams_anywhere():
    weights, streams, updates = chain_inputs(3, torch.float32)
    whole = chain(weights, streams, updates)[-1]
    with ops.backend("triton"):
        state: tuple[Tensor, ...] = (streams,)
        h = None
        for update, w in zip(updates, weights, strict=True):
            h, state = multi_gate_chain(state[:1], update if h is None else update + 0.1 * h, *w)
    assert torch.equal(whole, state[0])


@interpreter
def test_compiles_into_one_graph():
    weights, streams, updates = chain_inputs(3, torch.float32)
    assert_one_graph(lambda streams, *others: chain(weights, streams, [*others], segment=2), [streams, *updates])


def assert_the_fill_phase_is_right(
    tokens: int, n: int, width: int, dtype: torch.dtype, passes_on: bool, tolerance: float, device: str = "cpu"
) -> None:
    """The pool, the streams it passes on and every gradient, against the reference in float64 on the same numbers."""
    streams, _, query, *_ = junction(tokens, n, width, True, device)
    probes = torch.randn(n + 1, tokens, width, device=device).to(dtype)

    def run(operator: Callable, work: torch.dtype) -> list[Tensor]:
        stored = [t.to(dtype).to(work).requires_grad_() for t in streams.unbind(1)]
        leaves = [*stored, query.to(torch.promote_types(work, torch.float32)).requires_grad_()]
        h, after = operator(leaves[:-1], leaves[-1])
        read = (h, *after) if passes_on else (h,)
        total = sum((probe.to(y) * y).sum() for probe, y in zip(probes, read, strict=False))
        return [h, *after, *torch.autograd.grad(total, leaves)]

    def ours(*args: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with ops.backend("triton"):
            return ops.pool_streams(*args)

    for a, b in zip(run(ours, dtype), run(reference.pool_streams, torch.float64), strict=True):
        assert a.isfinite().all() and (a.double() - b).norm() <= tolerance * b.norm()


@interpreter
@pytest.mark.parametrize("case", only_nightly(product((2, 3), (True, False)), but=[(2, False), (3, True)]), ids=str)
def test_the_fill_phase_equals_the_reference_in_every_gradient(case):
    """n, and whether the streams are read again."""
    n, passes_on = case
    assert_the_fill_phase_is_right(4, n, 20, torch.float32, passes_on, 5e-6)


@interpreter
def test_streams_of_the_fill_phase_need_not_be_stacked():
    inputs = chain_inputs(3, torch.float32)
    assert_equal(*(chain_with_gradients(*inputs, apart=apart, segment=2) for apart in (False, True)))


def test_auto_backend_uses_the_reference_on_a_cpu():
    inputs = junction(2, 2, 8, True)
    assert torch.equal(ops.multi_gate(*inputs)[0], reference.multi_gate(*inputs)[0])
    h, state = multi_gate_chain((inputs[0],), *inputs[1:])
    assert len(state) == 1 and torch.equal(h, reference.multi_gate(*inputs)[0])


# Each row is two kernels that take seconds to compile, so not every combination: every width in both dtypes, both kinds
# of gates, and each way in which the launcher cuts rows. Sixteen streams take longest; their width is that of one tile.
ON_A_GPU = {
    "2 streams": (2, 768, FP32, False),
    "2 streams, a warp to a token": (2, 1280, FP32, True),
    "4 streams, ragged": (4, 1000, FP32, True),
    "4 streams": (4, 768, BF16, True),
    "4 streams, a warp to a token": (4, 1280, BF16, True),
    "7 streams, padded and ragged": (7, 1000, BF16, False),
    "8 streams": (8, 768, BF16, True),
    "8 streams, wide": (8, 1280, BF16, True),
    "4 streams, widest": (4, 4096, BF16, True),
    "16 streams, ragged": (16, 100, FP32, False),
}
TOLERANCE = {FP32: 2e-5, BF16: 1e-2}


@on_gpu
@pytest.mark.parametrize(("n", "width", "dtype", "competitive"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_gpu_gradients_are_correct(n, width, dtype, competitive):
    inputs = [t.to(dtype) if t.dim() > 1 else t for t in junction(700, n, width, competitive, "cuda")]
    exact = results(partial(reference.multi_gate, competitive=competitive), inputs, torch.float64)
    assert_close(results(partial(triton, competitive=competitive), inputs), exact, TOLERANCE[dtype])


@on_gpu
@pytest.mark.parametrize(
    ("n", "width", "dtype", "passes_on"), [(2, 768, BF16, True), (4, 768, BF16, True), (3, 1000, FP32, False)], ids=str
)
def test_gpu_fill_phase_equals_the_reference(n, width, dtype, passes_on):
    assert_the_fill_phase_is_right(700, n, width, dtype, passes_on, TOLERANCE[dtype], "cuda")


@on_gpu
@pytest.mark.parametrize("segment", [1, 2])
def test_gpu_runs_are_bit_identical(segment):
    drawn = [[t.cuda() for t in junction(3000, 4, 768, True)] for _ in range(6)]
    weights = [[t.detach().requires_grad_() for t in d[2:]] for d in drawn]
    streams, updates = drawn[0][0].bfloat16().requires_grad_(), [d[1].bfloat16().requires_grad_() for d in drawn]
    assert_equal(*(chain_with_gradients(weights, streams, updates, segment=segment) for _ in range(2)))


def normed_inputs(tokens: int, n: int, width: int, competitive: bool, dtype: torch.dtype, device: str) -> list[Tensor]:
    """streams, update, gate_query, gate_bias, pool_query, gain, and the gradients of the norm and of the streams."""
    drawn = junction(tokens, n, width, competitive, device)
    drawn += [torch.randn(shape, device=device) for shape in ((width,), (tokens, width), (tokens, n, width))]
    return [t.to(dtype) if t.dim() > 1 else t for t in drawn]


def junction_and_norm(drawn: list[Tensor], competitive: bool, passes_on: bool = True) -> list[Tensor]:
    """Junction, then norm, and every gradient, by autograd in float64."""
    *leaves, g_normed, g_after = (t.double() for t in drawn)
    *weights, gain = leaves = [t.requires_grad_() for t in leaves]
    h, after = reference.multi_gate(*weights, competitive=competitive, eps=EPS)
    x = rms_norm(h, gain, eps=NORM_EPS)
    total = (x * g_normed).sum() + (after * g_after).sum() * passes_on
    return [x, after, *torch.autograd.grad(total, leaves)]


def normed_junction(
    drawn: list[Tensor], competitive: bool, passes_on: bool = True, apart: bool = False
) -> list[Tensor]:
    """The same from the operators; the streams may be one tensor or n."""
    streams, f, w1, bias, w2, gain, g_normed, g_after = drawn
    operators, width = torch.ops.residua, f.shape[-1]
    given = list(streams.unbind(-2)) if apart else [streams]
    x, after, stats, hidden = operators.multi_gate_forward(given, f, w1, bias, w2, competitive, EPS, gain, NORM_EPS)
    *g_streams, g_f, row = operators.multi_gate_backward(
        g_normed, [g_after] * passes_on, given, [f], [stats], w1, w2, apart, competitive, EPS, gain, hidden
    )
    g_w1, g_w2, g_bias, g_gain = row.split([width, width, streams.shape[-2] + 1, width])
    g_s = torch.stack(g_streams, -2) if apart else g_streams[0]
    return [x, after, g_s, g_f, g_w1, g_bias[0 if competitive else 1 :], g_w2, g_gain]


NORMED_SIZES = {
    "odd width, shared programs": (4, 4, 33, True, True),
    "width of several tiles, apart": (2, 2, 300, False, True),
    "padded streams, last junction": (3, 3, 20, True, False),
    "eight streams": (1, 8, 40, True, True),
}


@interpreter
@pytest.mark.parametrize(("tokens", "n", "width", "competitive", "passes_on"), NORMED_SIZES.values(), ids=NORMED_SIZES)
def test_a_normed_junction_equals_junction_and_norm(tokens, n, width, competitive, passes_on):
    drawn = normed_inputs(tokens, n, width, competitive, FP32, "cpu")
    made = normed_junction(drawn, competitive, passes_on, apart=n == 2)
    assert_close(made, junction_and_norm(drawn, competitive, passes_on), 5e-6)


@interpreter
def test_empty_input_gives_no_normed_output_and_zero_gradients():
    made = normed_junction(normed_inputs(0, 3, 8, True, FP32, "cpu"), True)
    assert made[0].shape == (0, 8) and made[1].shape == (0, 3, 8)
    assert all(g.count_nonzero() == 0 for g in made[2:])


def second_of_a_segment(drawn: list[Tensor], first: list[Tensor]) -> list[list[Tensor]]:
    """The gradients of a junction whose streams are recomputed from those before another one, and from its own."""
    streams, f, w1, bias, w2, gain, g_normed, g_after = drawn
    operators = torch.ops.residua
    _, mine, past, _ = operators.multi_gate_forward([streams], *first[1:5], True, EPS, first[5], NORM_EPS)
    _, _, stats, hidden = operators.multi_gate_forward([mine], f, w1, bias, w2, True, EPS, gain, NORM_EPS)
    kept = ([streams], [first[1], f], [past, stats]), ([mine], [f], [stats])
    settings = (w1, w2, False, True, EPS, gain, hidden)
    return [operators.multi_gate_backward(g_normed, [g_after], *what, *settings) for what in kept]


@interpreter
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_recomputed_streams_of_normed_junctions_are_identical(dtype):
    again, kept = second_of_a_segment(*(normed_inputs(2, 3, 10, True, dtype, "cpu") for _ in range(2)))
    assert_equal(again, kept)


# every way in which the launcher cuts rows
NORMED_ON_A_GPU = {
    "2 streams": (2, 768, FP32, False),
    "4 streams, ragged": (4, 1000, FP32, True),
    "4 streams": (4, 768, BF16, True),
    "4 streams, between powers": (4, 1280, BF16, True),
    "8 streams": (8, 768, BF16, True),
    "4 streams, wide": (4, 2048, BF16, False),
}


@on_gpu
@pytest.mark.parametrize(("n", "width", "dtype", "competitive"), NORMED_ON_A_GPU.values(), ids=NORMED_ON_A_GPU)
def test_gpu_normed_gradients_are_correct_and_repeatable(n, width, dtype, competitive):
    drawn = normed_inputs(700, n, width, competitive, dtype, "cuda")
    made = normed_junction(drawn, competitive)
    assert_close(made, junction_and_norm(drawn, competitive), TOLERANCE[dtype])
    assert all(torch.equal(a, b) for a, b in zip(made, normed_junction(drawn, competitive), strict=True))
