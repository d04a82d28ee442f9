"""Chains that keep no streams: gradients as exact as the inversion, rows kept for β near 1, and junctions that keep
theirs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.multi_gate import inversion, multi_gate_inverted
from residua.ops.multi_gate import reference as plain
from residua.ops.multi_gate.inversion import UNBOUNDED_AMPLIFICATION, amplification, junctions_to_keep
from tests.nightly import only_nightly
from tests.ops.harness import assert_equal, assert_one_graph, interpreter, on_gpu, relative

TOKENS, N, WIDTH = 24, 4, 12
HALF_BIT = torch.finfo(torch.bfloat16).eps / 2


def drawn(
    junctions: int, bias: float, dtype: torch.dtype = torch.float64, tokens: int = TOKENS, width: int = WIDTH
) -> dict[str, Any]:
    """The leaves of a chain whose competitive gates write about 1/(n + e^bias) each, more for some tokens."""
    generator = torch.Generator().manual_seed(junctions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    biases = torch.zeros(N + 1, dtype=torch.float64)
    biases[0] = bias
    weights = [(normal(width), biases + 0.1 * normal(N + 1), normal(width)) for _ in range(junctions)]
    weight_dtype = torch.promote_types(dtype, torch.float32)
    return {
        "streams": normal(tokens, N, width).to(dtype).requires_grad_(),
        "updates": [normal(tokens, width).to(dtype).requires_grad_() for _ in range(junctions)],
        "weights": [[w.to(weight_dtype).requires_grad_() for w in ws] for ws in weights],
    }


def run(chain: dict[str, Any], operator: str, apart: bool = False, **settings: Any) -> list[Tensor]:
    """Every h of a chain, the last streams, and the gradients of all leaves."""
    streams, updates, weights = chain["streams"], chain["updates"], chain["weights"]
    state, outputs = streams.unbind(-2) if apart else (streams,), []
    for k, (update, ws) in enumerate(zip(updates, weights, strict=True)):
        update = update + 0.1 * outputs[-1] if outputs else update  # the sublayer's output depends on its input
        how = settings | ({"last": k == len(updates) - 1} if operator == "multi_gate_inverted" else {})
        h, state = getattr(ops, operator)(state, update, *ws, **how)
        outputs.append(h)
    outputs.append(state[0])
    leaves = [streams, *updates, *(w for ws in weights for w in ws)]
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    total = sum((probe * y).sum() for probe, y in zip(probes, outputs, strict=True))
    return [*outputs, *torch.autograd.grad(total, leaves)]


def worst(ours: list[Tensor], exact: list[Tensor]) -> float:
    return max(relative(a, b) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "one per stream"])
def test_float64_gradients_equal_those_of_kept_streams(apart: bool) -> None:
    chain = drawn(8, bias=3.0)
    kept, found = run(chain, "multi_gate_chain"), run(chain, "multi_gate_inverted", apart)
    assert_equal(kept[:9], found[:9])
    assert worst(found, kept) < 1e-11


def test_independent_gates_are_also_inverted() -> None:
    chain = drawn(3, bias=0.0)
    for ws in chain["weights"]:
        ws[1] = (ws[1].detach()[1:] - 2.0).requires_grad_()
    kept, found = (run(chain, name, competitive=False) for name in ("multi_gate_chain", "multi_gate_inverted"))
    assert worst(found, kept) < 1e-12


def test_overwritten_streams_are_exactly_the_kept_ones() -> None:
    """β = 1 leaves nothing of s in s': only the kept rows can restore it."""
    chain = drawn(4, bias=3.0)
    with torch.no_grad():
        for ws in chain["weights"][:3]:
            ws[0].mul_(0.0)
            ws[0][0] = 400.0  # the gate looks at one channel, which one stream of one token has and no other
        for t in (chain["streams"], *chain["updates"]):
            t[..., 0] = -3.0
        chain["streams"][5, 2, 0] = 30.0
        for update in chain["updates"]:
            update[5, 0] = 30.0
    beta = plain.gates(chain["streams"], *chain["weights"][0][:2])
    assert beta[5, 2] == 1.0 and beta.flatten().topk(2).values[1] < 0.3
    exact = run(chain, "multi_gate_chain")
    one_row = run(chain, "multi_gate_inverted", share=1 / (TOKENS * N))
    assert worst(one_row, exact) < 1e-9
    none = run(chain, "multi_gate_inverted", share=0.0)
    assert worst(none, exact) > 1e-3 and all(torch.isfinite(g).all() for g in none)


