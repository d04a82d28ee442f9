"""What a study measures of each run by itself: the training loss at the end, and the outliers of the model."""

from __future__ import annotations

import json
import math
import os
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

import residua
from residua.data import Dataset
from residua.data.loader import Batch
from residua.errors import UserError
from residua.model import taps
from residua.study import StudyConfig
from residua.study import measurements as work
from residua.study.config import NoMatch
from residua.study.extend_study import complete_records
from residua.study.measurements import OutlierMeasurement, look
from residua.study.plan import PlannedRun, make_plan
from residua.study.records import INSPECTION, OUTLIERS, Outliers, RunRecord, mean_of_last, read_run
from residua.study.results import collect
from residua.study.results_file import save_study
from residua.study.tables import markdown, side_tables
from tests.model.small import small
from tests.study.recorded import write_all


@pytest.fixture
def study(study: StudyConfig) -> StudyConfig:
    """Two variants of two layers."""
    changes = {"variants": {"prenorm": ("prenorm",), "mgr": ("mgr",)}, "set": (*study.set, "model.layers=2")}
    return study.model_copy(update={**changes, "match": NoMatch()})


@pytest.mark.parametrize(("steps", "every", "window"), [(4000, 10, 200), (4000, 300, 200), (1000, 7, 100), (5, 1, 1)])
def test_the_training_loss_is_the_mean_over_the_last_200_steps(steps: int, every: int, window: int) -> None:
    each = [5.0 - step / steps + 0.1 * math.sin(step) for step in range(1, steps + 1)]
    ends = sorted({1, steps, *range(every, steps + 1, every)})
    begins = [0, *ends[:-1]]
    rows = [{"step": end, "loss": sum(each[a:end]) / (end - a)} for a, end in zip(begins, ends, strict=True)]
    # A line that begins before the window counts with its mean for the steps inside.
    spread = [row["loss"] for row, a, end in zip(rows, begins, ends, strict=True) for _ in range(a, end)]
    assert mean_of_last(rows) == pytest.approx(sum(spread[-window:]) / window, rel=1e-12)
    if window % every == 0:
        assert mean_of_last(rows) == pytest.approx(sum(each[-window:]) / window, rel=1e-12)


def test_a_run_without_log_lines_has_no_training_loss(tmp_path: Path) -> None:
    assert math.isnan(RunRecord(tmp_path, 1).train_loss)


@torch.no_grad()
def test_outliers_are_those_of_a_direct_computation() -> None:
    torch.manual_seed(0)
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
def test_attention_is_looked_at_on_the_first_sequences_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "SINK_TOKENS", 40)
    monkeypatch.setattr(work, "AT_ONCE", 32)
    model = residua.build(small(vocab_size=64, context=16)).eval()
    batches = [Batch(*(torch.randint(64, (2, 16)) for _ in range(2))) for _ in range(3)]
    assert look(model, batches).tokens == 48
    linear = small(
        vocab_size=64, context=16, attention={"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
    )
    found = look(residua.build(linear).eval(), batches)
    assert (found.attention_sink, found.uniform_attention) == (None, None)


@pytest.mark.slow
def test_runs_are_measured_once_and_again_when_trained_further(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(study, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    measured: list[str] = []

    def measure(self: object, run: PlannedRun, *rest: object) -> str:
        if run.variant == "mgr":
            raise UserError("it is damaged")
        measured.append(run.title)
        (run.folder / OUTLIERS).write_text(Outliers(peak_activation=1.0, sink_ratio=2.0).model_dump_json())
        return ""

    monkeypatch.setattr(OutlierMeasurement, "measure_run", measure)
    printed = StringIO()
    console = Console(width=200, file=printed)
    OutlierMeasurement().measure(plan, console)
    assert measured == [], "runs without weights cannot be"
    for run in plan.runs:
        (run.folder / "checkpoints" / "step-10").mkdir(parents=True)
    for _ in range(2):
        OutlierMeasurement().measure(plan, console)
    assert measured == [run.title for run in plan.runs if run.variant != "mgr"]
    assert "mgr-seed0: no outliers were measured: it is damaged" in printed.getvalue()
    later = (plan.runs[0].folder / OUTLIERS).stat().st_mtime + 60
    os.utime(plan.runs[0].folder / INSPECTION, (later, later))
    OutlierMeasurement().measure(plan, console)
    assert measured[-1] == plan.runs[0].title and len(measured) == 3
    (plan.runs[0].folder / OUTLIERS).write_text("{")
    os.utime(plan.runs[0].folder / OUTLIERS, (later, later))
    OutlierMeasurement().measure(plan, console)
    assert len(measured) == 4, "a damaged file is made again"


@pytest.mark.slow
def test_both_are_in_the_tables_and_in_the_results_file(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    plan = make_plan(study, out, dataset)
    write_all(plan, lambda run, step: 3.0 + run.seed + 1.0 / step)
    for run in plan.runs:
        found = Outliers(
            peak_activation=100.0 + 20 * run.seed, sink_ratio=4.0, attention_sink=0.25, uniform_attention=0.1
        )
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
    saved = save_study(study, plan, complete_records(plan, {}), dataset.fingerprint, None)
    again = saved.plan(out)
    assert collect(study, again, saved.records(again), {}).variants == result.variants
    older = json.loads(saved.text())
    assert "train_loss" in older["runs"][0] and read_run(plan.runs[0].folder, plan.runs[0].config).outliers is not None
