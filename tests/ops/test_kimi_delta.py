"""The delta rule with a decay per channel: loop, chunks and single steps against the paper's equation, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from residua.ops import gated_delta, kimi_delta
from residua.ops.kimi_delta.reference import chunked, naive, step
from tests.golden import kimi
from tests.golden.compare import agree, close, gradients, random
from tests.nightly import only_nightly
from tests.ops.test_gated_delta import Rule, leaf, short_documents, tokens


def inputs(length: int, *, key_heads: int = 4) -> dict[str, Tensor]:
    """The rule's arguments as leaves: unit keys, decays from none to strong, a state to continue."""
    return {
        "q": random(2, length, key_heads, 5, seed=1),
        "k": leaf(normalize(random(2, length, key_heads, 5, seed=2), dim=-1)),
        "v": random(2, length, 4, 3, seed=3),
        "g": leaf(-(random(2, length, 4, 5, seed=4).abs() ** 3)),
        "beta": leaf(random(2, length, 4, seed=5).sigmoid()),
        "state": random(2, 4, 5, 3, seed=6),
    }


def test_naive_is_the_equation_of_the_paper() -> None:
    arguments = inputs(9)
    del arguments["state"]
    o, _ = naive(**arguments)
    for h in range(4):
        printed = kimi.delta_rule(*(x[1, :, h] for x in arguments.values()))
        agree([o[1, :, h]], [printed], arguments)


@pytest.mark.parametrize(
    ("length", "documents"), [(1, "one"), (7, "many"), (63, "many"), (64, "one"), (65, "many"), (130, "many")]
)
def test_chunked_equals_naive_in_values_and_gradients(length: int, documents: str) -> None:
    arguments = inputs(length, key_heads=2)
    segments = short_documents(length) if documents == "many" else None
    agree(chunked(**arguments, segments=segments), naive(**arguments, segments=segments), arguments)


@pytest.mark.parametrize("rule", [naive, chunked])
def test_no_tokens_give_no_outputs_and_leave_the_state(rule: Rule) -> None:
    arguments = inputs(0)
    o, state = rule(**arguments, segments=torch.zeros(2, 0, dtype=torch.int64))
    assert o.shape == (2, 0, 4, 3)
    assert torch.equal(state, arguments["state"])


@pytest.mark.slow
@pytest.mark.parametrize("boundary", only_nightly([1, 15, 16, 17, 63, 64, 65, 100], but=[17, 64]))
def test_packed_documents_equal_documents_run_apart(boundary: int) -> None:
    arguments = tokens(inputs(130), slice(None))
    segments = (torch.arange(130) >= boundary).long().expand(2, -1)
    first, _ = chunked(**tokens(arguments, slice(boundary)))
    second, last = chunked(**tokens(arguments, slice(boundary, None)))
    agree(chunked(**arguments, segments=segments), [torch.cat([first, second], 1), last], arguments)


def test_steps_from_a_prefilled_state_equal_naive() -> None:
    arguments = inputs(70)
    o, state = chunked(**tokens(arguments, slice(66)), state=arguments["state"])
    outputs = [o]
    for t in range(66, 70):
        o, state = step(**tokens(arguments, t), state=state)
        outputs.append(o[:, None])
    agree([torch.cat(outputs, 1), state], naive(**arguments), arguments)


def test_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    arguments = inputs(70)
    arguments["g"] = leaf(-(random(2, 70, 4, seed=7).abs() ** 3))
    spread = arguments | {"g": arguments["g"][..., None].expand(-1, -1, -1, 5)}
    agree(kimi_delta(**spread), gated_delta(**arguments), arguments)


def test_an_output_depends_on_no_later_token() -> None:
    arguments = inputs(130)
    o, _ = chunked(**arguments)
    reached = torch.autograd.grad(o[:, 70].sum(), [arguments[name] for name in ("k", "v", "g", "beta")])
    for gradient in reached:
        assert gradient[:, :71].abs().sum() > 0
        assert gradient[:, 71:].abs().sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("decay", [-60.0, -1000.0])
def test_strong_decay_in_some_channels_neither_overflows_nor_spoils_gradients(decay: float) -> None:
    arguments = inputs(130)
    arguments["g"] = leaf(torch.where(torch.arange(5) < 3, decay, -0.01).expand(2, 130, 4, 5).double())
    found = chunked(**arguments)
    for a, b in zip(found, naive(**arguments), strict=True):
        close("value", a, b)
    for name, gradient in gradients(found, [torch.ones_like(x) for x in found], arguments).items():
        assert gradient.isfinite().all(), name


@pytest.mark.slow
def test_float32_keeps_its_precision_under_decays_that_would_overflow() -> None:
    """exp(−G) of a chunk is exp(320) here: the products must be formed between blocks."""
    arguments = inputs(130)
    arguments["g"] = leaf(torch.full_like(arguments["g"], -5.0))
    exact, _ = naive(**arguments)
    o, _ = chunked(**{name: x.float() for name, x in arguments.items()})
    torch.testing.assert_close(o.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_low_precision_is_reduced_in_float32_also_under_autocast() -> None:
    arguments = {name: x.detach().bfloat16() for name, x in inputs(130).items()}
    exact, _ = naive(**{name: x.double() for name, x in arguments.items()})
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunked(**arguments)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.double(), exact, rtol=2.0**-8, atol=1e-4)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"H a multiple of H_k"):
        kimi_delta(**inputs(7, key_heads=3))
    arguments = inputs(7)
    with pytest.raises(ValueError, match=r"g and beta have shapes \(2, 7, 4\)"):
        kimi_delta(**arguments | {"g": arguments["g"][..., 0]})
