"""A diagnosis of every complete run of a study, in the run's folder, and one page with the variants side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from residua.report.failure import tell
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
AGAIN = "diagnosis"
"""In the folder of a run that has a diagnosis on another text: its diagnosis on the study's."""
OUR_TEXT = "the validation text of "
"""How diagnoses of a study call their text; the name of its folder follows."""


def diagnose_runs(study: StudyConfig, plan: StudyPlan, out: Path, dataset: Dataset, console: Console) -> None:
    """Diagnose the complete runs that have no diagnosis yet, and put those of the first seed side by side on a page.

    A run of the first seed whose diagnosis is on another text is diagnosed for the page once more, in `AGAIN` of its
    folder. When a run cannot be diagnosed, the reason is printed and the next run follows.
    """
    if not study.diagnose:
        return
    complete = [run for run in plan.compared if is_complete(run.folder, run.config)]
    first = [run for run in plan.compared if run.seed == study.seeds[0]]
    waiting = {run: run.folder for run in complete if found(run.folder) is None}
    waiting |= {
        run: run.folder / AGAIN
        for run in first
        if run in complete and run not in waiting and _on_our_text(run, dataset) is None
    }
    with ProgressBars(console) as bars:
        all_runs, stages = bars.stages("diagnosing"), bars.stages("")
        for index, (run, folder) in enumerate(waiting.items()):
            all_runs(f"diagnosing {run.title}", index, len(waiting))
            try:
                made = diagnose_run(run, dataset, stages, folder, list(study.variants).index(run.variant))
                again = "" if folder == run.folder else " (its own diagnosis is of another text; this is the study's)"
                console.print(outcome(f"{run.title}{again}: {_headline(made)}"))
            except ValueError as problem:
                tell(console, f"{run.title} has no diagnosis", problem)
    left = _side_by_side(study, [run for run in first if run in complete], out, dataset)
    left = {**{run: "no complete run in this folder" for run in first if run not in complete}, **left}
    if left:
        told = ", ".join(f"{run.title} ({why})" for run, why in left.items())
        console.print(outcome(f"the page of diagnoses side by side is without {told}", good=False))


def diagnose_run(
    run: PlannedRun, dataset: Dataset, progress: StageProgress, folder: Path, place: int | None = None
) -> ModelDiagnosis:
    """Diagnose a run's model on the validation text of the study, into a folder.

    `place` is that of its variant in the study: the variant keeps its colour.
    """
    from residua.data import Tokenizer
    from residua.diagnose import Diagnosis, diagnose_model
    from residua.diagnose.api import write
    from residua.diagnose.folder import open_subject
    from residua.machine import choose_device

    subject = open_subject(run.folder, choose_device(run.config.train.device, "train.device"))
    sample = replace(_sample(run, dataset), tokenizer=Tokenizer.load(run.folder))
    made = diagnose_model(subject, sample, path=str(run.folder), progress=progress)
    made = made.model_copy(update={"place": place})
    write(Diagnosis(models=[made]), folder)
    return made


def found(folder: Path) -> ModelDiagnosis | None:
    """The diagnosis in a folder; None if it is missing or unreadable."""
    from residua.diagnose import Diagnosis
    from residua.diagnose.api import JSON

    if not (folder / DIAGNOSIS).exists():
        return None
    try:
        return Diagnosis.read(folder / JSON).models[0]
    except (OSError, ValueError):
        return None


def _on_our_text(run: PlannedRun, dataset: Dataset) -> ModelDiagnosis | None:
    """The diagnosis of a run on the study's validation text, wherever the text was then; None if there is none."""
    facts = _sample(run, dataset).facts
    for folder in (run.folder, run.folder / AGAIN):
        made = found(folder)
        if made is not None and made.text.source.startswith(OUR_TEXT):
            moved = made.text.model_copy(update={"source": facts.source})
            if moved == facts:
                return made.model_copy(update={"text": moved})
    return None


def _sample(run: PlannedRun, dataset: Dataset) -> Sample:
    """The first sequences of the validation text that the study's losses are measured on."""
    import torch

    from residua.data import validation_batches
    from residua.diagnose.schema import TextFacts
    from residua.diagnose.text import DEFAULT_TOKENS, Sample

    length = run.config.sequence
    limit = min(DEFAULT_TOKENS, run.config.data.validation_tokens)
    batches = list(validation_batches(dataset.split("validation"), length, 16, limit_tokens=limit))
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
    source = f"{OUR_TEXT}{dataset.path.name}"
    return Sample(
        tokens, targets, TextFacts(source=source, tokens=tokens.numel(), sequences=len(tokens), length=length)
    )


def _headline(made: ModelDiagnosis) -> str:
    return "; ".join(finding.words for finding in made.findings[:2]) or "nothing stands out"


def _side_by_side(study: StudyConfig, runs: list[PlannedRun], out: Path, dataset: Dataset) -> dict[PlannedRun, str]:
    """One page with these runs, the complete ones of the first seed; returns those left out, and why.

    Models are side by side on the same tokens: those of sizes with sequences of another length are left out.
    """
    from residua.diagnose import Diagnosis
    from residua.diagnose.api import write

    places = {name: place for place, name in enumerate(study.variants)}
    models: list[ModelDiagnosis] = []
    left: dict[PlannedRun, str] = {}
    for run in runs:
        made = _on_our_text(run, dataset)
        if made is None:
            left[run] = "it has no diagnosis on the study's text"
        elif models and made.text != models[0].text:
            left[run] = f"its sequences have {made.text.length} tokens, not {models[0].text.length}"
        else:
            name = run.variant if len(study.sizes) == 1 else f"{run.variant} {run.size}"
            models.append(made.model_copy(update={"name": name, "place": places[run.variant]}))
    if len(models) > 1:
        write(Diagnosis(models=models), out / SIDE_BY_SIDE)
    return left
