"""Plan the runs of a study: every variant at every size, matched in parameters, each with a folder.

A search of each variant's learning rate (`tune`) multiplies every rate of the optimizer: Muon's, and that of the AdamW
that trains the rest. The choice is stored in `tuning.json`, so that a resumed study does not choose again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from residua.config import variants
from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError, Frozen, of_file, override_key
from residua.data import Dataset
from residua.data.source import find_data, open_data
from residua.data.tokenizer import padded_vocabulary
from residua.files import write_atomically
from residua.model.size import measure
from residua.reading import ReadError, inside, read_json, toml_string
from residua.study.config import Scaling, StudyConfig, Tune, match
from residua.study.records import comparable, is_complete, read_run
from residua.train.start import check_model, check_tokenizer

RUNS, CONFIGS, LOGS, TIMINGS, LOCK, STUDY = "runs", "configs", "logs", "timings", ".lock", "study.toml"
STARTED = "started.toml"
"""The study file during training; study.toml replaces it once everything has been measured."""
EXTENDED = "extended.json"
"""The file in a study's folder that records the path of its results file."""
TUNING = "tuning.json"
BEGUN = (RUNS, CONFIGS, LOGS, LOCK, TIMINGS, TUNING, EXTENDED, "diagnosis")
"""Files in an interrupted study's folder, in addition to started.toml."""
PLACE = (
    "data.path", "data.tokenizer", "train.device", "train.log_every", "train.save_every", "train.keep", "train.track",
    "train.telemetry", "train.profile", "train.divergence_", "parallel.",
)  # fmt: skip
"""Keys that do not change the result of a run: the path of its text (the fingerprint counts), its device, its logs and
the limits at which it gives up."""


@dataclass(frozen=True)
class PlannedModel:
    """A variant at one size: its overrides, the changes from matching, and its cost."""

    config: RunConfig
    overrides: tuple[str, ...]
    matching: str
    parameters: int
    flops_per_token: float


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One training run of the study. `budget` is its multiple of the study's steps: 1, except in the ladder.

    `rate` is the multiple of the variant's learning rate that a `tune` trial uses.
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
        return self.folder.name

    @property
    def key(self) -> tuple[str, str, int, float]:
        """The identity of a run, used to join the records of studies on the same text."""
        return self.size, self.variant, self.seed, self.budget

    @property
    def family(self) -> tuple[str, str, int, float]:
        """Equal for runs of one model, seed and rate, whose shorter budgets branch off the longest."""
        return self.size, self.variant, self.seed, self.rate


@dataclass(frozen=True)
class StudyPlan:
    """The models by (size, variant), and the runs in the order they start: by seed, so that pairs finish together.

    The longest of several budgets starts first, since the others branch off it.

    `runs` includes the ladder, `text_tokens` is the length of the training text. `tuned` are the learning rates that a
    search chose for the models. `trials` are its runs still to be trained; until then, the models of these variants
    have their original rates.
    """

    models: dict[tuple[str, str], PlannedModel]
    runs: tuple[PlannedRun, ...]
    text_tokens: int = 0
    tuned: tuple[TunedRate, ...] = ()
    trials: tuple[PlannedRun, ...] = ()

    @property
    def compared(self) -> tuple[PlannedRun, ...]:
        """The runs of variants × seeds × sizes, excluding the ladder."""
        return tuple(run for run in self.runs if run.budget == 1.0)

    @property
    def ladder(self) -> tuple[PlannedRun, ...]:
        """The runs at other budgets than the study's own."""
        return tuple(run for run in self.runs if run.budget != 1.0)

    def check_tokenizer(self) -> None:
        """Refuse a text whose tokenizer differs from that of the initial weights."""
        first = next(iter(self.models.values())).config
        check_tokenizer(first, open_data(first))

    @property
    def settled(self) -> tuple[PlannedRun, ...]:
        """The runs whose learning rate is known: every trial that it depends on is trained."""
        searched, chosen = {trial.variant for trial in self.trials}, {(rate.size, rate.variant) for rate in self.tuned}
        return tuple(run for run in self.runs if run.variant not in searched or (run.size, run.variant) in chosen)


