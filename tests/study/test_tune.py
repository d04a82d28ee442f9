"""A search of learning rates: the choice, its runs, its persistence, and its tables."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.config import Tune
from residua.study.plan import PlannedRun, Trial, choose_rates, make_plan, rate_changes, short_run, tuned_for
from residua.study.plan import choose as choose_rate
from residua.study.results import StudyResult
from residua.study.results_file import SavedStudy
from residua.study.train_runs import StudyInterrupted, cost_sentences
from tests.study.conftest import SET_SMALL, SMALL, Choose, Trainer, choose, compare, printed
from tests.study.recorded import write_run

LONGER = (*SMALL, "train.steps=40", "model.layers=2")
BEST = {"prenorm": 1.0, "mgr": 2.0}
"""The multiple at which a variant's loss is lowest."""


def loss(run: PlannedRun, step: int) -> float:
    return 3.0 + abs(math.log(run.rate / BEST[run.variant])) + 0.01 * run.seed / (step + 1)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, no_page: None) -> Trainer:
    return Trainer(loss).replace_training(monkeypatch, pages=True)


@pytest.fixture
def chosen(dataset: Dataset) -> Choose:
    return partial(choose, dataset, "mgr", set=LONGER, match={"kind": "none"}, tune={"lr": ["0.5x", "1x", "2x"]})


def rates(result: StudyResult) -> dict[str, float]:
    return {rate.variant: rate.chosen for rate in result.tuning}


@pytest.mark.slow
def test_each_variant_gets_the_rate_of_its_best_short_run(
    chosen: Choose, trainer: Trainer, out: Path, dataset: Dataset
) -> None:
    result = compare(chosen(), out)
    assert rates(result) == BEST
    trials, compared = trainer.trained[:6], trainer.trained[6:]
    assert trials[:3] == [f"prenorm-lr{factor}x-seed1000" for factor in ("0.5", "1", "2")]
    assert sorted(compared) == ["mgr-seed0", "mgr-seed1", "prenorm-seed0", "prenorm-seed1"]
    plans = (make_plan(chosen(tune=None), out, dataset), make_plan(chosen(), out, dataset, result.tuning))
    own, tuned = (plan.models["tiny", "mgr"].config.train.optimizer for plan in plans)
    assert own.kind == tuned.kind == "muon"
    assert (tuned.lr, tuned.rest.lr) == pytest.approx((2 * own.lr, 2 * own.rest.lr))
    for seed in (0, 1):
        assert f"lr = {tuned.lr}" in (out / f"runs/mgr-seed{seed}/config.toml").read_text()
    assert {r.folder for r in result.runs} == set(compared), "trials are not runs of the comparison"


@pytest.mark.slow
def test_trials_are_recorded_in_the_files_of_the_study(chosen: Choose, trainer: Trainer, out: Path) -> None:
    trainer.fails = (0.5,)
    compare(chosen(), out)
    (mgr,) = [rate for rate in json.loads((out / "results.json").read_text())["tuning"] if rate["variant"] == "mgr"]
    assert (mgr["chosen"], mgr["seed"], mgr["steps"]) == (2.0, 1000, 10)
    assert [trial["problem"] for trial in mgr["trials"]] == ["the run diverged", "", ""]
    assert mgr["trials"][2]["loss"] < mgr["trials"][1]["loss"] and mgr["trials"][0]["loss"] is None
    table = (out / "results.md").read_text()
    assert "## learning rates" in table and "| failed |" in table
    assert ", 2× its own; the largest one tried" in table and "a larger one may be better" in table
    assert StudyConfig.from_toml(out / "study.toml").tune == Tune(lr=(0.5, 1.0, 2.0))