PARTS = [False, pytest.param(True, marks=[interpreter, pytest.mark.slow])]


@pytest.mark.parametrize("kernel", PARTS, ids=["plain", "kernel"])
def test_inversion_is_exact_or_finite_beyond_the_floor(kernel: bool) -> None:
    after, update = torch.randn(2, 3, N, 37), torch.randn(2, 3, 37)
    beta = torch.linspace(0.1, 0.9, 6 * N).view(2, 3, N)
    beta[1, 2, 3] = 1.0
    if kernel:
        from residua.ops.multi_gate import launch

        stats = torch.cat([beta, torch.full((2, 3, 4 * N + 2), float("nan"))], -1)
        found = launch.invert(after, update, stats, inversion.FLOOR)
    else:
        found = inversion.Plain(True, 1e-6).invert(after, update, beta)
    b, f = beta[..., None], update[..., None, :]
    torch.testing.assert_close((found + b * (f - found)).flatten(0, 2)[:-1], after.flatten(0, 2)[:-1])
    torch.testing.assert_close(found[1, 2, 3], (after[1, 2, 3] - update[1, 2]) / inversion.FLOOR)


def test_a_chain_keeps_streams_once_then_one_percent_of_rows() -> None:
    chain = drawn(6, bias=3.0, tokens=100)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.shape[-1] == WIDTH and t.numel() > WIDTH:
            kept[t.data_ptr()] = t.numel()
        return t

    state = (chain["streams"],)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for k, (update, ws) in enumerate(zip(chain["updates"], chain["weights"], strict=True)):
            _, state = multi_gate_inverted(state, update, *ws, last=k == 5)
    streams, updates, rows = 100 * N * WIDTH, 6 * 100 * WIDTH, 5 * 4 * WIDTH
    assert sum(kept.values()) == streams + updates + rows


def test_a_chain_without_its_last_junction_names_the_fix() -> None:
    chain = drawn(2, bias=3.0)
    h, _ = ops.multi_gate_inverted((chain["streams"],), chain["updates"][0], *chain["weights"][0], last=False)
    with pytest.raises(RuntimeError, match="last=True"):
        h.sum().backward()


def test_state_does_not_grow_without_gradients() -> None:
    chain = drawn(1, bias=3.0)
    with torch.no_grad():
        _, state = ops.multi_gate_inverted((chain["streams"],), chain["updates"][0], *chain["weights"][0], last=False)
    assert len(state) == 1


def test_bfloat16_error_is_as_documented() -> None:
    """65 junctions at the gates' start (mean β 0.026): the streams at the bottom are 1 to 3 % off."""
    error = bottom_error(65, 0.026)
    assert 0.003 < error < 0.03


def bottom_error(junctions: int, mean: float, share: float = inversion.SHARE, tail: float = 0.0) -> float:
    """RMS error of the first streams of a bfloat16 chain, found from its last ones."""
    generator = torch.Generator().manual_seed(0)
    tokens, width = 256, 64
    s = torch.randn(tokens, N, width, generator=generator).bfloat16()
    first, steps = s, []
    for _ in range(junctions):
        f = torch.randn(tokens, width, generator=generator).bfloat16()
        beta = mean * torch.exp(0.5 * torch.randn(tokens, N, generator=generator)).clamp(max=0.9 / mean)
        large = torch.rand(tokens, N, generator=generator) < tail
        beta = torch.where(large, 0.3 + 0.6 * torch.rand(tokens, N, generator=generator), beta)
        where = beta.flatten().topk(max(1, int(share * tokens * N))).indices if share else beta.new_empty(0).long()
        steps.append((f, beta, where, s.flatten(0, 1)[where]))
        s = (s.float() + beta[..., None] * (f.float()[:, None] - s.float())).bfloat16()
    plain_halves = inversion.Plain(True, 1e-6)
    for f, beta, where, rows in reversed(steps):
        s = plain_halves.invert(s, f, beta).flatten(0, 1).index_copy(0, where, rows).view_as(s)
    return float((s.float() - first.float()).norm() / first.float().norm())


