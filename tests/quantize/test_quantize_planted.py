"""Outliers planted in a model that computes the same with them: W4A4 breaks, SmoothQuant fixes it."""

from copy import deepcopy
from typing import Any

import pytest
import torch

import residua
from residua.data.loader import Batch
from residua.model.decoder import Decoder
from residua.quantize.evaluate import outlier_facts
from residua.quantize.modules import quantize_model
from residua.quantize.schemes import find_scheme
from residua.quantize.smoothing import edges, smooth
from tests.diagnose.planted import control, diagnosed, plant_outlier, sample
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

CHANNEL = 5
SIZES = (1.0, 10.0, 100.0, 1000.0, 6000.0)
NORMS: dict[str, Any] = {
    "rmsnorm": {"kind": "rmsnorm"},
    "preaffine": {"kind": "preaffine"},
    "gatednorm": {"kind": "gatednorm", "rank": 4},
    "dyt": {"kind": "dyt"},
    "gated_dyt": {"kind": "gated_dyt", "rank": 4},
}
BATCH = Batch(*tokens_and_targets(batch=4, length=8))


def model_with(norm: str, outlier: float) -> Decoder:
    """One channel of every norm `outlier` times larger, the matrices that read it smaller by the same factor."""
    torch.manual_seed(3)
    model = residua.build(small(width=64, norm=NORMS[norm], ffn={"kind": "swiglu", "hidden": 96}, init={"std": 0.1}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for edge in edges(model):
        if edge.name.endswith(".norm"):
            factor = torch.ones(64)
            factor[CHANNEL] = 1 / outlier
            edge.fold(factor)
    return model


@torch.no_grad()
def error(model: Decoder, scheme: str, alpha: float | None = None) -> float:
    """Relative error of the final states after quantizing a copy."""
    exact = model.hidden(BATCH.tokens)
    low = deepcopy(model)
    if alpha is not None:
        smooth(low, [BATCH], alpha)
        assert (low.hidden(BATCH.tokens) - exact).norm() < 1e-4 * exact.norm()
    quantize_model(low, find_scheme(scheme))
    return float((low.hidden(BATCH.tokens) - exact).norm() / exact.norm())


@pytest.mark.parametrize("norm", only_nightly(NORMS, but=["preaffine", "gated_dyt"]))
def test_smoothing_undoes_the_outliers_w4a4_error(norm: str) -> None:
    plain = [error(model_with(norm, size), "nvfp4") for size in SIZES]
    smoothed = [error(model_with(norm, size), "nvfp4", alpha=0.5) for size in SIZES]
    assert plain[-1] > 1.8 * plain[0] and max(plain[2:]) > 1.5 * max(plain[:1])
    assert smoothed[-1] < 0.7 * plain[-1] and max(smoothed) < 1.5 * plain[0]


def test_w8a8_is_barely_affected_by_the_same_outlier() -> None:
    clean, planted = (error(model_with("rmsnorm", size), "fp8") for size in (1.0, 6000.0))
    assert planted < 1.2 * clean < 0.25


def test_peak_and_sink_ratio_match_the_diagnosis() -> None:
    model = control()
    plant_outlier(model, 7, 50.0, 0.02)
    shown = sample()
    made = diagnosed(model, shown, ablations="none")
    peak, ratio = outlier_facts(model, [Batch(shown.tokens, shown.targets)])
    assert peak == pytest.approx(max(state.largest[0].value for state in made.states), rel=1e-5)
    assert ratio == pytest.approx(made.dimensions.largest[0].ratio, rel=1e-5) and ratio > 10