def make_plan(study: StudyConfig, out: Path, dataset: Dataset, rates: Sequence[TunedRate] = ()) -> StudyPlan:
    """Plan the study on a prepared text that all runs share; `rates` are from an earlier search."""
    shared = [f"data.path={toml_string(dataset.path.resolve())}"]
    if "model.vocab_size" not in map(override_key, study.set):
        shared.append(f"model.vocab_size={padded_vocabulary(dataset.vocab_size)}")
    models: dict[tuple[str, str], PlannedModel] = {}
    first = base_run(study, study.sizes[0]).override(shared)
    for size in study.sizes:
        base = base_run(study, size).override(shared)
        models |= {(size, name): model for name, model in _models(study, base, first).items()}
    trials = _trials(study, models, out, rates)
    tuned = _with_law(study, models, _settled(study, models, rates))
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
    """The run that the variants of a size modify."""
    kept = (study.bases or {}).get(size)
    base = RunConfig.find(size) if kept is None else RunConfig(**kept)
    with of_file("set"):
        return base.override(list(study.set))


def open_dataset(study: StudyConfig, progress: bool) -> Dataset:
    """The text of every run: the study's, else its base's, else the embedded corpus (prepared on first use)."""
    config = base_run(study, study.sizes[0])
    return Dataset.open(study.data) if study.data else find_data(config, progress=progress)


def _models(study: StudyConfig, base: RunConfig, smallest: RunConfig) -> dict[str, PlannedModel]:
    """The variants of one size, matched to the baseline."""
    reference = vary(study, base, study.baseline)
    target = study.match.measured(measure(reference.model))
    length = _length(study, reference, vary(study, smallest, study.baseline))
    models = {}
    for name in study.variants:
        config = vary(study, base, name)
        model, matching = match(name, config.model, target, study.match)
        size = measure(model)
        config = config.model_copy(update={"model": model}).override(length)
        changes = tuple(variants.overrides(study.variants[name], base.model))
        models[name] = PlannedModel(config, changes, matching, size.parameters, float(size.flops_per_token))
    return models


def vary(study: StudyConfig, base: RunConfig, name: str) -> RunConfig:
    """The configuration of a variant's run, before matching."""
    try:
        varied = base.override(variants.overrides(study.variants[name], base.model))
        check_model(varied)
    except ConfigError as error:
        named = repr(name) in str(error)
        raise ConfigError(str(error) if named else f"variant {name!r}: {error}") from None
    return varied


def _length(study: StudyConfig, reference: RunConfig, smallest: RunConfig) -> list[str]:
    """The overrides that set the batch, steps and matching warm-up of every run of a size."""
    scaling, steps, changes = study.scaling, reference.train.steps, list[str]()
    if scaling is None:
        return changes
    if scaling.tokens_per_parameter is not None:
        per_step, tokens = reference.tokens_per_step, _budget(scaling, reference)
        if scaling.batch is not None:
            grown = smallest.tokens_per_step * (tokens / _budget(scaling, smallest)) ** scaling.batch
            exact = grown / reference.sequence / reference.train.accumulate
            rows = max(1, round(exact)) if exact < 16 else 8 * round(exact / 8)  # kernels prefer multiples of 8
            changes.append(f"train.micro_batch={rows}")
            per_step = rows * reference.train.accumulate * reference.sequence
        steps = max(1, round(tokens / per_step))
        changes.append(f"train.steps={steps}")
    warmup = [] if scaling.warmup is None else [f"train.schedule.warmup={round(scaling.warmup * steps)}"]
    return [*warmup, *changes]


def _budget(scaling: Scaling, run: RunConfig) -> float:
    """The training tokens of a size."""
    size = measure(run.model)
    return (scaling.tokens_per_parameter or 0.0) * (size.parameters if scaling.parameters == "all" else size.active)


def _run(
    study: StudyConfig, config: RunConfig, size: str, name: str, seed: int, out: Path, budget: float
) -> PlannedRun:
    """Plan one run. All variants of a seed share data order and weight seed; so do all budgets, up to their length."""
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
    """The rates chosen for exactly these models by exactly this search."""
    if study.tune is None:
        return {}
    searched = {(*key, tuned_for(model.config, study.tune)) for key, model in models.items()}
    return {(rate.size, rate.variant): rate for rate in rates if (rate.size, rate.variant, rate.made_for) in searched}


