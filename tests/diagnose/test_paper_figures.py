"""The values in the papers' figures equal their direct definition, in float64, over batches of unequal size."""

import json
import math
import re
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from residua.diagnose import ModelDiagnosis
from residua.diagnose.metrics.anchors import Anchors
from residua.diagnose.metrics.depth_weights import DepthWeights
from residua.diagnose.metrics.dimensions import Norms
from residua.diagnose.metrics.gates import EDGES, NormGates, WriteGates
from residua.diagnose.metrics.maps import AttentionLayerMaps, AttentionMaps, LayerMaps, TokenMaps
from residua.diagnose.metrics.outputs import Outputs
from residua.diagnose.metrics.streams import Streams
from residua.diagnose.metrics.sublayers import Sublayers
from residua.diagnose.observe import AnchorFacts
from residua.model.decoder import Decoder
from residua.report import Page
from tests.diagnose import planted
from tests.diagnose.reports import report
from tests.diagnose.test_metrics import Case, attention_map, looked_into

pytestmark = pytest.mark.slow


def case(maps: bool = False, **tables: Any) -> Case:
    """A model in float64 with other weights wherever an untrained one has a constant."""
    torch.manual_seed(0)
    model = planted.control(**tables).double()
    with torch.no_grad():
        for p in [*model.topology.parameters(), *_small(model)]:
            p.add_(torch.randn_like(p) * 0.3)
    return looked_into(model, maps)


def _small(model: Decoder) -> Iterable[Tensor]:
    """Norm weights, their gates, λ and the maps of γ: everything that is constant in an untrained model."""
    parts = ("norm.", "anchor_scale", "current_scale", "gamma.")
    return [p for name, p in model.named_parameters() if any(part in name for part in parts)]


def figures(metric: Any, *models: ModelDiagnosis) -> list[dict[str, Any]]:
    """The plots of a metric's section."""
    page = Page("t", "l")
    metric.draw(page, models)
    return [json.loads(p) for p in re.findall(r'<script type="application/json">(.*?)</script>', page.html())]


@pytest.fixture(scope="module")
def streams() -> Case:
    return case(topology={"kind": "multi_gate", "streams": 3})


def test_stream_distances_cover_every_earlier_reader(streams: Case) -> None:
    _, made, seen = streams
    for place, facts in enumerate(made.streams):
        after = seen[f"depth.{facts.reader - 1}.streams"]
        assert len(facts.earlier) == after.shape[-2]
        for i, row in enumerate(facts.earlier):
            assert len(row) == place
            for j, found in enumerate(row):
                before = seen[f"depth.{made.streams[j].reader - 1}.streams"]
                if i >= before.shape[-2]:
                    assert found is None
                    continue
                cosine = torch.cosine_similarity(before[..., i, :], after[..., i, :], -1).clamp(-1, 1)
                # streams that are not written yet do not turn: arccos of a rounded 1 is up to 1e-8
                assert found == pytest.approx(float((cosine.arccos() / math.pi).mean()), rel=1e-9, abs=2e-8)
        assert facts.angular_distance == [row[-1] for row in facts.earlier if row]


def test_stream_maxima_match_definition(streams: Case) -> None:
    _, made, seen = streams
    for facts in made.streams:
        expected = seen[f"depth.{facts.reader - 1}.streams"].abs().amax((0, 1, 3))
        assert facts.largest == pytest.approx(expected.tolist(), rel=1e-12)


def test_write_gate_box_plots_match_definition(streams: Case) -> None:
    _, made, seen = streams
    assert made.betas
    for facts in made.betas:
        beta = seen[f"depth.{facts.site}.beta"].flatten(0, 1).numpy()
        for values, found in zip([beta.ravel(), *beta.T], [facts.quartiles, *facts.by_stream], strict=True):
            lower, middle, upper = np.quantile(values, [0.25, 0.5, 0.75])
            reach = 1.5 * (upper - lower)
            inside = values[(values >= lower - reach) & (values <= upper + reach)]
            expected = [inside.min(), lower, middle, upper, inside.max(), values.max()]
            assert list(found.model_dump().values()) == pytest.approx(expected, rel=1e-9)


