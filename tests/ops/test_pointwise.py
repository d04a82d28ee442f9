"""RMS, GatedNorm, projection mixing and the loss against their equations."""

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops._runtime.numeric import few_products, mix_slices
from tests.golden import parts
from tests.golden.arithmetic import rms
from tests.golden.attention import mix, normed, rope, rotary
from tests.golden.compare import agree, each_token, random


@pytest.mark.parametrize("width", [1, 7, 33])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_matches_its_equation(width: int, eps: float) -> None:
    x, g = random(2, 3, width), random(width, seed=1)
    silent = ("x",) if width == 1 else ()
    agree([ops.rms(x, eps)], each_token(lambda v, _: [rms(v, eps)], x), {"x": x}, silent=silent)
    agree([ops.rms(x, eps, g)], each_token(lambda v, _: [g * rms(v, eps)], x), {"x": x, "gain": g}, silent=silent)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_mixed_slices_are_weighted_sums(compiled: bool, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    w, x = random(*(() if shared else (2, 3)), 4, 2), random(2, 3, 2, 5, seed=1)
    rows = [w[..., i, 0, None] * x[..., 0, :] + w[..., i, 1, None] * x[..., 1, :] for i in range(4)]
    agree([mix_slices(w, x)], [torch.stack(rows, -2)], {"w": w, "x": x})


@pytest.mark.parametrize("compiled", [False, True])
def test_few_products_equal_dot_products(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    x, w = random(2, 3, 5), random(7, 5, seed=1)
    expected = torch.stack([(x * row).sum(-1) for row in w], -1)
    agree([few_products(x, w, rows=3)], [expected], {"x": x, "w": w})


def test_few_products_in_half_precision_round_only_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = random(4, 8, 5).detach().bfloat16().requires_grad_()
    w, g = (random(*shape, seed=1).detach().float() for shape in ((7, 5), (4, 8, 7)))
    y = few_products(x, w.requires_grad_(), rows=3)
    y.backward(g)
    torch.testing.assert_close(y.detach(), (x.float() @ w.T).detach())
    assert x.grad is not None and w.grad is not None and w.grad.dtype is torch.float32
    expected = (g @ w).detach(), torch.einsum("btk,btc->kc", g, x.detach().float())
    for ours, golden in zip((x.grad.float(), w.grad), expected, strict=True):
        assert float((ours - golden).norm()) <= 0.01 * float(golden.norm())


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "silu", "identity"])
@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("outputs", ["elementwise", "tensorwise"])
def test_gated_norm_matches_its_equation(activation: str, width: int, outputs: str) -> None:
    rank = 5
    leaves = {
        "x": random(2, 3, width),
        "weight": random(width, seed=1),
        "down": random(rank, width, seed=2),
        "up": random(width if outputs == "elementwise" else 1, rank, seed=3),
    }
    _, weight, down, up = leaves.values()
    ours = ops.gated_norm(**leaves, eps=1e-3, activation=activation)
    golden = each_token(lambda v, _: [parts.gatednorm(v, weight, down, up, activation, 1e-3)], leaves["x"])
    agree([ours], golden, leaves)


def test_scaled_rms_norm_matches_its_equation() -> None:
    leaves = {"x": random(2, 3, 7), "weight": random(7, seed=1), "affine": random(7, seed=2)}
    x, weight, affine = leaves.values()
    golden = each_token(lambda v, _: [parts.preaffine(v, affine, weight, 0.1)], x)
    agree([ops.rms_norm(x, weight, affine=affine, eps=0.1)], golden, leaves)


def test_norm_rotate_matches_its_equation() -> None:
    """QK-norm, then the rotation by position."""
    leaves = {"x": random(2, 3, 4, 6), "weight": random(6, seed=1)}
    cos, sin = rotary(torch.arange(3), 6, 50.0)
    ours = ops.norm_rotate(**leaves, cos=cos, sin=sin, eps=1e-3)

    def turned(b: int, t: int, h: int) -> Tensor:
        return rope(leaves["weight"] * rms(leaves["x"][b, t, h], 1e-3), t, 50.0)

    golden = torch.stack([torch.stack([turned(b, t, h) for h in range(4)]) for b in range(2) for t in range(3)])
    agree([ours], [golden.unflatten(0, (2, 3))], leaves)


SCALES = {"elementwise": (4, 6), "headwise": (4,), "broadcast": (4, 1), "scalar": (), "per token": (2, 3, 1, 1)}


@pytest.mark.parametrize("norm", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize("scale", SCALES)
def test_mix_projection_matches_its_equation(scale: str, norm: bool) -> None:
    leaves = {
        "current": random(2, 3, 4, 6),
        "anchor": random(2, 3, 4, 6, seed=1),
        "current_scale": random(*SCALES[scale], seed=2),
        "anchor_scale": random(*SCALES[scale], seed=3),
    }
    gain = {"norm_weight": random(6, seed=4)} if norm else {}

    def of_batch(name: str, b: int) -> list[Tensor]:
        value = leaves[name]
        return [value[b, t, 0, 0] for t in range(3)] if scale == "per token" else [value] * 3

    golden = torch.stack(
        [
            mix(
                leaves["current"][b],
                normed(leaves["anchor"][b], gain.get("norm_weight")),
                of_batch("anchor_scale", b),
                of_batch("current_scale", b),
            )
            for b in range(2)
        ]
    )
    agree([ops.mix_projection(**leaves, **gain)], [golden], leaves | gain)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [(), (0, 4), (0, 1, 2, 3, 4, 5)], ids=["none", "some", "all"])
def test_linear_cross_entropy_matches_its_equation(z_loss: float, ignored: tuple[int, ...]) -> None:
    hidden, weight = random(2, 3, 7), random(11, 7, seed=1)
    targets = torch.tensor([[3, 0, 10], [10, 5, 3]])
    targets.view(-1)[list(ignored)] = -100
    ours = ops.linear_cross_entropy(hidden, weight, targets, z_loss=z_loss)
    golden = parts.cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), z_loss)
    silent = ("hidden", "weight") if len(ignored) == 6 else ()
    agree(ours, golden, {"hidden": hidden, "weight": weight}, silent=silent)


def test_linear_cross_entropy_separates_z_and_ignores_index() -> None:
    hidden, weight, targets = random(2, 3, 7), random(11, 7, seed=1), torch.tensor([[3, 0, 10], [7, 5, 3]])
    pure, none = ops.linear_cross_entropy(hidden, weight, targets)
    same, z = ops.linear_cross_entropy(hidden, weight, targets, z_loss=1e-2)
    assert none == 0 and z > 0
    assert torch.equal(pure, same)
    without, _ = ops.linear_cross_entropy(hidden, weight, targets, ignore_index=3)
    reference = torch.nn.functional.cross_entropy(hidden.flatten(0, 1) @ weight.T, targets.flatten(), ignore_index=3)
    torch.testing.assert_close(without, reference)
