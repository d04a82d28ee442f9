"""A diagnosis of every complete run of a study, in the run's folder, and one page with the variants side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from residua.report.plain import outcome
from residua.report.terminal import ProgressBars, StageProgress
from residua.study.config import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import DIAGNOSIS, is_complete

if TYPE_CHECKING:
    from residua.data import Dataset
    from residua.diagnose import ModelDiagnosis
    from residua.diagnose.text import Sample

SIDE_BY_SIDE = "diagnosis"


def diagnose_runs(study: StudyConfig, plan: StudyPlan, out: Path, dataset: Dataset, console: Console) -> None:
    """Diagnose the complete runs that have no diagnosis yet, and put those of the first seed side by side on a page.

    When a run cannot be diagnosed, the reason is printed and the next run follows.
    """
    if not study.diagnose:
        return
    complete = [run for run in plan.compared if is_complete(run.folder, run.config)]
    waiting = [run for run in complete if found(run) is None]
    with ProgressBars(console) as bars:
        all_runs, stages = bars.stages("diagnosing"), bars.stages("")
        for index, run in enumerate(waiting):
            all_runs(f"diagnosing {run.title}", index, len(waiting))
            try:
                made = diagnose_run(run, dataset, stages, list(study.variants).index(run.variant))
                console.print(outcome(f"{run.title}: {_headline(made)}"))
            except ValueError as problem:
                console.print(outcome(f"{run.title} has no diagnosis: {problem}", good=False))
    _side_by_side(study, complete, out)


def diagnose_run(
    run: PlannedRun, dataset: Dataset, progress: StageProgress, place: int | None = None
) -> ModelDiagnosis:
    """Diagnose a run's model on the validation text of the study, into the run's folder.

    `place` is that of its variant in the study: the variant keeps its colour.
    """
    from residua.diagnose import Diagnosis, diagnose_model
    from residua.diagnose.api import write
    from residua.diagnose.folder import open_subject
    from residua.machine import choose_device

    subject = open_subject(run.folder, choose_device(run.config.train.device, "train.device"))
    made = diagnose_model(subject, _sample(run, dataset), path=str(run.folder), progress=progress)
    made = made.model_copy(update={"place": place})
    write(Diagnosis(models=[made]), run.folder)
    return made


def found(run: PlannedRun) -> ModelDiagnosis | None:
    """The diagnosis in a run's folder; None if it is missing or unreadable."""
    from residua.diagnose import Diagnosis
    from residua.diagnose.api import JSON

    if not (run.folder / DIAGNOSIS).exists():
        return None
    try:
        return Diagnosis.read(run.folder / JSON).models[0]
    except (OSError, ValueError):
        return None


def _sample(run: PlannedRun, dataset: Dataset) -> Sample:
    """The first sequences of the validation text that the study's losses are measured on."""
    import torch

    from residua.data import Tokenizer, validation_batches
    from residua.diagnose.schema import TextFacts
    from residua.diagnose.text import DEFAULT_TOKENS, Sample

    length = run.config.sequence
    limit = min(DEFAULT_TOKENS, run.config.data.validation_tokens)
    batches = list(validation_batches(dataset.split("validation"), length, 16, limit_tokens=limit))
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
    source = f"the validation text of {dataset.path.name}"
    facts = TextFacts(source=source, tokens=tokens.numel(), sequences=len(tokens), length=length)
    return Sample(tokens, targets, facts, Tokenizer.load(run.folder))


def _headline(made: ModelDiagnosis) -> str:
    return "; ".join(finding.words for finding in made.findings[:2]) or "nothing stands out"


def _side_by_side(study: StudyConfig, complete: list[PlannedRun], out: Path) -> None:
    """One page with the first seed's models; models that were shown other text than the first are left out."""
    from residua.diagnose import Diagnosis
    from residua.diagnose.api import write

    places = {name: place for place, name in enumerate(study.variants)}
    models = [
        made.model_copy(
            update={
                "name": run.variant if len(study.sizes) == 1 else f"{run.variant} {run.size}",
                "place": places[run.variant],
            }
        )
        for run in complete
        if run.seed == study.seeds[0] and (made := found(run)) is not None
    ]
    alike = [made for made in models if made.text == models[0].text]
    if len(alike) > 1:
        write(Diagnosis(models=alike), out / SIDE_BY_SIDE)
