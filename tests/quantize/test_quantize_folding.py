"""Folding a factor along the model's graph changes nothing, for any parts of a model."""

import numpy as np
import pytest
import torch
from torch import Tensor

import residua
from residua.data.loader import Batch
from residua.model.decoder import Decoder
from residua.model.equivalence import divide_square
from residua.model.norm import Norm
from residua.quantize.modules import targets
from residua.quantize.smoothing import channel_peaks, edges, readers, smooth, smoothing_factors, stated
from tests.model.combinations import ROWS, config_of, name_of
from tests.model.pairwise import Row
from tests.model.small import small, tokens_and_targets
from tests.nightly import covering
from tests.ops.harness import relative

pytestmark = pytest.mark.slow


@torch.no_grad()
def lively(**tables: object) -> Decoder:
    return stirred(residua.build(small(**tables)))


@torch.no_grad()
def stirred(model: Decoder) -> Decoder:
    """Every parameter random, also those that start at a constant: so that a misplaced factor is noticed."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.double()


@torch.no_grad()
def change_by_folding(model: Decoder) -> float:
    tokens = tokens_and_targets()[0]
    before = model(tokens)
    for edge in edges(model):
        edge.fold(torch.exp(torch.randn(int(edge.channel.max()) + 1, dtype=torch.float64)))
    return relative(model(tokens), before)


@pytest.mark.parametrize("row", covering(ROWS, ("norm", "attention"), ("norm", "ffn")), ids=name_of)
def test_folding_random_factors_into_every_edge_changes_nothing(row: Row) -> None:
    assert change_by_folding(stirred(residua.build(config_of(row)))) < 1e-12


def test_relu2_factors_take_their_square_root_in_float64() -> None:
    """Each weight is rounded once; a root in float32 rounds it twice, and a quarter of the weights differ."""
    draw = torch.Generator().manual_seed(0)
    weight, factor = torch.randn(256, 64, generator=draw), torch.exp(torch.randn(256, generator=draw))
    found = weight.clone()
    divide_square(found, factor)
    exact = weight.double().numpy() / np.sqrt(factor.double().numpy())[:, None]
    assert torch.equal(found, torch.from_numpy(exact).float())
    assert not torch.equal(weight / factor.sqrt()[:, None], found)


def test_grouped_heads_and_shared_gains_share_one_factor() -> None:
    grouped = lively(attention={"kind": "softmax", "heads": 4, "kv_heads": 2})
    (values,) = grouped.sublayers[0].body.inner_edges("x")
    assert values.channel.tolist() == [0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2
    linear = lively(attention={"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8})
    (gain,) = linear.sublayers[0].body.inner_edges("x")
    assert gain.channel.tolist() == list(range(8)) * 2


def test_shared_anchors_fold_into_their_layers_lambda() -> None:
    gated = {"kind": "softmax", "heads": 2, "gate": "elementwise"}
    for kind, granularity, layers in (
        ("exoformer", "elementwise", (0, 2, 4)), ("nuresformer", "elementwise", (2, 4)),
        ("exoformer", "scalar", ()), ("nuresformer", "scalar", ()),
    ):  # fmt: skip
        model = lively(attention=gated, anchors={"kind": kind, "granularity": granularity})
        values = [edge.name for edge in edges(model) if edge.name.endswith("values")]
        assert values == [f"sublayers.{k}.body.values" for k in layers], (kind, granularity)


@pytest.mark.parametrize("options", [{"qk_norm": "rms_qkv"}, {"values": "keys"}], ids=str)
def test_normed_values_and_values_tied_to_keys_are_not_folded(options: dict[str, str]) -> None:
    model = lively(attention={"kind": "softmax", "heads": 2, **options})
    assert not [edge for edge in edges(model) if edge.name.endswith("values")] and change_by_folding(model) < 1e-12


@pytest.mark.parametrize("topology", ["additive", "mudd", "dca"])
def test_smoothing_balances_channels_and_keeps_the_function(topology: str) -> None:
    model = lively(norm={"kind": "gatednorm", "rank": 4}, topology={"kind": topology}).float()
    tokens, targets_ = tokens_and_targets()
    batches = [Batch(tokens, targets_)]
    before = model(tokens).detach()
    first = edges(model)[0]
    peaks = channel_peaks(model, [first], batches, lambda b: model.hidden(b.tokens))[first.name]
    columns = first.readers[0].abs().amax(0)
    smooth(model, batches, 0.5)
    after = channel_peaks(model, [first], batches, lambda b: model.hidden(b.tokens))[first.name]
    # with α = ½ a channel's peak and its column's meet at their geometric mean
    torch.testing.assert_close(after, (peaks * columns).sqrt(), rtol=1e-4, atol=0)
    assert relative(model(tokens).detach(), before) < 1e-5


def test_silent_channels_keep_a_factor_of_one() -> None:
    model = lively()
    edge = edges(model)[0]
    with torch.no_grad():
        edge.readers[0][:, 3] = 0.0
    peaks = torch.ones(16)
    peaks[5] = 0.0
    factors = smoothing_factors(edge, peaks, 0.5)
    assert factors[[3, 5]].tolist() == [1.0, 1.0] and factors.isfinite().all()


def test_parts_without_folding_rules_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LayerNorm does not define"):
        stated(torch.nn.LayerNorm(4), "divide", "how to divide its output per channel")
    with pytest.raises(ValueError, match="Norm does not define"):
        Norm().divide(torch.ones(4))
    with pytest.raises(ValueError, match="Identity does not define"):
        readers(torch.nn.Identity())


class OwnNorm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(x)

    def divide(self, by: Tensor) -> None:
        self.gain.div_(by)


def test_a_plugin_norm_with_folding_rules_is_folded() -> None:
    """As docs/reference/quantization.md shows it."""
    model = lively()
    for sublayer in model.sublayers:
        sublayer.norm = OwnNorm(16).double()
    assert change_by_folding(model) < 1e-12


def test_small_control_maps_are_not_quantized() -> None:
    dynamic = {"kind": "exoformer", "mixing": {"kind": "dynamic", "hidden": 4}}
    model = lively(attention={"kind": "softmax", "heads": 2, "gate": "elementwise"}, anchors=dynamic)
    assert not [name for name in targets(model) if "gamma" in name]
    assert "anchors.project" in targets(model)
    linear = lively(attention={"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8})
    assert "sublayers.0.body.gates" not in targets(linear)
