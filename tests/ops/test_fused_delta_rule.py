"""The kernels of delta rules against loops in float64: in Triton's interpreter, and compiled on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

from residua import ops
from residua.bench.suite import peers
from residua.ops.delta_rule import autograd, gated_delta_step, launch
from residua.ops.delta_rule.reference import naive
from tests.nightly import only_nightly
from tests.ops.harness import assert_close, assert_one_graph, choose, results

GPU = torch.device("cuda")
Rule = Callable[..., Sequence[Tensor]]
both = pytest.mark.parametrize("rule", [ops.gated_delta, ops.kimi_delta], ids=["gated", "kimi"])


def inputs(
    length: int, key_heads: int = 1, heads: int = 2, widths: tuple[int, int] = (16, 32), batch: int = 2,
    rule: Rule = ops.gated_delta,
) -> dict[str, Tensor]:  # fmt: skip
    """The rule's arguments in float64: unit keys that are often equal, decays from none to strong, a state."""
    lead, channels = (batch, length), () if rule is ops.gated_delta else widths[:1]
    common = torch.randn(batch, 1, key_heads, widths[0])
    made = {
        "q": torch.randn(*lead, key_heads, widths[0]) * widths[0] ** -0.5,
        "k": normalize(torch.randn(*lead, key_heads, widths[0]) + common, dim=-1),
        "v": torch.randn(*lead, heads, widths[1]),
        "g": -(torch.randn(*lead, heads, *channels).abs() ** 3) / 4,
        "beta": torch.randn(*lead, heads).sigmoid(),
        "state": torch.randn(batch, heads, *widths),
    }
    return {name: x.double() for name, x in made.items()}


def documents(batch: int, length: int, share: float = 0.05) -> Tensor:
    """Segments that begin anywhere, also at the first token of a chunk."""
    begins = torch.rand(batch, length) < share
    begins[:, 64:65] = True
    return begins.cumsum(1)


def follows(fused: Rule, exact: Rule, inputs: Sequence[Tensor], most: float) -> None:
    """Outputs and all gradients of a random scalar of them have relative RMS errors below `most`."""
    assert_close(results(fused, inputs), results(exact, [x.cpu() for x in inputs], torch.float64), most)


def rule_follows(
    rule: Rule, arguments: dict[str, Tensor], segments: Tensor | None, device: torch.device, dtype: torch.dtype,
    most: float,
) -> None:  # fmt: skip
    """The operator's kernels match the loop in float64."""
    low = [x.to(device, dtype if name in "qkv" else torch.float32) for name, x in arguments.items()]

    def fused(*x: Tensor) -> Sequence[Tensor]:
        with ops.backend("triton"):
            o, last = rule(*x[:5], state=x[5], segments=None if segments is None else segments.to(device))
        assert o.dtype is dtype and last.dtype is torch.float32
        return o, last

    follows(fused, lambda *x: naive(*x[:5], state=x[5], segments=segments), low, most)


SHAPES = [
    (1, False, (1, 1), (16, 16)),
    (70, True, (1, 2), (16, 32)),
    (130, True, (2, 2), (32, 16)),
    (128, False, (1, 1), (16, 16)),
]
CASES = [(rule, *shape) for rule in (ops.gated_delta, ops.kimi_delta) for shape in SHAPES]


@pytest.mark.slow
@pytest.mark.parametrize("case", only_nightly(CASES, but=[*CASES[:4], CASES[5]]))
def test_every_gradient_matches_the_recurrence(case: tuple[Rule, int, bool, tuple[int, int], tuple[int, int]]) -> None:
    rule, length, packed, heads, widths = case
    arguments = inputs(length, *heads, widths, rule=rule)
    segments = documents(2, length) if packed else None
    rule_follows(rule, arguments, segments, torch.device("cpu"), torch.float32, 2e-5)


@pytest.mark.slow
def test_every_gradient_is_correct_under_strong_channel_decays() -> None:
    """exp(G) of a chunk is e⁻³⁰⁰⁰ in some channels; the sums of these log decays are exact in float32."""
    arguments = inputs(70, batch=1, heads=1, rule=ops.kimi_delta)
    arguments["g"] = (arguments["g"] * 1600).round() / 8
    rule_follows(ops.kimi_delta, arguments, None, torch.device("cpu"), torch.float32, 2e-5)


def single(length: int = 70, **sizes: Any) -> dict[str, Tensor]:
    return {name: x.float().requires_grad_() for name, x in inputs(length, **sizes).items()}


@pytest.mark.slow
@pytest.mark.nightly
def test_channel_operators_pass_opcheck() -> None:
    given = [x.detach().float() for x in inputs(70, rule=ops.kimi_delta).values()]
    fake = ("test_schema", "test_faketensor")
    torch.library.opcheck(launch.forward, [*given[:5], None, given[5], True], test_utils=fake)
    o, last, *kept = launch.forward(*given[:5], None, given[5], True)
    torch.library.opcheck(launch.backward, [o, last, *given[:3], kept, True], test_utils=fake)


