"""Linear attention as a sequence mixer: documents, decoding, initialisation, training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, rms_norm, sigmoid, silu, softplus

from residua.config import choices
from residua.model.body import reset
from residua.model.context import Context
from residua.model.linear_attention import GatedDeltaNet, KimiDeltaAttention
from residua.ops.delta_rule.reference import naive
from tests.golden.compare import agree, close, leaves_of, random, randomise

WIDTH = 16


def mixer(convolution: int = 4) -> GatedDeltaNet:
    """Two key heads and four value heads of 8, in float64, no parameter at its start."""
    config = choices.GatedDeltaNet(key_heads=2, value_heads=4, head_dim=8, convolution=convolution)
    module = GatedDeltaNet(config, WIDTH, std=0.2, output_std=0.2)
    randomise(module, 0.2)
    return module


def delta(convolution: int = 4) -> KimiDeltaAttention:
    """Kimi's, with two heads of 8."""
    config = choices.KimiDelta(heads=2, head_dim=8, convolution=convolution)
    module = KimiDeltaAttention(config, WIDTH, std=0.2, output_std=0.2)
    randomise(module, 0.2)
    return module


every_mixer = pytest.mark.parametrize("build_mixer", [mixer, delta])


def run(module: nn.Module, x: Tensor, segments: Tensor | None = None) -> Tensor:
    y, anchors = module(x, (), Context(None, segments))
    assert anchors == ()
    return y


def test_mixer_matches_its_equations() -> None:
    module, x = mixer(), random(2, 70, WIDTH)
    w_q, w_k, w_v, w_z = module.project.weight.split([16, 16, 32, 32])
    w_a, w_b = module.gates.weight.split([4, 4])

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, 8))

    def convolved(w: Tensor, kernel: Tensor) -> Tensor:
        padded = pad((x @ w.T).mT, (3, 0))
        return heads(silu(conv1d(padded, kernel.flip(0).T[:, None], groups=w.shape[0])).mT)

    def unit(y: Tensor) -> Tensor:
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    kernels = module.convolve.weight.split([16, 16, 32], 1)
    q, k, v = (convolved(w, kernel) for w, kernel in zip((w_q, w_k, w_v), kernels, strict=True))
    g = -module.A_log.exp() * softplus(x @ w_a.T + module.dt_bias)
    o, _ = naive(unit(q) / 8**0.5, unit(k), v, g, sigmoid(x @ w_b.T))
    gated = rms_norm(o, (8,), module.norm.weight, eps=1e-6) * silu(heads(x @ w_z.T))
    agree([run(module, x)], [gated.flatten(-2) @ module.out.weight.T], leaves_of(module, x=x))


@every_mixer
@pytest.mark.parametrize("convolution", [1, 4])
def test_packed_documents_equal_documents_run_separately(build_mixer: Any, convolution: int) -> None:
    module, x = build_mixer(convolution), random(2, 75, WIDTH)
    documents = x.split([1, 2, 66, 6], 1)
    segments = torch.cat([torch.full((2, part.shape[1]), i) for i, part in enumerate(documents)], 1)
    apart = torch.cat([run(module, part) for part in documents], 1)
    agree([run(module, x, segments)], [apart], leaves_of(module, x=x))


@every_mixer
@pytest.mark.parametrize("convolution", [1, 4])
@pytest.mark.parametrize("prefill", [0, 1, 2, 66])
def test_cached_decoding_equals_the_full_forward(build_mixer: Any, prefill: int, convolution: int) -> None:
    module, x = build_mixer(convolution), random(2, 70, WIDTH)
    cache, outputs = None, []
    for part in x.split([prefill] * (prefill > 0) + [1] * 2 + [70 - prefill - 2], 1):
        y, cache = module.advance(part, cache)
        outputs.append(y)
    close("output", torch.cat(outputs, 1), run(module, x))


def test_decoding_after_packed_documents_continues_the_last_one() -> None:
    module, x = mixer(), random(2, 12, WIDTH)
    segments = (torch.arange(10) >= 8).long().expand(2, -1)
    _, cache = module.advance(x[:, :10], segments=segments)
    y, _ = module.advance(x[:, 10:], cache)
    close("output", y, run(module, x[:, 8:])[:, 2:])


def test_the_cache_does_not_grow_with_the_sequence() -> None:
    module = mixer()
    short, long = (module.advance(random(2, length, WIDTH))[1] for length in (2, 70))
    assert [part.shape for part in short] == [part.shape for part in long] == [(2, 3, 64), (2, 4, 8, 8)]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (GatedDeltaNet, choices.GatedDeltaNet(key_heads=64, value_heads=256, head_dim=2)),
        (KimiDeltaAttention, choices.KimiDelta(heads=256, head_dim=4)),
    ],
)
def test_reset_after_a_meta_build_gives_the_documented_ranges(kind: Any, config: Any) -> None:
    with torch.device("meta"):
        module = kind(config, WIDTH, std=0.02, output_std=0.0)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    reset(module)
    rate, dt = module.A_log.exp(), softplus(module.dt_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16.01
    assert 0.99e-3 <= dt.min() < 1.2e-3 and 0.08 < dt.max() <= 0.101
    assert 0.008 < dt.median() < 0.0125
    assert module.convolve.weight.abs().max() <= 0.5
    assert module.project.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert module.out.weight.abs().max() == 0 and (module.norm.weight == 1).all()


def test_fused_maps_are_declared_separately_to_the_optimizer() -> None:
    module = mixer()
    assert module.project.hidden_matrices == {"weight": (16, 16, 32, 32)}
    assert module.gates.hidden_matrices == {"weight": (4, 4)}


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    module, x = mixer(), random(2, 70, WIDTH)
    segments = (torch.arange(70) >= 9).long().expand(2, -1)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    close("output", run(compiled, x, segments), run(module, x, segments))


def test_low_precision_stays_close_to_full_precision() -> None:
    module, x = mixer().float(), random(2, 70, WIDTH, grad=False).float()
    exact = run(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(module, x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.02 * exact.norm()
