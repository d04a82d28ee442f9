"""A study's numbers as one file: its contents, its extension by a later study, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset, open_corpus, prepare
from residua.errors import UserError
from residua.study.extend_study import join
from residua.study.page import show_saved
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import Inspection, read_run
from residua.study.results_file import SavedStudy, save_study
from residua.study.run_study import run_study, summarise
from residua.study.timing import StepTiming, TimingMeasurement, keep_timings
from residua.study.train_runs import StudyInterrupted
from tests.study.conftest import (
    ENVIRONMENT,
    SMALL,
    Choose,
    Trainer,
    changed,
    choose,
    compare,
    falling,
    printed,
    refusal,
)
from tests.study.pretend import pretended
from tests.study.recorded import write_run

pytestmark = pytest.mark.slow


def test_the_file_reproduces_the_results_of_its_study(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    study = chosen("mgr", ladder=[2, 3])
    result = compare(study, tmp_path / "study", tmp_path / "kept" / "x.json")
    saved = SavedStudy.read(tmp_path / "kept" / "x.json")
    again = show_saved(saved)
    assert again.variants == result.variants
    assert [r.loss for r in again.runs] == [r.loss for r in result.runs]
    assert saved.commands == ("residua compare study.toml",)
    assert saved.environments == ({k: v for k, v in ENVIRONMENT.items() if k != "platform"},)
    assert str(tmp_path) not in saved.text()
    assert SavedStudy(**json.loads(saved.text())) == saved and saved.checksum
    assert saved.dataset is not None and again.dataset == saved.dataset


def test_a_run_without_a_speed_does_not_hide_the_others(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    """A run trained while other work ran has a loss and no speed worth keeping."""
    compare(chosen("mgr"), tmp_path / "study", tmp_path / "x.json")
    saved = SavedStudy.read(tmp_path / "x.json")
    first, *others = saved.runs
    assert (first.variant, first.seed) == ("prenorm", 0)
    struck = first.model_copy(update={"tokens_per_second": None})
    baseline, mgr = show_saved(saved.model_copy(update={"runs": (struck, *others)})).variants
    (kept,) = [run for run in others if run.variant == "prenorm"]
    assert baseline.tokens_per_second == pytest.approx(kept.tokens_per_second)
    assert mgr.throughput_ratio is not None and mgr.throughput_ratio.count == 1
    # The speed next to the ratio is that of the same seed: another one may have been slowed as well.
    slow = {"tokens_per_second": 100.0}
    slowed = [run.model_copy(update=slow) if (run.variant, run.seed) == ("mgr", 0) else run for run in others]
    _, again = show_saved(saved.model_copy(update={"runs": (struck, *slowed)})).variants
    assert again.tokens_per_second == mgr.tokens_per_second and again.throughput_ratio == mgr.throughput_ratio


def test_the_page_can_be_built_from_the_file_alone(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    compare(chosen("mgr"), tmp_path / "study", tmp_path / "x.json")
    show_saved(SavedStudy.read(tmp_path / "x.json"), tmp_path / "page")
    made = {path.name for path in (tmp_path / "page").iterdir()}
    assert made >= {"report.html", "results.json", "results.md"} and "runs" not in made
    assert "Depth weights" in (tmp_path / "page" / "report.html").read_text(), "from the inspections in the file"


def test_long_curves_are_thinned_and_speeds_are_not(chosen: Choose, dataset: Dataset, out: Path) -> None:
    study = chosen(set=(*SMALL, "train.steps=1000"), seeds=1)
    plan = make_plan(study, out, dataset)
    (one,) = plan.runs
    write_run(one, falling)
    rows = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
    many = [{**rows[0], "step": i + 1, "tokens_per_second": i, "memory_gib": i % 8} for i in range(1000)]
    (one.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*many, *rows[1::2]]))
    record = read_run(one.folder, one.config)
    assert record.tokens_per_second == sum(range(100, 1000)) / 900, "without the first tenth, which compiles"
    assert record.memory_gib == 7
    saved = save_study(study, plan, {one: record}, dataset.fingerprint, None)
    assert len(saved.runs[0].train.step) == 60
    assert (saved.runs[0].train.step[0], saved.runs[0].train.step[-1]) == (1, 1000)
    assert saved.runs[0].tokens_per_second == record.tokens_per_second
    again = saved.plan(out)
    assert save_study(study, again, saved.records(again), dataset.fingerprint, None).text() == saved.text()


def test_an_extension_trains_only_new_runs(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    kept = tmp_path / "x.json"
    compare(chosen("mgr", seeds=[0, 1]), tmp_path / "first", kept)
    first = list(trainer.trained)
    # Another folder, as on another machine that has only the file.
    result = compare(chosen("block_attnres", seeds=[0, 1, 2], ladder=[2]), tmp_path / "second", kept)
    new = trainer.trained[len(first) :]
    longer = [f"{name}-seed{i}" for name in ("block_attnres", "prenorm-2x") for i in range(3)]
    assert sorted(new) == sorted(["prenorm-seed2", *longer])
    assert {row.name for row in result.variants} == {"prenorm", "mgr", "block_attnres"}
    counts = {row.name: row.loss.count for row in result.variants}
    assert counts == {"prenorm": 3, "mgr": 2, "block_attnres": 3}
    assert {r.status for r in result.runs} == {"complete"}
    assert show_saved(SavedStudy.read(kept)).variants == result.variants
    # And a third time nothing is left to train.
    compare(chosen("mgr", "block_attnres", seeds=[0, 1]), tmp_path / "third", kept)
    assert len(trainer.trained) == len(first) + len(new)


def test_saved_runs_are_measured_on_the_studys_text(
    chosen: Choose, trainer: Trainer, dataset: Dataset, tmp_path: Path
) -> None:
    """Their weights may be in the folder, and then low precision is measured: not on the embedded corpus."""
    kept, out = tmp_path / "x.json", tmp_path / "out"
    compare(chosen("mgr"), out, kept)
    study = chosen("block_attnres")
    extended = join(study, make_plan(study, out, dataset), out, dataset, kept)
    assert {run.variant for run in extended.plan.runs} == {"prenorm", "mgr", "block_attnres"}
    assert {run.config.data.path for run in extended.plan.runs} == {str(dataset.path)}
    assert {model.config.data.path for model in extended.plan.models.values()} == {str(dataset.path)}


def test_stopped_study_keeps_its_runs_and_resumes_elsewhere(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    kept, study = tmp_path / "x.json", chosen("mgr", seeds=[0, 1])
    trainer.stop_after = 3
    with pytest.raises(StudyInterrupted):
        compare(study, tmp_path / "first", kept)
    assert len(SavedStudy.read(kept).runs) == 3
    trainer.stop_after = None
    result = compare(study, tmp_path / "second", kept)
    assert len(trainer.trained) == len(set(trainer.trained)) == 4
    assert {r.status for r in result.runs} == {"complete"}


def test_timings_are_stored_in_the_file(
    chosen: Choose, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = StepTiming(device="H200", tokens=64, median=0.5, p10=0.4, p90=0.6, count=10, error=0.01)

    def timed(self: TimingMeasurement, plan: StudyPlan, console: Console) -> None:
        keep_timings(self.study, plan, self.out, {key: {"H200": timing} for key in plan.models})

    monkeypatch.setattr(TimingMeasurement, "measure", timed)
    compare(chosen("mgr", time_alone=True), tmp_path / "first", tmp_path / "x.json")
    monkeypatch.setattr(TimingMeasurement, "measure", lambda *arguments: None)
    result = compare(chosen("block_attnres"), tmp_path / "second", tmp_path / "x.json")
    timings = {row.name: row.timing for row in result.variants}
    assert timings == {"prenorm": timing, "mgr": timing, "block_attnres": None}
    assert SavedStudy.read(tmp_path / "x.json").config.time_alone  # so that the file's own study times the third, too


def test_timings_of_two_sessions_are_not_saved_together(
    chosen: Choose, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline became slower, so it was timed again; the variant could not be."""
    timing = StepTiming(device="H200", tokens=64, median=0.5, p10=0.4, p90=0.6, count=10, error=0.01)
    speeds = {"prenorm": timing, "mgr": timing}

    def timed(self: TimingMeasurement, plan: StudyPlan, console: Console) -> None:
        shutil.rmtree(self.out / "timings", ignore_errors=True)
        taken = {key: {"H200": speeds[key[1]]} for key in plan.models if key[1] in speeds}
        keep_timings(self.study, plan, self.out, taken)

    monkeypatch.setattr(TimingMeasurement, "measure", timed)
    study, file = chosen("mgr", time_alone=True), tmp_path / "x.json"
    compare(study, tmp_path / "first", file)
    speeds = {"prenorm": timing.scaled(2.0)}
    compare(study, tmp_path / "second", file)
    assert SavedStudy.read(file).timings == {("tiny", "prenorm"): {"H200": speeds["prenorm"]}, ("tiny", "mgr"): {}}