@pytest.mark.slow
@interpreter
@pytest.mark.parametrize("apart", only_nightly([False, True], but=[True]), ids=["one tensor", "one per stream"])
def test_the_kernels_invert_like_the_reference(apart: bool) -> None:
    exact = run(drawn(3, bias=3.0, tokens=5), "multi_gate_inverted")
    with ops.backend("triton"):
        ours = run(drawn(3, bias=3.0, tokens=5, dtype=torch.float32), "multi_gate_inverted", apart)
    assert worst(ours, exact) < 2e-5


@pytest.mark.slow
@interpreter
def test_the_fused_chain_compiles_into_one_graph() -> None:
    chain = drawn(3, bias=3.0, tokens=3, dtype=torch.float32)

    def total(streams: Tensor, *updates: Tensor) -> Tensor:
        state, h = (streams,), 0.0
        with ops.backend("triton"):
            for k, (update, ws) in enumerate(zip(updates, chain["weights"], strict=True)):
                h, state = ops.multi_gate_inverted(state, update + 0.1 * h, *ws, last=k == 2)
        return h

    assert_one_graph(total, [chain["streams"], *chain["updates"]])


def moved_to_gpu(chain: dict[str, Any]) -> dict[str, Any]:
    return {
        "streams": chain["streams"].detach().cuda().requires_grad_(),
        "updates": [t.detach().cuda().requires_grad_() for t in chain["updates"]],
        "weights": [[w.detach().cuda().requires_grad_() for w in ws] for ws in chain["weights"]],
    }


@on_gpu
@pytest.mark.parametrize("width", [768, 1280])
def test_gpu_inversion_matches_kept_streams(width: int) -> None:
    chain = moved_to_gpu(drawn(12, bias=4.0, dtype=torch.bfloat16, tokens=700, width=width))
    kept, found = run(chain, "multi_gate_chain", segment=1), run(chain, "multi_gate_inverted")
    assert_equal(kept[:13], found[:13])
    assert worst(found, kept) < 0.02


@on_gpu
def test_gpu_inversion_keeps_half_the_memory_of_recomputation() -> None:
    """21 junctions of 12 layers: in multiples of f, 1.1 to keep per junction against 3. Prints MiB and milliseconds."""
    chain = moved_to_gpu(drawn(21, bias=3.0, dtype=torch.bfloat16, tokens=8200, width=768))
    kept: dict[str, float] = {}
    for name in ("multi_gate_chain", "multi_gate_inverted"):
        for _ in range(3):
            times = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            before = torch.cuda.memory_allocated()
            state, h = (chain["streams"],), None
            times[0].record()
            for k, (update, ws) in enumerate(zip(chain["updates"], chain["weights"], strict=True)):
                how = {"last": k == 20} if name == "multi_gate_inverted" else {}
                h, state = getattr(ops, name)(state, update * 1, *ws, **how)
            state = ()
            kept[name] = (torch.cuda.memory_allocated() - before) / 2**20
            times[1].record()
            h.float().square().sum().backward()
            times[2].record()
            torch.cuda.synchronize()
        forward, backward = times[0].elapsed_time(times[1]), times[1].elapsed_time(times[2])
        print(f"{name}: keeps {kept[name]:.0f} MiB, forward {forward:.2f} ms, backward {backward:.2f} ms")
    assert kept["multi_gate_inverted"] < 0.5 * kept["multi_gate_chain"]