def test_streams_and_write_gates_are_drawn_as_in_the_paper(streams: Case) -> None:
    _, made, _ = streams
    plots = figures(Streams, made)
    maps = [p["data"][0] for p in plots if p["data"][0]["type"] == "heatmap"]
    assert len(maps) == 3  # one for each stream
    between = {s.reader: s for s in made.streams}
    # n layers later (upward) from layer ℓ (to the right): stream 1 after layer 1 and two layers later
    cell = maps[1]["z"][maps[1]["y"].index("2")][1]
    assert cell == pytest.approx(between[8].earlier[1][3], abs=1e-4) and maps[1]["z"][0][1:] == [None] * 3
    sizes = [p for p in plots if p["layout"]["yaxis"]["title"]["text"] == "largest |s|"]
    assert [len(p["data"]) for p in sizes] == [3, 3]
    assert sizes[0]["data"][2]["y"][-1] == between[8].largest[2]  # after the last feed-forward
    assert sizes[1]["data"][2]["y"][-1] == between[7].largest[2]  # after the last attention
    box, ring = figures(WriteGates, made)[0]["data"]
    assert box["type"] == "box" and box["q3"] == [b.quartiles.upper for b in made.betas]
    assert ring["y"] == [b.quartiles.largest for b in made.betas]


def test_three_largest_values_of_every_output_match_definition(streams: Case) -> None:
    _, made, seen = streams
    for facts in made.outputs:
        y = seen[f"sublayer.{facts.site}.output"].abs()
        top = y.flatten().sort(descending=True).values[:3]
        assert [a.value for a in facts.largest] == pytest.approx(top.tolist(), rel=1e-12)
        for a in facts.largest:
            assert float(y[a.sequence, a.position, a.dimension]) == a.value
    plots = figures(Outputs, made)
    assert [len(p["data"]) for p in plots] == [3] * 4
    written = plots[0]["data"]  # the feed-forwards' outputs: largest, second, third
    assert [curve["y"][1] for curve in written] == [a.value for a in made.outputs[3].largest]
    assert [curve["y"][1] for curve in plots[1]["data"]] == [a.value for a in made.states[4].largest]


def test_layer_output_and_gradient_sum_over_its_sublayers(streams: Case) -> None:
    """As in 004, figure 2: a point for each Transformer block."""
    model, made, seen = streams
    text = planted.sample()
    model.zero_grad()
    model.losses(text.tokens, text.targets)[0].backward()
    written, slopes = [], []
    for layer in range(4):
        y = seen[f"sublayer.{2 * layer}.output"] + seen[f"sublayer.{2 * layer + 1}.output"]
        written.append(float(y.square().mean().sqrt()))
        own = model.sublayers[2 * layer : 2 * layer + 2]
        slopes.append(float(torch.cat([p.grad.flatten() for p in own.parameters()]).square().mean().sqrt()))
    model.zero_grad()
    assert [found.layer for found in made.layer_sizes] == [0, 1, 2, 3]
    assert [found.output_rms for found in made.layer_sizes] == pytest.approx(written, rel=1e-12)
    assert [found.gradient_rms for found in made.layer_sizes] == pytest.approx(slopes, rel=1e-9)
    drawn = [p["data"][0]["y"] for p in figures(Sublayers, made)]
    assert [s.rms for s in made.states] in drawn and made.depth_weights and made.depth_blocks == []
    assert drawn[3:] == [
        [found.output_rms for found in made.layer_sizes],
        [made.states[k].rms for k in (2, 4, 6, 8)],
        [site.gradient_rms for site in made.sites],
        [found.gradient_rms for found in made.layer_sizes],
    ]


def reads(seen: dict[str, Tensor], readers: Iterable[int], blocks: dict[str, list[list[int]]]) -> dict[str, float]:
    """The mean weight of some readers on each block, given the positions of its sources for each reader in turn.

    Reader 0 has one source, the embedding.
    """
    weights = [seen[f"depth.{k - 1}.weights"].mean((0, 1)) if k else torch.ones(1) for k in readers]
    return {
        name: float(sum(w[i] for w, own in zip(weights, positions, strict=True) for i in own)) / len(weights)
        for name, positions in blocks.items()
    }


