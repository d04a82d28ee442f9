"""Chains that keep no streams: gradients as exact as the inversion, the fallback for β near 1, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops import fused
from residua.ops.multi_gate import inversion, multi_gate_inverted
from residua.ops.multi_gate import reference as plain

TOKENS, N, WIDTH = 24, 4, 12
interpreter = pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1")


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
        update = update + 0.1 * outputs[-1] if outputs else update  # a sublayer writes what it makes of what it read
        how = {"last": k == len(updates) - 1, **settings} if operator == "multi_gate_inverted" else {}
        h, state = getattr(ops, operator)(state, update, *ws, **how)
        outputs.append(h)
    outputs.append(state[0])
    leaves = [streams, *updates, *(w for ws in weights for w in ws)]
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    total = sum((probe * y).sum() for probe, y in zip(probes, outputs, strict=True))
    return [*outputs, *torch.autograd.grad(total, leaves)]


def worst(ours: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, exact, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "as the fill phase leaves them"])
def test_in_float64_every_gradient_is_that_of_kept_streams(apart: bool) -> None:
    chain = drawn(8, bias=3.0)
    kept, found = run(chain, "multi_gate_chain"), run(chain, "multi_gate_inverted", apart)
    assert all(torch.equal(a, b) for a, b in zip(kept[:9], found[:9], strict=True))
    assert worst(found, kept) < 1e-11


def test_independent_gates_are_inverted_as_well() -> None:
    chain = drawn(3, bias=0.0)
    for ws in chain["weights"]:
        ws[1] = (ws[1].detach()[1:] - 2.0).requires_grad_()
    outcomes = []
    for operator in (ops.multi_gate_chain, ops.multi_gate_inverted):
        state = (chain["streams"],)
        for k, (update, ws) in enumerate(zip(chain["updates"], chain["weights"], strict=True)):
            how = {"last": k == 2} if operator is ops.multi_gate_inverted else {}
            h, state = operator(state, update, *ws, competitive=False, **how)
        outcomes.append(torch.autograd.grad(h.square().sum(), [chain["streams"], *chain["updates"]]))
    assert worst(list(outcomes[1]), list(outcomes[0])) < 1e-12


def test_streams_that_were_overwritten_are_those_that_were_kept() -> None:
    """β = 1 exactly leaves nothing of s in s': only the kept rows can give it back."""
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


def test_the_rows_kept_are_those_with_the_largest_beta() -> None:
    after, update = torch.randn(2, 3, N, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    beta = torch.linspace(0.1, 0.9, 6 * N, dtype=torch.float64).view(2, 3, N)
    beta[1, 2, 3] = 1.0
    rows = torch.full((1, 5), 7.0, dtype=torch.float64)
    found = inversion.invert(after, update, beta, beta.flatten().topk(1).indices, rows)
    assert torch.equal(found[1, 2, 3], rows[0])
    others = ((after - beta[..., None] * update[..., None, :]) / (1 - beta[..., None])).flatten(0, 2)[:-1]
    torch.testing.assert_close(found.flatten(0, 2)[:-1], others)


def test_beyond_the_floor_a_row_that_is_not_kept_stays_finite() -> None:
    after, update = torch.randn(1, 2, 5), torch.randn(1, 5)
    beta = torch.tensor([[1.0, 0.5]])
    found = inversion.invert(after, update, beta, torch.tensor([1]), torch.zeros(1, 5))
    torch.testing.assert_close(found[0, 0], (after[0, 0] - update[0]) / inversion.FLOOR)


def test_a_chain_keeps_its_streams_once_and_a_hundredth_of_them_otherwise() -> None:
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


def test_a_chain_without_its_last_junction_says_what_is_missing() -> None:
    chain = drawn(2, bias=3.0)
    h, _ = ops.multi_gate_inverted((chain["streams"],), chain["updates"][0], *chain["weights"][0], last=False)
    with pytest.raises(RuntimeError, match="last=True"):
        h.sum().backward()


def test_without_gradients_nothing_is_added_to_the_state() -> None:
    chain = drawn(1, bias=3.0)
    with torch.no_grad():
        _, state = ops.multi_gate_inverted((chain["streams"],), chain["updates"][0], *chain["weights"][0], last=False)
    assert len(state) == 1


def test_in_bfloat16_the_error_is_what_the_docs_say() -> None:
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
    for f, beta, where, rows in reversed(steps):
        s = inversion.invert(s, f, beta, where, rows)
    return float((s.float() - first.float()).norm() / first.float().norm())


@pytest.mark.slow
@interpreter
@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "as the fill phase leaves them"])
def test_the_kernels_invert_as_the_reference_does(apart: bool) -> None:
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
        return h.square().sum()

    leaves = [chain["streams"], *chain["updates"]]
    eager, compiled = (
        torch.autograd.grad(f(*leaves), leaves)
        for f in (total, torch.compile(total, backend="aot_eager", fullgraph=True))
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(fused.INTERPRETED, reason="needs TRITON_INTERPRET=0")
def test_on_a_gpu_inversion_agrees_with_kept_streams() -> None:
    chain = drawn(12, bias=4.0, dtype=torch.bfloat16, tokens=700, width=768)
    chain = {
        "streams": chain["streams"].detach().cuda().requires_grad_(),
        "updates": [t.detach().cuda().requires_grad_() for t in chain["updates"]],
        "weights": [[w.detach().cuda().requires_grad_() for w in ws] for ws in chain["weights"]],
    }
    kept, found = run(chain, "multi_gate_chain"), run(chain, "multi_gate_inverted")
    assert all(torch.equal(a, b) for a, b in zip(kept[:13], found[:13], strict=True))
    assert worst(found, kept) < 0.02
