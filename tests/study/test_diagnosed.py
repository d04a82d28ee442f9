"""Diagnoses of a study's runs: made once, linked from the page and the table, side by side, and no run in the way."""

from __future__ import annotations

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
from residua.study.conduct import summarise
from residua.study.diagnosed import diagnose_runs
from residua.study.plan import StudyPlan, make_plan
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


def test_every_run_is_diagnosed_once_linked_and_laid_side_by_side(
    asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    log = Console(record=True, width=200, file=io.StringIO())
    diagnose_runs(asked, plan, out, dataset, log)
    said = log.export_text()
    *good, broken = plan.runs
    assert f"✗ {broken.title} has no diagnosis" in said and "is not finite" in said
    assert not (broken.folder / "report.html").exists()
    for run in good:
        assert f"✓ {run.title}: " in said
        found = Diagnosis.read(run.folder / "diagnosis.json").models[0]
        assert found.text.source == f"the validation text of {dataset.path.name}" and found.ablations
        assert found.text.tokens <= run.config.data.validation_tokens  # no more than its loss is measured on
        assert found.place == list(asked.variants).index(run.variant)
    both = Diagnosis.read(out / "diagnosis" / "diagnosis.json")
    assert [model.name for model in both.models] == ["prenorm", "mgr"]
    assert [model.place for model in both.models] == [0, 1]  # they keep the colours of the study's page

    before = {run: (run.folder / "diagnosis.json").stat() for run in good}
    diagnose_runs(asked, plan, out, dataset, Console(quiet=True))
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


def test_nothing_is_diagnosed_unless_asked_for(
    asked: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    plain = StudyConfig(**{**asked.model_dump(), "diagnose": False})
    diagnose_runs(plain, plan, out, dataset, Console(quiet=True))
    outcome = summarise(plain, plan, out, {}, None)
    assert outcome.diagnosis is None and all(run.diagnosis is None for run in outcome.result.runs)
    assert "Diagnoses" not in (out / "results.md").read_text()