def _trials(
    study: StudyConfig, models: Mapping[tuple[str, str], PlannedModel], out: Path, rates: Sequence[TunedRate]
) -> tuple[PlannedRun, ...]:
    """The short runs of variants whose rate has not been chosen yet."""
    if (tune := study.tune) is None:
        return ()
    done = _settled(study, models, rates)
    waiting = {key: model for key, model in models.items() if key not in done and key[0] in study.sizes[: tune.sizes]}

    def trial(size: str, name: str, model: PlannedModel, factor: float) -> PlannedRun:
        folder = out / RUNS / f"{model_title(study, size, name)}-lr{factor:g}x-seed{tune.seed}"
        return PlannedRun(name, size, tune.seed, short_run(model.config, tune, factor), folder, tune.share, factor)

    return tuple(trial(*key, model, factor) for key, model in waiting.items() for factor in tune.lr)


def _with_law(
    study: StudyConfig, models: Mapping[tuple[str, str], PlannedModel], chosen: dict[tuple[str, str], TunedRate]
) -> dict[tuple[str, str], TunedRate]:
    """The chosen rates; for sizes that are not searched, those of the law through the two largest searched sizes."""
    tune = study.tune
    if tune is None or tune.sizes is None:
        return chosen
    rates = dict(chosen)
    below, last = study.sizes[tune.sizes - 2 : tune.sizes]
    for size in study.sizes[tune.sizes :]:
        for name in study.variants:
            pair, model = (chosen.get((below, name)), chosen.get((last, name))), models[size, name]
            if pair[0] is None or pair[1] is None or (size, name) in chosen:
                continue
            grown = [math.log(models[place, name].parameters) for place in (below, last, size)]
            best = [math.log(rate.optimum) for rate in pair if rate is not None]
            power = max(-1.0, min(1.0, (best[1] - best[0]) / (grown[1] - grown[0])))
            rate = float(f"{math.exp(best[1] + power * (grown[2] - grown[1])):.3g}")
            factor = rate / model.config.train.optimizer.lr
            rates[size, name] = TunedRate(
                size=size, variant=name, seed=tune.seed, steps=0, trials=(Trial(factor=factor, rate=rate),),
                chosen=factor, made_for=tuned_for(model.config, tune),
                law=f"the law through {below} and {last}, lr ∝ N^{power:.2f}",
            )  # fmt: skip
    return rates


def _tuned(model: PlannedModel, rate: TunedRate | None) -> PlannedModel:
    if rate is None or rate.chosen == 1.0:
        return model
    changes = rate_changes(model.config, rate.chosen)
    return replace(model, config=model.config.override(changes), overrides=(*model.overrides, *changes))


def model_title(study: StudyConfig, size: str, name: str) -> str:
    """The part of file names that identifies the model."""
    return f"{Path(size).stem}-{name}" if study.scaling else name


def _check_ladder(runs: tuple[PlannedRun, ...]) -> None:
    """Refuse budgets that give the same number of steps, or the same folder as another run."""
    seen: dict[object, PlannedRun] = {}
    for run in runs:
        for key in (run.folder, (run.size, run.variant, run.seed, run.config.train.steps)):
            twin = seen.setdefault(key, run)
            if twin is not run:
                raise ConfigError(
                    f"ladder = {run.budget:g} and {twin.title} have the same number of steps: choose budgets "
                    "further apart, or rename the variant."
                )


class Trial(Frozen):
    """One rate: a multiple of the variant's own, the optimizer's `lr`, and the validation loss after the short run."""

    factor: float
    rate: float
    loss: float | None = None
    problem: str = ""


class TunedRate(Frozen):
    """The trials of the search for a variant at one size, and the multiple that it chose.

    `made_for` identifies its model, recipe and search. `law` says where the rate of a size that was not searched comes
    from.
    """

    size: str
    variant: str
    seed: int
    steps: int
    trials: tuple[Trial, ...]
    chosen: float
    made_for: str
    law: str = ""

    @property
    def best(self) -> Trial:
        return next(trial for trial in self.trials if trial.factor == self.chosen)

    @property
    def optimum(self) -> float:
        """The best learning rate: the vertex of the parabola in ln lr through the best trial and its neighbours.

        The best trial's own rate if that trial is at an end, or if a neighbour failed.
        """
        place = self.trials.index(self.best)
        around = [(math.log(t.rate), t.loss) for t in self.trials[max(0, place - 1) : place + 2] if t.loss is not None]
        if len(around) < 3 or not 0 < place < len(self.trials) - 1:
            return self.best.rate
        (x0, y0), (x1, y1), (x2, y2) = around
        left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        if right <= left:
            return self.best.rate
        return math.exp((x0 + x1) / 2 - left * (x2 - x0) / (2 * (right - left)))

    @property
    def note(self) -> str:
        """A caveat about the choice; empty if there is none."""
        if self.law:
            return f"from {self.law}"
        if self.best.loss is None:
            return "no trial completed, so the rate nearest to its default is used"
        if sum(trial.loss is not None for trial in self.trials) < 2:
            return "the only trial that completed"
        if self.chosen == max(trial.factor for trial in self.trials):
            return "the largest one tried: a larger one may be better"
        if self.chosen == min(trial.factor for trial in self.trials):
            return "the smallest one tried: a smaller one may be better"
        return ""

    def sentence(self, several_sizes: bool) -> str:
        where = f" ({self.size})" if several_sizes else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.variant}{where}: learning rate {self.best.rate:g}, {self.chosen:.3g}× its own{note}."


