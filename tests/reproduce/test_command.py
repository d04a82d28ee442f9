"""`residua reproduce` as users see it: plans, mistakes, and an entry from start to end."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.reproduce import app
from residua.config.run import RunConfig
from residua.data import Dataset
from residua.errors import UserError
from residua.reproduce import run_entry as work
from residua.reproduce.entry import Inside, Nothing, load, names
from residua.reproduce.request import Request, selected
from residua.study.timing import TimingMeasurement
from tests.forked import fork_workers
from tests.report.browser import chromium, opened
from tests.reproduce.conftest import QUICK
from tests.trained import train_run

runner = CliRunner()
SMALL = ["--scale", "1/1000000", *(word for change in QUICK for word in ("--set", change))]


@pytest.fixture(autouse=True)
def known_rate(monkeypatch) -> None:
    monkeypatch.setattr(work, "training_rate", lambda: 1e12)


def test_plan_prints_runs_tokens_flops_hours_and_writes_nothing(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "study"
    arguments = ["004:table1", *SMALL, "--sizes", "S,M", "--rows", "mgr", "--plan", "--data", str(dataset.path)]
    shown = runner.invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False).output
    assert "2 variants × 3 seeds × 2 sizes = 12 runs" in shown
    assert "12 runs, 3.07 k tokens" in shown and "FLOPs: about" in shown and "on this device" in shown
    assert "QK-norm is off" in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["004:table9"], "there is no entry '004:table9': did you mean"),
        (["004:table2"], "cannot be reproduced: a list of hyper-parameters. Nearest: the presets"),
        (["003:fig1"], "name a model with --run FOLDER"),
        (["004:table1", "--run", "runs/x"], "--run is for entries that diagnose a model"),
        (
            ["004:fig2", "--run", "runs/x", "--data", "data/x"],
            "--run diagnoses an existing model and trains nothing: leave --data out.",
        ),
        (["004:fig2", "--run", "runs/x", "--seeds", "3"], "leave --seeds out"),
        (["004:fig2", "--run", "runs/x", "--scale", "1/32"], "leave --scale out"),
        (["004:fig2", "--run", "runs/x", "--plan"], "leave --plan out"),
        (["--data", "data/x"], "--data needs an entry, such as 004:table1"),
        (["004:table1", "--scale", "3"], "--scale 3 is not a number above 0 and at most 1"),
        (["004:table1", "--demo", "--scale", "1"], "--demo sets its own size: leave --scale out."),
        (["--demo"], "--demo needs an entry, such as 004:table1"),
        (["004:table1", "--sizes", "XL"], "--sizes XL is not in this entry: choose from S, M, L"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


@pytest.mark.slow
def test_entry_runs_to_the_end_and_resumes(dataset: Dataset, tmp_path: Path, monkeypatch) -> None:
    fork_workers(monkeypatch)
    out = tmp_path / "study"
    arguments = ["004:table1", *SMALL, "--sizes", "S", "--rows", "block4", "--seeds", "1", "--out", str(out)]
    arguments += ["--data", str(dataset.path), "--threads", "1", "--set", "model.layers=2"]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Paper, 004:table1: Table 1" in (out / "report.html").read_text("utf-8")
    assert "2.9107" in (out / "results.md").read_text("utf-8")  # the paper's loss of Block AttnRes (n=4)
    runs = json.loads((out / "results.json").read_text("utf-8"))["runs"]
    assert [run["status"] for run in runs] == ["complete"] * 2
    written = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    assert runner.invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.slow
def test_demo_trains_small_models_separately_without_verdicts(dataset: Dataset, tmp_path, monkeypatch) -> None:
    fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TimingMeasurement, "measure", lambda *arguments: None)  # covered by `test_timing.py`
    out = tmp_path / "runs" / "004-table1-demo"  # the entry itself trains into 004-table1
    arguments = ["004:table1", "--demo", "--rows", "full_attnres", "--data", str(dataset.path)]
    quick = (
        "model.layers=2", "train.steps=4", "train.schedule.warmup=1", "train.micro_batch=2",
        "data.validation_tokens=256",
    )  # fmt: skip
    arguments += [word for change in quick for word in ("--set", change)]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "it says nothing about the paper's claims" in (out / "results.md").read_text("utf-8")
    assert "direction confirmed" not in result.output and "direction not shown" in result.output
    runs = json.loads((out / "results.json").read_text("utf-8"))["runs"]
    assert [(run["size"], run["seed"], run["status"]) for run in runs] == [("mgr-s-prenorm", 0, "complete")] * 2


TRAINED = [name for name in names() if not isinstance(entry := load(name), Nothing) and entry.trains]


def task_files(folder: Path) -> Path:
    """A few questions of every task that an entry asks."""
    from tests.evaluate.test_eval_scores import write_task

    folder.mkdir()
    for task in ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu"):
        write_task(folder, task, questions=2)
    return folder


def few_experts(name: str) -> list[str]:
    """16 experts instead of 128 or 256: a CPU computes them in turn."""
    entry = load(name)
    assert not isinstance(entry, Nothing)
    mixtures = [size for size in entry.sizes if RunConfig.find(size.base).model.ffn.kind == "moe"]
    return ["--set", "model.ffn.experts=16"] if mixtures else []


SMALLER = {
    "000:table3": {"rows": "gated_attention,resformer,nuresformer,nuresformer_scalar,exoformer,exoformer_dynamic"},
    "003:table1": {"set": "model.layers=8"},  # 22 models of 28 layers
    "003:table2": {"set": "model.layers=4"},  # six mixtures of 24 and 48 layers, each in three precisions
    "004:table1": {"sizes": "S"},  # 27 models of 12 to 36 layers
}
"""Options for entries that would take more than a minute on two cores."""


def conducted(name: str, dataset: Dataset, folder: Path, *more: str) -> Path:
    """Run an entry, and return the folder of its study."""
    out = folder / "study"
    arguments = [name, *SMALL, "--seeds", "1", "--out", str(out), "--data", str(dataset.path), "--threads", "1"]
    arguments += ["--calibration", "2", "--task-dir", str(task_files(folder / "tasks")), *more]
    result = runner.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "shown"),
    [
        ("000:table1", ["--rows", "resformer"], ["14.79", "49.65"]),  # with accuracies
        ("001:fig5", [], ["Cost of removal"]),  # inside a model
        ("003:fig3", ["--rows", "glu"], ["6000", "1.975"]),  # with outliers
    ],
)
def test_each_kind_of_entry_runs_to_the_end_with_two_layers(
    name: str, rows: list[str], shown: list[str], dataset: Dataset, tmp_path: Path, monkeypatch
) -> None:
    fork_workers(monkeypatch)
    out = conducted(name, dataset, tmp_path, *rows, "--set", "model.layers=2")
    table = (out / "results.md").read_text("utf-8")
    assert f"## Paper, {name}" in table and [value for value in shown if value not in table] == []
    runs = json.loads((out / "results.json").read_text("utf-8"))["runs"]
    assert {run["status"] for run in runs} == {"complete"} and all(run["peaks"] and run["outliers"] for run in runs)
    assert f"Paper, {name}" in (out / "report.html").read_text("utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINED)
def test_every_entry_runs_from_start_to_end(name: str, dataset: Dataset, tmp_path: Path, monkeypatch) -> None:
    fork_workers(monkeypatch)
    smaller = SMALLER.get(name, {})
    options = [word for option, value in smaller.items() for word in (f"--{option}", value)]
    out = conducted(name, dataset, tmp_path, *few_experts(name), *options)
    chromium()
    with opened(out / "report.html") as seen:
        titles = seen.page.locator("main h2").all_inner_texts()
        assert titles[0].startswith(f"Paper, {name}")
        whole = load(name)
        assert not isinstance(whole, Nothing)
        chosen = {key: tuple(value.split(",")) for key, value in smaller.items() if key != "set"}
        entry = selected(whole, Request(**chosen))
        shown = seen.page.locator("main section").first.inner_text()
        assert [row.printed for row in entry.rows if row.printed not in shown] == []
        sizes = [size.name for size in entry.sizes]
        published = [by for row in entry.rows for size, by in row.published.items() if size in sizes]
        values = {f"{value:g}" for by in published for value in by.values()}
        assert [value for value in values if value not in shown] == []
        assert seen.problems == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["000:fig6", "003:fig1"])
def test_a_users_own_model_can_be_inspected(name: str, tmp_path: Path) -> None:
    look = tmp_path / "look"
    result = runner.invoke(app, [name, "--run", str(train_run(tmp_path)), "--out", str(look)], catch_exceptions=False)
    assert f"{name} is in the section" in result.output
    page = (look / "report.html").read_text("utf-8")
    entry = load(name)
    assert isinstance(entry, Inside)
    assert [title for title in entry.shows if f">{title}<" not in page] == []
