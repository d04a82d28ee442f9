"""Measure each trained model of a study once, and store the results in the folders of the runs.

Peak activation and residual-sink ratio are those of `residua quantize`, attention sinks those of `residua diagnose`.
Accuracies on tasks are those of `residua eval`, also in low precision. Their file is written after every task, so that
a stopped study resumes with the next one. Plotting libraries are imported only when needed, so this can run on the
training machine. `timing.py` times steps in isolation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.console import Console

from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.files import write_atomically
from residua.quantize.recipe import Recipe
from residua.report.failure import tell
from residua.report.plain import outcome
from residua.report.terminal import Progress, ProgressBars, StageProgress
from residua.storage.checkpoint import checkpoints
from residua.study.config import StudyConfig, Tasks
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.records import (
    ACCURACIES,
    DIAGNOSIS,
    OUTLIERS,
    QUANTIZED,
    Accuracies,
    Outliers,
    QuantizedRun,
    RunRecord,
    TaskAccuracy,
    is_complete,
    read_current,
)
from residua.study.statistics import mean
from residua.study.train_runs import StudyInterrupted, stop_as_exception

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from residua.data import Dataset
    from residua.data.loader import Batch
    from residua.diagnose import ModelDiagnosis
    from residua.diagnose.text import Sample
    from residua.evaluate.results import TaskScore
    from residua.evaluate.score import Scorer
    from residua.model.decoder import Decoder
    from residua.quantize.evaluate import CalibrationText

SINK_TOKENS, TOKENS_AT_ONCE = 8192, 2048
"""Tokens, from the first sequences, on which attention is measured (as in a diagnosis), and tokens per forward pass."""
SIDE_BY_SIDE = "diagnosis"
AGAIN = "diagnosis"
"""Subfolder for a run's diagnosis on the study's text, if the run already has one on another text."""
OUR_TEXT = "the validation text of "
"""How a study's diagnoses name their text, followed by the name of its folder."""


class RunMeasurement:
    """A measurement made once per run and stored in its folder: `waits` selects the runs, `measure_run` measures one.

    After one of `errors`, the run has no numbers: the reason is printed, and the next run is measured.
    """

    title: ClassVar[str]
    stopped: ClassVar[str]
    lost: ClassVar[str] = ""
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def measure(self, plan: StudyPlan, console: Console) -> None:
        waiting = [run for run in plan.compared if self.waits(run)]
        if not waiting:
            return
        with stop_as_exception(), ProgressBars(console) as bars:
            every, stages = bars.stages(self.title), bars.stages("")
            try:
                for index, run in enumerate(waiting):
                    every(f"{self.title} of {run.title}", index, len(waiting))
                    try:
                        if headline := self.measure_run(run, console, stages):
                            console.print(outcome(f"{run.title}{headline}"))
                    except self.errors as problem:
                        tell(console, f"{run.title}{self.lost}", problem)
            except KeyboardInterrupt:
                raise StudyInterrupted(f"Stopped while {self.stopped}: run the same command to continue.") from None

    def waits(self, run: PlannedRun) -> bool:
        """Whether a run can be measured and has not been, or was trained further since."""
        raise NotImplementedError

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        """Measure a run's last checkpoint and write its file; returns text to print after its title, or ""."""
        raise NotImplementedError


def has_weights(run: PlannedRun) -> bool:
    """Whether a run is complete and its weights are on this machine."""
    return is_complete(run.folder, run.config) and bool(checkpoints(run.folder))


def open_run(run: PlannedRun) -> Decoder:
    """The model of a run's last checkpoint, on the device that the run would train on."""
    from residua.machine import choose_device
    from residua.storage.load import load

    return load(run.folder).to(choose_device(run.config.train.device, "train.device")).eval()


class OutlierMeasurement(RunMeasurement):
    """Measures outliers of the trained models, stored in outliers.json."""

    title, stopped, lost = "outliers", "outliers were measured", ": no outliers were measured"
    errors = (RuntimeError, ValueError)  # also out of memory

    def waits(self, run: PlannedRun) -> bool:
        return read_current(run.folder, OUTLIERS, Outliers) is None and has_weights(run)

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        from residua.quantize.evaluate import CalibrationText

        outliers = look(open_run(run), CalibrationText.of_run(run.config).validation())
        write_atomically(run.folder / OUTLIERS, outliers.model_dump_json(indent=1) + "\n")
        return ""


