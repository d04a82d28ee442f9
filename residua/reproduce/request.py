"""Turn an entry into an ordinary study: its sizes at a scale, its rows, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from importlib.util import find_spec

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model.size import measure
from residua.reproduce.entry import Size, Study
from residua.reproduce.scale import changes, sentence
from residua.study.config import Scaling, StudyConfig, Tasks


@dataclass(frozen=True)
class Request:
    """The user's request: the scale, and which part of the entry; empty means all of it."""

    scale: Fraction = Fraction(1)
    sizes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    seeds: int | None = None
    set: tuple[str, ...] = ()
    data: str | None = None
    workers: int = 1
    threads: int | None = None
    task_dir: str | None = None
    limit: int | None = None
    no_tasks: bool = False
    tune: tuple[str, ...] = ()
    calibration: int | None = None
    demo: bool = False

    @property
    def sentence(self) -> str:
        if self.demo:
            return (
                "A demo: tiny models, a few steps and one seed on a CPU. It shows what the entry measures and "
                "what the page looks like; it says nothing about the paper's claims."
            )
        return sentence(self.scale)

    @property
    def given(self) -> list[str]:
        """The options that the user gave, except the scale."""
        names = [key.name for key in fields(self) if getattr(self, key.name) != key.default]
        return [name.replace("_", "-") for name in names if name != "scale"]


def selected(entry: Study, request: Request) -> Study:
    """The entry with the requested rows and sizes, always including the baseline, and the claims about them."""
    sizes = _chosen("--sizes", request.sizes, [size.name for size in entry.sizes])
    rows = _chosen("--rows", request.rows, [row.name for row in entry.rows])
    baseline = entry.baseline or entry.rows[0].name
    rows = [row.name for row in entry.rows if row.name in rows or row.name == baseline]
    if len(rows) < 2 < 1 + len(entry.rows):
        raise ConfigError("--rows selects only the baseline: name at least one row to compare with it.")
    return entry.model_copy(
        update={
            "baseline": baseline,
            "sizes": tuple(size for size in entry.sizes if size.name in sizes),
            "rows": tuple(row for row in entry.rows if row.name in rows),
            "claims": tuple(
                claim
                for claim in entry.claims
                if set(claim.named) <= set(rows) and (not claim.sizes or set(claim.sizes) & set(sizes))
            ),
            "seeds": request.seeds or entry.seeds,
        }
    )


DEMO_SCALE = Fraction(1, 10**6)
DEMO_LAYERS = 8
DEMO_EXPERTS = 16
DEMO = (
    "train.device=cpu", "train.steps=60", "train.micro_batch=16", "train.accumulate=1", "train.schedule.warmup=6",
    "train.log_every=5", "train.validate_every=20", "train.save_every=60", "model.context=64",
    "data.validation_tokens=8192",
)  # fmt: skip
"""About a minute of CPU time per row, including its isolated step timing."""


def demo_of(entry: Study, request: Request) -> tuple[Study, Request]:
    """The entry's first size, shrunk so that all its rows train in minutes on a CPU, with equal depth in every row."""
    names = request.sizes or tuple(size.name for size in entry.sizes[:1])
    size = next((size for size in entry.sizes if size.name == names[0]), entry.sizes[0])
    model = RunConfig.find(size.base).override(list(size.set)).model
    changes = [*DEMO, f"model.layers={min(DEMO_LAYERS, model.layers)}"]
    if model.ffn.mixture:
        changes.append(f"model.ffn.experts={min(DEMO_EXPERTS, model.ffn.experts)}")
    small = replace(
        request,
        scale=DEMO_SCALE,
        sizes=names,
        seeds=request.seeds or 1,
        set=(*changes, *request.set),
        no_tasks=request.task_dir is None,
        calibration=request.calibration or 16,
        workers=max(2, request.workers),
        threads=request.threads or 1,
    )
    rows = tuple(row.model_copy(update={"variant": _without_layers(row.variant)}) for row in entry.rows)
    return entry.model_copy(update={"rows": rows}), small


