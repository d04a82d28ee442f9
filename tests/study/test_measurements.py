"""Measurements of each trained model: taken once, repeated after further training, and shown in the results."""

import json
import math
import os
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import residua
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.loader import Batch
from residua.errors import UserError
from residua.model import taps
from residua.study import StudyConfig
from residua.study import measurements as work
from residua.study.collect_results import collect
from residua.study.config import NoMatch
from residua.study.extend_study import complete_records
from residua.study.measurements import OutlierMeasurement, PrecisionMeasurement, look
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import (
    INSPECTION,
    OUTLIERS,
    QUANTIZED,
    Outliers,
    QuantizedRun,
    mean_of_last,
    read_measured,
)
from residua.study.run_study import run_study, summarise
from residua.study.tables import markdown, side_tables
from tests.forked import fork_workers
from tests.model.small import small
from tests.study.conftest import Choose, compare
from tests.study.recorded import write_all

RECIPES = ("fp8", "nvfp4", "nvfp4+smooth")


@pytest.fixture
def study(study: StudyConfig) -> StudyConfig:
    """Two variants of two layers."""
    changes = {"variants": {"prenorm": ("prenorm",), "mgr": ("mgr",)}, "set": (*study.set, "model.layers=2")}
    return study.model_copy(update={**changes, "match": NoMatch()})


def low(study: StudyConfig, **changes: object) -> StudyConfig:
    variants = {"prenorm": ("prenorm",), "gatednorm": ("gatednorm",)}
    small = {"variants": variants, "seeds": (0,), "threads": 1, "quantize": RECIPES, "calibration": 8}
    return StudyConfig(**{**study.model_dump(), **small, **changes})


def with_weights(plan: StudyPlan) -> None:
    for run in plan.runs:
        (run.folder / "checkpoints" / "step-10").mkdir(parents=True)


def quantized(study: StudyConfig) -> QuantizedRun:
    losses = dict.fromkeys(study.quantize, 3.1)
    return QuantizedRun(calibration=study.calibration, loss=3.0, peak_activation=1.0, sink_ratio=1.0, losses=losses)


