"""A study that is only planned (`--plan`): say what is left to train, and add complete runs to the results file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from residua.reading import counted
from residua.study.conduct import begin
from residua.study.config import StudyConfig
from residua.study.extend import missing_weights, settled
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runner import own_results
from residua.study.runs import is_complete


def preview(study: StudyConfig, out: Path, console: Console, results: Path | None = None) -> None:
    """Announce a study; trains nothing. The file `results` changes only if `out` has complete runs that it lacks."""
    study = settled(study, out, results)
    keeper = begin(study, out, console, results, "")
    whole = keeper.whole
    found = [run for run in whole.new.settled if is_complete(run.folder, run.config)]
    done = sum(run in whole.known or run in found for run in whole.asked)
    left = f"{len(whole.asked) - done or 'none'} left to train"
    trials = sum(not is_complete(run.folder, run.config) for run in whole.plan.trials)
    tuning = f", after {counted(trials, 'trial')} of learning rates" if trials else ""
    are = "is" if done == 1 else "are"
    console.print(f"{done} of {counted(len(whole.asked), 'run')} {are} complete; {left}{tuning}.", highlight=False)
    if missing := missing_weights(whole):
        console.print(Text(f"• {missing}"), soft_wrap=True)
    if results is None:
        return
    if found:
        part = _part_with(study, found)
        with own_results(results):
            keeper.planned_as(part, _plan_with(part, whole.plan, found)).write()
    kept = len(whole.known) + len(found)
    told = f"{results} holds the numbers of {counted(kept, 'complete run')}"
    console.print(Text(told if kept else f"No run is complete, so {results} gets no numbers yet."), soft_wrap=True)


def _part_with(study: StudyConfig, runs: Sequence[PlannedRun]) -> StudyConfig:
    """The study with only the baseline and the variants, seeds and budgets of these runs."""
    names, seeds, budgets = ({getattr(run, key) for run in runs} for key in ("variant", "seed", "budget"))
    ladder = tuple(budget for budget in study.ladder if budget in budgets)
    return study.model_copy(
        update={
            "variants": {name: v for name, v in study.variants.items() if name in {study.baseline, *names}},
            "seeds": tuple(seed for seed in study.seeds if seed in seeds),
            "ladder": () if ladder == (1.0,) else ladder,
        }
    )


def _plan_with(study: StudyConfig, plan: StudyPlan, runs: Sequence[PlannedRun]) -> StudyPlan:
    """The plan with only these runs and the models of `study`."""
    models = {key: model for key, model in plan.models.items() if key[1] in study.variants}
    tuned = tuple(rate for rate in plan.tuned if rate.variant in study.variants)
    return replace(plan, models=models, runs=tuple(runs), tuned=tuned, trials=())
