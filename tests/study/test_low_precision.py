"""Low-precision columns of a study: measured once per run, without a plotting library, and shown."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.measurements import PrecisionMeasurement
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import QUANTIZED, QuantizedRun, read_measured
from residua.study.run_study import run_study, summarise
from residua.study.tables import markdown
from tests.forked import fork_workers
from tests.study.recorded import write_all

pytestmark = pytest.mark.slow

RECIPES = ("fp8", "nvfp4", "nvfp4+smooth")


def low(study: StudyConfig, **changes: object) -> StudyConfig:
    variants = {"prenorm": ("prenorm",), "gatednorm": ("gatednorm",)}
    small = {"variants": variants, "seeds": (0,), "threads": 1, "quantize": RECIPES, "calibration": 8}
    return StudyConfig(**{**study.model_dump(), **small, **changes})


def with_weights(plan: StudyPlan) -> None:
    for run in plan.runs:
        (run.folder / "checkpoints" / "step-10").mkdir(parents=True)


def test_a_study_of_trained_models_has_a_loss_for_every_recipe(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = low(study, data=str(dataset.path), variants={"prenorm": ("prenorm",)})
    fork_workers(monkeypatch)
    with monkeypatch.context() as trained_there, pytest.raises(ImportError):
        trained_there.setitem(sys.modules, "plotly", None)  # where models are trained there may be none
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


def test_a_recipe_that_does_not_exist_is_refused_before_anything_runs(study: StudyConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        low(study, quantize=("int8",))
    asked = low(study)
    (tmp_path / "study.toml").write_text(asked.to_toml())
    assert StudyConfig.from_toml(tmp_path / "study.toml") == asked


def test_runs_that_were_not_measured_have_no_row(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    asked = low(study)
    plan = make_plan(asked, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    result = summarise(asked, plan, out, {}, None).result
    assert all(row.low_precision is None for row in result.variants)
    assert "residual-sink" not in markdown(result)
    (plan.runs[0].folder / "quantized.json").write_text('{"loss": "damaged"')
    assert read_measured(plan.runs[0].folder / QUANTIZED, QuantizedRun) is None


def test_a_run_is_measured_again_once_it_was_trained_further(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = low(study, variants={"prenorm": ("prenorm",)}, quantize=("fp8",))
    plan = make_plan(asked, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    PrecisionMeasurement(asked).measure(plan, Console(quiet=True))
    assert read_measured(plan.runs[0].folder / QUANTIZED, QuantizedRun) is None, (
        "a run without weights cannot be measured"
    )
    with_weights(plan)
    measured = []

    def measure(run: PlannedRun, study: StudyConfig, tell: object) -> QuantizedRun:
        measured.append(run.title)
        losses = dict.fromkeys(study.quantize, 3.1)
        found = QuantizedRun(
            calibration=study.calibration, loss=3.0, peak_activation=1.0, sink_ratio=1.0, losses=losses
        )
        (run.folder / "quantized.json").write_text(found.model_dump_json())
        return found

    monkeypatch.setattr("residua.study.measurements.measure_precision", measure)
    for _ in range(2):
        PrecisionMeasurement(asked).measure(plan, Console(quiet=True))
    assert len(measured) == 1
    later = (plan.runs[0].folder / "quantized.json").stat().st_mtime + 60
    os.utime(plan.runs[0].folder / "inspection.json", (later, later))
    PrecisionMeasurement(asked).measure(plan, Console(quiet=True))
    assert len(measured) == 2


def test_a_rerun_without_recipes_keeps_what_was_measured_and_one_with_others_adds_to_it(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = low(study, variants={"prenorm": ("prenorm",)}, quantize=("fp8",), data=str(dataset.path))
    plan = make_plan(first, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    with_weights(plan)
    measured = []

    def measure(run: PlannedRun, study: StudyConfig, tell: object) -> QuantizedRun:
        measured.append((study.quantize, study.calibration))
        losses = dict.fromkeys(study.quantize, 3.1)
        found = QuantizedRun(
            calibration=study.calibration, loss=3.0, peak_activation=1.0, sink_ratio=1.0, losses=losses
        )
        (run.folder / "quantized.json").write_text(found.model_dump_json())
        return found

    def recipes(again: StudyConfig) -> list[str]:
        row = run_study(again, out, Console(quiet=True)).result.variants[0].low_precision
        return [] if row is None else list(row.losses)

    page = SimpleNamespace(write=lambda path: path)  # drawing it takes seconds
    monkeypatch.setattr("residua.study.page.study_page", lambda *_: page)
    monkeypatch.setattr("residua.study.measurements.measure_precision", measure)
    assert recipes(first) == ["fp8"]
    plain = {k: v for k, v in first.model_dump().items() if k not in ("quantize", "calibration")}
    assert recipes(StudyConfig(**plain)) == ["fp8"]
    assert measured == [(("fp8",), 8)], "nothing is measured again, nor with another calibration"
    assert recipes(StudyConfig(**plain, quantize=("nvfp4",))) == ["fp8", "nvfp4"]
    assert StudyConfig.from_toml(out / "study.toml").quantize == ("fp8", "nvfp4")
