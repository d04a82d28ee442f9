"""What low precision does to the models of a study: every complete run measured once, into its own folder.

Needs no plotting library, so it can run where the models were trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from residua.quantize.recipe import Treatment
from residua.storage.files import write_atomically
from residua.study.config import StudyConfig
from residua.study.plan import Plan, PlannedRun
from residua.study.runs import INSPECTION, QUANTIZED, QuantizedRun, is_complete, read_quantized

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.quantize.calibration import Material


def measure_runs(study: StudyConfig, plan: Plan, console: Console) -> None:
    """Measure what the study asks for in every complete run that does not have it yet."""
    waiting = [
        run
        for run in plan.runs
        if study.quantize and is_complete(run.folder, run.config) and not _is_measured(run.folder, study)
    ]
    if not waiting:
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("low precision", total=len(waiting) * (1 + len(study.quantize)))
        for run in waiting:
            measure_run(run, study, lambda what: bars.update(task, advance=1, description=what))
            console.print(f"[green]✓[/green] {run.title}: {words(read_quantized(run.folder))}", highlight=False)


def words(found: QuantizedRun | None) -> str:
    """One line for a log."""
    assert found is not None
    return f"loss {found.loss:.4f}, " + ", ".join(
        f"{name} {'not finite' if loss is None else format(loss, '.4f')}" for name, loss in found.losses.items()
    )


def measure_run(run: PlannedRun, study: StudyConfig, tell: Callable[[str], None] = lambda what: None) -> None:
    """Evaluate a run's last checkpoint exactly and under every treatment; quantized.json is written at the end."""
    import residua
    from residua.quantize.calibration import Material
    from residua.quantize.measure import mean_loss, outlier_facts
    from residua.train.step import choose_device

    material = Material.of_run(run.config)
    validation = material.validation()
    model = residua.load(run.folder).to(choose_device(run.config.train)).eval()
    exact = mean_loss(model, validation)
    peak, ratio = outlier_facts(model, validation)
    tell(run.title)
    losses: dict[str, float | None] = {}
    for name in study.quantize:
        treated = _treated(model, Treatment.parse(name), material, study.calibration)
        loss = mean_loss(treated, validation)
        losses[name] = loss if math.isfinite(loss) else None
        tell(f"{run.title}, {name}")
    found = QuantizedRun(
        calibration=study.calibration, loss=exact, peak_activation=peak, sink_ratio=ratio, losses=losses
    )
    write_atomically(run.folder / QUANTIZED, found.model_dump_json(indent=1) + "\n")


def _treated(model: Decoder, treatment: Treatment, material: Material, calibration: int) -> Decoder:
    """A copy of the model, smoothed if asked, in low precision."""
    from residua.quantize.apply import quantize_model
    from residua.quantize.measure import forward
    from residua.quantize.schemes import find_scheme
    from residua.quantize.smoothing import smooth

    copy = deepcopy(model)
    if treatment.alpha is not None:
        smooth(copy, material.calibration(calibration), treatment.alpha, run=partial(forward, copy))
    quantize_model(copy, find_scheme(treatment.scheme))
    return copy


def _is_measured(folder: Path, study: StudyConfig) -> bool:
    """Whether all that is asked for is there, of the model as it is: a run that was trained on is measured again."""
    found = read_quantized(folder)
    if found is None or (folder / QUANTIZED).stat().st_mtime < (folder / INSPECTION).stat().st_mtime:
        return False
    return found.calibration == study.calibration and set(study.quantize) <= found.losses.keys()