def look(model: Decoder, validation: Sequence[Batch]) -> Outliers:
    """Peak activation and residual sinks on all batches, attention sinks on the first sequences."""
    from residua.quantize.evaluate import outlier_facts

    peak, ratio = outlier_facts(model, validation)
    sink, uniform, tokens = _attention_sink(model, validation)
    return Outliers(
        peak_activation=peak, sink_ratio=ratio, attention_sink=sink, uniform_attention=uniform, tokens=tokens
    )


def _attention_sink(model: Decoder, validation: Sequence[Batch]) -> tuple[float | None, float | None, int]:
    """Mean attention to the first token over softmax layers, its value for uniform attention, and the token count."""
    from residua.diagnose.attention import LayerSums
    from residua.diagnose.native import NativeSubject

    subject = NativeSubject(model, "")
    device = next(model.parameters()).device
    layers: dict[int, LayerSums] = {}
    tokens = 0
    for shown, targets in _first_sequences(validation):
        observation = subject.observe(shown.to(device), targets.to(device))
        for layer, sums in observation.attention.items():
            if layer not in layers:
                layers[layer] = LayerSums(sums, subject.vocabulary)
            layers[layer].add(sums, observation.tokens)
        tokens += shown.numel()
    facts = [sums.facts(layer) for layer, sums in sorted(layers.items())]
    if not facts:
        return None, None, tokens
    return mean([f.first_token for f in facts]), mean([f.uniform_first_token for f in facts]), tokens


