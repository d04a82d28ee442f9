"""Delta rules: loop, chunks and single steps against the papers' equations, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from residua.ops import gated_delta, kimi_delta
from residua.ops.delta_rule.reference import naive, step
from tests.golden import kimi
from tests.golden.compare import agree, close, gradients, random
from tests.nightly import only_nightly

Rule = Callable[..., tuple[Tensor, Tensor]]
both = pytest.mark.parametrize("rule", [gated_delta, kimi_delta], ids=["gated", "kimi"])


def inputs(rule: Rule, length: int, *, key_heads: int = 2) -> dict[str, Tensor]:
    """The rule's arguments as leaves: unit keys, decays from none to strong, a state to continue."""
    decays = (5,) if rule is kimi_delta else ()
    return {
        "q": random(2, length, key_heads, 5, seed=1),
        "k": leaf(normalize(random(2, length, key_heads, 5, seed=2), dim=-1)),
        "v": random(2, length, 4, 3, seed=3),
        "g": leaf(-(random(2, length, 4, *decays, seed=4).abs() ** 3)),
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


@both
def test_naive_matches_the_equation_of_the_paper(rule: Rule) -> None:
    arguments = inputs(rule, 9)
    o, _ = naive(**arguments)
    q, k, v, g, beta, state = (x[1] for x in arguments.values())
    decays = g if rule is kimi_delta else g[..., None].expand(-1, -1, 5)
    for h in range(4):
        expected = kimi.delta_rule(q[:, h // 2], k[:, h // 2], v[:, h], decays[:, h], beta[:, h], state[h])
        agree([o[1, :, h]], [expected], arguments)


@both
@pytest.mark.parametrize("documents", ["one", "many"])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 130])
def test_chunks_equal_naive_in_values_and_gradients(rule: Rule, length: int, documents: str) -> None:
    arguments = inputs(rule, length)
    segments = short_documents(length) if documents == "many" else None
    agree(rule(**arguments, segments=segments), naive(**arguments, segments=segments), arguments)


@both
@pytest.mark.parametrize("naively", [False, True])
def test_empty_input_gives_empty_output_and_keeps_the_state(rule: Rule, naively: bool) -> None:
    arguments = inputs(rule, 0)
    o, state = (naive if naively else rule)(**arguments, segments=torch.zeros(2, 0, dtype=torch.int64))
    assert o.shape == (2, 0, 4, 3)
    assert torch.equal(state, arguments["state"])


PACKED = [
    *((run, gated_delta, boundary) for run in (naive, gated_delta) for boundary in (1, 63, 64, 65, 100)),
    *((kimi_delta, kimi_delta, boundary) for boundary in (1, 15, 16, 17, 63, 64, 65, 100)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", only_nightly(PACKED, but=[c for c in PACKED if c[0] is not kimi_delta or c[2] in (17, 64)])
)
def test_packed_documents_equal_documents_run_separately(case: tuple[Rule, Rule, int]) -> None:
    run, rule, boundary = case
    arguments = tokens(inputs(rule, 130), slice(None))
    segments = (torch.arange(130) >= boundary).long().expand(2, -1)
    first, _ = run(**tokens(arguments, slice(boundary)))
    second, last = run(**tokens(arguments, slice(boundary, None)))
    agree(run(**arguments, segments=segments), [torch.cat([first, second], 1), last], arguments)


@both
def test_steps_from_a_prefilled_state_equal_naive(rule: Rule) -> None:
    arguments = inputs(rule, 70)
    o, state = rule(**tokens(arguments, slice(66)), state=arguments["state"])
    outputs = [o]
    for t in range(66, 70):
        o, state = step(**tokens(arguments, t), state=state)
        outputs.append(o[:, None])
    agree([torch.cat(outputs, 1), state], naive(**arguments), arguments)


@pytest.mark.parametrize(
    ("rule", "decay", "faded"),
    [
        (gated_delta, -60.0, 5),
        pytest.param(kimi_delta, -60.0, 3, marks=pytest.mark.slow),
        pytest.param(kimi_delta, -1000.0, 3, marks=pytest.mark.slow),
    ],
)
def test_strong_decay_keeps_values_and_gradients_finite(rule: Rule, decay: float, faded: int) -> None:
    """In all channels, or in the first `faded` of five."""
    arguments = inputs(rule, 130)
    decays = torch.where(torch.arange(5) < faded, decay, -0.01).expand(2, 130, 4, 5).double()
    arguments["g"] = leaf(decays if rule is kimi_delta else decays[..., 0])
    found = rule(**arguments)
    for a, b in zip(found, naive(**arguments), strict=True):
        close("value", a, b)
    for name, gradient in gradients(found, [torch.ones_like(x) for x in found], arguments).items():
        assert gradient.isfinite().all(), name


@pytest.mark.slow
def test_float32_keeps_its_precision_under_strong_decays() -> None:
    """exp(−G) of a chunk is exp(320) here: the products must be formed between blocks."""
    arguments = inputs(kimi_delta, 130)
    arguments["g"] = leaf(torch.full_like(arguments["g"], -5.0))
    exact, _ = naive(**arguments)
    o, _ = kimi_delta(**{name: x.float() for name, x in arguments.items()})
    torch.testing.assert_close(o.double(), exact, rtol=1e-5, atol=1e-6)


@both
def test_low_precision_is_accumulated_in_float32(rule: Rule) -> None:
    arguments = {name: x.detach().bfloat16() for name, x in inputs(rule, 130).items()}
    exact, _ = naive(**{name: x.double() for name, x in arguments.items()})
    with torch.autocast("cpu", torch.bfloat16):
        o, state = rule(**arguments)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    # One rounding of the result: half a unit in bfloat16's last of 8 bits.
    torch.testing.assert_close(o.double(), exact, rtol=2.0**-8, atol=1e-4)


@both
def test_mismatched_shapes_are_named(rule: Rule) -> None:
    with pytest.raises(ValueError, match=rf"^{rule.__name__}: q, k and v .* H a multiple of H_k"):
        rule(**inputs(rule, 7, key_heads=3))
    arguments = inputs(rule, 7)
    with pytest.raises(ValueError, match=rf"^{rule.__name__}: g and beta have shapes \(2, 7(, 4)?\) and"):
        rule(**arguments | {"g": arguments["g"][..., 0]})
