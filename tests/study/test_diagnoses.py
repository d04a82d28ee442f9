"""Diagnoses of a study's runs: made once, linked from the page and the table, compared; a broken run stops nothing."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import residua
from residua.data import Dataset
from residua.diagnose import Diagnosis
from residua.study import StudyConfig
from residua.study.extend_study import join
from residua.study.measurements import DiagnosisMeasurement, OutlierMeasurement
from residua.study.plan import StudyPlan, make_plan
from residua.study.run_study import measurements_of, summarise
from residua.study.timing import TimingMeasurement
from tests.study.conftest import changed
from tests.study.recorded import write_all
from tests.study.test_results import straight

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(study: StudyConfig) -> StudyConfig:
    small = {"variants": {"prenorm": ("prenorm",), "mgr": ("mgr",)}, "seeds": (0, 1), "diagnose": True}
    changes = ("model.layers=2", "model.width=16", "model.ffn.hidden=32")
    return StudyConfig(**{**study.model_dump(), **small, "set": (*study.set, *changes)})


@pytest.fixture
def plan(asked: StudyConfig, dataset: Dataset, out: Path) -> StudyPlan:
    """Complete runs, each with a checkpoint; the last one's weights are broken."""
    made = make_plan(asked, out, dataset)
    write_all(made, straight)
    for run in made.runs:
        torch.manual_seed(run.seed)
        weights = {name: p.detach() for name, p in residua.build(run.config.model).named_parameters()}
        if run is made.runs[-1]:
            weights["embed.weight"][0, 0] = float("nan")
        checkpoint = run.folder / "checkpoints" / "step-10"
        checkpoint.mkdir(parents=True)
        save_file(weights, checkpoint / "model.safetensors")
        (checkpoint / "state.json").write_text(json.dumps({"validation_loss": 1.0}))
        (run.folder / "tokenizer.json").write_text((dataset.path / "tokenizer.json").read_text())
    return made


def measure(asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path) -> str:
    """Runs missing diagnoses, and returns the messages."""
    log = Console(record=True, width=300, file=io.StringIO())
    DiagnosisMeasurement(asked, out, dataset).measure(plan, log)
    return log.export_text()


def test_every_run_is_diagnosed_once_and_linked_and_compared(
    asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    said = measure(asked, plan, dataset, out)
    *good, broken = plan.runs
    assert f"✗ {broken.title} has no diagnosis" in said and "is not finite" in said
    assert not (broken.folder / "report.html").exists()
    for run in good:
        assert f"✓ {run.title}: " in said
        found = Diagnosis.read(run.folder / "diagnosis.json").models[0]
        assert found.text.source == f"the validation text of {dataset.path.name}" and found.ablations
        assert found.text.tokens <= run.config.data.validation_tokens  # no more than its loss is measured on
        assert found.place == list(asked.variants).index(run.variant)
    both = Diagnosis.read(out / "diagnosis" / "diagnosis.json").models
    assert [(model.name, model.place) for model in both] == [("prenorm", 0), ("mgr", 1)]  # with the page's colours

    before = {run: (run.folder / "diagnosis.json").stat() for run in good}
    measure(asked, plan, dataset, out)
    assert {run: (run.folder / "diagnosis.json").stat() for run in good} == before

    outcome = summarise(asked, plan, out, {}, None)
    assert outcome.diagnosis == out / "diagnosis" / "report.html"
    assert [run.diagnosis is not None for run in outcome.result.runs] == [True, True, True, False]
    page, table = outcome.report.read_text(), (out / "results.md").read_text()
    for run in good:
        link = f"runs/{run.title}/report.html"
        assert f'href="{link}"' in page and f"[{run.title}]({link})" in table and (out / link).exists()
    assert 'href="diagnosis/report.html"' in page
    assert f"runs/{broken.title}/report.html" not in page


def test_nothing_is_diagnosed_unless_requested(
    asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    plain = changed(asked, diagnose=False)
    whole = join(plain, plan, out, dataset, None)
    assert [type(each) for each in measurements_of(plain, whole, None)] == [TimingMeasurement, OutlierMeasurement]
    assert DiagnosisMeasurement in map(type, measurements_of(asked, whole, None))
    outcome = summarise(plain, plan, out, {}, None)
    assert outcome.diagnosis is None and all(run.diagnosis is None for run in outcome.result.runs)
    assert "Diagnoses" not in (out / "results.md").read_text()


def test_the_page_uses_the_text_of_the_study(
    asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path, tmp_path: Path
) -> None:
    """The first variant's diagnosis is the user's own: it stays, and the page uses the study's text."""
    (text := tmp_path / "own.txt").write_text("def f(x): return x + 1\n" * 400)
    folder = plan.runs[0].folder
    residua.diagnose.diagnose([folder], folder, text=text, tokens=512, length=32, ablations="none", device="cpu")
    own = (folder / "diagnosis.json").read_bytes()
    said = measure(asked, plan, dataset, out)
    assert (folder / "diagnosis.json").read_bytes() == own
    both = Diagnosis.read(out / "diagnosis" / "diagnosis.json").models
    assert [model.name for model in both] == ["prenorm", "mgr"]
    assert {model.text.source for model in both} == {f"the validation text of {dataset.path.name}"}
    assert "(this diagnosis uses the study's text, the run's own a different one): " in said and "lacks" not in said

    before = (folder / "diagnosis" / "diagnosis.json").stat()
    measure(asked, plan, dataset, out)
    assert (folder / "diagnosis" / "diagnosis.json").stat() == before


def test_runs_missing_from_the_page_are_named(asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path) -> None:
    lost, broken = (run for run in plan.runs if run.seed == 0)
    (lost.folder / "metrics.jsonl").unlink()
    (broken.folder / "checkpoints" / "step-10" / "model.safetensors").unlink()
    why = "no complete run in this folder), mgr-seed0 (it was not diagnosed on the study's text)"
    told = f"✗ the page that compares diagnoses lacks prenorm-seed0 ({why}"
    assert told in measure(asked, plan, dataset, out)
