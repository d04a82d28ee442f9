"""An untrained study, as `residua compare --results` would save it, with losses from a formula."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from residua.config.run import RunConfig
from residua.study.config import StudyConfig
from residua.study.plan import PlannedRun, make_plan
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
    tokens = SimpleNamespace(tokens=FACTS.train_tokens)
    vocabulary = RunConfig.find("tiny").model.vocab_size
    text = SimpleNamespace(path=Path("text"), vocab_size=vocabulary, split=lambda name: tokens)
    plan = make_plan(study, Path("study"), text)
    place = list(study.variants).index
    records = {
        run: _record(run, ends[run.variant] + 0.001 * run.seed + 0.0001 * (place(run.variant) * run.seed % 3))
        for run in plan.runs
        if run.variant in ends
    }
    return save_study(study, plan, records, "0123456789abcdef", FACTS)


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
