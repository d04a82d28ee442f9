"""`residua compare` as users see it: help, lists, plans, and mistakes reported in one sentence."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.compare import app
from residua.config.run import RunConfig
from residua.config.variants import KNOWN
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from tests.study.conftest import SET_SMALL, printed, refusal
from tests.study.recorded import write_all


def test_the_list_names_every_known_variant() -> None:
    shown = printed("--list")
    assert all(name in shown for name in KNOWN)


def test_a_plan_shows_matching_changes_and_trains_nothing(dataset: Dataset, out: Path) -> None:
    arguments = ["prenorm", "exoformer", "--base", "mini", "--seeds", "2", "--data", dataset.path, "--plan"]
    shown = printed(*arguments, "--out", out)
    assert "2 variants × 2 seeds = 4 runs" in shown and "FFN width 2048 → " in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name at least two variants"),
        (["prenorm"], "name at least two variants"),
        (["prenorm", "mrg"], "^'mrg' is not a known variant: did you mean 'mgr'"),
        (["prenorm", "zzzz"], "^'zzzz' is not a known variant: `residua compare --list` lists them"),
        (["prenorm", "mgr+mrg"], r"^variant 'mgr\+mrg': 'mrg' is not a known variant"),
        (["prenorm", "prenorm"], "variants names 'prenorm' twice"),
        (["prenorm", "mgr+block_attnres"], "'mgr' and 'block_attnres' both set model.topology.kind"),
        (["prenorm", "mgr", "--match", "width"], r"match\.kind = 'width' does not exist"),
        (["prenorm", "mgr", "--base", "tinny"], "tiny"),
        (["prenorm", "mgr", "--tokens-per-parameter", "20"], "needs --sizes"),
        (["--demo", "mgr"], "name at least two variants"),
        (["--demo", "study.toml"], "^--demo is a complete study: give either --demo or study.toml"),
        (["tiny", "prenorm"], "^'tiny' is a preset, not a variant: `residua compare --base tiny`"),
        (["prenorm,", "mgr"],
         "^'prenorm,' contains a comma: separate variants by spaces, as in `residua compare prenorm mgr`"),
        (["prenorm,mgr"], "separate variants by spaces, as in `residua compare prenorm mgr`"),
        (["res/c.json", "prenorm"], r"^res/c\.json is a file, not a variant: name a results file with --results res/c"),
        (["runs/wiki", "prenorm"], "^runs/wiki is a path, not a variant: give either a study folder or variants"),
        (["runs/nowhere"], "^runs/nowhere is not a folder: name a study folder"),
        (["prenorm", "mgr", "--data", "nope"], "^nope does not exist: name a folder made by residua data prepare"),
        (["missing.toml"], r"missing\.toml does not exist"),
        (["prenorm", "study.toml"], "a complete study"),
        (["prenorm", "mgr", "--tune", "lr=0.5x"],
         r"^there are too few learning rates to try \('0\.5x'\): give at least two, as in 0\.5x, 1x, 2x\.$"),
        (["prenorm", "mgr", "--tune", "0.5x,2x"], "is not a list of learning rates: write it as lr=0.5x,1x,2x.$"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_sentence(arguments: list[str], sentence: str, dataset: Dataset) -> None:
    given = arguments if {"--demo", "--data"} & set(arguments) else [*arguments, "--data", dataset.path]
    assert re.search(sentence, refusal(*given, "--plan"))


def test_options_override_a_study_file(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "tiny"\nvariants = ["prenorm", "mgr"]\nseeds = 5\ndata = "{dataset.path}"\n')
    assert "2 variants × 2 seeds = 4 runs" in printed(file, "--seeds", "2", "--plan")


@pytest.mark.parametrize(
    ("content", "variants", "sentence"),
    [
        ('extends = "tiny"\n[train]\nsteps = 4\n', [], "configures a run, not a study: .* mgr --base .*nano"),
        (RunConfig.find("tiny").to_toml(), [], "nano.toml configures a run, not a study"),
        (
            'extends = "x.toml"\nvariants = ["prenorm", "mgr"]\n',
            [],
            "a study has no key 'extends': write base = 'x.toml'",
        ),
        ('extends = "x.toml"\n', ["prenorm", "mgr", "--base"], "'x.toml' is a file, but only a preset can be extended"),
    ],
)
def test_run_config_is_distinguished_from_a_study_file(
    tmp_path: Path, dataset: Dataset, content: str, variants: list[str], sentence: str
) -> None:
    file = tmp_path / "nano.toml"
    file.write_text(content)
    assert re.search(sentence, refusal(*variants, file, "--data", dataset.path, "--plan"))


def test_study_folder_among_variants_is_recognised(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mgr"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.toml").write_text('variants = ["prenorm", "mgr"]\n')
    alone = "mine is a study folder, not a variant: give either the folder or variants."
    assert refusal("mine", "prenorm", "--plan") == alone
    planned = printed("prenorm", "mgr", "--data", dataset.path, "--plan")
    assert "= 6 runs" in planned  # of the variant, not of the folder with its name


@pytest.mark.parametrize("stranger", ["config.toml", "quantization.json", "diagnosis.json", "config.json"])
@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_a_folder_of_other_files_is_refused_and_unchanged(
    stranger: str, plan: list[str], dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / stranger).write_text("its own")
    (tmp_path / "report.html").write_text("its own page")
    arguments = ["prenorm", "mgr", "--seeds", 1, *SET_SMALL, "--data", dataset.path, "--out", tmp_path, *plan]
    told = f"{tmp_path} contains {stranger}, which was not written by a study: choose another --out."
    assert refusal(*arguments) == told
    assert {path.name for path in tmp_path.iterdir()} == {stranger, "report.html"}
    assert (tmp_path / "report.html").read_text() == "its own page"


def test_change_undone_by_a_variant_is_reported(dataset: Dataset) -> None:
    changes = ["--set", "model.topology.kind=additive", "--set", "train.steps=100"]
    shown = printed("prenorm", "mgr", *changes, "--data", dataset.path, "--plan")
    assert "--set model.topology.kind=additive has no effect on mgr, which overrides it." in shown
    assert "train.steps=100 does not" not in shown and "for prenorm" not in shown


@pytest.mark.slow
def test_variants_that_a_study_drops_are_named(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    earlier = {"variants": ["prenorm", "mgr", "mgr+exoformer"], "ladder": [2.5]}
    write_all(make_plan(StudyConfig(**{**study.model_dump(), **earlier}), out, dataset), lambda run, step: 3.0)

    def planned(*variants: str) -> str:
        arguments = [*variants, "--seeds", 1, *SET_SMALL, "--data", dataset.path, "--out", out, "--plan"]
        return " ".join(printed(*arguments).split())

    told = f"{out} also contains mgr, which this study leaves out: name it too to include it on the page."
    assert told in planned("prenorm", "mgr+exoformer")
    assert "also contains mgr, mgr+exoformer, which" in planned("prenorm", "resformer")
    assert "also contains" not in planned("prenorm", "mgr", "mgr+exoformer", "resformer")


def test_a_failed_run_is_explained_on_standard_error(
    dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(study: object, plan: StudyPlan, out: Path, watcher: object) -> dict[PlannedRun, str]:
        write_all(replace(plan, runs=plan.runs[1:]), lambda run, step: 3.0)
        return {plan.runs[0]: "it ran out of memory"}

    monkeypatch.setattr("residua.study.train_runs.run_plan", fail)
    arguments = ["prenorm", "mgr", "--seeds", "1", *SET_SMALL, "--data", str(dataset.path), "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "residua: prenorm-seed0 did not complete: it ran out of memory\n" in result.stderr
    assert result.stderr.endswith("residua: 1 of 2 runs did not complete: see above.\n")
