"""Names of variants that hold a number: any number will do."""

from __future__ import annotations

import pytest

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import overrides


def topology(name: str) -> dict[str, object]:
    base = RunConfig.find("mini")
    return base.override(overrides([name], base.model)).model.topology.model_dump()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block3", {"kind": "block_attnres", "sublayers_per_block": 6}),
        ("mgr6", {"kind": "multi_gate", "streams": 6, "gate": "competitive"}),
        ("mgr6_independent", {"kind": "multi_gate", "streams": 6, "gate": "independent"}),
        ("clip250", {"kind": "clipped", "limit": 250.0}),
    ],
)
def test_a_name_takes_any_number(name: str, expected: dict[str, object]) -> None:
    layers = RunConfig.find("mini").model.layers
    if "sublayers_per_block" in expected:
        expected = {**expected, "sublayers_per_block": -(-2 * layers // 3)}
    assert expected.items() <= topology(name).items()


def test_numbered_names_combine_and_exclude_each_other_like_others() -> None:
    base = RunConfig.find("mini")
    both = base.override(overrides(["mgr6+exoformer"], base.model)).model
    assert (both.topology.kind, both.anchors.kind) == ("multi_gate", "exoformer")
    with pytest.raises(ConfigError, match="'block3' and 'mgr6' both set"):
        overrides(["block3+mgr6"], base.model)


@pytest.mark.parametrize("name", ["block", "block0", "block-1", "glu4", "mgr4_free", "clip1e9"])
def test_a_number_where_there_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a known variant"):
        topology(name)
