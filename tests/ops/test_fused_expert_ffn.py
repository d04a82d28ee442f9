"""The feed-forwards of experts: fused products against an independent transcription in float64, in the interpreter and
on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, sigmoid, silu

from residua import ops
from residua.config import choices
from residua.model.context import Context
from residua.model.moe import MoE
from residua.ops.expert_slots import sort_slots
from tests.golden.compare import agree
from tests.ops.harness import assert_close, assert_equal, interpreter, on_gpu, relative

pytestmark = pytest.mark.slow

GATED = ("swiglu", "glu", "geglu")


def inputs(
    tokens: int, choices: int, experts: int, width: int, hidden: int, activation: str, *,
    crowd: str = "spread", device: str = "cpu", dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """x, up, out and weights, then the order of the slots and where each expert's end."""
    torch.manual_seed(0)
    rows = hidden * (1 + (activation in GATED))
    shapes = {"x": (tokens, width), "up": (experts, rows, width), "out": (experts, width, hidden)}
    scales = {"x": 1.0, "up": width**-0.5, "out": hidden**-0.5}
    made = {name: (scales[name] * torch.randn(shape)).to(device, dtype) for name, shape in shapes.items()}
    made["weights"] = torch.rand(tokens, choices).to(device)
    popular = torch.rand(tokens, experts)
    popular[:, :choices] += {"spread": 0.0, "one": 2.0, "few": 0.5}[crowd]
    slots = sort_slots(popular.topk(choices).indices.to(device), experts)
    return made, slots.order.int(), slots.ends


def activate(h: Tensor, activation: str, hidden: int) -> Tensor:
    gate, linear = h[..., :hidden], h[..., hidden:]
    return {
        "swiglu": lambda: silu(gate) * linear,
        "glu": lambda: sigmoid(gate) * linear,
        "geglu": lambda: gelu(gate, approximate="tanh") * linear,
        "relu2": lambda: relu(h) ** 2,
        "gelu": lambda: gelu(h),
    }[activation]()


def by_slot(made: dict[str, Tensor], order: Tensor, ends: Tensor, activation: str) -> Tensor:
    """The equations, one slot at a time."""
    x, up, out, weights = made.values()
    rows: list[list[Tensor]] = [[] for _ in x]
    for place, slot in enumerate(order.tolist()):
        token, choice = divmod(slot, weights.shape[1])
        e = int((ends <= place).sum())
        a = activate(up[e] @ x[token], activation, out.shape[2])
        rows[token].append(weights[token, choice] * (out[e] @ a))
    return torch.stack([sum(row[1:], row[0]) for row in rows])


def all_at_once(made: dict[str, Tensor], order: Tensor, ends: Tensor, activation: str) -> Tensor:
    """Every expert on every token, of which the chosen are taken: independent of the order of slots, for a GPU."""
    x, up, out, weights = made.values()
    slot = torch.arange(len(order), device=x.device)
    expert = torch.empty_like(slot).scatter_(0, order.long(), torch.searchsorted(ends, slot.int(), right=True))
    y = torch.stack([activate(x @ up[e].T, activation, out.shape[2]) @ out[e].T for e in range(len(up))], 1)
    chosen = y.gather(1, expert.view_as(weights)[..., None].expand(-1, -1, x.shape[1]))
    return (weights[..., None] * chosen).sum(1)


def run(function, made: dict[str, Tensor], *rest: object) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in made.items()}
    y = function(leaves, *rest)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), g)]


def ours(made: dict[str, Tensor], order: Tensor, ends: Tensor, activation: str) -> Tensor:
    x, up, out, weights = made.values()
    with ops.backend("triton"):
        return ops.expert_ffn(x, up, out, ends, activation, order=order, weights=weights)


@pytest.mark.parametrize("activation", ["swiglu", "glu", "geglu", "relu2", "gelu"])
def test_reference_matches_its_equations(activation: str) -> None:
    made, order, ends = inputs(7, 2, 4, 8, 6, activation)
    leaves = {name: t.double().requires_grad_() for name, t in made.items()}
    x, up, out, weights = leaves.values()
    found = ops.expert_ffn.reference(x, up, out, ends, activation, order=order, weights=weights)
    agree([found], [by_slot(leaves, order, ends, activation)], leaves)