def _without_layers(variant: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(change for change in variant if not change.startswith("model.layers="))


def build_study(name: str, entry: Study, request: Request) -> StudyConfig:
    """Build the study of a selected entry, with the runs of its sizes if there are several."""
    several = len(entry.sizes) > 1
    runs = {
        size.name: RunConfig.find(size.base).override(size_changes(size, request.scale))
        for size in (entry.sizes if several else ())
    }
    first = entry.sizes[0]
    return StudyConfig(
        name=name.replace(":", "-"),
        base=first.base,
        scaling=Scaling(sizes=tuple(runs)) if several else None,
        bases={size: run.model_dump(mode="json", exclude_none=True) for size, run in runs.items()} or None,
        set=request.set if several else (*size_changes(first, request.scale), *request.set),
        variants={row.name: row.variant for row in entry.rows},
        baseline=entry.baseline,
        seeds=entry.seeds,
        data=request.data,
        match=entry.match,
        ladder=entry.ladder,
        time_alone=entry.time_alone,
        quantize=entry.quantize,
        diagnose=entry.diagnosed,
        tasks=_tasks(entry, request),
        tune={"lr": request.tune} if request.tune else None,
        workers=request.workers,
        threads=request.threads,
        **({} if request.calibration is None else {"calibration": request.calibration}),
    )


def _tasks(entry: Study, request: Request) -> Tasks | None:
    """The tasks of a table with accuracies: from local files, else from lm-eval if it is installed."""
    if not entry.tasks or request.no_tasks or (request.task_dir is None and find_spec("lm_eval") is None):
        return None
    return Tasks(names=entry.tasks, folder=request.task_dir, shots=entry.shots, limit=request.limit)


def tasks_sentence(entry: Study, study: StudyConfig) -> str:
    """How accuracies are measured, or why they are not; empty if the table has none."""
    if not entry.tasks:
        return ""
    if study.tasks is None:
        return "Accuracies are not measured: give --task-dir FOLDER, or install lm-eval (pip install 'residua[eval]')."
    source = "lm-eval, which downloads its data" if study.tasks.folder is None else study.tasks.folder
    return f"Every model is scored on {', '.join(study.tasks.names)} from {source}."


def size_changes(size: Size, scale: Fraction) -> list[str]:
    """The overrides that turn a size's preset into its run at a scale."""
    base = RunConfig.find(size.base).override(list(size.set))
    return [*size.set, *changes(base, scale, size.tokens)]


@dataclass(frozen=True)
class Cost:
    """The cost of training an entry."""

    runs: int
    tokens: float
    flops: float


def estimated_cost(entry: Study, scale: Fraction) -> Cost:
    """Runs, tokens and FLOPs, using the baseline's FLOPs per token for every row and the published vocabulary."""
    budgets = sum(budget for budget in entry.ladder if budget != 1.0)
    per_size = len(entry.rows) + budgets
    runs = len(entry.rows) + sum(budget != 1.0 for budget in entry.ladder)
    tokens = flops = 0.0
    for size in entry.sizes:
        trained, per_token = _base_cost(size.base, size.set, size.tokens, scale)
        tokens += trained * per_size * entry.seeds
        flops += trained * per_size * entry.seeds * per_token
    return Cost(runs * len(entry.sizes) * entry.seeds, tokens, flops)


@cache
def _base_cost(base: str, overrides: tuple[str, ...], tokens: float | None, scale: Fraction) -> tuple[float, float]:
    """Training tokens and FLOPs per token of a size."""
    run = RunConfig.find(base)
    run = run.override(size_changes(Size(name="any", base=base, set=overrides, tokens=tokens), scale))
    return float(run.tokens), float(measure(run.model).flops_per_token)


def _chosen(option: str, names: Sequence[str], known: list[str]) -> list[str]:
    stranger = next((name for name in names if name not in known), None)
    if stranger is not None:
        raise ConfigError(f"{option} {stranger} is not in this entry: choose from {', '.join(known)}.")
    return list(names) or known
