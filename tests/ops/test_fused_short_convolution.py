"""Convolved heads, gated output and the mixer: their kernels against float64, in the interpreter and on a GPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.delta_rule.autograd import delta_mixer
from residua.ops.delta_rule.reference import naive
from residua.ops.gated_output import launch as output
from residua.ops.short_convolution import launch
from tests.ops.test_fused_delta_rule import follows

CPU = torch.device("cpu")
WIDTH = 16


def by_token(
    projected: Tensor, weight: Tensor, key_heads: int, value_heads: int, segments: Tensor | None
) -> list[Tensor]:
    """Convolution, silu and norms, one token at a time."""
    taps, channels = weight.shape
    rows = []
    for b in range(projected.shape[0]):
        for t in range(projected.shape[1]):
            y = torch.zeros(channels, dtype=projected.dtype)
            for j in range(min(taps, t + 1)):
                if segments is not None and len(segments[b, t - j : t + 1].unique_consecutive()) > 1:
                    break
                y = y + weight[j] * projected[b, t - j, :channels]
            rows.append(y / (1 + torch.exp(-y)))
    heads = torch.stack(rows).view(*projected.shape[:2], 2 * key_heads + value_heads, -1)
    q, k, v = heads.split([key_heads, key_heads, value_heads], 2)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    z = projected[..., channels:].unflatten(-1, v.shape[2:]) if projected.shape[-1] > channels else v[:, :, :0]
    return [q / v.shape[-1] ** 0.5, k, v, z]


def convolution_follows(
    length: int, taps: int, heads: tuple[int, int], packed: bool, device: torch.device, dtype: torch.dtype,
    most: float, width: int = WIDTH, gated: bool = True,
) -> None:  # fmt: skip
    key_heads, value_heads = heads
    channels = (2 * key_heads + value_heads) * width
    x, weight = torch.randn(2, length, channels + gated * value_heads * width), torch.randn(taps, channels)
    segments = (torch.rand(2, length) < 0.2).cumsum(1) % 3 if packed else None

    def fused(projected: Tensor, weight: Tensor) -> Sequence[Tensor]:
        on = None if segments is None else segments.to(device)
        return launch.convolve_heads(projected, weight, *heads, segments=on)

    inputs = x.to(device, dtype), weight.to(device)
    follows(fused, lambda x, w: by_token(x, w, *heads, segments), inputs, most)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "taps", "heads", "packed"), [(9, 4, (1, 2), True), (5, 4, (2, 1), False), (3, 1, (1, 1), True)]
)
def test_convolved_heads_and_gradients_match_a_loop(
    length: int, taps: int, heads: tuple[int, int], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of four tokens, so that some have others before and after them."""
    monkeypatch.setattr(launch, "FORWARD", launch.TilePlan(4, 1))
    monkeypatch.setattr(launch, "BACKWARD", launch.TilePlan(4, 1, 2, 1))
    convolution_follows(length, taps, heads, packed, CPU, torch.float32, 1e-5)


@pytest.mark.slow
def test_a_projection_without_a_gate_is_convolved_equally() -> None:
    convolution_follows(3, 4, (1, 1), False, CPU, torch.float32, 1e-5, gated=False)


def normed(o: Tensor, z: Tensor, weight: Tensor) -> list[Tensor]:
    return [weight * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * z / (1 + torch.exp(-z))]


def fused_output(o: Tensor, z: Tensor, weight: Tensor) -> list[Tensor]:
    return [output.gated_output(o, z, weight)]


@pytest.mark.slow
def test_gated_output_matches_its_equation_on_strided_heads() -> None:
    whole = torch.randn(2, 5, 4, 3 * WIDTH)
    inputs = torch.randn(2, 5, 4, WIDTH), whole[..., WIDTH : 2 * WIDTH], torch.randn(WIDTH)
    follows(fused_output, normed, inputs, 1e-5)


def test_reference_matches_unfused_code() -> None:
    inputs = torch.randn(2, 9, 6 * WIDTH).double(), torch.randn(4, 4 * WIDTH).double()
    segments = (torch.rand(2, 9) < 0.3).cumsum(1)
    found = ops.convolve_heads(*inputs, 1, 2, segments=segments)
    for a, b in zip(found, by_token(*inputs, 1, 2, segments), strict=True):
        torch.testing.assert_close(a, b)
    o, z, weight = found[2], found[3], torch.randn(WIDTH).double()
    torch.testing.assert_close(ops.gated_output(o, z, weight), normed(o, z, weight)[0])


def mixed(projected: Tensor, g: Tensor, beta: Tensor, weight: Tensor, gain: Tensor, segments: Tensor) -> list[Tensor]:
    """The whole mixer, by transcriptions of its convolution and norm and by the loop of the rule."""
    q, k, v, z = by_token(projected, weight, 1, 2, segments)
    o, last = naive(q, k, v, g, beta, segments=segments)
    return [*normed(o, z, gain), last]


@pytest.mark.slow
def test_fused_mixer_and_gradients_match_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BACKWARD", launch.TilePlan(4, 1, 2, 1))
    gates = -torch.rand(2, 7, 2), torch.rand(2, 7, 2)
    inputs = torch.randn(2, 7, 6 * WIDTH), *gates, torch.randn(4, 4 * WIDTH), torch.randn(WIDTH)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0] * 7])
    follows(lambda *x: delta_mixer(*x, 1, segments=segments), lambda *x: mixed(*x, segments), inputs, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "heads", "packed"), [(1000, (2, 4), True), (64, (3, 3), False)])
def test_gpu_kernels_match_a_loop(length: int, heads: tuple[int, int], packed: bool) -> None:
    convolution_follows(length, 4, heads, packed, torch.device("cuda"), torch.bfloat16, 0.01, width=128)
    o, z = (torch.randn(2, length, 3, 128).to("cuda", torch.bfloat16) for _ in range(2))
    follows(fused_output, normed, (o, z, torch.randn(128, device="cuda")), 0.01)
