"""The loss of a study's models in low precision: each complete run is measured once, into its own folder.

Imports no plotting library, so it can run where the models were trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from residua.files import write_atomically
from residua.quantize.recipe import Recipe
from residua.report.plain import outcome
from residua.report.terminal import ProgressBars
from residua.storage.checkpoint import checkpoints
from residua.study.config import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import QUANTIZED, QuantizedRun, is_complete, measured_after, read_quantized

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.quantize.calibration import CalibrationText


def measure_runs(study: StudyConfig, plan: StudyPlan, console: Console) -> None:
    """Measure the complete runs that do not have what the study asks for yet; a run without weights cannot be."""
    waiting = [
        run
        for run in plan.compared
        if study.quantize and is_complete(run.folder, run.config) and checkpoints(run.folder)
        if not _is_measured(run.folder, study)
    ]
    if not waiting:
        return
    total, done = len(waiting) * (1 + len(study.quantize)), count(1)
    with ProgressBars(console) as bars:
        progress = bars.stages("low precision")
        for run in waiting:
            measured = measure_run(run, study, lambda what: progress(what, next(done), total))
            console.print(outcome(f"{run.title}: {_headline(measured)}"))


def _headline(found: QuantizedRun) -> str:
    return f"loss {found.loss:.4f}, " + ", ".join(
        f"{name} {'not finite' if loss is None else format(loss, '.4f')}" for name, loss in found.losses.items()
    )


def measure_run(run: PlannedRun, study: StudyConfig, tell: Callable[[str], None] = lambda what: None) -> QuantizedRun:
    """Evaluate a run's last checkpoint in high precision and with every recipe, and write quantized.json."""
    from residua.machine import choose_device
    from residua.quantize.calibration import CalibrationText
    from residua.quantize.measure import mean_loss, outlier_facts
    from residua.storage.load import load

    text = CalibrationText.of_run(run.config)
    validation = text.validation()
    model = load(run.folder).to(choose_device(run.config.train.device, "train.device")).eval()
    exact = mean_loss(model, validation)
    peak, ratio = outlier_facts(model, validation)
    tell(run.title)
    losses: dict[str, float | None] = {}
    for name in study.quantize:
        quantized = quantized_copy(model, name, text, study.calibration)
        loss = mean_loss(quantized, validation)
        losses[name] = loss if math.isfinite(loss) else None
        tell(f"{run.title}, {name}")
    found = QuantizedRun(
        calibration=study.calibration, loss=exact, peak_activation=peak, sink_ratio=ratio, losses=losses
    )
    write_atomically(run.folder / QUANTIZED, found.model_dump_json(indent=1) + "\n")
    return found


def quantized_copy(model: Decoder, name: str, text: CalibrationText, calibration: int) -> Decoder:
    """A copy of the model in low precision by the recipe called `name`, smoothed if it says so."""
    from residua.quantize.apply import quantize_model
    from residua.quantize.measure import forward, static_scales
    from residua.quantize.schemes import find_scheme
    from residua.quantize.smoothing import smooth

    recipe, copy = Recipe.parse(name), deepcopy(model)
    if recipe.alpha is not None:
        smooth(copy, text.calibration(calibration), recipe.alpha, run=partial(forward, copy))
    scheme = find_scheme(recipe.scheme)
    quantize_model(copy, scheme, scales=static_scales(copy, scheme, text.calibration(calibration)))
    return copy


def _is_measured(folder: Path, study: StudyConfig) -> bool:
    """Whether everything asked for was measured on the current model; a run that was trained further is not."""
    found = read_quantized(folder)
    if found is None or not measured_after(folder, QUANTIZED):
        return False
    return found.calibration == study.calibration and set(study.quantize) <= found.losses.keys()