def test_depth_weights_are_grouped_by_block() -> None:
    """As in 001, figure 34: a row for each block, a column for each block and the embedding."""
    _, made, seen = case(topology={"kind": "block_attnres", "sublayers_per_block": 3})
    found = {block.name: dict(zip(block.sources, block.mean, strict=True)) for block in made.depth_blocks}
    assert {block.name: block.readers for block in made.depth_blocks} == {
        "block 1": [0, 1, 2], "block 2": [3, 4, 5], "block 3": [6, 7], "the final norm": [8],
    }  # fmt: skip
    # the first reader of a block has no sum of its own block yet
    expected = {
        "block 1": reads(seen, (0, 1, 2), {"embedding": [[0]] * 3, "block 1": [[], [1], [1]]}),
        "block 2": reads(
            seen, (3, 4, 5), {"embedding": [[0]] * 3, "block 1": [[1]] * 3, "block 2": [[], [2], [2]]}
        ),
        "block 3": reads(
            seen, (6, 7),
            {"embedding": [[0]] * 2, "block 1": [[1]] * 2, "block 2": [[2]] * 2, "block 3": [[], [3]]},
        ),
        "the final norm": reads(
            seen, (8,), {"embedding": [[0]], "block 1": [[1]], "block 2": [[2]], "block 3": [[3]]}
        ),
    }  # fmt: skip
    assert list(found) == list(expected)
    for name, row in expected.items():
        assert found[name] == pytest.approx(row, rel=1e-9) and sum(found[name].values()) == pytest.approx(1.0)
    by_reader, by_block = (p["data"][0] for p in figures(DepthWeights, made)[:2])
    assert by_block["y"] == list(expected) and by_block["x"] == ["embedding", "block 1", "block 2", "block 3"]
    assert by_block["z"][1] == [*found["block 2"].values(), None] and len(by_reader["z"]) == 8


def test_full_attnres_depth_weights_are_grouped_by_layer() -> None:
    _, made, seen = case(topology={"kind": "full_attnres"})
    found = {block.name: dict(zip(block.sources, block.mean, strict=True)) for block in made.depth_blocks}
    assert list(found) == ["layer 0", "layer 1", "layer 2", "layer 3", "the final norm"]
    # reader 4 sees the embedding and outputs 0 to 3, reader 5 also output 4: its own layer's attention
    blocks = {"embedding": [[0]] * 2, "layer 0": [[1, 2]] * 2, "layer 1": [[3, 4]] * 2, "layer 2": [[], [5]]}
    assert found["layer 2"] == pytest.approx(reads(seen, (4, 5), blocks), rel=1e-9)
    assert found["layer 0"] == pytest.approx(reads(seen, (0, 1), {"embedding": [[0]] * 2, "layer 0": [[], [1]]}))


def test_windowed_and_boundary_attnres_are_grouped_by_block() -> None:
    _, made, seen = case(topology={"kind": "full_attnres", "window": 3})
    (row,) = (block for block in made.depth_blocks if block.name == "layer 3")
    blocks = {"embedding": [[0]] * 2, "layer 1": [[1], []], "layer 2": [[2, 3], [1, 2]], "layer 3": [[], [3]]}
    assert dict(zip(row.sources, row.mean, strict=True)) == pytest.approx(reads(seen, (6, 7), blocks), rel=1e-9)
    _, made, _ = case(topology={"kind": "boundary_attnres", "sublayers_per_block": 3})
    assert [(block.name, block.readers) for block in made.depth_blocks] == [
        ("block 1", [0]), ("block 2", [3]), ("block 3", [6]),
    ]  # fmt: skip
    assert [block.mean for block in made.depth_blocks[1:]] == [reader.mean for reader in made.depth_weights]
    assert made.depth_blocks[2].sources == ["embedding", "block 1", "block 2"]


@pytest.fixture(scope="module")
def dynamic() -> Case:
    return case(
        maps=True,
        anchors={"kind": "exoformer", "mixing": {"kind": "dynamic"}},
        attention={"kind": "softmax", "heads": 4, "gate": "elementwise"},
        norm={"kind": "preaffine"},
    )


