"""The fused hyper-connection junction and Sinkhorn against the references in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.hyper_connection import launch, manifold_weights
from tests.ops.harness import assert_close, assert_equal, choose, interpreter, named_results, on_gpu
from tests.ops.harness import results as outputs_and_gradients

pytestmark = pytest.mark.slow
OUTPUTS = ("h", "X'", "z")


def drawn(norm: str, n: int, width: int, *lead: int, per_token: bool = True, device: str = "cpu") -> dict[str, Tensor]:
    """Weights well away from their initial values."""
    draw = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=draw)

    tokens = lead if per_token else ()
    inputs = {"streams": random(*lead, n, width), "update": random(*lead, width)}
    inputs |= {"post": random(*tokens, n), "mix": random(*tokens, n, n), "bias": random(n)}
    rows, columns = {"all": (n * n + 2 * n, n * width), "each": (n + 2, width), "none": (0, 0)}[norm]
    return inputs | ({"scale": random(), "phi": random(rows, columns) / columns**0.5} if rows else {})


def results(choice: str, inputs: dict[str, Tensor], norm: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    def step(**leaves: Tensor) -> list[Tensor]:
        return [y for y in ops.hyper_step(**leaves, norm=norm, eps=1e-3) if y.shape[-1]]

    named = named_results(choose(choice, step), inputs, OUTPUTS, dtype)
    if "g scale" in named:
        # one number, a sum over tokens that may cancel: measured with the sums next to it, not by itself
        named["g bias"] = torch.cat([named["g bias"], named.pop("g scale")[None]])
    return named


def assert_exact(inputs: dict[str, Tensor], norm: str) -> None:
    assert_close(results("triton", inputs, norm), results("reference", inputs, norm, torch.float64), 1e-5)


@interpreter
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("norm", ["all", "each", "none"])
def test_a_step_equals_the_reference_in_every_gradient(norm, n):
    assert_exact(drawn(norm, n, 70, 5), norm)


MORE_STEPS = {
    "all, more than a tile of tokens": (("all", 2, 12, 3, 11), True),
    "each, more than a tile of tokens": (("each", 2, 12, 3, 11), True),
    "wide rows that are read two at a time": (("all", 1, 1100, 3), True),
    "weights shared by all tokens, with one gradient": (("none", 3, 20, 2, 4), False),
}


@interpreter
@pytest.mark.parametrize("case", MORE_STEPS)
def test_a_step_of_other_sizes_equals_the_reference(case):
    sizes, per_token = MORE_STEPS[case]
    assert_exact(drawn(*sizes, per_token=per_token), sizes[0])


def single_pass(choice: str, inputs: dict[str, Tensor], used: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The first `used` of h, X' and z, and the gradients through them."""
    step = choose(choice, lambda **leaves: ops.single_pass_step(**leaves, eps=1e-3)[:used])
    return named_results(step, inputs, OUTPUTS, dtype)


@interpreter
@pytest.mark.parametrize(("n", "used", "tokens"), [(1, 3, (5,)), (3, 1, (5,)), (4, 2, (2, 3)), (4, 3, (3, 11))])
def test_single_pass_step_equals_reference_in_every_gradient(n, used, tokens):
    inputs = drawn("each", n, 70, *tokens)
    del inputs["scale"], inputs["bias"]
    phi = inputs.pop("phi")
    inputs |= {"pre": torch.randn(*tokens, n), "phi": phi}
    truth = single_pass("reference", inputs, used, torch.float64)
    assert_close(single_pass("triton", inputs, used, torch.float32), truth, 1e-5)


@interpreter
@pytest.mark.parametrize("norm", ["all", "each"])
def test_split_phi_and_prefetched_tiles_match_the_reference(norm, monkeypatch):
    monkeypatch.setattr(launch, "_parts", lambda phi, dtype: torch.stack([0.25 * phi, 0.75 * phi]))
    monkeypatch.setitem(launch.TILES["spread"], 4, launch.Tile(16, 16, 4, ahead=1))
    assert_exact(drawn(norm, 3, 40, 5), norm)


@interpreter
def test_expanded_streams_are_accepted():
    inputs = drawn("all", 2, 10, 3)
    inputs["streams"] = inputs["update"][:, None].expand(3, 2, 10)
    assert_exact(inputs, "all")


@interpreter
def test_more_than_four_streams_fall_back_to_the_reference():
    inputs = drawn("all", 5, 4, 2)
    wanted, found = results("reference", inputs, "all"), results("auto", inputs, "all")
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    for call in (
        lambda: ops.hyper_step(**drawn("none", 5, 4, 2)),
        lambda: ops.sinkhorn(torch.zeros(2, 5, 5), 3),
        lambda: manifold_weights(torch.zeros(2, 35), torch.ones(3), torch.zeros(35), 5, 3),
        lambda: ops.sinkhorn(torch.zeros(2, 4, 4), 0),
    ):
        with ops.backend("triton"), pytest.raises(ValueError, match="has no fused"):
            call()


def doubly_stochastic(choice: str, logits: Tensor, iterations: int) -> list[Tensor]:
    return outputs_and_gradients(choose(choice, ops.sinkhorn, iterations=iterations), [logits])


