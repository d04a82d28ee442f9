"""From a study to its runs: every variant at every size, matched in parameters, each with a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from residua.config import variants
from residua.config.run import RunConfig, differences
from residua.config.settings import ConfigError, of_file
from residua.data import Dataset
from residua.data.tokenizer import padded_vocabulary
from residua.files import refuse_blocked
from residua.model.size import Size, measure
from residua.reading import toml_string
from residua.storage.load import weights_fingerprint
from residua.storage.run import failed_early
from residua.study.config import StudyConfig
from residua.study.matching import match
from residua.study.runs import read_environment
from residua.study.trials import TUNING, TunedRate, rate_changes, rate_title, short_run, tuned_for
from residua.train.environment import START, TEXT
from residua.train.start import check_model

RUNS, CONFIGS, LOGS, TIMINGS, LOCK, STUDY = "runs", "configs", "logs", "timings", ".lock", "study.toml"
STARTED = "started.toml"
"""The study while it trains. study.toml replaces it at the end: what that file asks for was measured."""
EXTENDED = "extended.json"
"""Where a study's folder has the place of its results file."""
# What an interrupted study leaves in its folder, beside started.toml.
_BEGUN = (RUNS, CONFIGS, LOGS, LOCK, TIMINGS, TUNING, EXTENDED, "diagnosis")
_RUN = re.compile(r"(.+?)(-(lr)?[\d.]+x)?-seed\d+")
"""The folder of a run: its model, and the budget or the rate that it may have."""


@dataclass(frozen=True)
class PlannedModel:
    """A variant at one size: its overrides, what matching changed, and its cost."""

    config: RunConfig
    overrides: tuple[str, ...]
    matching: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One training run of the study. `budget` is its share of the study's steps: 1, but for runs of the ladder.

    `rate` is the multiple of its variant's learning rate that a trial of `tune` has.
    """

    variant: str
    size: str
    seed: int
    config: RunConfig
    folder: Path
    budget: float = 1.0
    rate: float = 1.0

    @property
    def title(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def family(self) -> tuple[str, str, int, float]:
        """Equal for runs of one model, seed and rate: budgets, of which the shorter ones branch off the longest."""
        return self.size, self.variant, self.seed, self.rate


@dataclass(frozen=True)
class StudyPlan:
    """The models by (size, variant), and the runs in the order they start: by seed, so that pairs finish together.

    Of several budgets the longest starts first, since the others branch off it.

    `runs` includes those of the ladder, `text_tokens` is the length of the training text. `tuned` are the learning
    rates that a search gave the models. `trials` are its runs that are still needed: until they are trained, the models
    of these variants have their own rates.
    """

    models: dict[tuple[str, str], PlannedModel]
    runs: tuple[PlannedRun, ...]
    text_tokens: int = 0
    tuned: tuple[TunedRate, ...] = ()
    trials: tuple[PlannedRun, ...] = ()

    @property
    def compared(self) -> tuple[PlannedRun, ...]:
        """The runs of variants × seeds × sizes, without those of the ladder."""
        return tuple(run for run in self.runs if run.budget == 1.0)

    @property
    def ladder(self) -> tuple[PlannedRun, ...]:
        """The runs at other budgets than the study's own."""
        return tuple(run for run in self.runs if run.budget != 1.0)

    @property
    def settled(self) -> tuple[PlannedRun, ...]:
        """The runs whose learning rate is known: their variant has no trial left to train."""
        searched = {(trial.size, trial.variant) for trial in self.trials}
        return tuple(run for run in self.runs if (run.size, run.variant) not in searched)


def make_plan(study: StudyConfig, out: Path, dataset: Dataset, rates: Sequence[TunedRate] = ()) -> StudyPlan:
    """Plan the study on a prepared text, which all runs share; `rates` are those that an earlier search chose."""
    shared = [f"data.path={toml_string(dataset.path.resolve())}"]
    if not any(change.replace(" ", "").startswith("model.vocab_size=") for change in study.set):
        shared.append(f"model.vocab_size={padded_vocabulary(dataset.vocab_size)}")
    models: dict[tuple[str, str], PlannedModel] = {}
    for size in study.sizes:
        base = base_run(study, size).override(shared)
        models |= {(size, name): model for name, model in _models(study, base).items()}
    trials = _trials(study, models, out, rates)
    tuned = _settled(study, models, rates)
    models = {key: _tuned(model, tuned.get(key)) for key, model in models.items()}
    started = [(name, budget) for name in study.variants for budget in study.budgets_of(name)]
    runs = tuple(
        _run(study, models[size, name].config, size, name, seed, out, budget)
        for size in study.sizes
        for seed in study.seeds
        for name, budget in started
    )
    _check_ladder(runs)
    return StudyPlan(models, runs, dataset.split("train").tokens, tuple(tuned.values()), trials)


