"""Norms and feed-forwards against their equations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.context import Context
from residua.model.ffn import build_ffn
from residua.model.norm import build_norm
from tests.golden import parts
from tests.golden.arithmetic import gelu
from tests.golden.compare import agree, each_token, leaves_of, random, randomise

NOWHERE = Context(None, None)


def check_norm(config: choices.Norm, width: int, equation: Callable[[nn.Module, Tensor], Tensor]) -> None:
    norm = randomise(build_norm(config, width))
    x = random(2, 3, width)
    agree([norm(x)], each_token(lambda v, _: [equation(norm, v)], x), leaves_of(norm, x=x))


@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rmsnorm_and_preaffine_match_their_equations(width: int, eps: float) -> None:
    check_norm(choices.RMSNorm(eps=eps), width, lambda n, x: parts.rmsnorm(x, n.weight, eps))
    check_norm(choices.PreAffine(eps=eps), width, lambda n, x: parts.preaffine(x, n.affine, n.weight, eps))


@pytest.mark.parametrize("parameters", ["gain_and_bias", "gain", "none"])
def test_layernorm_matches_its_equation(parameters: str) -> None:
    config = choices.LayerNorm(parameters=parameters, eps=0.1)
    check_norm(config, 7, lambda n, x: parts.layernorm(x, n.weight, n.bias, 0.1))


def test_unit_rmsnorm_equals_rmsnorm_with_gains_of_one() -> None:
    check_norm(choices.UnitRMSNorm(eps=0.1), 7, lambda _, x: parts.rmsnorm(x, torch.ones_like(x), 0.1))


GATES = [(g, a) for g in ("elementwise", "tensorwise") for a in ("sigmoid", "tanh", "silu", "identity")]


@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize(("granularity", "activation"), GATES)
def test_gated_norm_and_gated_dyt_match_their_equations(granularity: str, activation: str, width: int) -> None:
    options = {"rank": 3, "granularity": granularity, "activation": activation}
    check_norm(
        choices.GatedNorm(**options, eps=0.01),
        width,
        lambda n, x: parts.gatednorm(x, n.weight, n.gate.down, n.gate.up, activation, 0.01),
    )
    check_norm(
        choices.GatedDyT(**options),
        width,
        lambda n, x: parts.gate(parts.dyt(x, n.alpha, n.weight, n.bias), n.gate.down, n.gate.up, activation),
    )


@pytest.mark.parametrize("width", [7, 33])
def test_dyt_and_derf_match_their_equations(width: int) -> None:
    check_norm(choices.DyT(), width, lambda n, x: parts.dyt(x, n.alpha, n.weight, n.bias))
    check_norm(choices.Derf(), width, lambda n, x: parts.derf(x, n.alpha, n.shift, n.weight, n.bias))


def gated_halves(ffn: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    return (*ffn.gate_up.weight.chunk(2), ffn.out.weight)


FFNS = {
    "swiglu": (choices.SwiGLU(hidden=9), lambda f, x: parts.swiglu(x, *gated_halves(f))),
    "glu": (choices.GLU(hidden=9), lambda f, x: parts.glu(x, *gated_halves(f))),
    "geglu": (choices.GeGLU(hidden=9), lambda f, x: parts.geglu(x, *gated_halves(f))),
    "clamped_swiglu": (choices.ClampedSwiGLU(hidden=9), lambda f, x: parts.clamped_swiglu(x, *gated_halves(f))),
    "relu2": (choices.ReLU2(hidden=9), lambda f, x: parts.relu2(x, f.up.weight, f.out.weight)),
    "gelu_tanh": (choices.TanhGELU(hidden=9), lambda f, x: f.out.weight @ parts.gelu_tanh(f.up.weight @ x)),
    "gelu": (choices.GELU(hidden=9), lambda f, x: f.out.weight @ gelu(f.up.weight @ x)),
}


def test_biases_are_added_after_each_product() -> None:
    gated = randomise(build_ffn(choices.SwiGLU(hidden=9, bias=True), 7, std=0.2, output_std=0.2))
    plain = randomise(build_ffn(choices.ReLU2(hidden=9, bias=True), 7, std=0.2, output_std=0.2))
    x = random(2, 3, 7)
    gate, up = (x @ gated.gate_up.weight.T + gated.gate_up.bias).chunk(2, -1)
    expected = (gate / (1 + (-gate).exp()) * up) @ gated.out.weight.T + gated.out.bias
    agree([gated(x, (), NOWHERE)[0]], [expected], leaves_of(gated, x=x))
    squares = (x @ plain.up.weight.T + plain.up.bias).clamp(min=0) ** 2
    agree([plain(x, (), NOWHERE)[0]], [squares @ plain.out.weight.T + plain.out.bias], leaves_of(plain, x=x))


@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("kind", FFNS)
def test_feed_forwards_match_their_equations(kind: str, width: int) -> None:
    config, equation = FFNS[kind]
    ffn = randomise(build_ffn(config, width, std=0.2, output_std=0.2))
    x = random(2, 3, width, scale=8.0 if kind == "clamped_swiglu" else 1.0)
    assert (
        kind != "clamped_swiglu" or (x @ ffn.gate_up.weight.T).aminmax().min < -7 < 7 < (x @ ffn.entry.weight.T).max()
    )
    ours, anchors = ffn(x, (), NOWHERE)
    assert anchors == ()
    agree([ours], each_token(lambda v, _: [equation(ffn, v)], x), leaves_of(ffn, x=x))