@pytest.fixture(scope="module")
def made_once(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four complete runs in `first`, and its numbers in x.json."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patched:
        Trainer().replace_training(patched)
        compare(choose(dataset, "mgr", seeds=[0, 1]), folder / "first", folder / "x.json")
    return folder


@pytest.fixture
def kept(made_once: Path, trainer: Trainer, tmp_path: Path) -> Path:
    shutil.copytree(made_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "x.json"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"set": ["train.optimizer.lr=0.5"]}, r"prenorm with train\.optimizer\.lr = 0\.02, but this study needs 0\.5"),
        ({"baseline": "mgr"}, "baseline = 'prenorm' and this study 'mgr'"),
        (
            {"variants": {"prenorm": ["prenorm"], "mgr": ["mgr", "model.topology.streams=2"]}},
            "give the variant another",
        ),
        ({"match": {"kind": "none"}}, r"has match\.kind = 'ffn' and this study 'none': use the same"),
        ({"match": {"kind": "ffn", "tolerance": 0.01}}, r"has match\.tolerance = 0\.005 and this study 0\.01: use"),
        ({"tune": {"lr": [0.5, 1]}}, r"has tune\.lr = none and this study "),
        ({"scaling": {"sizes": ["tiny", "mini"]}}, "scaled differently"),
    ],
)
def test_a_study_that_contradicts_the_file_is_refused(
    chosen: Choose, kept: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    before = kept.read_text()
    changes = {**changes, **({"set": (*SMALL, *changes["set"])} if "set" in changes else {})}
    study = changed(chosen("mgr"), **changes)
    with pytest.raises(ConfigError, match=words):
        compare(study, tmp_path / "second", kept)
    assert kept.read_text() == before


def test_another_result_of_the_same_run_is_refused(chosen: Choose, kept: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "first" / "runs" / "mgr-seed1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 4', '"loss": 3'))
    with pytest.raises(ConfigError, match="mgr-seed1 ends with a loss of 3"):
        compare(chosen("mgr", seeds=[0, 1]), tmp_path / "first", kept)


def test_another_text_is_refused(chosen: Choose, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for index in range(5):
        (tmp_path / "text" / f"{index}.txt").write_text("other words than before " * 40)
    other = prepare(open_corpus([tmp_path / "text"], holdout=0.4), tmp_path / "other", "bytes")
    shutil.copytree(other.path, tmp_path / "elsewhere")
    assert Dataset.open(tmp_path / "elsewhere").fingerprint == other.fingerprint, "it ignores the place"
    with pytest.raises(ConfigError, match=r"different text .* with --data, or name another file for --results"):
        compare(chosen("mgr", data=str(other.path)), tmp_path / "b", kept)


def test_runs_of_another_numerics_version_are_reported(
    chosen: Choose, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("residua.study.extend_study.MATHEMATICS", 7)
    console = Console(record=True, width=400, quiet=False, file=(tmp_path / "shown").open("w"))
    run_study(chosen("mgr", seeds=[0, 1]), tmp_path / "second", console, kept)
    shown = console.export_text()
    assert "4 runs of x.json will not be trained again" in shown
    assert "mathematics version 1, but this Residua has version 7" in shown


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: "[]", "holds a list of 0 entries, expected an object"),
        (lambda text: "{}", "does not hold the results of a study"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "has version 9"),
        (lambda text: text.replace('"steps": 10', '"steps": 9'), "its checksum does not match"),
        (lambda text: text.replace('"environment": 0', '"environment": 5'), "its checksum does not match"),
        (lambda text: text.replace('"matching"', '"matchinh"'), r"has no key models\[0\]\.matching"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(kept: Path, damage: Callable[[str], str], words: str) -> None:
    kept.write_text(damage(kept.read_text()))
    with pytest.raises(ValueError, match=words) as refused:
        SavedStudy.read(kept)
    assert "\n" not in str(refused.value)


def test_results_json_is_distinguished_from_a_results_file(tmp_path: Path) -> None:
    summary = tmp_path / "results.json"
    summary.write_text(pretended(2).result.model_dump_json())
    with pytest.raises(ValueError, match=rf"make one with `residua compare {tmp_path} --results FILE\.json`"):
        SavedStudy.read(summary)
    with pytest.raises(ValueError, match="is a folder, not a file"):
        SavedStudy.read(tmp_path)


ONE_SUBLAYER = Inspection.rounded({"sublayers": [{"sublayer": 0, "output_rms": 1.0, "gradient_rms": 1.0}]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": 5}, "refers to a missing environment"),
        ({"seed": 0}, "occurs twice"),
        ({"steps": 11}, "was not validated at its last step"),
        ({"inspection": ONE_SUBLAYER}, "has the inspection of a different model"),
    ],
)
def test_an_inconsistent_file_is_refused(kept: Path, change: dict[str, Any], words: str) -> None:
    saved = SavedStudy.read(kept)
    runs = (*saved.runs[:-1], saved.runs[-1].model_copy(update=change))
    saved.model_copy(update={"runs": runs}).write(kept)
    with pytest.raises(ValueError, match=words):
        SavedStudy.read(kept)


def test_a_key_added_by_a_later_version_gets_its_default(kept: Path) -> None:
    saved = SavedStudy.read(kept)
    models = []
    for model in saved.models:
        train = {key: value for key, value in model.config["train"].items() if key != "determinism"}
        models.append(model.model_copy(update={"config": {**model.config, "train": train}}))
    saved.model_copy(update={"models": tuple(models)}).write(kept)
    assert [run.config.train.determinism for run in SavedStudy.read(kept).plan(Path()).runs] == ["fast"] * 4


def test_speeds_are_compared_only_on_the_same_hardware(
    chosen: Choose, trainer: Trainer, dataset: Dataset, tmp_path: Path
) -> None:
    study, out = chosen("mgr", seeds=1), tmp_path / "study"
    compare(study, out, tmp_path / "x.json")
    there = out / "runs" / "mgr-seed0" / "environment.json"
    there.write_text(json.dumps({**ENVIRONMENT, "gpu": "B200"}))
    result = summarise(study, make_plan(study, out, dataset), out, {}, None).result
    assert result.variants[1].step_gain is not None
    assert result.variants[1].throughput_ratio is None and result.variants[1].wall_clock_gain is None


def test_the_command_shows_a_file_and_resumes_its_study(
    chosen: Choose, kept: Path, trainer: Trainer, dataset: Dataset, tmp_path: Path
) -> None:
    shown = printed(kept)
    assert "prenorm" in shown and "mgr" in shown
    assert "Report: " in printed(kept, "--out", tmp_path / "page") and (tmp_path / "page" / "report.html").exists()
    assert "--seeds has no effect" in refusal(kept, "--seeds", 2)
    assert "lost.json does not exist, so there is no study to continue" in refusal("--results", tmp_path / "lost.json")
    trainer.trained.clear()
    # Without names, the study is the file's own; with --seeds it has more.
    said = printed("--results", kept, "--data", dataset.path, "--out", tmp_path / "more", "--seeds", 3)
    assert "4 runs of x.json will not be trained again; 2 runs left to train." in said
    assert trainer.trained == ["prenorm-seed2", "mgr-seed2"]
    assert len(SavedStudy.read(kept).runs) == 6
    again = printed("--results", kept, "--data", dataset.path, "--out", tmp_path / "more")
    assert "6 runs of x.json will not be trained again; none left to train." in again


def test_study_resumes_without_the_file_of_its_base(
    chosen: Choose, trainer: Trainer, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = [f"data.path='{dataset.path}'", "train.optimizer.lr=0.00123"]
    (tmp_path / "mine.toml").write_text(RunConfig.find("tiny").override(here).to_toml())
    results = tmp_path / "x.json"
    compare(chosen("mgr", base="mine.toml", data=None), tmp_path / "first", results)
    (tmp_path / "mine.toml").unlink()
    assert str(dataset.path) not in results.read_text()
    trainer.trained.clear()
    printed("--results", results, "--data", dataset.path, "--out", tmp_path / "elsewhere", "--seeds", 3)
    assert trainer.trained == ["prenorm-seed2", "mgr-seed2"]
    assert all(model.config["train"]["optimizer"]["lr"] == 0.00123 for model in SavedStudy.read(results).models)
    assert "none left to train" in printed("--results", results, "--data", dataset.path, "--out", tmp_path / "again")
    printed(tmp_path / "first")  # the study's folder needs no file either
    assert len(trainer.trained) == 2
    again = ("--results", results, "--data", dataset.path, "--out", tmp_path / "third")
    assert "mine.toml does not exist" in refusal(*again, "--base", "mine.toml")  # a file that is named is read
    assert trainer.trained == ["prenorm-seed2", "mgr-seed2"]


def test_a_plan_records_complete_runs_and_trains_nothing(
    chosen: Choose, kept: Path, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "more.toml").write_text(chosen("mgr", seeds=3).to_toml())
    arguments = (tmp_path / "more.toml", "--out", tmp_path / "first", "--results", tmp_path / "again.json", "--plan")
    said = " ".join(printed(*arguments).split())
    assert "4 of 6 runs are complete; 2 left to train. " in said
    assert "again.json has the numbers of 4 complete runs" in said
    assert "4 of 4 runs are complete; none left to train." in printed(tmp_path / "first", "--plan")
    elsewhere = printed(tmp_path / "more.toml", "--out", tmp_path / "new", "--results", kept, "--seeds", 1, "--plan")
    assert "2 of 2 runs are complete" in elsewhere, "the file has them"
    assert trainer.trained == []
    made = SavedStudy.read(tmp_path / "again.json")
    assert made.runs == SavedStudy.read(kept).runs
    assert made.config.seeds == (0, 1) and made.commands == (), "no seed that was not trained"


def test_a_plan_adds_complete_runs_only_to_the_results_file(chosen: Choose, kept: Path, tmp_path: Path) -> None:
    before = kept.read_text()
    (tmp_path / "more.toml").write_text(chosen("mgr", "block_attnres", seeds=5, ladder=[1, 2]).to_toml())
    arguments = (tmp_path / "more.toml", "--out", tmp_path / "first", "--results", kept, "--plan")
    assert "x.json has the numbers of 4 complete runs" in " ".join(printed(*arguments).split())
    assert kept.read_text() == before
    compare(chosen("mgr", "block_attnres", seeds=[0]), tmp_path / "first", tmp_path / "other.json")
    assert "x.json has the numbers of 5 complete runs" in " ".join(printed(*arguments).split())
    after, first = SavedStudy.read(kept), SavedStudy(**json.loads(before))
    assert list(after.config.variants) == ["prenorm", "mgr", "block_attnres"]
    assert (after.config.seeds, after.config.ladder) == ((0, 1), ()) and after.commands == first.commands
    assert sorted(r.model_dump_json() for r in first.runs) == sorted(
        r.model_dump_json() for r in after.runs if r.variant != "block_attnres"
    )


def test_two_studies_cannot_write_one_file_at_once(
    chosen: Choose, kept: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: Any) -> dict[PlannedRun, str]:
        with pytest.raises(UserError, match=r"x\.json is in use by another study: wait for it"):
            compare(chosen("block_attnres"), tmp_path / "third", kept)
        (tmp_path / "first.toml").write_text(chosen("mgr").to_toml())
        arguments = (tmp_path / "first.toml", "--out", tmp_path / "first", "--results", kept, "--plan")
        assert "has the numbers of 4 complete runs" in " ".join(printed(*arguments).split()), "a plan only reads"
        return trainer(*given)

    monkeypatch.setattr("residua.study.train_runs.run_plan", meanwhile)
    compare(chosen("exoformer"), tmp_path / "second", kept)
    monkeypatch.setattr("residua.study.train_runs.run_plan", trainer)
    compare(chosen("block_attnres"), tmp_path / "third", kept)
    assert {r.variant for r in SavedStudy.read(kept).runs} == {"prenorm", "mgr", "exoformer", "block_attnres"}
    with pytest.raises(ConfigError):
        compare(chosen("mgr", base="nothing"), tmp_path / "fourth", tmp_path / "new" / "y.json")
    assert not list(tmp_path.glob(".*.lock")) and not (tmp_path / "new").exists()


def test_a_file_without_runs_does_not_constrain_later_studies(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(chosen("mgr").to_toml())
    printed(tmp_path / "one.toml", "--out", tmp_path / "study", "--results", tmp_path / "new.json", "--plan")
    assert not (tmp_path / "new.json").exists()
    compare(chosen("mgr"), tmp_path / "first", tmp_path / "x.json")
    empty = SavedStudy.read(tmp_path / "x.json").model_copy(update={"runs": (), "environments": ()})
    empty.write(tmp_path / "new.json")
    compare(chosen("mgr", set=(*SMALL, "train.steps=20")), tmp_path / "second", tmp_path / "new.json")
    assert {run.steps for run in SavedStudy.read(tmp_path / "new.json").runs} == {20}


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_runs_of_another_configuration_are_not_recorded(
    chosen: Choose, kept: Path, tmp_path: Path, plan: list[str]
) -> None:
    (tmp_path / "other.toml").write_text(chosen("mgr", set=(*SMALL, "train.optimizer.lr=0.5")).to_toml())
    said = refusal(tmp_path / "other.toml", "--out", tmp_path / "first", "--results", tmp_path / "false.json", *plan)
    assert "prenorm-seed0 has a run with train.optimizer.lr = 0.02, but this study needs 0.5" in said
    assert not (tmp_path / "false.json").exists()


def test_the_command_accepts_a_study_folder(kept: Path, trainer: Trainer, tmp_path: Path) -> None:
    trainer.trained.clear()
    printed(tmp_path / "first", "--results", tmp_path / "again.json")
    assert trainer.trained == []
    assert SavedStudy.read(tmp_path / "again.json").runs == SavedStudy.read(kept).runs
    (tmp_path / "empty").mkdir()
    assert "holds no study" in refusal(tmp_path / "empty")


def test_an_unknown_topology_is_not_reported_as_damage(kept: Path) -> None:
    saved = SavedStudy.read(kept)
    first, *models = saved.models
    foreign = {**first.config, "model": {**first.config["model"], "topology": {"kind": "mine"}}}
    saved.model_copy(update={"models": (first.model_copy(update={"config": foreign}), *models)}).write(kept)
    words = r"cannot be built here \(.*'mine' does not exist.*RESIDUA_PLUGINS.*name its plugin"
    with pytest.raises(ValueError, match=words):
        SavedStudy.read(kept)
