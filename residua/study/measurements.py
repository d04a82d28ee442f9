"""What is measured of the trained models of a study, once each, into the folders of their runs.

Peak activation and residual-sink ratio are those of `residua quantize`, attention sinks those of `residua diagnose`.
Imports no plotting library at first, so it can run where the models were trained. Tasks are in `score_tasks.py`, steps
timed alone in `timing.py`.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from rich.console import Console

from residua.files import write_atomically
from residua.quantize.recipe import Recipe
from residua.report.failure import tell
from residua.report.plain import outcome
from residua.report.terminal import ProgressBars, StageProgress
from residua.storage.checkpoint import checkpoints
from residua.study.config import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.records import DIAGNOSIS, OUTLIERS, QUANTIZED, Outliers, QuantizedRun, is_complete, read_current
from residua.study.statistics import mean
from residua.study.train_runs import StudyInterrupted, stop_as_exception

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from residua.data import Dataset
    from residua.data.loader import Batch
    from residua.diagnose import ModelDiagnosis
    from residua.diagnose.text import Sample
    from residua.model.decoder import Decoder
    from residua.quantize.evaluate import CalibrationText

SINK_TOKENS, TOKENS_AT_ONCE = 8192, 2048
"""Attention is looked at on the first sequences with so many tokens, as in a diagnosis; so many tokens at a time."""
SIDE_BY_SIDE = "diagnosis"
AGAIN = "diagnosis"
"""In the folder of a run that has a diagnosis on another text: its diagnosis on the study's."""
OUR_TEXT = "the validation text of "
"""How diagnoses of a study call their text; the name of its folder follows."""


class Measurement(Protocol):
    """A measurement of trained runs. It does not repeat measurements that are on disk already."""

    def measure(self, plan: StudyPlan, console: Console) -> None: ...


class RunMeasurement:
    """A measurement that is made run by run, into the folder of each: `waits` says of which, `measure_run` makes it.

    `errors` are those that cost one run its numbers: the reason is printed, and the next run follows.
    """

    title: ClassVar[str]
    stopped: ClassVar[str]
    lost: ClassVar[str] = ""
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def measure(self, plan: StudyPlan, console: Console) -> None:
        """Measure the runs that wait."""
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
                raise StudyInterrupted(f"Stopped while {self.stopped}: the same command continues.") from None

    def waits(self, run: PlannedRun) -> bool:
        """Whether a run can be measured and was not, or was trained further since."""
        raise NotImplementedError

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        """Measure a run's last checkpoint and write its file; returns what follows its title in a line, or nothing."""
        raise NotImplementedError


def has_weights(run: PlannedRun) -> bool:
    """Whether a run is complete and its weights are here."""
    return is_complete(run.folder, run.config) and bool(checkpoints(run.folder))


def open_run(run: PlannedRun) -> Decoder:
    """The model of a run's last checkpoint, where the run would train."""
    from residua.machine import choose_device
    from residua.storage.load import load

    return load(run.folder).to(choose_device(run.config.train.device, "train.device")).eval()


class OutlierMeasurement(RunMeasurement):
    """Outliers of the trained models, into outliers.json."""

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
    """Mean attention to the first token over softmax layers, its value if attention were uniform, and the tokens."""
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
    """The loss with every recipe of low precision, into quantized.json."""

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
    """A copy of the model in low precision by the recipe called `name`, smoothed if it says so."""
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


@dataclass(frozen=True)
class DiagnosisMeasurement(RunMeasurement):
    """A diagnosis of every complete run, in the run's folder, and one page with the variants side by side.

    A run of the first seed whose diagnosis is on another text is diagnosed for the page once more, in `AGAIN` of its
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
            console.print(outcome(f"the page of diagnoses side by side is without {who}", good=False))

    def waits(self, run: PlannedRun) -> bool:
        if not is_complete(run.folder, run.config):
            return False
        on_page = run.seed == self.study.seeds[0]
        return _read_diagnosis(run.folder) is None or (on_page and self._on_our_text(run) is None)

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        """Diagnose a run's model on the validation text of the study; its variant keeps its colour."""
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
        why = " (its own diagnosis is of another text; this is the study's)" if again else ""
        return f"{why}: {headline}"

    def _on_our_text(self, run: PlannedRun) -> ModelDiagnosis | None:
        """The diagnosis of a run on the study's validation text, wherever the text was then; None if there is none."""
        facts = self._sample(run).facts
        for folder in (run.folder, run.folder / AGAIN):
            diagnosis = _read_diagnosis(folder)
            if diagnosis is not None and diagnosis.text.source.startswith(OUR_TEXT):
                moved = diagnosis.text.model_copy(update={"source": facts.source})
                if moved == facts:
                    return diagnosis.model_copy(update={"text": moved})
        return None

    def _sample(self, run: PlannedRun) -> Sample:
        """The first sequences of the validation text that the study's losses are measured on."""
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
        """One page with the complete ones of these runs; returns those left out, and why.

        Models are side by side on the same tokens: those of sizes with sequences of another length are left out.
        """
        from residua.diagnose import Diagnosis
        from residua.diagnose.api import write

        places = {name: place for place, name in enumerate(self.study.variants)}
        models: list[ModelDiagnosis] = []
        left = {run: "no complete run in this folder" for run in runs if not is_complete(run.folder, run.config)}
        for run in (run for run in runs if run not in left):
            diagnosis = self._on_our_text(run)
            if diagnosis is None:
                left[run] = "it has no diagnosis on the study's text"
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