@interpreter
@pytest.mark.parametrize(("n", "iterations"), [(1, 2), (2, 20), (3, 1), (4, 20)])
def test_sinkhorn_equals_the_reference_with_its_gradient(n, iterations):
    logits = 2 * torch.randn(3, 5, n, n)
    exact = doubly_stochastic("reference", logits.double(), iterations)
    for ours, truth in zip(doubly_stochastic("triton", logits, iterations), exact, strict=True):
        assert (ours - truth).norm() <= 2e-6 * truth.norm() + 1e-6


@interpreter
def test_sinkhorn_accepts_empty_and_strided_inputs():
    assert ops.sinkhorn(torch.randn(0, 3, 3), 2).shape == (0, 3, 3)
    logits = torch.randn(4, 3, 3).transpose(1, 2)
    with ops.backend("triton"):
        ours = ops.sinkhorn(logits, 5)
    assert torch.allclose(ours, ops.sinkhorn(logits, 5), atol=1e-6)


def write_weights(choice: str, n: int, iterations: int, dtype: torch.dtype, device: str = "cpu", used: int = 3) -> Any:
    """post and mix (used: 1, 2 or both as bits), and the gradients of z, scale and bias."""
    draw = torch.Generator(device).manual_seed(n)
    sizes = ((3, 25, n * n + 2 * n), (3,), (n * n + 2 * n,))
    inputs = [2 * torch.randn(size, generator=draw, device=device) for size in sizes]

    def weights(*leaves: Tensor) -> list[Tensor]:
        return [y for i, y in enumerate(manifold_weights(*leaves, n, iterations)) if used >> i & 1]

    return outputs_and_gradients(choose(choice, weights), inputs, dtype)


@interpreter
@pytest.mark.parametrize(
    ("n", "iterations", "used"), [(1, 2, 3), (2, 20, 3), (3, 1, 3), (4, 20, 3), (4, 2, 1), (2, 3, 2)]
)
def test_write_weights_equal_the_reference_with_their_gradients(n, iterations, used):
    exact = write_weights("reference", n, iterations, torch.float64, used=used)
    for ours, truth in zip(write_weights("triton", n, iterations, torch.float32, used=used), exact, strict=True):
        assert (ours - truth).norm() <= 3e-6 * truth.norm() + 1e-6


@interpreter
def test_write_weights_handle_tiny_logits_and_empty_input():
    logits = torch.zeros(2, 24)
    logits[0, 8:12], logits[1, [9, 13, 17, 21]] = -300.0, -300.0  # a row and a column
    one = (torch.ones(3), torch.zeros(24), 4, 20)
    with ops.backend("triton"):
        mix = manifold_weights(logits, *one)[1]
        assert [y.shape for y in manifold_weights(logits[:0], *one)] == [(0, 4), (0, 4, 4)]
    torch.testing.assert_close(mix, torch.full((2, 4, 4), 0.25))


FP32, BF16 = torch.float32, torch.bfloat16
# Each row is two kernels to compile, so not every combination: every norm and n in both dtypes and on a width that ends
# inside a block of channels (ragged), every width in both dtypes. 768 and 1280 are the same code in more turns.
ON_A_GPU = {
    "all 4 streams": ("all", 4, 1280, FP32, True),
    "all 4 streams, ragged": ("all", 4, 1000, BF16, True),
    "all 2 streams, ragged": ("all", 2, 1000, FP32, True),
    "all 2 streams": ("all", 2, 1280, BF16, True),
    "each of 4, ragged": ("each", 4, 1000, FP32, True),
    "each of 4": ("each", 4, 768, BF16, True),
    "no norm, ragged": ("none", 4, 1000, FP32, True),
    "no norm": ("none", 4, 768, BF16, True),
    "weights of all tokens, 3 streams": ("none", 3, 1000, BF16, False),
}


@on_gpu
@pytest.mark.parametrize(("norm", "n", "width", "dtype", "per_token"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_gpu_gradients_are_correct(norm, n, width, dtype, per_token):
    inputs = drawn(norm, n, width, 2, 700, per_token=per_token, device="cuda")
    inputs |= {name: inputs[name].to(dtype) for name in ("streams", "update")}
    ours = results("triton", inputs, norm)
    assert_close(ours, results("reference", inputs, norm, torch.float64), {FP32: 1e-5, BF16: 1e-2}[dtype])
    again = results("triton", inputs, norm)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@on_gpu
@pytest.mark.parametrize("n", [2, 3, 4])
def test_gpu_sinkhorn_is_correct(n):
    logits = 2 * torch.randn(3000, n, n, device="cuda")
    assert_close(doubly_stochastic("triton", logits, 20), doubly_stochastic("reference", logits.double(), 20), 1e-5)


@on_gpu
@pytest.mark.parametrize("n", [2, 3, 4])
def test_gpu_write_weights_are_correct(n):
    exact = write_weights("reference", n, 20, torch.float64, "cuda")
    ours = write_weights("triton", n, 20, torch.float32, "cuda")
    assert_close(ours, exact, 1e-5)
    assert_equal(ours, write_weights("triton", n, 20, torch.float32, "cuda"))
