"""Runs in low precision: which products, ranges over steps, resuming, ranks, and telemetry."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model.decoder import build
from residua.ops.fp8_codes import encode_weights
from residua.ops.low_precision import product
from residua.ops.low_precision.product import fp8_linear
from residua.storage.run import read_metrics
from residua.train import low_precision
from residua.train.compile.working_copies import WorkingCopies
from residua.train.low_precision import RECIPES, Fp8Linear, LowPrecision, build_low_precision
from residua.train.step import Step, build_step
from residua.train.telemetry import Growth, _out_of_range
from residua.train.timing import random_batches
from tests.ops.harness import assert_equal
from tests.train.conftest import Lab
from tests.train.test_resume import assert_same_run

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WIDE = ("model.width=32", "model.ffn.hidden=48", "model.attention.head_dim=16", "train.low_precision.smallest=16")
FP8, NVFP4 = "train.precision=fp8_emulated", "train.precision=nvfp4_emulated"
HEAD = "train.low_precision.head=true"


def places(config: RunConfig) -> list[tuple[int, str]]:
    low = build_low_precision(build(config.model), config.train, CPU)
    assert low is not None
    return low.places


def made(config: RunConfig, *changes: str) -> tuple[Step, LowPrecision]:
    """A step with all its products in FP8, and their ranges."""
    torch.manual_seed(0)
    config = config.override([*WIDE, FP8, *changes])
    step = build_step(build(config.model), config.train, CPU)
    assert step.low_precision is not None
    return step, step.low_precision


def test_matrices_are_selected_by_sublayer_size_and_depth(config: RunConfig) -> None:
    config = config.override([*WIDE, "model.layers=4", FP8])
    names = {name for _, name in places(config)}
    assert len(places(config)) == 4 * 4 and {"project", "out"} <= names
    assert {k % 2 for k, _ in places(config.override(["train.low_precision.sublayers=attention"]))} == {0}
    assert not places(config.override(["train.low_precision.smallest=33"]))
    spared = places(config.override([NVFP4]))
    assert max(k for k, _ in spared) == 5  # the last of four layers stays: 0.15 of them, rounded up


def test_small_control_maps_stay_in_full_precision(config: RunConfig) -> None:
    dynamic = [
        "model.attention.gate=elementwise",
        "model.anchors.kind=exoformer",
        "model.anchors.mixing.kind=dynamic",
        "model.anchors.mixing.hidden=16",
    ]
    assert not any("gamma" in name for _, name in places(config.override([*WIDE, FP8, *dynamic])))


def test_fp8_default_skips_small_models_with_a_message(lab: Lab) -> None:
    lab.train("train.precision=fp8", "train.steps=3")
    assert "no product in FP8: no matrix has at least 1,024 rows and columns" in lab.printed


@pytest.mark.parametrize("precision", ["fp8", "fp8_emulated"])
def test_ranges_cover_the_largest_values_of_the_last_steps(config: RunConfig, precision: str) -> None:
    config = config.override([*WIDE, f"train.precision={precision}", "train.low_precision.history=2"])
    low = LowPrecision(build(config.model), config.train, CPU)
    scales = low._scales[0]
    seen = []
    for largest in (4.0, 2.0, 1.0):
        scales.seen_x.fill_(largest * 448)
        scales.seen_g.fill_(largest * 57_344)
        low.end_step(lambda values: values)
        seen.append((scales.x.item(), scales.g.item()))
    assert seen == [(4.0, 4.0), (4.0, 4.0), (2.0, 2.0)] and scales.seen_x == 0


def test_an_out_of_range_outlier_is_reported_then_fits(config: RunConfig) -> None:
    step, low = made(config)
    product = step.model.sublayers[1].body.out.forward  # type: ignore[union-attr, operator]
    assert isinstance(product, Fp8Linear)
    x = torch.randn(8, 48)
    for factor, exceeds in ((1.0, False), (100.0, True), (100.0, False)):
        y = product(x * factor)
        _, _, clamped, _, reach = product.figures(x * factor)
        assert y.isfinite().all() and (clamped > 0) == (reach > 1) == exceeds
        low.end_step(lambda values: values)
        assert [(each.place, each.tensor) for each in low.beyond()] == [((1, "out"), "input")] * exceeds
        history = low.config.history  # until so many steps are done, the advice to raise it would be wrong
        assert _out_of_range(step, history) == [] and len(_out_of_range(step, history + 1)) == exceeds
    assert low.state()[-1][2 * low.places.index((1, "out"))] == pytest.approx(100 * x.abs().max().item())


def test_first_step_finds_ranges_without_other_effects(config: RunConfig) -> None:
    config = config.override(["train.accumulate=2"])
    batches, weights = random_batches(config), []
    for find_first in (True, False):
        step, low = made(config)
        assert not low.knows_ranges
        if find_first:
            with low.encoded_weights():
                step._find_ranges(batches, (batches[0].targets != -100).sum() * 2)
            assert low.knows_ranges and all(p.grad is None for p in step.model.parameters())
            assert all(largest > 0 for largest in low.state()[-1])
        step(batches)
        weights.append([p.detach().clone() for p in step.model.parameters()])
    assert_equal(*weights)
    assert len([row for row in low.state() if any(row)]) == 2  # of that pass and of the step


def test_weights_are_rounded_once_per_step_and_never_stale(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config.override(["train.accumulate=3"])
    step, low = made(config)
    calls = []
    monkeypatch.setattr(low_precision, "encode_weights", lambda *a: calls.append(len(a[0])) or encode_weights(*a))
    for _ in range(2):
        step(random_batches(config))
    assert calls == [len(low.places)] * 2
    out = step.model.sublayers[1].body.out.forward  # type: ignore[union-attr, operator]
    x, weight = torch.randn(8, 48), out.projection.weight
    expected = fp8_linear(x, weight, out.scales)
    assert torch.equal(out(x), expected)  # of the weights after the update
    with low.encoded_weights():
        assert torch.equal(out(x), expected)
    assert len(calls) == 3


@pytest.mark.parametrize("model", ["model.ffn.kind=relu2", "model.topology.kind=mudd"])
def test_weights_stored_as_codes_need_no_working_copies(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Several reads (MUDD) call a projection more than once."""
    monkeypatch.setattr("residua.train.step.resolve", lambda *_: (torch.bfloat16, False))
    totals = []
    for unread in (True, False):
        step, low = made(config, model)
        if unread:
            assert step._copies is not None
            empty = [copy for copy in step._copies._copies if copy.untyped_storage().nbytes() == 2]
            assert len(empty) == len(low.places) and all(copy.isnan().all() for copy in empty)
        else:
            step._copies = WorkingCopies(step.model, torch.bfloat16)
            step._losses = step._build_losses(config.train)
        for _ in range(2):
            step(random_batches(config))
        totals.append(step.totals())
    assert totals[0] == totals[1] and math.isfinite(totals[0].grad_norm)