def test_mixing_coefficients_of_a_dynamic_model_include_gamma(dynamic: Case) -> None:
    model, made, seen = dynamic
    for facts in made.anchors:
        sublayer = model.sublayers[2 * facts.layer]
        mix = sublayer.body.mix
        with torch.no_grad():
            gamma = mix.gamma(sublayer.norm(seen[f"sublayer.{2 * facts.layer}.input"])).mean((0, 1))
        at = 2 * mix.pathways.index(facts.pathway)
        one, two = mix.anchor_scale[facts.pathway].flatten(), mix.current_scale[facts.pathway].flatten()
        assert facts.gamma == pytest.approx(gamma[at : at + 2].tolist(), rel=1e-9)
        assert facts.anchor_channels == pytest.approx((one * gamma[at]).tolist(), rel=1e-5)
        assert facts.current_channels == pytest.approx((two * gamma[at + 1]).tolist(), rel=1e-5)
        ratio = ((one * gamma[at]) / (two * gamma[at + 1])).tolist()
        assert facts.ratio == pytest.approx(median(ratio), rel=1e-4)
    plots = figures(Anchors, made)
    assert [len(p["data"][0]["x"]) for p in plots[4:6]] == [4 * planted.WIDTH] * 2  # every channel of Q, K, V and G
    first = made.anchors[0]
    quotient = first.anchor_channels[0] / first.current_channels[0]
    assert plots[4]["data"][0]["z"][0][0] == pytest.approx(quotient, rel=1e-5)


def test_static_and_dynamic_mixing_start_with_equal_weights() -> None:
    attention = {"kind": "softmax", "heads": 4, "gate": "elementwise"}
    for mixing in ("static", "dynamic"):
        model = planted.control(anchors={"kind": "exoformer", "mixing": {"kind": mixing}}, attention=attention)
        made = planted.diagnosed(model, ablations="none")
        assert {x for a in made.anchors for x in (*a.anchor_channels, *a.current_channels)} == {0.5}
        assert {a.ratio for a in made.anchors} == {1.0}


def test_both_preaffine_factors_are_shown_for_each_norm(dynamic: Case) -> None:
    model, made, _ = dynamic
    norms = [*(s.norm for s in model.sublayers), model.norm]
    for factor, name in (("λ", "weight"), ("λ1", "affine")):
        own = [n for n in made.norms if n.factor == factor]
        values = torch.stack([getattr(norm, name).detach() for norm in norms])
        assert [n.state for n in own] == list(range(9))
        low, high = values.amin(0).argsort().tolist()[:24], values.amax(0).argsort(descending=True).tolist()[:24]
        order = low + [j for j in high if j not in low]
        for n, expected in zip(own, values, strict=True):
            assert n.dimensions == order and n.values == pytest.approx(expected[order].tolist(), rel=1e-12)
            assert (n.lowest, n.highest) == (float(expected.min()), float(expected.max()))
    maps = [p["data"][0] for p in figures(Norms, made) if p["data"][0]["type"] == "heatmap"]
    assert len(maps) == 2 and maps[1]["z"][3][0] == pytest.approx(made.norms[9 + 3].values[0], rel=1e-3)


def test_the_most_extreme_factor_is_named_with_the_other() -> None:
    model = planted.control(norm={"kind": "preaffine"})
    with torch.no_grad():
        model.sublayers[3].norm.affine[7], model.sublayers[3].norm.weight[7] = 7.19, 0.06
    (told,) = Norms.sentences(planted.diagnosed(model, ablations="none"))
    assert told.text == (
        "Norm weights furthest from 1: λ = 0.06 in dimension 7 before layer 1 feed-forward, where λ1 is 7.19; "
        "λ1 = 7.19 in dimension 7 before layer 1 feed-forward, where λ is 0.06."
    )


def test_token_dimension_maps_match_definition(dynamic: Case) -> None:
    _, made, seen = dynamic
    states = torch.stack([*(seen[f"sublayer.{k}.input"] for k in range(8)), seen["final.input"]]).abs()
    order = states.mean((0, 1, 2)).argsort(descending=True).tolist()[:48]
    found = made.token_map
    assert found.dimensions == order
    for values, expected in ((found.values, states[:, 0].mean(0)), (made.layer_maps[2].values, states[4, 0])):
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected[:48, order], rtol=1e-4, atol=0.0)
    assert [m.name for m in made.layer_maps] == [*(f"layer {n} attention" for n in range(4)), "the final norm"]
    (shown,) = figures(TokenMaps, made)
    assert shown["data"][0]["z"] == found.values
    (shown,) = figures(LayerMaps, made.model_copy(update={"layer_maps": made.layer_maps[2:3]}))
    assert shown["data"][0]["z"] == made.layer_maps[2].values