SHAPES = [
    (37, 3, 5, 32, 24, "swiglu", "spread"),
    (33, 2, 3, 16, 40, "glu", "few"),
    (20, 1, 4, 24, 16, "geglu", "one"),
    (41, 2, 8, 40, 32, "relu2", "one"),
    (18, 8, 9, 16, 8, "gelu", "spread"),
    (1, 2, 6, 8, 8, "relu2", "spread"),
]


@interpreter
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_interpreted_products_equal_float64_with_every_gradient(shape) -> None:
    *sizes, activation, crowd = shape
    made, order, ends = inputs(*sizes, activation, crowd=crowd)
    exact = run(all_at_once, {name: t.double() for name, t in made.items()}, order, ends, activation)
    assert_close(run(ours, made, order, ends, activation), exact, 2e-6)


@interpreter
@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_interpreted_weights_may_be_negative_or_zero(activation: str) -> None:
    made, order, ends = inputs(20, 2, 3, 16, 16, activation)
    made["weights"] -= 0.5
    made["weights"][4:6] = 0
    exact = run(all_at_once, {name: t.double() for name, t in made.items()}, order, ends, activation)
    found = run(ours, made, order, ends, activation)
    assert_close(found[:4], exact[:4], 2e-6)
    there = made["weights"] != 0  # relu² gives a weight of zero no gradient
    assert relative(found[4][there], exact[4][there]) < 2e-6 and found[4].isfinite().all()


@interpreter
def test_interpreted_presorted_rows_keep_their_order() -> None:
    made, order, ends = inputs(24, 2, 4, 16, 24, "swiglu")
    made["x"] = made["x"].repeat_interleave(2, 0)[order.long()]
    del made["weights"]

    def sorted_rows(choice: str, leaves: dict[str, Tensor]) -> Tensor:
        with ops.backend(choice):
            return ops.expert_ffn(*leaves.values(), ends, "swiglu")

    found = run(lambda leaves: sorted_rows("triton", leaves), made)
    exact = run(lambda leaves: sorted_rows("reference", leaves), {name: t.double() for name, t in made.items()})
    assert_close(found, exact, 2e-6)


@interpreter
def test_nan_does_not_spread_to_other_tokens_or_experts() -> None:
    made, order, ends = inputs(20, 1, 4, 16, 16, "relu2")
    made["x"][3] = float("nan")
    y, _, g_up, *_ = run(ours, made, order, ends, "relu2")
    assert y[3].isnan().all() and not y[torch.arange(20) != 3].isnan().any()
    assert g_up.isnan().flatten(1).any(1).sum() == 1


@on_gpu
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 3, 16, 512, 512, "relu2", "spread"),
        (1000, 8, 256, 264, 136, "swiglu", "few"),
        (777, 2, 3, 72, 200, "gelu", "one"),
        (5, 2, 64, 256, 128, "glu", "spread"),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_gpu_bfloat16_is_close_to_float64_and_repeatable(shape) -> None:
    *sizes, activation, crowd = shape
    made, order, ends = inputs(*sizes, activation, crowd=crowd, device="cuda", dtype=torch.bfloat16)
    exact = run(all_at_once, {name: t.double() for name, t in made.items()}, order, ends, activation)
    first = run(ours, made, order, ends, activation)
    assert_close(first, exact, 1e-2)
    for _ in range(3):
        assert_equal(first, run(ours, made, order, ends, activation))


@on_gpu
def test_gpu_autocast_rounds_results_but_not_gradients() -> None:
    made, order, ends = inputs(300, 2, 4, 64, 64, "swiglu", device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = run(ours, made, order, ends, "swiglu")
    exact = run(all_at_once, {name: t.double() for name, t in made.items()}, order, ends, "swiglu")
    assert [t.dtype for t in found] == [torch.bfloat16, *[torch.float32] * 4]
    assert_close(found, exact, 2e-2)


@interpreter
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_compiled_mixtures_are_one_graph_with_eager_numbers(activation: str) -> None:
    config = choices.MoE(hidden=16, experts=4, top_k=2, activation=activation)
    mixture = MoE(config, 0, 16, std=0.3, output_std=0.3)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y, _, routing = mixture(x, (), Context(None, None))
        return y, routing.load, routing.probability, routing.z

    x = torch.randn(2, 5, 16, requires_grad=True)
    found = []
    with ops.backend("triton"):
        for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            y, load, probability, z = run(x)
            total = y.square().sum() + (load * probability).sum() + z
            found.append([y, load, z, *torch.autograd.grad(total, [x, *mixture.parameters()])])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)
