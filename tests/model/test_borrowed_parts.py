"""Parts that other families have: norms on outputs, scaled embeddings, windows, biases, stretched positions."""

from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua.config.model import ModelConfig
from residua.model.context import Context
from residua.model.decoder import Decoder
from residua.model.size import measure
from residua.quantize.smoothing import edges
from tests.golden.compare import agree, leaves_of, randomise
from tests.golden.parts import rmsnorm
from tests.model.small import small, tokens_and_targets
from tests.model.test_decoding import MODELS, SOFTMAX

LONG = {"kind": "longrope", "short": [1.0, 2.0], "long": [3.0, 4.0], "original_context": 4}


def norm_rows(x: Tensor, norm: Any) -> Tensor:
    return torch.stack([torch.stack([rmsnorm(v, norm.weight) for v in row]) for row in x])


@pytest.mark.parametrize("placement", ["input", "output", "both"])
def test_norms_follow_the_configured_placement(placement: str) -> None:
    model = randomise(residua.build(small(placement=placement, layers=2, embed_scale=3.0)))
    tokens, _ = tokens_and_targets(2, 5)
    rotary = model._rotary(tokens)
    h = 3.0 * model.embed.weight[tokens]
    for sublayer in model.sublayers:
        x = h if placement == "output" else norm_rows(h, sublayer.norm)
        y, _ = sublayer.body(x, (), Context(rotary, None))
        h = h + (y if placement == "input" else norm_rows(y, sublayer.after))
    expected = norm_rows(h, model.norm) @ model.embed.weight.T
    agree([model(tokens)], [expected], leaves_of(model))


def test_output_norms_are_counted_and_offer_no_folding_edge() -> None:
    sizes = {where: measure(small(placement=where)).norms for where in ("input", "output", "both")}
    assert sizes == {"input": 7 * 16, "output": 7 * 16, "both": 13 * 16}
    model = residua.build(small(placement="output"))
    assert not [edge for edge in edges(model) if edge.name.endswith(".norm")]


@torch.no_grad()
def test_positions_that_depend_on_length_use_no_table() -> None:
    """LongRoPE changes its angles when the sequence grows beyond its first length: decoding has to do so too."""
    from residua.model.inference import InferenceDecoder

    tokens, _ = tokens_and_targets(1, 4)
    model: Decoder = randomise(residua.build(small(attention=SOFTMAX | {"rope_scaling": LONG}))).eval()
    rewritten = InferenceDecoder(model, 8)
    assert rewritten.table is None
    cache = model.new_cache(1, 8)
    model(tokens[:, :3], cache=cache)
    torch.testing.assert_close(rewritten(tokens[:, 3:], cache=cache), model(tokens)[:, 3:], rtol=0, atol=1e-12)
    short = residua.build(small(attention=SOFTMAX | {"rope_scaling": LONG | {"long": [1.0, 2.0]}})).double()
    short.load_state_dict(model.state_dict())
    longer, _ = tokens_and_targets(1, 5)
    assert (short(longer) - model(longer)).abs().max() > 1e-3
    assert torch.equal(short(tokens), model(tokens))


@torch.no_grad()
def test_biased_projections_quantize_with_their_bias() -> None:
    from residua.quantize.modules import quantize_model
    from residua.quantize.schemes import find_scheme

    model = randomise(residua.build(small(**MODELS["biases"])), 0.1).float()
    tokens, targets = tokens_and_targets()
    before = model.loss(tokens, targets)
    quantize_model(model, find_scheme("fp8"))
    assert abs(float(model.loss(tokens, targets) - before)) < 0.1
    assert model.sublayers[0].body.project.bias is not None


def test_scaled_positions_survive_toml_and_the_hybrid_variant() -> None:
    from residua.config.variants import overrides

    config = small(attention=SOFTMAX | {"rope_scaling": LONG, "window": 4, "window_layers": [0, 2]})
    assert ModelConfig(**config.model_dump()) == config
    changes = [change.removeprefix("model.") for change in overrides(["hybrid"], config)]
    assert config.override([*changes, "attention.softmax_every=2"]).softmax == config.softmax
