"""A diagnosis names exactly the defects that were planted."""

from html import unescape

import pytest
import torch

from residua.diagnose import Diagnosis
from residua.diagnose.metrics.dimensions import DimensionFacts, DimensionProfile, Dimensions
from residua.diagnose.page import diagnosis_page
from tests.diagnose import planted
from tests.diagnose.planted import TOPOLOGIES, control, diagnosed, named
from tests.diagnose.reports import findings_of, report

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_clean_model_has_no_findings(topology: str) -> None:
    made = diagnosed(control(topology=TOPOLOGIES[topology]))
    assert named(made) == set()


def test_a_sink_on_the_first_token_is_named_with_its_layer() -> None:
    model = control()
    planted.plant_sink(model, layer=1, dimension=0)
    made = diagnosed(model)
    assert named(made) == {("attention_sink", (("layers", (1,)), ("position", 0)))}
    layer = made.attention[1]
    assert layer.first_token > 0.9 and layer.sink_rate == 1.0
    assert layer.uniform_first_token == pytest.approx(sum(1 / i for i in range(1, 33)) / 32)
    assert all(a.sink_rate == 0 for a in made.attention if a.layer != 1)


def test_token_sink_at_any_position_is_named_by_id() -> None:
    model = control()
    with torch.no_grad():
        model.embed.weight[:, 0] = 0.0
        model.embed.weight[17, 0] = 4.0
    planted.plant_sink(model, layer=2, dimension=0)
    text = planted.sample()
    generator = torch.Generator().manual_seed(3)
    for row in text.tokens:
        row[row == 17] = 18
        row[1 + int(torch.randint(5, (), generator=generator))] = 17
    made = diagnosed(model, text)
    assert ("sink_token", (("layers", (2,)), ("token", 17))) in named(made)
    assert {kind for kind, _ in named(made)} == {"sink_token"}


def test_an_outlier_dimension_is_named_with_its_norm_gain() -> None:
    model = control()
    planted.plant_outlier(model, dimension=5, size=41.0, gain=0.006)
    made = diagnosed(model)
    assert named(made) == {("residual_sink", (("dimension", 5),))}
    largest = made.dimensions.largest[0]
    assert largest.dimension == 5 and largest.gain == pytest.approx(0.006) and largest.share > 0.95
    assert "norm gain 0.006" in made.findings[-1].words


@pytest.mark.parametrize(("share", "ratio", "sink"), [(0.6, 9.0, True), (0.4, 9.0, False), (0.9, 7.0, False)])
def test_a_residual_sink_must_be_large_in_most_tokens(share: float, ratio: float, sink: bool) -> None:
    largest = DimensionFacts(dimension=3, mean=ratio, ratio=ratio, share=share, gain=0.1)
    profile = DimensionProfile(median=1.0, median_gain=1.0, largest=[largest])
    assert bool(findings_of(Dimensions, report(layers=2).model_copy(update={"dimensions": profile}))) is sink


def test_a_dead_layer_and_a_dead_sublayer_are_named_separately() -> None:
    model = control()
    planted.silence(model, 4, 5, 1)
    made = diagnosed(model)
    assert named(made) == {("dead_layer", (("layer", 2),)), ("dead_sublayer", (("sublayer", 1),))}
    assert next(a for a in made.ablations if a.kind == "layer" and a.index == 2).change == pytest.approx(0, abs=1e-6)


def test_a_routed_reader_is_named_with_its_source() -> None:
    model = control(topology={"kind": "full_attnres"})
    planted.plant_routing(model, reader=5)
    made = diagnosed(model)
    assert named(made) == {("depth_routing", (("reader", 5), ("source", 0)))}
    reader = next(r for r in made.depth_weights if r.reader == 5)
    assert reader.sources[0] == "embedding" and reader.mean[0] > 0.95
    assert "uniform weights there change the loss" in made.findings[-1].words


def test_several_planted_defects_are_named_without_false_alarms() -> None:
    model = control()
    planted.plant_sink(model, layer=1, dimension=0)
    planted.plant_outlier(model, dimension=5, size=41.0, gain=0.006)
    planted.silence(model, 6, 7)
    assert named(diagnosed(model)) == {
        ("attention_sink", (("layers", (1,)), ("position", 0))),
        ("residual_sink", (("dimension", 5),)),
        ("dead_layer", (("layer", 3),)),
    }


def test_the_page_lists_findings_with_the_loss_first() -> None:
    model = control()
    planted.plant_sink(model, layer=1, dimension=0)
    planted.plant_outlier(model, dimension=5, size=41.0, gain=0.006)
    made = diagnosed(model)
    shown = unescape(diagnosis_page(Diagnosis(models=[made])).html())
    assert len(made.findings) == 3 and all(finding.words[1:] in shown for finding in made.findings)
    assert made.findings[0].kind == "chance_level_loss"


def test_a_massive_activation_is_named_by_its_dimension() -> None:
    model = control()
    with torch.no_grad():
        model.embed.weight[planted.FIRST, 9] = 3000.0
    assert ("massive_activation", (("dimension", 9),)) in named(diagnosed(model, ablations="none"))


def test_layer_that_writes_next_to_an_outlier_is_not_dead() -> None:
    model = control()
    planted.plant_outlier(model, dimension=5, size=600.0, gain=0.006)
    made = diagnosed(model)
    assert all(site.relative_rms is not None and site.relative_rms < 0.001 for site in made.sites)
    assert {kind for kind, _ in named(made)} == {"residual_sink"}
