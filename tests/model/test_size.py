"""FLOPs per token, against counts by hand for three layers of width 16 with two heads of 8."""

from typing import Any

import pytest

from residua.model.size import measure
from tests.model.small import small

ROWS: dict[str, tuple[dict[str, Any], int, int]] = {
    "lime": ({"anchors": {"kind": "lime"}}, (2 * 4 + 2 * 6) * (8 + 8), 2 * 4 + 2 * 6),
    "depth_attention": ({"anchors": {"kind": "depth_attention"}}, 2 * (1 + 2 + 3) * (8 + 8), 0),
    "dense": ({"topology": {"kind": "dense"}}, (2 + 3 + 4) * 16, 2 + 3 + 4),
    "mudd": ({"topology": {"kind": "mudd"}}, (4 * 2 + 4 * 3 + 4) * 16, 0),
    "mudd, one way": ({"topology": {"kind": "mudd", "ways": ["v"], "sources": 1}}, (2 + 2 + 2) * 16, 0),
    "dca": ({"topology": {"kind": "dca"}}, (3 + 3 * 2 + 3 * 3 + 4) * (16 + 16), (22 + 10) * 16),
    "full_attnres": ({"topology": {"kind": "full_attnres"}}, (2 + 3 + 4 + 5 + 6 + 7) * (16 + 16), 6 * 2 * 16),
    "blocks": (
        {"topology": {"kind": "block_attnres", "sublayers_per_block": 2}},
        (2 + 2 + 3 + 3 + 4 + 4) * (16 + 16),
        6 * 2 * 16,
    ),
    "boundaries": (
        {"topology": {"kind": "boundary_attnres", "sublayers_per_block": 2}}, (2 + 3) * (16 + 16), 2 * 2 * 16
    ),
    "delta": (
        {"topology": {"kind": "delta_attnres", "sublayers_per_block": 1}}, (2 + 3 + 4 + 5 + 6) * (16 + 16), 5 * 2 * 16
    ),
    "mgr": ({"topology": {"kind": "multi_gate", "streams": 3}}, (2 * 2 + 2 * 3 + 4 * 4 * 3) * 16, (6 + 4) * 16),
    "gated": ({"topology": {"kind": "gated_residual", "streams": 2}}, (7 * 2 + 6 * 2) * 16, 0),
    "hyper": (
        {"topology": {"kind": "hyper", "streams": 2}}, 6 * (2 + 2 + 4 + 2 * (1 + 1 + 2)) * 16, 6 * (1 + 1 + 2) * 16
    ),
    "mhc": ({"topology": {"kind": "mhc", "streams": 2, "iterations": 3}}, 6 * (2 + 2 + 4) * 16, 0),
    "frac": ({"topology": {"kind": "frac", "fractions": 2}}, 6 * (2 + 2 + 1 + 2 + 2 + 1) * 16, 6 * (2 + 2 + 1) * 8),
}  # fmt: skip
"""Multiply-adds of the mixtures for one token, and those of them that the model's parameters count already."""


@pytest.mark.parametrize("name", ROWS)
def test_flops_count_a_mixing_weight_once_per_use(name: str) -> None:
    tables, products, counted = ROWS[name]
    plain, mixed = measure(small()), measure(small(**tables))
    more = mixed.flops_per_token - plain.flops_per_token
    assert more == 6 * (mixed.active - plain.active + products - counted)