def _first_sequences(validation: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of the first sequences, a few at a time."""
    left = -(-SINK_TOKENS // validation[0].tokens.shape[1])
    rows = max(1, TOKENS_AT_ONCE // validation[0].tokens.shape[1])
    for batch in validation:
        yield from zip(batch.tokens[:left].split(rows), batch.targets[:left].split(rows), strict=True)
        left -= min(left, len(batch.tokens))
        if not left:
            return


@dataclass(frozen=True)
class PrecisionMeasurement(RunMeasurement):
    """Measures the loss with every low-precision recipe, stored in quantized.json."""

    study: StudyConfig
    title, stopped = "low precision", "low precision was measured"

    def waits(self, run: PlannedRun) -> bool:
        known, study = read_current(run.folder, QUANTIZED, QuantizedRun), self.study
        same = known is not None and known.calibration == study.calibration and known.losses.keys() >= {*study.quantize}
        return not same and has_weights(run)

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        quantized = measure_precision(run, self.study, stages)
        write_atomically(run.folder / QUANTIZED, quantized.model_dump_json(indent=1) + "\n")
        low = (f"{n} {'not finite' if loss is None else f'{loss:.4f}'}" for n, loss in quantized.losses.items())
        return ", ".join([f": loss {quantized.loss:.4f}", *low])


def measure_precision(run: PlannedRun, study: StudyConfig, stages: StageProgress) -> QuantizedRun:
    """Evaluate a run's last checkpoint in high precision and with every recipe."""
    from residua.quantize.evaluate import CalibrationText, mean_loss, outlier_facts

    text, model = CalibrationText.of_run(run.config), open_run(run)
    validation = text.validation()
    exact = mean_loss(model, validation)
    peak, ratio = outlier_facts(model, validation)
    losses: dict[str, float | None] = {}
    for done, name in enumerate(study.quantize):
        stages(f"{run.title}, {name}", done, len(study.quantize))
        loss = mean_loss(quantized_copy(model, name, text, study.calibration), validation)
        losses[name] = loss if math.isfinite(loss) else None
    return QuantizedRun(
        calibration=study.calibration, loss=exact, peak_activation=peak, sink_ratio=ratio, losses=losses
    )


def quantized_copy(model: Decoder, name: str, text: CalibrationText, calibration: int) -> Decoder:
    """A low-precision copy of the model by the recipe `name`, smoothed if the recipe says so."""
    from residua.quantize.evaluate import forward, static_scales
    from residua.quantize.modules import quantize_model
    from residua.quantize.schemes import find_scheme
    from residua.quantize.smoothing import smooth

    recipe, copy = Recipe.parse(name), deepcopy(model)
    if recipe.alpha is not None:
        smooth(copy, text.calibration(calibration), recipe.alpha, run=partial(forward, copy))
    scheme = find_scheme(recipe.scheme)
    quantize_model(copy, scheme, scales=static_scales(copy, scheme, text.calibration(calibration)))
    return copy


def open_questions(tasks: Tasks) -> Questions:
    """Open the tasks of a study; refuse unknown names here, before anything is trained.

    `asked` of the result is a digest of each task's questions, by name; it changes when they do.
    """
    return _HarnessTasks(tasks) if tasks.folder is None else _LocalTasks(tasks, Path(tasks.folder))


class _LocalTasks:
    """Multiple-choice questions from files."""

    def __init__(self, tasks: Tasks, folder: Path) -> None:
        from residua.evaluate.tasks import open_tasks

        opened = open_tasks(folder, list(tasks.names), shots=tasks.shots, split=None, limit=tasks.limit)
        self._tasks = {task.name: task for task in opened}
        self.asked = {task.name: _digest([task.split, task.metric, task.questions]) for task in opened}

    def score(self, scorer: Scorer, name: str, progress: Progress) -> TaskAccuracy:
        from residua.evaluate.results import score_task

        score: TaskScore = score_task(scorer, self._tasks[name], progress)
        return TaskAccuracy(
            value=score.reported.value, error=score.reported.error, metric=score.metric, chance=score.chance,
            questions=score.questions, asked=self.asked[name],
        )  # fmt: skip


class _HarnessTasks:
    """Tasks of lm-evaluation-harness; our task groups use the number of worked examples from their papers."""

    def __init__(self, tasks: Tasks) -> None:
        from residua.evaluate.harness import find_tasks, runs_code
        from residua.evaluate.tasks import expand

        self._limit = tasks.limit
        self._shots = {
            name: wanted.shots if tasks.shots is None else tasks.shots for name, wanted in expand(tasks.names).items()
        }
        self._manager, names = find_tasks(list(tasks.names), allow_code=True)
        unsafe = next((name for name in names if runs_code(name, self._manager.task_index)), None)
        if unsafe is not None:
            raise UserError(
                f"{unsafe} runs the programs that the model writes, which a study does not do: score its runs with "
                "residua eval --allow-code."
            )
        self.asked = {name: _digest(["lm-eval", name, self._shots[name], tasks.limit]) for name in names}

    def score(self, scorer: Scorer, name: str, progress: Progress) -> TaskAccuracy:
        from residua.evaluate.harness import evaluate_with_harness, reported
        from residua.generate.generator import Generator

        generator = Generator(scorer.model, scorer.tokenizer)
        results = evaluate_with_harness(
            scorer, generator, [name], shots=self._shots[name], limit=self._limit, task_manager=self._manager
        )
        score = reported(results).get(name)
        if score is None:
            raise UserError(f"lm-eval reports no accuracy of {name}: choose a task of multiple-choice questions.")
        return TaskAccuracy(value=score.value, error=score.error, asked=self.asked[name])


Questions = _LocalTasks | _HarnessTasks


class Job(NamedTuple):
    """A task to score; in high precision if `recipe` is empty."""

    task: str
    recipe: str
    asked: str

    def __str__(self) -> str:
        return f"{self.task} in {self.recipe}" if self.recipe else self.task


class TaskMeasurement(RunMeasurement):
    """Scores the complete runs on the tasks they lack; an unavailable task is reported once and skipped.

    Tasks are also scored with each of `recipes`; `calibration` is the number of sequences for SmoothQuant.
    """

    title, stopped = "tasks", "tasks were scored"

    def __init__(self, questions: Questions, recipes: Sequence[str] = (), calibration: int = 0) -> None:
        self._questions, self._recipes, self._calibration = questions, recipes, calibration
        self._lost: set[str] = set()

    def waits(self, run: PlannedRun) -> bool:
        return has_weights(run) and bool(self.missing(run))

    def missing(self, run: PlannedRun) -> list[Job]:
        """The tasks that a run has not been scored on."""
        known, digests = _known_scores(run), self._questions.asked
        jobs = [Job(task, "", questions) for task, questions in digests.items()]
        jobs += [
            Job(task, recipe, _digest([questions, recipe, self._calibration]))
            for recipe in self._recipes
            for task, questions in digests.items()
        ]
        return [job for job in jobs if (score := known.get((job.recipe, job.task))) is None or score.asked != job.asked]

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        from residua.evaluate.score import Scorer
        from residua.machine import choose_device
        from residua.quantize.evaluate import CalibrationText
        from residua.storage.model_folder import open_model, place

        jobs = [job for job in self.missing(run) if job.task not in self._lost]
        if not jobs:
            return ""
        model, tokenizer = open_model(run.folder, "last")
        model = place(model, choose_device(run.config.train.device, "train.device"))
        scores = _known_scores(run)
        for recipe, group in groupby(jobs, key=lambda job: job.recipe):
            text = CalibrationText.of_run(run.config) if recipe else None
            copy = model if text is None else quantized_copy(model, recipe, text, self._calibration)
            scorer = Scorer(copy, tokenizer)
            for job in group:
                if job.task in self._lost:
                    continue
                stage = f"{run.title}, {job}"
                try:
                    score = self._questions.score(scorer, job.task, partial(stages, stage))
                except (RuntimeError, ValueError) as problem:  # also out of memory
                    tell(console, f"{job} was not scored", problem)
                    self._lost.add(job.task)
                    continue
                scores[recipe, job.task] = score.model_copy(update={"asked": job.asked})
                self._write(run, scores)
                console.print(outcome(f"{stage}: {100 * score.value:.1f} %"))
        return ""

    def _write(self, run: PlannedRun, scores: Scores) -> None:
        by_recipe: dict[str, dict[str, TaskAccuracy]] = {"": {}}
        for (recipe, task), score in scores.items():
            by_recipe.setdefault(recipe, {})[task] = score
        written = Accuracies(wanted=tuple(self._questions.asked), tasks=by_recipe.pop(""), low=by_recipe)
        write_atomically(run.folder / ACCURACIES, written.model_dump_json(indent=1) + "\n")


Scores = dict[tuple[str, str], TaskAccuracy]
"""Keyed by recipe (empty for high precision) and task."""


def _known_scores(run: PlannedRun) -> Scores:
    """The run's scores, unless it was trained further since; then it is scored again."""
    known = read_current(run.folder, ACCURACIES, Accuracies)
    by_recipe = {} if known is None else {"": known.tasks, **known.low}
    return {(recipe, task): score for recipe, tasks in by_recipe.items() for task, score in tasks.items()}


def refuse_other_questions(path: Path, questions: Questions, known: Mapping[PlannedRun, RunRecord]) -> None:
    """Refuse questions that differ from those of a saved run without weights here: it cannot be scored again."""
    for run, record in known.items():
        scores = {} if record.accuracies is None or has_weights(run) else record.accuracies.tasks
        for task, digest in questions.asked.items():
            if task in scores and scores[task].asked != digest:
                raise ConfigError(
                    f"{path} has {task} of {run.title} with other questions or worked examples, and its weights are "
                    "not here: use the same --task-dir, --shots and --limit, or name another file for --results."
                )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class DiagnosisMeasurement(RunMeasurement):
    """A diagnosis of every complete run, in the run's folder, and one page with the variants side by side.

    If a run of the first seed was diagnosed on another text, it is diagnosed again for the page, in `AGAIN` of its
    folder.
    """

    study: StudyConfig
    out: Path
    dataset: Dataset
    title, stopped, lost, errors = "diagnosis", "models were diagnosed", " has no diagnosis", (ValueError,)

    def measure(self, plan: StudyPlan, console: Console) -> None:
        super().measure(plan, console)
        left = self._lay_side_by_side([run for run in plan.compared if run.seed == self.study.seeds[0]])
        if left:
            who = ", ".join(f"{run.title} ({why})" for run, why in left.items())
            console.print(outcome(f"the page that compares diagnoses lacks {who}", good=False))

    def waits(self, run: PlannedRun) -> bool:
        if not is_complete(run.folder, run.config):
            return False
        on_page = run.seed == self.study.seeds[0]
        return _read_diagnosis(run.folder) is None or (on_page and self._on_our_text(run) is None)

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        """Diagnose a run's model on the study's validation text, in its variant's colour."""
        from residua.data import Tokenizer
        from residua.diagnose import Diagnosis, diagnose_model
        from residua.diagnose.api import write
        from residua.diagnose.folder import open_subject
        from residua.machine import choose_device

        again = _read_diagnosis(run.folder) is not None
        subject = open_subject(run.folder, choose_device(run.config.train.device, "train.device"))
        sample = replace(self._sample(run), tokenizer=Tokenizer.load(run.folder))
        diagnosed = diagnose_model(subject, sample, path=str(run.folder), progress=stages)
        diagnosed = diagnosed.model_copy(update={"place": list(self.study.variants).index(run.variant)})
        write(Diagnosis(models=[diagnosed]), run.folder / AGAIN if again else run.folder)
        headline = "; ".join(finding.words for finding in diagnosed.findings[:2]) or "nothing stands out"
        why = " (this diagnosis uses the study's text, the run's own a different one)" if again else ""
        return f"{why}: {headline}"

    def _on_our_text(self, run: PlannedRun) -> ModelDiagnosis | None:
        """The diagnosis of a run on the study's validation text, whatever its path was then; None if there is none."""
        facts = self._sample(run).facts
        for folder in (run.folder, run.folder / AGAIN):
            diagnosis = _read_diagnosis(folder)
            if diagnosis is not None and diagnosis.text.source.startswith(OUR_TEXT):
                moved = diagnosis.text.model_copy(update={"source": facts.source})
                if moved == facts:
                    return diagnosis.model_copy(update={"text": moved})
        return None

    def _sample(self, run: PlannedRun) -> Sample:
        """The first sequences of the validation text used for the study's losses."""
        import torch

        from residua.data import validation_batches
        from residua.diagnose.schema import TextFacts
        from residua.diagnose.text import DEFAULT_TOKENS, Sample

        length = run.config.sequence
        limit = min(DEFAULT_TOKENS, run.config.data.validation_tokens)
        batches = list(validation_batches(self.dataset.split("validation"), length, 16, limit_tokens=limit))
        tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
        source = f"{OUR_TEXT}{self.dataset.path.name}"
        facts = TextFacts(source=source, tokens=tokens.numel(), sequences=len(tokens), length=length)
        return Sample(tokens, targets, facts)

    def _lay_side_by_side(self, runs: Sequence[PlannedRun]) -> dict[PlannedRun, str]:
        """One page with the complete runs among these; returns the omitted ones, and why.

        Models are compared on the same tokens, so sizes with another sequence length are omitted.
        """
        from residua.diagnose import Diagnosis
        from residua.diagnose.api import write

        places = {name: place for place, name in enumerate(self.study.variants)}
        models: list[ModelDiagnosis] = []
        left = {run: "no complete run in this folder" for run in runs if not is_complete(run.folder, run.config)}
        for run in (run for run in runs if run not in left):
            diagnosis = self._on_our_text(run)
            if diagnosis is None:
                left[run] = "it was not diagnosed on the study's text"
            elif models and diagnosis.text != models[0].text:
                left[run] = f"its sequences have {diagnosis.text.length} tokens, not {models[0].text.length}"
            else:
                name = run.variant if len(self.study.sizes) == 1 else f"{run.variant} {run.size}"
                models.append(diagnosis.model_copy(update={"name": name, "place": places[run.variant]}))
        if len(models) > 1:
            write(Diagnosis(models=models), self.out / SIDE_BY_SIDE)
        return left


def _read_diagnosis(folder: Path) -> ModelDiagnosis | None:
    """The diagnosis in a folder; None if it is missing or unreadable."""
    from residua.diagnose import Diagnosis
    from residua.diagnose.api import JSON

    try:
        return Diagnosis.read(folder / JSON).models[0] if (folder / DIAGNOSIS).exists() else None
    except (OSError, ValueError):
        return None