def test_amplification_follows_the_largest_gate_not_kept() -> None:
    beta = torch.tensor([[0.5, 0.75], [0.9, 0.2]], dtype=torch.float64)
    found = [float(amplification(beta, share)) for share in (0.0, 0.1, 0.25, 0.5, 1.0)]
    assert found == pytest.approx([10, 4, 4, 2, 1])
    assert float(amplification(torch.tensor([0.99, 0.1]), 0.0)) == UNBOUNDED_AMPLIFICATION


def test_junctions_with_large_errors_keep_their_streams() -> None:
    most = inversion.MAX_AMPLIFIED_ERROR / HALF_BIT
    assert most == 64
    assert junctions_to_keep(dict.fromkeys(range(3, 9), 2.0), (), HALF_BIT) == []  # 2⁶
    assert junctions_to_keep(dict.fromkeys(range(3, 10), 2.0), (), HALF_BIT) == [6]  # every fourth: 2³ is the room left
    assert junctions_to_keep(dict.fromkeys(range(3, 10), 2.0), (6,), HALF_BIT) == []
    assert junctions_to_keep({3: 1.1, 4: UNBOUNDED_AMPLIFICATION, 5: 1.1}, (), HALF_BIT) == [4]
    assert junctions_to_keep(dict.fromkeys(range(20), 2.0), (), torch.finfo(torch.float32).eps / 2) == []


def overwriting_chain(dtype: torch.dtype, *, keep: tuple[int, ...] | None) -> tuple[list[Tensor], dict[int, float]]:
    """Gradients of a chain in which half of the junctions overwrite half of one stream; None keeps all streams."""
    tokens, width, junctions = 96, 16, 14
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    streams, updates = normal(tokens, N, width), [normal(tokens, width) for _ in range(junctions)]
    weights = []
    for k in range(junctions):
        bias = torch.tensor([0.0, math.log(1.5), -1.8, -1.8, -1.8] if 3 <= k < 10 else [3.0, 0, 0, 0, 0])
        weights.append([0.1 * normal(width), bias.double() + 0.1 * normal(N + 1), normal(width)])
    exact = torch.promote_types(dtype, torch.float32)
    s, f = streams.to(dtype).requires_grad_(), [u.to(dtype).requires_grad_() for u in updates]
    w = [[x.to(exact).requires_grad_() for x in own] for own in weights]
    state, total, amplified = (s,), torch.zeros((), dtype=torch.float64), {}
    for k in range(junctions):
        amplified[k] = float(amplification(plain.gates(state[0], *w[k][:2]).detach(), 0.01))
        if keep is None:
            h, state = ops.multi_gate_chain(state, f[k], *w[k])
        else:
            h, state = ops.multi_gate_inverted(state, f[k], *w[k], last=k == junctions - 1 or k in keep)
        total = total + (normal(tokens, width) * h).sum()
    return list(torch.autograd.grad(total, [s, *f, *(x for own in w for x in own)])), amplified


def test_keeping_some_junctions_fixes_bfloat16_gradients() -> None:
    exact, amplified = overwriting_chain(torch.float64, keep=None)
    keep = tuple(junctions_to_keep({k: amplified[k] for k in list(amplified)[:-1]}, (), HALF_BIT))
    assert 0 < len(keep) < 7
    kept, inverted, some = (worst(overwriting_chain(torch.bfloat16, keep=k)[0], exact) for k in (None, (), keep))
    assert inverted > 10 * kept and some < 2 * kept, (kept, inverted, some, keep)
    assert worst(overwriting_chain(torch.float64, keep=keep)[0], exact) < 1e-11


@pytest.mark.nightly
def test_compiled_code_follows_changes_of_kept_junctions() -> None:
    from residua.config.topologies import Invert, MultiGate
    from residua.model.topology import build_topology

    topology = build_topology(MultiGate(streams=2, memory=Invert()), 4, WIDTH)
    step = torch.compile(lambda k, y, state: topology.step(k, y, state), backend="eager")
    streams, y = torch.randn(1, 3, 2, WIDTH, requires_grad=True), torch.randn(1, 3, WIDTH)
    assert len(step(2, y, (streams,))[1]) == 2  # the streams, and the link to the next junction
    topology.recovery().kept = (2,)
    assert len(step(2, y, (streams,))[1]) == 1
