"""The outliers of a study's trained models: each complete run is measured once, into its own folder.

Peak activation and residual-sink ratio are those of `residua quantize`, attention sinks those of `residua diagnose`.
Imports no plotting library, so it can run where the models were trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from residua.files import write_atomically
from residua.report.failure import tell
from residua.report.terminal import ProgressBars
from residua.storage.checkpoint import checkpoints
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import OUTLIERS, Outliers, is_complete, measured_after, read_outliers
from residua.study.statistics import mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from residua.data.loader import Batch
    from residua.model.decoder import Decoder

SINK_TOKENS, AT_ONCE = 8192, 2048
"""Attention is looked at on the first sequences with so many tokens, as in a diagnosis; so many tokens at a time."""


def measure_outliers(plan: StudyPlan, console: Console) -> None:
    """Measure the complete runs that have no outliers yet; a run that cannot be opened is told and left out."""
    waiting = [run for run in plan.compared if _waits(run)]
    if not waiting:
        return
    with ProgressBars(console) as bars:
        progress = bars.stages("outliers")
        for index, run in enumerate(waiting):
            progress(f"outliers of {run.title}", index, len(waiting))
            try:
                measure_run(run)
            except (RuntimeError, ValueError) as problem:  # also out of memory
                tell(console, f"{run.title}: no outliers were measured", problem)


def _waits(run: PlannedRun) -> bool:
    measured = measured_after(run.folder, OUTLIERS) and read_outliers(run.folder) is not None
    return not measured and is_complete(run.folder, run.config) and bool(checkpoints(run.folder))


def measure_run(run: PlannedRun) -> Outliers:
    """Look at a run's last checkpoint on its validation text, and write outliers.json."""
    from residua.machine import choose_device
    from residua.quantize.calibration import CalibrationText
    from residua.storage.load import load

    model = load(run.folder).to(choose_device(run.config.train.device, "train.device")).eval()
    found = look(model, CalibrationText.of_run(run.config).validation())
    write_atomically(run.folder / OUTLIERS, found.model_dump_json(indent=1) + "\n")
    return found


def look(model: Decoder, validation: Sequence[Batch]) -> Outliers:
    """Peak activation and residual sinks on all batches, attention sinks on the first sequences."""
    from residua.quantize.measure import outlier_facts

    peak, ratio = outlier_facts(model, validation)
    sink, uniform, tokens = _attention_sink(model, validation)
    return Outliers(
        peak_activation=peak, sink_ratio=ratio, attention_sink=sink, uniform_attention=uniform, tokens=tokens
    )


def _attention_sink(model: Decoder, validation: Sequence[Batch]) -> tuple[float | None, float | None, int]:
    """Mean attention to the first token over softmax layers, its value if attention were uniform, and the tokens."""
    from residua.diagnose.native import NativeSubject
    from residua.diagnose.sinks import LayerSums

    subject = NativeSubject(model, "")
    device = next(model.parameters()).device
    layers: dict[int, LayerSums] = {}
    tokens = 0
    for shown, targets in _first_sequences(validation):
        seen = subject.observe(shown.to(device), targets.to(device))
        for layer, sums in seen.attention.items():
            if layer not in layers:
                layers[layer] = LayerSums(sums, subject.vocabulary)
            layers[layer].add(sums, seen.tokens)
        tokens += shown.numel()
    facts = [sums.facts(layer) for layer, sums in sorted(layers.items())]
    if not facts:
        return None, None, tokens
    return mean([f.first_token for f in facts]), mean([f.uniform_first_token for f in facts]), tokens


def _first_sequences(validation: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of the first sequences, a few at a time."""
    left = -(-SINK_TOKENS // validation[0].tokens.shape[1])
    rows = max(1, AT_ONCE // validation[0].tokens.shape[1])
    for batch in validation:
        yield from zip(batch.tokens[:left].split(rows), batch.targets[:left].split(rows), strict=True)
        left -= min(left, len(batch.tokens))
        if not left:
            return
