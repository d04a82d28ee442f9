"""An untrained study, as `residua compare --results` would save it, with losses from a formula."""

from pathlib import Path
from typing import Any

from residua.config import variants as known
from residua.model.size import measure
from residua.study.config import StudyConfig, match
from residua.study.plan import PlannedModel, PlannedRun, StudyPlan, base_run
from residua.study.records import Peaks, RunRecord
from residua.study.results import DatasetFacts
from residua.study.results_file import SavedStudy, save_study
from tests.study.pretend import ENVIRONMENT

STEPS = 100
FACTS = DatasetFacts(
    path="text", vocab_size=512, train_tokens=900_000, validation_tokens=9_000, bytes_per_token=4.0, unigram_entropy=6.1
)


def saved_study(ends: dict[str, float], variants: dict[str, list[str]] | None = None, **keys: Any) -> SavedStudy:
    """Three seeds of each variant with a last loss in `ends`; `variants` define those without a known name.

    Variants without a last loss have no run. The seeds agree to 0.001, and differences between variants to 0.0001.
    """
    given = {name: variants.get(name, [name]) if variants else [name] for name in {**ends, **(variants or {})}}
    study = StudyConfig(**{"name": "pretended", "base": "tiny", "set": [f"train.steps={STEPS}"],
                           "variants": given, **keys})  # fmt: skip
    models, runs, records = {}, [], {}
    for size in study.sizes:
        base = base_run(study, size)
        reference = base.override(known.overrides(study.variants[study.baseline], base.model))
        target = measure(reference.model).parameters
        for place, (name, entries) in enumerate(study.variants.items()):
            changes = known.overrides(entries, base.model)
            config = base.override(changes)
            model, matching = match(name, config.model, target, study.match)
            config = config.model_copy(update={"model": model})
            models[size, name] = PlannedModel(config, tuple(changes), matching, measure(model).parameters, 1e6)
            for seed in study.seeds if name in ends else ():
                run = PlannedRun(name, size, seed, config, Path("runs") / f"{size}-{name}-seed{seed}")
                runs.append(run)
                records[run] = _record(run, ends[name] + 0.001 * seed + 0.0001 * (place * seed % 3))
    return save_study(study, StudyPlan(models, tuple(runs)), records, "0123456789abcdef", FACTS)


def with_peaks(saved: SavedStudy, peaks: dict[str, tuple[float, float, float]]) -> SavedStudy:
    """The study with telemetry at a tenth of the steps, at half and at the end; seeds differ by 1 %."""
    runs = []
    for run in saved.runs:
        if run.variant in peaks:
            values = tuple(value * (1 + 0.01 * run.seed) for value in peaks[run.variant])
            kept = Peaks(step=(STEPS // 10, STEPS // 2, STEPS), peak=values, sink_ratio=(1.0, None, 2.0))
            run = run.model_copy(update={"peaks": kept})
        runs.append(run)
    return saved.model_copy(update={"runs": tuple(runs)})


def _record(run: PlannedRun, end: float) -> RunRecord:
    rows = []
    for step in range(STEPS // 10, STEPS + 1, STEPS // 10):
        loss = end + 0.5 * (1 - step / STEPS)
        rows.append({"step": step, "loss": loss, "seconds": 0.1 * step, "bits_per_byte": loss / 3})
    return RunRecord(
        run.folder, run.config.tokens_per_step, rows, rows, environment=ENVIRONMENT,
        tokens_per_second=1000.0, memory_gib=1.0, train_loss=end + 0.02,
    )  # fmt: skip