@pytest.mark.slow
def test_resumed_study_does_not_choose_rates_again(
    chosen: Choose, trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stop_after = 2
    with pytest.raises(StudyInterrupted):
        compare(chosen(), out)
    trainer.stop_after = 8
    with pytest.raises(StudyInterrupted):
        compare(chosen(), out)
    assert len(set(trainer.trained)) == 8, "a complete trial is not trained again"
    trainer.stop_after = None
    monkeypatch.setitem(BEST, "mgr", 0.5)  # as if a trial gave another number
    for path in out.glob("runs/*-lr*"):
        path.rename(path.with_name(f"moved-{path.name}"))
    assert rates(compare(chosen(), out)) == {"prenorm": 1.0, "mgr": 2.0}
    assert len(trainer.trained) == 10
    assert rates(compare(chosen(seeds=3, tune=None), out)) == {"prenorm": 1.0, "mgr": 2.0}
    assert trainer.trained[10:] == ["prenorm-seed2", "mgr-seed2"], "a new seed has the chosen rate"
    (out.parent / "again.toml").write_text(chosen(tune=None).to_toml())
    printed(out.parent / "again.toml", "--out", out, "--plan")  # a plan has the chosen rates, too


@pytest.mark.slow
def test_chosen_rates_are_stored_in_the_results_file(chosen: Choose, trainer: Trainer, tmp_path: Path) -> None:
    kept = tmp_path / "x.json"
    first = compare(chosen(), tmp_path / "first", kept)
    before = len(trainer.trained)
    again = compare(chosen(seeds=3), tmp_path / "second", kept)
    assert trainer.trained[before:] == ["prenorm-seed2", "mgr-seed2"]
    assert again.tuning == first.tuning == SavedStudy.read(kept).tuning
    with pytest.raises(ConfigError, match=r"has tune.lr = \(0.5, 1.0, 2.0\) and this study none"):
        compare(chosen(tune=None), tmp_path / "third", kept)


@pytest.mark.slow
def test_a_plan_counts_the_trials_and_trains_nothing(chosen: Choose, dataset: Dataset, out: Path) -> None:
    plan = make_plan(chosen(), out, dataset)
    assert len(plan.trials) == 6 and {r.config.train.steps for r in plan.trials} == {10}
    assert {(r.seed, r.config.data.seed, r.config.train.seed) for r in plan.trials} == {(1000, 1000, 1000)}
    adds = "Tuning adds 3.84 k training tokens to the 10.24 k of the comparison (+38%)"
    assert cost_sentences(plan)[0].startswith(adds)
    arguments = ["prenorm", "mgr", "--seeds", 1, *SET_SMALL, "--data", dataset.path, "--out", out, "--plan"]
    shown = " ".join(printed(*arguments, "--tune", "lr=0.5x,1x,2x").split())
    assert "2 variants × 1 seed = 2 runs, and 6 to tune learning rates" in shown
    assert "0 of 2 runs are complete; 2 left to train, after 6 trials of learning rates." in shown
    assert not out.exists()


def test_a_trial_has_fewer_steps_and_another_seed(chosen: Choose, dataset: Dataset, out: Path) -> None:
    config = make_plan(chosen(), out, dataset).models["tiny", "prenorm"].config
    longer = config.override(["train.steps=1000", "train.schedule.warmup=100"])
    trial = short_run(longer, Tune(lr=(1.0, 3.0)), 3.0)
    assert (trial.train.steps, trial.train.schedule.warmup, trial.train.seed) == (250, 25, 1000)
    assert trial.model == longer.model and trial.train.optimizer.lr == pytest.approx(3 * config.train.optimizer.lr)
    plain = config.override(["train.optimizer={kind='adamw', lr=0.001}"])
    assert rate_changes(plain, 0.1) == ["train.optimizer.lr=0.0001"]


@pytest.mark.parametrize(
    ("losses", "factor", "note"),
    [
        ((2.0, 1.0, 3.0), 1.0, ""),
        ((2.0, 2.0, 2.0), 1.0, ""),
        ((1.0, 2.0, 3.0), 0.5, "a smaller one may be better"),
        ((None, 2.0, None), 1.0, "the only trial that completed"),
        ((None, None, None), 1.0, "no trial completed"),
    ],
)
def test_lowest_loss_wins_and_an_edge_of_the_grid_is_reported(
    losses: tuple[float | None, ...], factor: float, note: str
) -> None:
    tried = [Trial(factor=f, rate=f / 100, loss=v) for f, v in zip((0.5, 1.0, 2.0), losses, strict=True)]
    found = choose_rate("tiny", "mgr", tried, 1000, 10, "")
    assert found.chosen == factor
    assert note in found.note and bool(note) == bool(found.note)


def test_rates_of_larger_sizes_follow_a_fitted_law(dataset: Dataset, out: Path, trainer: Trainer) -> None:
    """The best rate is between two trials at `tiny`, and half of that at twice the logarithm of its parameters."""
    sizes = ["tiny", "mini", "mgr-s-prenorm"]
    study = choose(
        dataset, "mgr", set=["train.steps=40", "train.schedule.warmup=2"], match={"kind": "none"}, seeds=1,
        scaling={"sizes": sizes}, tune={"lr": [0.25, 0.5, 1, 2], "sizes": 2},
    )  # fmt: skip
    plan = make_plan(study, out, dataset)
    assert {trial.size for trial in plan.trials} == {"tiny", "mini"} and not plan.settled
    best = {"tiny": 0.008, "mini": 0.006}
    for run in plan.trials:
        rate = run.config.train.optimizer.lr
        write_run(run, lambda run, step, x=rate: 3.0 + math.log(x / best[run.size]) ** 2)
    rates = choose_rates(study, plan, {})
    assert [rate.optimum for rate in rates if rate.variant == "mgr"] == pytest.approx([0.008, 0.006])
    tuned = make_plan(study, out, dataset, rates)
    assert len(tuned.settled) == len(tuned.runs) and len(tuned.tuned) == 6
    grown = [math.log(tuned.models[size, "mgr"].parameters) for size in sizes]
    power = math.log(0.006 / 0.008) / (grown[1] - grown[0])
    wanted = 0.006 * math.exp(power * (grown[2] - grown[1]))
    assert tuned.models[sizes[2], "mgr"].config.train.optimizer.lr == pytest.approx(wanted, rel=5e-3)
    (law,) = (rate for rate in tuned.tuned if (rate.size, rate.variant) == (sizes[2], "mgr"))
    assert "the law through tiny and mini, lr ∝ N^" in law.note


def test_chosen_rates_survive_settings_of_later_versions() -> None:
    """Rates in a file were chosen for configurations without keys that came later."""
    saved = SavedStudy.read(Path("docs/results/twenty.json"))
    older = tuple(rate.model_copy(update={"made_for": "old"}) for rate in saved.tuning or ())
    again = saved.model_copy(update={"tuning": older})
    assert [rate.made_for for rate in again.rates()] == [rate.made_for for rate in saved.rates()] != []
    own, tune = saved.plan(Path()).models["6x256.toml", "mgr_exo"].config, saved.config.tune
    assert tuned_for(own.override(rate_changes(own, 0.5)), tune) in {rate.made_for for rate in saved.rates()}


def test_trials_are_compared_on_text_that_all_of_them_read(chosen: Choose, out: Path, dataset: Dataset) -> None:
    study = chosen()
    plan = make_plan(study, out, dataset)
    for trial in plan.trials:  # on all of the text the order is another, but some were validated only on a part
        final = {"loss": 1.0 + abs(trial.rate - 0.5), "bits_per_byte": 1.0, "tokens": 100}
        write_run(trial, loss, final=None if trial.rate == 1.0 else final)
    assert {rate.variant: rate.chosen for rate in choose_rates(study, plan, {})} == BEST


@pytest.mark.parametrize(
    ("tune", "sentence"),
    [
        ({"lr": [0.5, 1], "seed": 1}, "tune.seed = 1 is one of the study's seeds"),
        ({"lr": [1, 1]}, "use distinct positive multiples"),
        ({"lr": ["fastx", 1]}, "^the learning rates to try contain .fastx.: write multiples as 0.5x, 1x, 2x"),
        ({"lr": 2}, "give a list of multiples"),
    ],
)
def test_an_invalid_search_is_refused(tune: dict[str, Any], sentence: str, chosen: Choose) -> None:
    with pytest.raises(ConfigError, match=sentence):
        chosen(tune=tune)
