"""Heads in the order of other libraries, rotated as in those libraries."""

import pytest
import torch

from residua import ops
from residua.config.positions import PartialRope
from residua.convert.layouts import by_head, reordered, turned_order
from residua.model.rope import rotary_table

HEAD, TURNED, THETA = 8, 4, 50.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_partially_rotated_heads_match_the_equation(interleaved: bool) -> None:
    """x'_a = x_a cos − x_b sin, x'_b = x_b cos + x_a sin of the pairs (a, b) of the first elements; others stay."""
    x, position = torch.randn(3, HEAD, dtype=torch.float64), torch.tensor([0, 1, 5])
    expected = x.clone()
    for i in range(TURNED // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + TURNED // 2)
        angle = position * THETA ** (-2 * i / TURNED)
        expected[:, a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
        expected[:, b] = x[:, b] * angle.cos() + x[:, a] * angle.sin()
    order = turned_order(HEAD, TURNED, interleaved=interleaved)
    table = rotary_table(position, HEAD, THETA, PartialRope(share=TURNED / HEAD))
    turned = ops.rotate(x[:, order][None, :, None], table)[0, :, 0]
    torch.testing.assert_close(turned, expected[:, order], rtol=0, atol=1e-6)  # angles are float32


def test_reordered_rows_survive_a_round_trip() -> None:
    layout = reordered(
        by_head((2, 1), (turned_order(HEAD, TURNED), torch.arange(HEAD))), factor=torch.arange(1.0, 25.0)
    )
    stored = torch.randn(24, 5)
    torch.testing.assert_close(layout.write(layout.read(stored)), stored)
    assert layout.read(stored)[2].equal(3 * stored[4]) and layout.read(stored)[17].equal(18 * stored[17])
