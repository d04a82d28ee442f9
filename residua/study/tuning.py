"""Which learning rate each variant of a study gets: from the trials that were trained, or from an earlier choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from residua.study.config import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import comparable, is_complete, read_run
from residua.study.saved import SavedStudy
from residua.study.trials import Trial, TunedRate, choose, read_rates, tuned_for


def known_rates(out: Path, results: Path | None = None) -> list[TunedRate]:
    """The learning rates that a search chose, in the results file or in the study's folder."""
    saved = SavedStudy.read(results).tuning if results is not None and results.exists() else None
    return [*read_rates(out), *(saved or ())]


def chosen_rates(study: StudyConfig, plan: StudyPlan, problems: Mapping[PlannedRun, str]) -> list[TunedRate]:
    """The rate of each variant whose trials have ended."""
    assert study.tune is not None
    found, losses = [], _losses(plan.trials)
    for size, name in dict.fromkeys((run.size, run.variant) for run in plan.trials):
        runs = [run for run in plan.trials if (run.size, run.variant) == (size, name)]
        trials = [
            Trial(
                factor=run.rate,
                rate=run.config.train.optimizer.lr,
                loss=losses.get(run),
                problem=problems.get(run, ""),
            )
            for run in runs
        ]
        made_for = tuned_for(plan.models[size, name].config, study.tune)
        found.append(choose(size, name, trials, study.tune.seed, runs[0].config.train.steps, made_for))
    return found


def _losses(runs: Sequence[PlannedRun]) -> dict[PlannedRun, float]:
    """Of the complete ones, all on the same text."""
    complete = {run: read_run(run.folder, run.config) for run in runs if is_complete(run.folder, run.config)}
    return {run: record.final_loss for run, record in comparable(complete).items()}