def test_relu2_feed_forward_runs_as_one_equal_operator(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, calls = [], []
    for fused in (True, False):
        step, _ = made(config, "model.ffn.kind=relu2")
        if fused:
            monkeypatch.setattr(
                low_precision, "fp8_squared_relu", lambda *a: calls.append(1) or product.fp8_squared_relu(*a)
            )
        else:
            for sublayer in step.model.sublayers:
                vars(sublayer.body).pop("forward", None)
        for _ in range(3):
            step(random_batches(config))
        weights.append([p.detach().clone() for p in step.model.parameters()])
    assert len(calls) == 3 * config.model.layers * config.train.accumulate
    assert_equal(*weights)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_head_in_fp8_trains_on_codes_of_its_matrix(config: RunConfig, kind: str) -> None:
    config = config.override(["train.accumulate=2"])
    step, low = made(config, HEAD, f"model.head.kind={kind}")
    model = step.model
    assert low.describe().endswith(f"{len(low.places)} products in emulated FP8, including the head")
    for _ in range(2):
        step(random_batches(config))
    assert all(p.grad is None and p.isfinite().all() for p in model.parameters())
    last = low.state()[-1]
    assert last[-2] > 0 and last[-1] == 0  # of hidden; the gradient's range is fixed
    h, targets, found = torch.randn(8, model.config.width), torch.arange(8), []
    with torch.no_grad():
        for _ in range(2):
            with low.encoded_weights():
                found.append(model.training_losses(h, targets, 0.0)[0])
                model.head_weight.mul_(3.0)  # unnoticed until the next block, because only codes are read
                assert model.training_losses(h, targets, 0.0)[0] == found[-1]
        beyond = [model.training_losses(h * factor, targets, 0.0)[0] for factor in (1e6, 1e7)]
    assert found[0] != found[1] and beyond[0] == beyond[1]  # clamped in the range of the last steps


def test_step_with_head_in_fp8_compiles_to_the_same_losses(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one_graph = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr("residua.train.losses.compile_rewritten", one_graph)
    totals = []
    for compiled in ("on", "off"):
        step, _ = made(config, HEAD, "model.layers=1", f"train.compile={compiled}")
        for _ in range(2):
            step(random_batches(config))
        totals.append((*step.totals(), step.evaluate(random_batches(config))[0]))
    assert totals[0] == pytest.approx(totals[1], rel=1e-4)


def test_clamped_input_of_the_head_is_reported_by_name(config: RunConfig) -> None:
    step, low = made(config, HEAD)
    step(random_batches(config))
    low._scales[-1].seen_x.fill_(1e4)
    low.end_step(lambda values: values)
    (sentence,) = _out_of_range(step, 30)
    assert sentence.startswith("step 30: the input of the head was ")
    assert Growth(config)._name("kurtosis.head", config.model.sublayers) == "kurtosis of the input of the head"


def test_ranges_ignore_non_finite_values(config: RunConfig) -> None:
    low = LowPrecision(build(config.model), config.override([*WIDE, FP8]).train, CPU)
    low._scales[0].seen_x.fill_(float("inf"))
    low._scales[1].seen_x.fill_(2.0)
    low.end_step(lambda values: values)
    assert low.state()[-1][:4] == [0.0, 0.0, 2.0, 0.0]
    assert (low._scales[0].x, low._scales[1].x) == (1.0, 2.0**-7)  # some scale, until a magnitude is known


def test_resumed_run_may_change_history_and_products(config: RunConfig) -> None:
    config = config.override([*WIDE, FP8, "train.low_precision.history=3"])
    low = LowPrecision(build(config.model), config.train, CPU)
    rows = [[float(step)] * 2 * len(low.places) for step in (4, 1, 2)]
    low.set_state(rows)
    for history, kept in ((2, rows[1:]), (4, [[0.0] * len(rows[0]), *rows])):
        other = LowPrecision(
            build(config.model), config.override([f"train.low_precision.history={history}"]).train, CPU
        )
        other.set_state(low.state())
        assert other.state() == kept and other.knows_ranges
    other = LowPrecision(build(config.model), config.override([HEAD]).train, CPU)
    other.set_state(low.state())
    assert not other.knows_ranges


@pytest.mark.parametrize("precision", [(FP8, HEAD), pytest.param((NVFP4,), marks=pytest.mark.nightly)])
def test_resumed_low_precision_run_equals_the_uninterrupted_one(lab: Lab, precision: tuple[str, ...]) -> None:
    changes = (*WIDE, *precision, "train.telemetry=on", "train.telemetry_every=3")
    lab.train(*changes, out="whole")
    lab.stop(3, *changes)
    lab.resume(*changes)
    assert_same_run(lab / "whole", lab / "run")
    figures = [record for record in read_metrics(lab / "run" / "metrics.jsonl") if record["kind"] == "telemetry"][-1]
    assert {"kurtosis.project", "block_share.out", "underflow.out", "saturated.project"} <= set(figures["figures"])
    assert ("reach.head" in figures["figures"]) == (HEAD in precision)


def test_low_precision_trains_almost_like_float32(lab: Lab) -> None:
    losses = {p: lab.train(*WIDE, f"train.precision={p}", out=p).validation_loss for p in ("float32", "fp8_emulated")}
    assert losses["fp8_emulated"] != losses["float32"]
    assert losses["fp8_emulated"] == pytest.approx(losses["float32"], abs=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.compile=layers"], "shares code between layers"),
        (["parallel.pipeline=2"], "parallel.pipeline = 2"),
        (["parallel.data=2", NVFP4], "one process"),
        ([HEAD, NVFP4], "head = true does not support train.precision"),
        ([HEAD, "model.logit_softcap=30"], "head = true does not support model.logit_softcap"),
        ([HEAD, "model.vocab_size=300"], "vocab_size = 300, not a multiple of 16"),
    ],
)
def test_unsupported_low_precision_combinations_are_refused(config: RunConfig, changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.override([FP8, *changes])


def test_device_with_wrong_fp8_products_counts_as_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its operands are on the GPU: a scale left on the CPU once made every GPU count as lacking FP8."""
    assert low_precision.multiplies(CPU)
    operands, exact = [], low_precision.on_hardware
    for wrong in (1.05, float("nan")):
        monkeypatch.setattr(low_precision, "on_hardware", lambda *a, by=wrong: exact(*a) * by)
        assert not low_precision.multiplies(CPU)

    def record(*codes: Any) -> torch.Tensor:
        operands.extend(tensor for each in codes[:2] for tensor in each)
        raise RuntimeError

    monkeypatch.setattr(low_precision, "on_hardware", record)
    assert not low_precision.multiplies(torch.device("meta"))
    assert len(operands) == 4 and all(tensor.is_meta for tensor in operands)


def test_device_without_fp8_products_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("not supported")

    monkeypatch.setattr(low_precision, "on_hardware", missing)
    monkeypatch.setitem(RECIPES, "fp8", RECIPES["fp8"].__class__("FP8", 1024, 0.0, missing))
    lab.refuse("train.precision = 'fp8' needs a device with FP8 products", "train.precision=fp8")


def test_no_low_precision_state_is_built_unless_configured(config: RunConfig) -> None:
    assert build_low_precision(build(ModelConfig.preset("tiny")), config.train, CPU) is None