def base_run(study: StudyConfig, size: str) -> RunConfig:
    """The run that the variants of a size change."""
    kept = (study.bases or {}).get(size)
    base = RunConfig.find(size) if kept is None else RunConfig(**kept)
    with of_file("set"):
        return base.override(list(study.set))


def refuse_strangers(out: Path) -> None:
    """Refuse a folder that holds anything but a study, such as a training run."""
    refuse_blocked(out)
    if not out.exists() or (out / STUDY).exists():
        return
    stranger = min((path.name for path in out.iterdir() if not _expected(path)), default=None)
    if stranger is not None:
        raise ConfigError(f"{out} holds {stranger}, which no study wrote: choose another --out.")


def _expected(path: Path) -> bool:
    """Whether an unfinished study's folder may hold this file; the study file it is started from may lie there too."""
    return path.name in _BEGUN or (path.suffix == ".toml" and path.name != "config.toml")


def check_folders(runs: Iterable[PlannedRun]) -> None:
    """Refuse to reuse runs whose configuration differs from what this study needs, unless they hold no checkpoint."""
    for run in runs:
        written = run.folder / "config.toml"
        if not written.exists() or failed_early(run.folder):
            continue
        changed = differences(RunConfig.from_toml(written), run.config)
        if {"data.path", "data.tokenizer"} & changed.keys() and _same_text(run):
            changed = {key: pair for key, pair in changed.items() if key not in ("data.path", "data.tokenizer")}
        if "train.start" in changed and _same_start(run):
            del changed["train.start"]
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise ConfigError(
                f"{run.folder} holds a run with {key} = {old!r}, and this study needs {new!r}: "
                "choose another --out, or move that folder elsewhere."
            )


def _same_text(run: PlannedRun) -> bool:
    """Whether the run in the folder was trained on the text of the planned one, wherever that is now."""
    trained, path = read_environment(run.folder).get(TEXT), run.config.data.path
    return trained is not None and path is not None and trained == Dataset.open(path).fingerprint


def _same_start(run: PlannedRun) -> bool:
    """Whether the run in the folder began with the weights of the planned one, wherever they are now."""
    began, start = read_environment(run.folder).get(START), run.config.train.start
    return began is not None and start is not None and began == weights_fingerprint(start)


def _models(study: StudyConfig, base: RunConfig) -> dict[str, PlannedModel]:
    """The variants of one size, matched to the baseline."""
    reference = _varied(study, base, study.baseline)
    size = measure(reference.model)
    target, length = size.parameters, _length(study, reference, size)
    found = {}
    for name in study.variants:
        config = _varied(study, base, name)
        matched = match(name, config.model, target, study.match)
        size = measure(matched.model)
        config = config.model_copy(update={"model": matched.model})
        config = config.override(length)
        changes = tuple(variants.overrides(study.variants[name], base.model))
        found[name] = PlannedModel(config, changes, matched.change, size.parameters, float(size.flops_per_token))
    return found


def _varied(study: StudyConfig, base: RunConfig, name: str) -> RunConfig:
    try:
        varied = base.override(variants.overrides(study.variants[name], base.model))
        check_model(varied)
    except ConfigError as error:
        named = repr(name) in str(error)
        raise ConfigError(str(error) if named else f"variant {name!r}: {error}") from None
    return varied


def undone_sentences(study: StudyConfig) -> list[str]:
    """One sentence for each `set` change that a variant overrides."""
    base = base_run(study, study.sizes[0])
    return [
        f"--set {change} has no effect on {name}, which sets its own value."
        for change in study.set
        if variants.holds(base, change)
        for name, entries in study.variants.items()
        if not variants.holds(_varied(study, base, name), change) and not _sets(entries, change)
    ]


def same_sentences(study: StudyConfig, plan: StudyPlan) -> list[str]:
    """One sentence for each variant that matching turned into the baseline."""
    return [
        f"{name}{f' at {size}' if len(study.sizes) > 1 else ''} is the same model as {study.baseline} after matching "
        f"({model.matching}): use --match none to keep what it sets."
        for (size, name), model in plan.models.items()
        if name != study.baseline and model.matching and model.config == plan.models[size, study.baseline].config
    ]


