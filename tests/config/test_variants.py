"""Variants of hybrids and mixtures: what a short name changes depends on the base, and names still combine."""

from __future__ import annotations

import pytest

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import overrides
from residua.model.size import measure
from residua.study import plots
from residua.study.runs import RunRecord


def varied(base: str, *entries: str) -> RunConfig:
    config = RunConfig.find(base)
    return config.override(overrides(entries, config.model))


def test_moe_gives_a_token_the_bases_width() -> None:
    dense, sparse = measure(RunConfig.find("tiny").model), measure(varied("tiny", "moe").model)
    assert dense.active <= sparse.active <= 1.01 * dense.active
    assert varied("tiny", "moe").model.ffn.activation == RunConfig.find("tiny").model.ffn.kind


def test_linear_attention_has_nearly_the_parameters_of_what_it_replaces() -> None:
    softmax, linear = measure(RunConfig.find("tiny").model), measure(varied("tiny", "linear").model)
    assert linear.attention == pytest.approx(softmax.attention, rel=0.05)


def test_names_combine_with_a_hybrid_in_any_order_that_makes_sense() -> None:
    model = varied("tiny", "hybrid+exoformer+moe+mgr").model
    assert model.attention.softmax.gate == "elementwise"
    assert (model.anchors.kind, model.ffn.kind, model.topology.kind) == ("exoformer", "moe", "multi_gate")
    assert varied("tiny-hybrid", "gated_attention").model.attention.softmax.gate == "elementwise"
    assert varied("tiny", "gated_attention").model.attention.gate == "elementwise"


@pytest.mark.parametrize(("base", "name"), [("tiny-hybrid", "linear"), ("tiny-linear", "hybrid"), ("tiny-moe", "moe")])
def test_a_name_that_has_nothing_to_replace_says_so(base: str, name: str) -> None:
    with pytest.raises(ConfigError, match="the base has"):
        varied(base, name)


def test_expert_loads_are_drawn_for_the_variants_that_have_them(tmp_path) -> None:
    load = [{"layer": 0, "load": [0.4, 0.3, 0.2, 0.1]}, {"layer": 1, "load": [0.25] * 4}]
    sparse = RunRecord(tmp_path, 1, [], [], {"experts": load})
    dense = RunRecord(tmp_path, 1, [], [], {"sublayers": []})
    figures = plots.expert_loads({"dense": [dense], "moe": [sparse, sparse]})
    assert list(figures) == ["moe"]
    assert [list(row) for row in figures["moe"].data[0].z] == [pytest.approx([1.6, 1.2, 0.8, 0.4]), [1.0] * 4]


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ("mgr+block_attnres", "model.topology.kind"),
        ("prenorm+mgr", "model.topology.kind"),
        ("gatednorm+exoformer+dyt", "model.norm.kind"),
        ("resformer+exoformer", "model.anchors.kind"),
        ("sink+linear", "model.attention.sink"),
    ],
)
def test_two_names_that_set_the_same_choice_are_refused(names: str, key: str) -> None:
    first, last = names.split("+")[0], names.split("+")[-1]
    with pytest.raises(ConfigError, match=f"'{first}' and '{last}' both set {key}"):
        varied("tiny", names)
    with pytest.raises(ConfigError, match=f"'{first}' and '{last}' both set {key}"):
        varied("tiny", *names.split("+"))


def test_names_that_agree_on_a_choice_combine() -> None:
    assert varied("tiny", "exoformer+gated_attention").model.attention.gate == "elementwise"
    assert varied("tiny", "gated_attention+sink+hybrid").model.attention.softmax.sink == "learned"
    assert varied("mgr-s-prenorm", "mgr8+mgr_independent").model.topology.streams == 8
    assert varied("tiny", "mgr", "model.topology.kind=additive").model.topology.kind == "additive"