def test_maps_of_every_layer_are_computed_only_on_request(streams: Case) -> None:
    assert streams[1].token_map is not None and streams[1].layer_maps == []
    assert streams[1].attention_map is not None and streams[1].attention_layer_maps == []


def test_attention_maps_match_definition(dynamic: Case) -> None:
    _, made, seen = dynamic
    whole = torch.stack([attention_map(seen, layer)[0, :, :48, :48] for layer in range(4)])  # [L, H, i, k]
    assert [m.layer for m in made.attention_layer_maps] == [0, 1, 2, 3]
    for values, expected in (
        (made.attention_map.values, whole.mean((0, 1))),
        (made.attention_layer_maps[2].heads[1], whole[2, 1]),
    ):
        assert [len(row) for row in values] == list(range(1, len(expected) + 1))
        for found, row in zip(values, expected, strict=True):
            assert found == pytest.approx(row[: len(found)].tolist(), rel=1e-3)
    (shown,) = figures(AttentionMaps, made)
    z = shown["data"][0]["z"]
    assert z[3][:4] == made.attention_map.values[3] and z[3][4] is None
    one = made.model_copy(update={"attention_layer_maps": made.attention_layer_maps[2:3]})
    assert figures(AttentionLayerMaps, one)[0]["data"][0]["z"][5][2] == pytest.approx(
        float(whole[2, :, 5, 2].mean()), rel=1e-2
    )


def test_gated_norm_gate_by_input_size_matches_definition() -> None:
    model, made, seen = case(norm={"kind": "gatednorm", "rank": 4})
    sizes, gates = [], []
    for facts in made.norm_gates:
        last = facts.state == 8
        norm = model.norm if last else model.sublayers[facts.state].norm
        x = seen["final.input" if last else f"sublayer.{facts.state}.input"]
        with torch.no_grad():
            y = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            gate = torch.sigmoid(torch.nn.functional.silu(y @ norm.gate.down.T) @ norm.gate.up.T)
            torch.testing.assert_close(y * gate, norm(x))  # the gate is the one that acts
        assert facts.mean == pytest.approx(float(gate.mean()), rel=1e-9)
        both = torch.stack([y.abs().flatten(), gate.flatten()])
        assert facts.correlation == pytest.approx(float(torch.corrcoef(both)[0, 1]), rel=1e-6)
        sizes.append((y.abs() / y.square().mean(-1, keepdim=True).sqrt()).flatten())
        gates.append(gate.flatten())
    size, gate = torch.cat(sizes), torch.cat(gates)
    assert len(sizes) == 9
    for i, (low, high) in enumerate(zip((-1.0, *EDGES), (*EDGES, math.inf), strict=True)):  # a size may be 0
        own = gate[(size > low) & (size <= high)]
        assert made.gate_by_size.share[i] == pytest.approx(len(own) / len(gate), abs=1e-12)
        assert made.gate_by_size.gate[i] == (pytest.approx(float(own.mean()), rel=1e-9) if len(own) else None)
    assert figures(NormGates, made)[0]["data"][0]["y"] == [g for g in made.gate_by_size.gate if g is not None]


def test_a_map_of_many_channels_has_no_grid_lines() -> None:
    """Cells narrower than a line would vanish."""
    facts = [
        AnchorFacts(
            layer=n, pathway="v", anchor=[0.5] * 4, current=[0.5] * 4, near_zero=0.0, ratio=1.0,
            anchor_channels=[0.1 * (j % 7 + 1) for j in range(1024)], current_channels=[0.5] * 1024,
        )
        for n in range(2)
    ]  # fmt: skip
    made = report(layers=2).model_copy(update={"anchors": facts})
    figure = figures(Anchors, made)[1]
    shown = figure["data"][0]
    assert (shown["xgap"], shown["ygap"]) == (0, 1)
    assert (figure["layout"]["xaxis"]["dtick"], figure["layout"]["yaxis"]["dtick"]) == (22, 1)  # every layer is named
    assert len(shown["x"]) == 256 and shown["x"][65] == "V head 1 channel 4"  # of four neighbours each
    assert shown["z"][0][0] == pytest.approx((0.2 + 0.4 + 0.6 + 0.8) / 4)