def left_out_sentences(study: StudyConfig, out: Path) -> list[str]:
    """A sentence if the folder has runs of variants that the study leaves out: its page will not show them."""
    planned = {model_title(study, size, name) for size in study.sizes for name in study.variants}
    found = {match[1] for path in (out / RUNS).glob("*") if (match := _RUN.fullmatch(path.name))}
    others = sorted(found - planned)
    if not others:
        return []
    it = "it" if len(others) == 1 else "them"
    return [
        f"{out} also holds {', '.join(others)}, which this study leaves out: name {it} too to have {it} on the page."
    ]


def _sets(entries: tuple[str, ...], change: str) -> bool:
    """Whether a variant sets this key explicitly."""
    key = change.partition("=")[0].strip()
    return any(entry.partition("=")[0].strip() == key for entry in entries)


def _length(study: StudyConfig, reference: RunConfig, size: Size) -> list[str]:
    """The changes that give every run of a size its steps, and the warm-up that goes with them."""
    scaling, steps, changes = study.scaling, reference.train.steps, []
    if scaling is not None and scaling.tokens_per_parameter is not None:
        counted = size.parameters if scaling.parameters == "all" else size.active
        steps = max(1, round(scaling.tokens_per_parameter * counted / reference.tokens_per_step))
        changes = [f"train.steps={steps}"]
    if scaling is not None and scaling.warmup is not None:
        changes.insert(0, f"train.schedule.warmup={round(scaling.warmup * steps)}")
    return changes


def _run(
    study: StudyConfig, config: RunConfig, size: str, name: str, seed: int, out: Path, budget: float
) -> PlannedRun:
    """All variants of a seed share the data order and the seed of the weights; so do all budgets, as far as they go."""
    seeded = config.override([f"train.seed={seed}", f"data.seed={seed}"])
    stem = model_title(study, size, name)
    if budget != 1.0:
        stem += f"-{budget:g}x"
        try:
            seeded = seeded.override([f"train.steps={max(1, round(budget * config.train.steps))}"])
        except ConfigError as error:
            raise ConfigError(f"ladder = {budget:g}: {error}") from None
    return PlannedRun(name, size, seed, seeded, out / RUNS / f"{stem}-seed{seed}", budget)


def _settled(
    study: StudyConfig, models: Mapping[tuple[str, str], PlannedModel], rates: Sequence[TunedRate]
) -> dict[tuple[str, str], TunedRate]:
    """The rates that were chosen for these very models by this very search."""
    if study.tune is None:
        return {}
    searched = {(*key, tuned_for(model.config, study.tune)) for key, model in models.items()}
    return {(rate.size, rate.variant): rate for rate in rates if (rate.size, rate.variant, rate.made_for) in searched}


def _trials(
    study: StudyConfig, models: Mapping[tuple[str, str], PlannedModel], out: Path, rates: Sequence[TunedRate]
) -> tuple[PlannedRun, ...]:
    """The short runs of the variants whose rate is not chosen yet."""
    if study.tune is None:
        return ()
    done = _settled(study, models, rates)
    return tuple(
        PlannedRun(
            name,
            size,
            study.tune.seed,
            short_run(model.config, study.tune, factor),
            out / RUNS / f"{model_title(study, size, name)}-{rate_title(factor)}-seed{study.tune.seed}",
            study.tune.share,
            factor,
        )
        for (size, name), model in models.items()
        if (size, name) not in done
        for factor in study.tune.lr
    )


def _tuned(model: PlannedModel, rate: TunedRate | None) -> PlannedModel:
    """The model with its chosen rate."""
    if rate is None or rate.chosen == 1.0:
        return model
    changes = rate_changes(model.config, rate.chosen)
    return replace(model, config=model.config.override(changes), overrides=(*model.overrides, *changes))


def model_title(study: StudyConfig, size: str, name: str) -> str:
    """The part of its files' names that says which model it is."""
    return f"{Path(size).stem}-{name}" if study.scaling else name


def _check_ladder(runs: tuple[PlannedRun, ...]) -> None:
    """Refuse budgets that come to the same number of steps, or to the folder of another run."""
    seen: dict[object, PlannedRun] = {}
    for run in runs:
        for key in (run.folder, (run.size, run.variant, run.seed, run.config.train.steps)):
            twin = seen.setdefault(key, run)
            if twin is not run:
                raise ConfigError(
                    f"ladder = {run.budget:g} and {twin.title} come to the same run: choose budgets further apart, or "
                    "rename the variant."
                )