MEASURED = {
    OUTLIERS: (lambda study: OutlierMeasurement(), lambda study: Outliers(peak_activation=1.0, sink_ratio=2.0)),
    QUANTIZED: (PrecisionMeasurement, quantized),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_runs_are_remeasured_only_after_further_training(
    name: str, study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, content = MEASURED[name]
    asked = study.model_copy(update={"quantize": ("fp8",)})
    plan, measurement, measured, printed = make_plan(asked, out, dataset), make(asked), [], StringIO()
    write_all(plan, lambda run, step: 3.0)
    first = plan.runs[0].folder

    def measure(run: PlannedRun, *rest: object) -> str:
        if run.variant == "mgr" and measurement.errors:
            raise UserError("it is damaged")
        measured.append(run.title)
        (run.folder / name).write_text(content(asked).model_dump_json())
        return ""

    def again() -> int:
        before = len(measured)
        measurement.measure(plan, Console(width=200, file=printed))
        return len(measured) - before

    monkeypatch.setattr(type(measurement), "measure_run", lambda self, *arguments: measure(*arguments))
    assert again() == 0, "runs without weights cannot be"
    with_weights(plan)
    assert again() == (2 if measurement.errors else 4) and again() == 0
    assert ("mgr-seed0: no outliers were measured: it is damaged" in printed.getvalue()) == bool(measurement.errors)
    later = (first / name).stat().st_mtime + 60
    os.utime(first / INSPECTION, (later, later))
    assert again() == 1 and measured[-1] == first.name
    (first / name).write_text("{")
    os.utime(first / name, (later, later))
    assert again() == 1, "a damaged file is made again"


@pytest.mark.parametrize(("steps", "every", "window"), [(4000, 10, 200), (4000, 300, 200), (1000, 7, 100), (5, 1, 1)])
def test_the_training_loss_is_the_mean_over_the_last_200_steps(steps: int, every: int, window: int) -> None:
    assert math.isnan(mean_of_last([])) and math.isnan(mean_of_last([{"step": 0, "loss": 3.0}])), "no step was trained"
    each = [5.0 - step / steps + 0.1 * math.sin(step) for step in range(1, steps + 1)]
    ends = sorted({1, steps, *range(every, steps + 1, every)})
    begins = [0, *ends[:-1]]
    rows = [{"step": end, "loss": sum(each[a:end]) / (end - a)} for a, end in zip(begins, ends, strict=True)]
    # A line that begins before the window counts with its mean for the steps inside.
    spread = [row["loss"] for row, a, end in zip(rows, begins, ends, strict=True) for _ in range(a, end)]
    assert mean_of_last(rows) == pytest.approx(sum(spread[-window:]) / window, rel=1e-12)
    if window % every == 0:
        assert mean_of_last(rows) == pytest.approx(sum(each[-window:]) / window, rel=1e-12)


@torch.no_grad()
def test_outliers_match_a_direct_computation() -> None:
    model = residua.build(small(vocab_size=64, context=16)).double().eval()
    batches = [Batch(*(torch.randint(64, (rows, 16)) for _ in range(2))) for rows in (3, 2)]
    found = look(model, batches)
    states, sinks = [], []
    for batch in batches:
        with taps.record() as seen:
            model.hidden(batch.tokens)
        states += [value.flatten(end_dim=-2) for name, value in seen.items() if name.endswith(".input")]
        for layer in range(model.config.layers):
            q, k = (seen[f"attention.{layer}.{name}"].transpose(1, 2) for name in ("query", "key"))
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
            sinks.append(scores.softmax(-1)[..., 0].mean((1, 2)))
    size = torch.cat(states).abs()
    assert found.peak_activation == pytest.approx(float(size.max()), rel=1e-12)
    assert found.sink_ratio == pytest.approx(float(size.mean(0).max() / size.mean(0).median()), rel=1e-9)
    assert found.attention_sink == pytest.approx(float(torch.cat(sinks).mean()), rel=1e-9)
    assert found.uniform_attention == pytest.approx(sum(1 / n for n in range(1, 17)) / 16, rel=1e-12)
    assert found.tokens == 5 * 16


@pytest.mark.slow
@torch.no_grad()
def test_attention_is_measured_only_on_the_first_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "SINK_TOKENS", 40)
    monkeypatch.setattr(work, "TOKENS_AT_ONCE", 32)
    model = residua.build(small(vocab_size=64, context=16)).eval()
    batches = [Batch(*(torch.randint(64, (2, 16)) for _ in range(2))) for _ in range(3)]
    assert look(model, batches).tokens == 48
    mixer = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
    found = look(residua.build(small(vocab_size=64, context=16, attention=mixer)).eval(), batches)
    assert (found.attention_sink, found.uniform_attention) == (None, None)


@pytest.mark.slow
def test_outliers_and_training_losses_are_in_the_tables(study: StudyConfig, plan: StudyPlan) -> None:
    write_all(plan, lambda run, step: 3.0 + run.seed + 1.0 / step)
    shares = {"sink_ratio": 4.0, "attention_sink": 0.25, "uniform_attention": 0.1}
    for run in plan.runs:
        found = Outliers(peak_activation=100.0 + 20 * run.seed, **shares)
        (run.folder / OUTLIERS).write_text(found.model_dump_json())
    result = collect(study, plan, complete_records(plan, {}), {})
    row = result.variants[0]
    assert row.outliers is not None and row.outliers.peak_activation.value == 110.0
    assert row.outliers.peak_activation.error == pytest.approx(10.0)
    assert row.train_loss is not None and row.train_loss.value == pytest.approx(3.6)
    text = markdown(result)
    assert "| 110 ± 10 |" in text and "uniform attention would give 0.1000" not in text.split("Columns:")[0]
    assert "| training loss |" in text and "3.6000 ± 0.5000" in text
    (table,) = side_tables(result, "tiny")
    assert "uniform attention would give 0.1000" in table.columns[-1].meaning


@pytest.mark.slow
def test_a_study_measures_a_loss_for_every_recipe(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = low(study, data=str(dataset.path), variants={"prenorm": ("prenorm",)})
    fork_workers(monkeypatch)
    with monkeypatch.context() as trained_there, pytest.raises(ImportError):
        trained_there.setitem(sys.modules, "plotly", None)  # the training machine may lack plotly
        run_study(asked, out, Console(quiet=True))
    measured = {run.folder: (run.folder / "quantized.json").stat() for run in make_plan(asked, out, dataset).runs}

    outcome = run_study(asked, out, Console(quiet=True))
    assert {folder: (folder / "quantized.json").stat() for folder in measured} == measured
    for row, run in zip(outcome.result.variants, outcome.result.runs, strict=True):
        found = row.low_precision
        assert found is not None and run.quantized is not None and run.loss is not None
        rows = [json.loads(line) for line in (out / "runs" / run.folder / "metrics.jsonl").read_text().splitlines()]
        assert found.loss.value == pytest.approx(rows[-1]["loss"], abs=1e-4)  # on the part of the text read in training
        assert list(found.losses) == list(RECIPES)
        assert found.peak_activation > 0 and found.sink_ratio >= 1
        fp8, nvfp4 = (found.costs[name] for name in ("fp8", "nvfp4"))
        assert fp8 is not None and nvfp4 is not None and abs(fp8.value) < 0.05 and abs(nvfp4.value) < 0.5
    page, table = (out / "report.html").read_text(), (out / "results.md").read_text()
    assert "Low precision" in page and "residual-sink ratio" in table and "nvfp4+smooth" in table
    written = json.loads((out / "results.json").read_text())
    assert written["variants"][0]["low_precision"]["losses"].keys() == set(RECIPES)


@pytest.mark.slow
def test_unmeasured_runs_have_no_row(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        low(study, quantize=("int8",))
    asked = low(study)
    plan = make_plan(asked, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    result = summarise(asked, plan, out, {}, None).result
    (out / "study.toml").write_text(asked.to_toml())
    assert StudyConfig.from_toml(out / "study.toml") == asked
    assert all(row.low_precision is None for row in result.variants)
    assert "residual-sink" not in markdown(result)
    (plan.runs[0].folder / "quantized.json").write_text('{"loss": "damaged"')
    assert read_measured(plan.runs[0].folder / QUANTIZED, QuantizedRun) is None


@pytest.mark.slow
def test_a_rerun_keeps_measurements_and_adds_other_recipes(
    chosen: Choose, dataset: Dataset, out: Path, no_page: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"seeds": 1, "threads": 1}
    plan = make_plan(chosen(**asked), out, dataset)
    write_all(plan, lambda run, step: 3.0)
    with_weights(plan)
    measured = []

    def measure(run: PlannedRun, study: StudyConfig, stages: object) -> QuantizedRun:
        measured.append((study.quantize, study.calibration))
        return quantized(study)

    def recipes(**changes: object) -> list[str]:
        row = compare(chosen(**asked, **changes), out).variants[0].low_precision
        return [] if row is None else list(row.losses)

    monkeypatch.setattr("residua.study.measurements.measure_precision", measure)
    monkeypatch.setattr(OutlierMeasurement, "waits", lambda *arguments: False)
    assert recipes(quantize=("fp8",), calibration=8) == ["fp8"]
    assert recipes() == ["fp8"]
    assert measured == [(("fp8",), 8)], "nothing is measured again, nor with another calibration"
    assert recipes(quantize=("nvfp4",)) == ["fp8", "nvfp4"]
    assert StudyConfig.from_toml(out / "study.toml").quantize == ("fp8", "nvfp4")
