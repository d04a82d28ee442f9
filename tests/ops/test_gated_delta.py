"""The gated delta rule: loop, chunks and single steps against the paper's equation, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from residua.ops.gated_delta import gated_delta
from residua.ops.gated_delta.reference import chunked, naive, step
from tests.golden.compare import agree, close, gradients, random

Rule = Callable[..., tuple[Tensor, Tensor]]


def inputs(length: int, *, key_heads: int = 2) -> dict[str, Tensor]:
    """The rule's arguments as leaves: unit keys, decays from none to strong, a state to continue."""
    return {
        "q": random(2, length, key_heads, 5, seed=1),
        "k": leaf(normalize(random(2, length, key_heads, 5, seed=2), dim=-1)),
        "v": random(2, length, 4, 3, seed=3),
        "g": leaf(-(random(2, length, 4, seed=4).abs() ** 3)),
        "beta": leaf(random(2, length, 4, seed=5).sigmoid()),
        "state": random(2, 4, 5, 3, seed=6),
    }


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def tokens(arguments: dict[str, Tensor], some: slice | int) -> dict[str, Tensor]:
    """The arguments of some tokens only, without the state."""
    return {name: x[:, some] for name, x in arguments.items() if name != "state"}


def short_documents(length: int) -> Tensor:
    """Segments of about ten tokens; an id comes back later, as another document."""
    return (torch.rand(2, length) < 0.1).cumsum(1) % 3


def as_printed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule as the paper prints it, S [V, K], for one head: q, k [T, K], v [T, V], g, beta [T]."""
    memory = torch.zeros(v.shape[1], k.shape[1], dtype=v.dtype)
    outputs = []
    for t in range(v.shape[0]):
        turn = torch.eye(k.shape[1], dtype=v.dtype) - beta[t] * torch.outer(k[t], k[t])
        memory = memory @ (g[t].exp() * turn) + beta[t] * torch.outer(v[t], k[t])
        outputs.append(memory @ q[t])
    return torch.stack(outputs)


def test_naive_is_the_equation_of_the_paper() -> None:
    arguments = inputs(9)
    del arguments["state"]
    o, _ = naive(**arguments)
    q, k, v, g, beta = (x[1] for x in arguments.values())
    for h in range(4):
        printed = as_printed(q[:, h // 2], k[:, h // 2], v[:, h], g[:, h], beta[:, h])
        agree([o[1, :, h]], [printed], arguments)


@pytest.mark.parametrize("documents", ["one", "many"])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 130])
def test_chunked_equals_naive_in_values_and_gradients(length: int, documents: str) -> None:
    arguments = inputs(length)
    segments = short_documents(length) if documents == "many" else None
    agree(chunked(**arguments, segments=segments), naive(**arguments, segments=segments), arguments)


@pytest.mark.parametrize("rule", [naive, chunked])
def test_no_tokens_give_no_outputs_and_leave_the_state(rule: Rule) -> None:
    arguments = inputs(0)
    o, state = rule(**arguments, segments=torch.zeros(2, 0, dtype=torch.int64))
    assert o.shape == (2, 0, 4, 3)
    assert torch.equal(state, arguments["state"])


@pytest.mark.slow
@pytest.mark.parametrize("boundary", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("rule", [naive, chunked])
def test_packed_documents_equal_documents_run_apart(rule: Rule, boundary: int) -> None:
    arguments = tokens(inputs(130), slice(None))
    segments = (torch.arange(130) >= boundary).long().expand(2, -1)
    first, _ = rule(**tokens(arguments, slice(boundary)))
    second, last = rule(**tokens(arguments, slice(boundary, None)))
    agree(rule(**arguments, segments=segments), [torch.cat([first, second], 1), last], arguments)


def test_steps_from_a_prefilled_state_equal_naive() -> None:
    arguments = inputs(70)
    o, state = chunked(**tokens(arguments, slice(66)), state=arguments["state"])
    outputs = [o]
    for t in range(66, 70):
        o, state = step(**tokens(arguments, t), state=state)
        outputs.append(o[:, None])
    agree([torch.cat(outputs, 1), state], naive(**arguments), arguments)


def test_full_share_without_decay_stores_the_value_under_its_key() -> None:
    arguments = inputs(80, key_heads=4)
    k, v = arguments["k"], arguments["v"]
    o, _ = chunked(k, k, v, torch.zeros_like(arguments["g"]), torch.ones_like(arguments["beta"]))
    close("value read back", o, v)


def test_an_output_depends_on_no_later_token() -> None:
    arguments = inputs(130)
    o, _ = chunked(**arguments)
    reached = torch.autograd.grad(o[:, 70].sum(), [arguments[name] for name in ("k", "v", "g", "beta")])
    for gradient in reached:
        assert gradient[:, :71].abs().sum() > 0
        assert gradient[:, 71:].abs().sum() == 0


def test_strong_decay_neither_overflows_nor_spoils_gradients() -> None:
    arguments = inputs(130)
    arguments["g"] = leaf(torch.full_like(arguments["g"], -60.0))
    found = chunked(**arguments)
    for a, b in zip(found, naive(**arguments), strict=True):
        close("value", a, b)
    for name, gradient in gradients(found, [torch.ones_like(x) for x in found], arguments).items():
        assert gradient.isfinite().all(), name


def test_low_precision_is_reduced_in_float32_also_under_autocast() -> None:
    arguments = {name: x.detach().bfloat16() for name, x in inputs(130).items()}
    exact, _ = naive(**{name: x.double() for name, x in arguments.items()})
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunked(**arguments)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    # One rounding of the result: half a unit in bfloat16's last of 8 bits.
    torch.testing.assert_close(o.double(), exact, rtol=2.0**-8, atol=1e-4)


def test_shapes_that_do_not_fit_are_named() -> None:
    arguments = inputs(7, key_heads=3)
    with pytest.raises(ValueError, match=r"H a multiple of H_k"):
        gated_delta(**arguments)
    arguments = inputs(7)
    with pytest.raises(ValueError, match=r"g and beta have shapes \(2, 7\)"):
        gated_delta(**arguments | {"g": arguments["g"][..., 0]})
