"""A hyper-connection junction with the norm after it, against junction and norm in float64."""

import pytest
import torch
from torch import Tensor

from residua.ops.hyper_connection import launch, reference
from residua.ops.rms_norm.reference import rms_norm
from tests.ops.harness import assert_close, interpreter, on_gpu
from tests.ops.test_fused_hyper_connection import BF16, FP32, drawn

pytestmark = pytest.mark.slow
EPS, NORM_EPS = 1e-3, 1e-2

Tensors = dict[str, Tensor]


def inputs(norm: str, n: int, width: int, tokens: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensors:
    """The inputs of a junction and its norm, and the gradients of x, X' and z: g_x, g_after and g_z."""
    given = drawn(norm, n, width, tokens, device=device)
    draw = torch.Generator(device).manual_seed(7)
    numbers = (len(given["phi"]),) if norm == "all" else (n, len(given["phi"]))
    shapes = {"gain": (width,), "g_x": (tokens, width), "g_after": (tokens, n, width), "g_z": (tokens, *numbers)}
    given |= {name: torch.randn(shape, generator=draw, device=device) for name, shape in shapes.items()}
    rounded = ("streams", "update", "g_x", "g_after")
    return {name: t.to(dtype) if name in rounded else t for name, t in given.items()}


def exact(given: Tensors, norm: str, used: int = 3) -> Tensors:
    """Junction, then norm, and every gradient through the first `used` of x, X' and z, by autograd in float64."""
    doubles = {name: t.double() for name, t in given.items() if not name.startswith("g_")}
    doubles["bias"] = doubles["bias"].expand(given["streams"].shape[:2])  # a row for each token
    leaves = {name: t.clone().requires_grad_() for name, t in doubles.items()}
    weights = {name: t for name, t in leaves.items() if name != "gain"}
    h, after, z = reference.hyper_step(**weights, norm=norm, eps=EPS)
    made = [rms_norm(h, leaves["gain"], eps=NORM_EPS), after, z]
    probes = [given[name].double() for name in ("g_x", "g_after", "g_z")]
    grads = torch.autograd.grad(made[:used], list(leaves.values()), probes[:used])
    return named(made, dict(zip(leaves, grads, strict=True)))


def named(made: list[Tensor], grads: Tensors) -> Tensors:
    """By name; the bias's gradient comes for each token, as the kernels return it, and is summed here."""
    found = dict(zip(("x", "X'", "z"), made, strict=True)) | {f"g {name}": g for name, g in grads.items()}
    found["g bias of each token"] = found.pop("g bias")
    # one number, a sum over tokens that may cancel: measured with the sums next to it, not by itself
    found["g bias"] = torch.cat([found["g bias of each token"].sum(0), found.pop("g scale")[None]])
    return found


def ours(given: Tensors, norm: str, used: int = 3) -> Tensors:
    """The same from the operators; the gradients of scale and φ as `autograd.py` computes them."""
    X, y, post, mix, bias, scale, phi, gain, g_x, g_after, g_z = given.values()
    flat, n = mix.flatten(1), X.shape[1]
    weights = (post, flat, bias, scale, phi)
    after, x, z, rstd, pre, stats = launch.step(X, y, *weights, norm, EPS, gain, NORM_EPS)
    through = (g_x, g_after if used > 1 else None, g_z.flatten(1) if used > 2 else None)
    g_streams, g_update, g_post, g_mix, g_pre, dz, g_gain = launch.step_backward(
        *through, X, y, post, flat, scale, phi, z, rstd, pre, norm, gain, stats
    )
    seen = z[:, :n] if norm == "all" else torch.tanh(z[:, :: len(phi)])
    g_phi = launch.phi_gradient(dz.reshape(-1, len(phi)), after.reshape(-1, phi.shape[1]))
    grads = {
        "streams": g_streams, "update": g_update, "post": g_post, "mix": g_mix.view(mix.shape), "bias": g_pre,
        "scale": (g_pre * seen).sum(), "phi": g_phi, "gain": g_gain,
    }  # fmt: skip
    return named([x, after, z.view(g_z.shape)], grads)


# 70 channels and 37 tokens end inside a block and a tile of every kernel
@interpreter
@pytest.mark.parametrize(
    ("norm", "n", "used"),
    [
        ("all", 1, 3),
        ("each", 2, 3),
        ("all", 3, 1),
        ("each", 3, 2),
        ("all", 4, 3),
        ("each", 4, 3),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [("each", 1, 3), ("all", 2, 3), ("each", 3, 1), ("all", 3, 2)]
        ),
    ],
)
def test_the_kernels_equal_junction_and_norm_in_every_gradient(norm, n, used):
    given = inputs(norm, n, 70, 37)
    assert_close(ours(given, norm, used), exact(given, norm, used), 1e-5)


@interpreter
def test_wide_rows_are_correct():
    given = inputs("all", 2, 1100, 3)
    assert_close(ours(given, "all"), exact(given, "all"), 1e-5)


@interpreter
@pytest.mark.parametrize("norm", ["all", "each"])
def test_prefetched_tiles_are_correct(norm, monkeypatch):
    monkeypatch.setitem(launch.TILES["spread"], 4, launch.Tile(16, 16, 4, ahead=1))
    given = inputs(norm, 2, 40, 19)
    assert_close(ours(given, norm), exact(given, norm), 1e-5)


@interpreter
def test_empty_input_gives_empty_output_and_zero_gradients():
    made = ours(inputs("all", 2, 10, 0), "all")
    assert made["x"].shape == (0, 10) and made["X'"].shape == (0, 2, 10)
    assert all(g.count_nonzero() == 0 for name, g in made.items() if name.startswith("g "))


# every way in which the launcher cuts rows
ON_A_GPU = {
    "all 4 streams": ("all", 4, 1280, FP32),
    "all 4 streams, ragged": ("all", 4, 1000, BF16),
    "all 2 streams, ragged": ("all", 2, 1000, FP32),
    "all 2 streams": ("all", 2, 1280, BF16),
    "all 3 streams, wide": ("all", 3, 8192, BF16),
    "each of 4, ragged": ("each", 4, 1000, FP32),
    "each of 4": ("each", 4, 768, BF16),
}


@on_gpu
@pytest.mark.parametrize(("norm", "n", "width", "dtype"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_gpu_gradients_are_correct_and_bit_identical(norm, n, width, dtype):
    """Rounding of 1400 tokens does not cancel where their gradients do: in bfloat16 the bias is measured by token."""
    given = inputs(norm, n, width, 1400, dtype, "cuda")
    made, right = ours(given, norm), exact(given, norm)
    if dtype is BF16:
        del right["g bias"]
    assert_close(made, right, {FP32: 1e-5, BF16: 1e-2}[dtype])
    again = ours(given, norm)
    assert all(torch.equal(made[name], again[name]) for name in made)