def choose(size: str, variant: str, trials: Sequence[Trial], seed: int, steps: int, made_for: str) -> TunedRate:
    """The rate with the lowest loss; on a tie, or if no trial completed, the one closest to the variant's own."""
    best = min(trials, key=lambda t: (math.inf if t.loss is None else t.loss, abs(math.log(t.factor))))
    return TunedRate(
        size=size, variant=variant, seed=seed, steps=steps, trials=tuple(trials), chosen=best.factor, made_for=made_for
    )


def choose_rates(study: StudyConfig, plan: StudyPlan, problems: Mapping[PlannedRun, str]) -> list[TunedRate]:
    """The rate with the lowest loss, for each variant whose trials have ended."""
    assert study.tune is not None
    complete = {run: read_run(run.folder, run.config) for run in plan.trials if is_complete(run.folder, run.config)}
    losses = {run: record.final_loss for run, record in comparable(complete).items()}  # all losses on the same text
    rates = []
    for size, name in dict.fromkeys((run.size, run.variant) for run in plan.trials):
        runs = [run for run in plan.trials if (run.size, run.variant) == (size, name)]
        tried = [
            Trial(factor=r.rate, rate=r.config.train.optimizer.lr, loss=losses.get(r), problem=problems.get(r, ""))
            for r in runs
        ]
        made_for = tuned_for(plan.models[size, name].config, study.tune)
        rates.append(choose(size, name, tried, study.tune.seed, runs[0].config.train.steps, made_for))
    return rates


def rate_changes(config: RunConfig, factor: float) -> list[str]:
    """The overrides that multiply every learning rate of a run."""
    optimizer = config.train.optimizer
    rates = {"lr": optimizer.lr}
    if optimizer.kind == "muon":
        rates["rest.lr"] = optimizer.rest.lr
    return [f"train.optimizer.{key}={float(f'{rate * factor:.12g}')!r}" for key, rate in rates.items()]


def short_run(config: RunConfig, tune: Tune, factor: float) -> RunConfig:
    """The run of one trial: fewer steps, a proportionally shorter warm-up, its own seed, and rates times `factor`."""
    recipe = config.train
    steps = max(2, round(tune.share * recipe.steps))
    warmup = min(max(1, round(tune.share * recipe.schedule.warmup)), steps - 1) if recipe.schedule.warmup else 0
    changes = [
        f"train.schedule.warmup={warmup}", f"train.steps={steps}", f"train.seed={tune.seed}", f"data.seed={tune.seed}",
    ]  # fmt: skip
    try:
        return config.override([*changes, *rate_changes(config, factor)])
    except ConfigError as error:
        raise ConfigError(f"tune.lr = {factor:g}: {error}") from None


def tuned_for(config: RunConfig, tune: Tune) -> str:
    """A key that is equal for searches over the same runs, on whichever machine."""
    kept = settings(config, without=(*PLACE, "data.seed", "train.seed"))
    content = json.dumps([kept, tune.model_dump(exclude_none=True)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class _File(Frozen):
    """The content of tuning.json."""

    rates: tuple[TunedRate, ...] = ()


def read_rates(out: Path) -> tuple[TunedRate, ...]:
    """The chosen rates stored in a study's folder; none if the file is missing or damaged."""
    try:
        return read_json(inside(out, TUNING), _File, "").rates
    except ReadError:
        return ()


def keep_rates(out: Path, rates: Iterable[TunedRate]) -> None:
    """Add chosen rates to those stored in a study's folder."""
    kept = {(rate.size, rate.variant): rate for rate in (*read_rates(out), *rates)}
    write_atomically(out / TUNING, _File(rates=tuple(kept.values())).model_dump_json(indent=1) + "\n")