@pytest.mark.slow
def test_strided_heads_give_dense_outputs() -> None:
    """As the heads of a fused projection come; compiled code is written for the strides that the operators state."""
    arguments = {n: x.detach() for n, x in single(5).items()}
    q, v = arguments["q"].repeat(1, 1, 3, 1)[:, :, 1:2], torch.randn(2, 5, 3, 32)[:, :, 1:]
    given = [q, arguments["k"], v, arguments["g"], arguments["beta"]]
    fake = ("test_schema", "test_faketensor")
    torch.library.opcheck(launch.forward, [*given, None, arguments["state"], True], test_utils=fake)
    o, last, *kept = launch.forward(*given, None, arguments["state"], True)
    torch.library.opcheck(launch.backward, [o, last, *given[:3], kept, True], test_utils=fake)
    torch.testing.assert_close(o, naive(*given, state=arguments["state"])[0], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@both
def test_unused_outputs_need_no_gradients(rule: Rule) -> None:
    """Neither the last state nor the first is part of a training step."""
    arguments = single(rule=rule)
    del arguments["state"]
    leaves = list(arguments.values())
    rules = choose("triton", rule), choose("reference", rule)
    for used, reached in ((0, leaves), (1, leaves[1:])):
        found, expected = (torch.autograd.grad(run(**arguments)[used].sum(), reached) for run in rules)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    segments = documents(2, 70)
    rule = lambda *leaves: autograd.gated_delta(*leaves[:5], state=leaves[5], segments=segments)  # noqa: E731
    assert_one_graph(rule, list(single().values()))


def test_identical_keys_do_not_amplify_rounding() -> None:
    """Powers of the triangle then reach 10¹⁷: a series instead of substitution would be nothing but rounding."""
    arguments = {name: x.detach() for name, x in single(64, heads=1).items()}
    arguments |= {"k": torch.ones_like(arguments["k"]) / 4, "g": torch.zeros(2, 64, 1), "beta": torch.ones(2, 64, 1)}
    found, expected = (rule(**arguments)[0] for rule in (autograd.gated_delta, naive))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_no_states_are_kept_without_gradients() -> None:
    arguments = {name: x.detach() for name, x in single(5, heads=1).items()}
    kept = launch.forward(*list(arguments.values())[:5], None, None, False)[5]
    assert kept.numel() == 0


@pytest.mark.parametrize(("key_heads", "widths"), [(1, (16, 64)), (2, (32, 16))])
def test_a_step_continues_the_rule_and_overwrites_its_state(key_heads: int, widths: tuple[int, int]) -> None:
    arguments = {name: x.detach() for name, x in single(2, key_heads=key_heads, widths=widths).items()}
    expected, last = naive(**arguments)
    state = arguments.pop("state").clone()
    with ops.backend("triton"), torch.no_grad():
        for t in range(2):
            o, after = gated_delta_step(**{name: x[:, t] for name, x in arguments.items()}, state=state)
            torch.testing.assert_close(o, expected[:, t], rtol=1e-4, atol=1e-5)
            assert after is state
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@both
def test_shapes_without_a_kernel_run_on_the_reference(rule: Rule) -> None:
    arguments = {name: x.detach() for name, x in single(7, widths=(16, 24), rule=rule).items()}
    rule(**arguments)
    with ops.backend("triton"), pytest.raises(ValueError, match=f"no fused kernel of {rule.__name__}"):
        rule(**arguments)


@both
def test_a_gpu_runs_kernels_in_bfloat16_with_heads_of_16_to_128(rule: Rule) -> None:
    """Elsewhere the reference runs, in chunks too. Fake tensors need no GPU."""
    widths = (16, 24, 32, 64, 96, 128, 256)

    def fused(dtype: torch.dtype) -> list[int]:
        with FakeTensorMode():
            given = {w: inputs(3, widths=(w, w), rule=rule).values() for w in widths}
            tensors = {w: [torch.empty_like(x, dtype=dtype, device=GPU) for x in given[w]] for w in widths}
        return [w for w in widths if rule.fuses(*tensors[w])]

    assert fused(torch.bfloat16) == [16, 32, 64, 128]
    assert fused(torch.float32) == []


@pytest.mark.gpu
@both
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "heads", "widths"), [(130, (2, 4), (128, 128)), (1, (1, 1), (64, 128)), (64, (2, 2), (32, 16))]
)
def test_kernels_match_the_recurrence_in_half_precision(
    rule: Rule, length: int, heads: tuple[int, int], widths: tuple[int, int], packed: bool
) -> None:
    segments = documents(2, length) if packed else None
    rule_follows(rule, inputs(length, *heads, widths, rule=rule), segments, GPU, torch.bfloat16, 0.02)


def half(length: int, batch: int = 2, rule: Rule = ops.gated_delta) -> dict[str, Tensor]:
    made = inputs(length, 3, 6, (128, 128), batch, rule)
    return {n: x.to(GPU, torch.bfloat16 if n in "qkv" else torch.float32).requires_grad_() for n, x in made.items()}


@pytest.mark.gpu
@both
def test_two_runs_and_a_cuda_graph_are_bit_identical(rule: Rule) -> None:
    arguments = half(1000, rule=rule)
    segments, leaves = documents(2, 1000).to(GPU), list(arguments.values())

    def run() -> list[Tensor]:
        with ops.backend("triton"):
            o, last = rule(**arguments, segments=segments)
        gradients = torch.autograd.grad((o, last), leaves, (o, last))
        return [o.detach(), last.detach(), *gradients]  # a graph that lives on would tie its leaves to its stream

    first = run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for a, b, c in zip(first, second, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.gpu
def test_the_benchmark_peer_computes_the_same() -> None:
    """Forward only: it refuses its backward pass on Hopper with some versions of Triton."""
    pytest.importorskip("fla.ops", reason="needs flash-linear-attention")  # the package `fla` alone holds no operators
    given = [x.detach() for n, x in half(130).items() if n != "state"]
    with torch.no_grad():
        (theirs,) = peers("gated_delta")["fla"](*given)
        ours, _ = ops.gated_delta(*given)
    assert float((ours - theirs).norm() / ours.norm()) < 0.02
