"""Turn the records of a study's runs into results: estimates, differences, gains, laws and missing measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from residua.data.loader import validated_tokens
from residua.model.size import measure
from residua.study.config import StudyConfig
from residua.study.gains import Race, Timings, adjusted, compare, concluded, race
from residua.study.ladder import FittedLaw, Gain, JointGains, Ladder, equivalent_tokens, fit_law, fit_laws
from residua.study.plan import RUNS, PlannedRun, StudyPlan
from residua.study.records import DIAGNOSIS, RunRecord, comparable, known
from residua.study.results import (
    PROJECTED,
    DatasetFacts,
    JointLaw,
    LadderResult,
    ProjectedGain,
    Rung,
    RunResult,
    Runs,
    ScalingResult,
    StudyResult,
    VariantResult,
    low_precision,
    low_task_means,
    outlier_means,
    source_means,
    task_means,
)
from residua.study.statistics import (
    Interval,
    compute_advantage,
    estimate,
    fit_power_law,
    geometric_mean,
    mean,
    paired_difference,
)


@dataclass(frozen=True)
class _Collection:
    """A study, its complete runs, and the timings of isolated steps by (size, variant)."""

    study: StudyConfig
    plan: StudyPlan
    records: Mapping[PlannedRun, RunRecord]
    timings: Mapping[tuple[str, str], Timings]

    def runs(self, size: str, name: str) -> dict[int, RunRecord]:
        """The complete runs of a variant by seed, excluding the ladder's."""
        return {seed: record for seed, record in self._planned(size, name).items() if record is not None}

    def _planned(self, size: str, name: str) -> dict[int, RunRecord | None]:
        """The same, with None for runs without a record."""
        return {r.seed: self.records.get(r) for r in self.plan.compared if (r.size, r.variant) == (size, name)}

    def row(self, size: str, name: str) -> VariantResult:
        study, level, ours = self.study, self.study.confidence, self.runs(size, name)
        model, reference = self.plan.models[size, name], self.plan.models[size, study.baseline]
        row = VariantResult(
            name=name,
            size=size,
            overrides=model.overrides,
            matching=model.matching,
            parameters=model.parameters,
            parameters_ratio=model.parameters / reference.parameters,
            flops_per_token=model.flops_per_token,
        )
        if not ours:
            return row
        baseline = None if name == study.baseline else self.runs(size, study.baseline)
        train_losses = [loss for run in ours.values() if (loss := known(run.train_loss)) is not None]
        measured = {
            "loss": estimate([run.final_loss for run in ours.values()], level),
            "bits_per_byte": estimate([run.final_bits_per_byte for run in ours.values()], level),
            "tokens_per_second": _speed(ours.values()),
            "memory_gib": known(max(run.memory_gib for run in ours.values())),
            "train_loss": estimate(train_losses, level) if train_losses else None,
            "sources": source_means(ours, baseline or {}, level),
            "outliers": outlier_means(ours, level),
            "tasks": task_means(ours, baseline, task_names(list(self.records.values())), level),
            "low_tasks": low_task_means(ours, study.quantize, level),
            "low_precision": low_precision(study.quantize, [run.quantized for run in ours.values()], level),
            "timing": [None, *self.timings.get((size, name), {}).values()][-1],
        }
        against = {} if baseline is None else self._against(size, name, ours, baseline)
        return row.model_copy(update=measured | against)

    def _against(self, size: str, name: str, ours: Runs, baseline: Runs) -> dict[str, Any]:
        """Difference from, gains over and ratios to the baseline, paired by the seeds that both completed."""
        level = self.study.confidence
        losses, reference = ({seed: run.final_loss for seed, run in runs.items()} for runs in (ours, baseline))
        timings, timed = (self.timings.get((size, who), {}) for who in (name, self.study.baseline))
        # Throughput is compared over the seeds at which the baseline's speed is known.
        paired = [r for s, r in ours.items() if s in baseline and math.isfinite(baseline[s].tokens_per_second)]
        return {
            "difference": paired_difference(losses, reference, level),
            "text_error": text_error(ours, baseline),
            "tokens_per_second": _speed(paired) or _speed(ours.values()),
            **compare(ours, baseline, self._equivalent(size, name, ours), timings, timed, level),
        }

    def _equivalent(self, size: str, name: str, ours: Runs) -> Gain | None:
        """The gain in tokens: from the law over all sizes if there is one, else from the ladder of this size."""
        losses, tokens = {seed: run.final_loss for seed, run in ours.items()}, max(run.tokens for run in ours.values())
        if self.laws:
            return self.joint_gains[name].gain((size, float(tokens)))
        ladder = self.ladders.get(size, {})
        return equivalent_tokens(ladder, losses, tokens, self.study.confidence) if len(ladder) > 1 else None

    def raced(self, rows: Sequence[VariantResult]) -> tuple[VariantResult, ...]:
        """The rows, with race results added if the study has a target; tested only with all seeds of the study."""
        target, first = self.study.target, self.study.baseline
        if target is None:
            return tuple(rows)
        races: dict[str, dict[str, Race]] = {}
        busy = {size for (size, _), each in self.timings.items() if any(timing.busy for timing in each.values())}
        for row in rows:
            timings = (self.timings.get((row.size, name), {}) for name in (row.name, first))
            ours, baseline = ({} if row.size in busy else dict(each) for each in timings)
            device = next((name for name in reversed(ours) if name in baseline), "")
            runs = self._planned(row.size, first)
            row_runs = runs if row.name == first else self._planned(row.size, row.name)
            outcome = race(row_runs, runs, target, ours.get(device), baseline.get(device), self.study.confidence)
            if not {*self.study.seeds} <= runs.keys() & row_runs.keys():  # a results file has no runs that failed
                outcome = replace(outcome, ratio=None, p=None)
            races.setdefault(row.size, {})[row.name] = outcome
        after = {size: adjusted(each) for size, each in races.items()}
        return tuple(row.model_copy(update={"race": after[row.size][row.name]}) for row in rows)

    @cached_property
    def ladders(self) -> dict[str, dict[float, dict[int, float]]]:
        """By size, the baseline's final losses by tokens and seed, at every budget; empty without a ladder."""
        return {} if not self.study.ladder else self._losses(self.study.baseline)

    def _losses(self, variant: str) -> dict[str, dict[float, dict[int, float]]]:
        losses: dict[str, dict[float, dict[int, float]]] = {}
        for run, record in self.records.items():
            if run.variant == variant:
                losses.setdefault(run.size, {}).setdefault(float(record.tokens), {})[run.seed] = record.final_loss
        return losses

    @cached_property
    def laws(self) -> dict[str, FittedLaw]:
        """The joint law at each size; empty if there is one size or too few budgets."""
        return fit_laws(self.ladders) if len(self.ladders) > 1 else {}

    @cached_property
    def joint_gains(self) -> dict[str, JointGains]:
        """The gains of each variant at every size and budget it was trained at."""
        gains = {}
        for name in self.study.variants:
            losses = self._losses(name)
            ours = {(size, tokens): runs for size in self.ladders for tokens, runs in losses.get(size, {}).items()}
            if name != self.study.baseline and ours:
                gains[name] = JointGains(self.ladders, ours, self.study.confidence)
        return gains

    def joint(self) -> tuple[JointLaw | None, tuple[ProjectedGain, ...]]:
        """The law over sizes and budgets, and the gains it projects at ten times the compute of the largest run."""
        if not self.laws:
            return None, ()
        models = {size: self.plan.models[size, self.study.baseline] for size in self.ladders}
        parameters = {size: measure(model.config.model).active for size, model in models.items()}
        losses: dict[float, Mapping[int, float]] = {}
        for size, model in models.items():
            if runs := self.runs(size, self.study.baseline):
                compute = model.flops_per_token * max(run.tokens for run in runs.values())
                losses[compute] = {seed: run.final_loss for seed, run in runs.items()}
        floors: Ladder = {parameters[size]: {0: law.floor} for size, law in self.laws.items()}
        law = JointLaw(
            parameters=parameters,
            tokens=self.laws[list(models)[-1]],
            size=fit_law(floors) if len(floors) > 2 else None,
            compute=fit_law(losses) if len(losses) > 2 else None,
        )
        last = max(models, key=lambda size: models[size].flops_per_token)
        if not (runs := self.runs(last, self.study.baseline)):
            return law, ()
        tokens = max(run.tokens for run in runs.values())
        to = (PROJECTED * models[last].flops_per_token * tokens, tokens / parameters[last])
        projected = []
        for name, gains in self.joint_gains.items():
            points = {
                cell: (models[cell[0]].flops_per_token * cell[1], cell[1] / parameters[cell[0]]) for cell in gains.cells
            }
            if (far := gains.project(points, to)) is not None:
                projected.append(ProjectedGain(name=name, compute=to[0], tokens=far[0], trend=far[1]))
        return law, tuple(projected)

    def ladder(self, size: str) -> LadderResult:
        """The budgets and the law fitted to them."""
        rungs, level = self.ladders[size], self.study.confidence
        return LadderResult(
            size=size,
            rungs=tuple(
                Rung(tokens=tokens, loss=estimate(list(losses.values()), level))
                for tokens, losses in sorted(rungs.items())
            ),
            law=self.laws.get(size) or fit_law(rungs),
        )

    def validated_tokens(self, dataset: DatasetFacts | None) -> int | None:
        """How many validation tokens the final losses cover: all, or the fixed part; None without a text."""
        final = next((record.final for record in self.records.values() if record.final is not None), None)
        return self.curve_tokens(dataset) if final is None else final.tokens

    def curve_tokens(self, dataset: DatasetFacts | None) -> int | None:
        """How many validation tokens the losses during training cover (the fixed part); None without a text."""
        if dataset is None:
            return None
        config = next(iter(self.plan.models.values())).config
        return validated_tokens(dataset.validation_tokens, config.sequence, config.data.validation_tokens)


def collect(
    study: StudyConfig,
    plan: StudyPlan,
    records: Mapping[PlannedRun, RunRecord],
    problems: Mapping[PlannedRun, str],
    dataset: DatasetFacts | None = None,
    timings: Mapping[tuple[str, str], Timings] | None = None,
) -> StudyResult:
    """Collect the results of the complete runs; list the others with their problems.

    `timings` holds the isolated step timings by (size, variant).
    """
    collection = _Collection(study, plan, comparable(records), timings or {})
    runs = tuple(_run_result(run, collection.records.get(run), problems.get(run, "")) for run in plan.runs)
    variants = tuple(
        collection.row(size, name)
        for size in study.sizes
        for name in study.variants
        if (size, name) in plan.models  # merged studies may lack a variant at some sizes
    )
    compared = [record for run, record in collection.records.items() if run.budget == 1.0]
    joint, projected = collection.joint()
    result = StudyResult(
        name=study.name,
        baseline=study.baseline,
        confidence=study.confidence,
        seeds=study.seeds,
        side_by_side=min(study.workers, len(plan.runs)),
        dataset=dataset,
        validated_tokens=collection.validated_tokens(dataset),
        curve_tokens=collection.curve_tokens(dataset),
        target=study.target,
        variants=collection.raced(variants),
        ladder=tuple(
            collection.ladder(size)
            for size in study.sizes
            if size in collection.laws or len(collection.ladders.get(size, {})) > 1
        ),
        joint=joint,
        projected=projected,
        scaling=_scaling(study, runs, variants) if study.scaling and joint is None else (),  # one law is enough
        tuning=plan.tuned,
        lacking=lacking(compared, study.tasks is not None, study.quantize),
        runs=runs,
    )
    return concluded(result)


def _run_result(run: PlannedRun, record: RunRecord | None, problem: str) -> RunResult:
    where = {
        "variant": run.variant, "size": run.size, "seed": run.seed, "folder": run.folder.name, "budget": run.budget,
    }  # fmt: skip
    if record is None:
        return RunResult(**where, status="failed" if problem else "missing", problem=problem)
    return RunResult(
        **where,
        status="complete",
        loss=record.final_loss,
        bits_per_byte=record.final_bits_per_byte,
        tokens=record.tokens,
        **record.stored,
        diagnosis=f"{RUNS}/{run.folder.name}/{DIAGNOSIS}" if (run.folder / DIAGNOSIS).exists() else None,
    )


def _speed(runs: Iterable[RunRecord]) -> float | None:
    """The mean of the known speeds; the speed of a run that shared its device is unknown."""
    speeds = [run.tokens_per_second for run in runs if math.isfinite(run.tokens_per_second)]
    return geometric_mean(speeds) if speeds else None


def _scaling(
    study: StudyConfig, runs: Sequence[RunResult], variants: Sequence[VariantResult]
) -> tuple[ScalingResult, ...]:
    """One fit per variant with complete runs at two or more sizes; advantages are at the baseline's largest compute."""
    points = compute_points(runs, variants)
    laws = {name: fit_power_law(losses) for name, losses in points.items() if len({c for c, _ in losses}) > 1}
    fits = {name: law for name, law in laws.items() if math.isfinite(law.scale)}
    if study.baseline not in fits:
        return ()
    largest = max(compute for compute, _ in points[study.baseline])

    def advantage(name: str) -> Interval | None:
        gain = compute_advantage(fits[name], fits[study.baseline], largest, study.confidence)
        if name == study.baseline or gain is None or not math.isfinite(gain.value):
            return None
        # JSON cannot represent infinity: drop intervals that are not finite.
        return gain if gain.high is None or math.isfinite(gain.high) else replace(gain, low=None, high=None)

    return tuple(
        ScalingResult(name=name, scale=law.scale, exponent=law.exponent, at_compute=largest, advantage=advantage(name))
        for name, law in fits.items()
    )


def compute_points(
    runs: Sequence[RunResult], variants: Sequence[VariantResult]
) -> dict[str, list[tuple[float, float]]]:
    """[(training FLOPs, final loss), ...] of each variant, one point per complete run."""
    flops = {(row.size, row.name): row.flops_per_token for row in variants}
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.loss is not None and run.tokens is not None and run.budget == 1.0:
            compute = flops[run.size, run.variant] * run.tokens
            points.setdefault(run.variant, []).append((compute, run.loss))
    return points


def task_names(runs: Sequence[RunRecord]) -> list[str]:
    """Every task that any run was scored on, in the order of the runs."""
    lists = [run.accuracies.wanted for run in runs if run.accuracies is not None]
    return list(dict.fromkeys(name for wanted in lists for name in wanted))


def lacking(runs: Sequence[RunRecord], tasks: bool, recipes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each measuring option of `residua compare`, the folders of the runs that lack some of its numbers."""
    names = set(task_names(runs))
    scored = {run.folder: run.accuracies for run in runs if run.accuracies is not None}
    low = {recipe for scores in scored.values() for recipe in scores.low}
    whole = {
        folder
        for folder, scores in scored.items()
        if all(tasks.keys() >= names for tasks in (scores.tasks, *(scores.low.get(recipe, {}) for recipe in low)))
    }
    unscored = (r for r in runs if r.folder not in whole)
    unquantized = (r for r in runs if r.quantized is None or not r.quantized.losses.keys() >= set(recipes))
    lacked = {"tasks": unscored if tasks or names else (), "quantize": unquantized if recipes else ()}
    folders = {option: tuple(run.folder.name for run in without) for option, without in lacked.items()}
    return {option: without for option, without in folders.items() if without}


def text_error(ours: Runs, baseline: Runs) -> float | None:
    """The standard error of the loss difference due to sampling text, for fixed seeds.

    Document j has n_j tokens; d_j is the difference of its summed losses, averaged over seeds. With D = Σd / Σn the
    error is √(J/(J−1)·Σ(d_j − D·n_j)²) / Σn: documents are sampled, and the two models read the same ones. None if
    fewer than two documents are known.
    """
    pairs = [
        (a.document_losses, b.document_losses, a.document_tokens)
        for seed in sorted(ours.keys() & baseline.keys())
        if (a := ours[seed].final) and (b := baseline[seed].final) and a.document_tokens == b.document_tokens
    ]
    if not pairs or len(pairs[0][2]) < 2:
        return None
    tokens = pairs[0][2]
    sums = [mean([a[j] - b[j] for a, b, _ in pairs]) for j in range(len(tokens))]
    difference = math.fsum(sums) / sum(tokens)
    spread = math.fsum((d - difference * n) ** 2 for d, n in zip(sums, tokens, strict=True))
    return math.sqrt(len(tokens) / (len(tokens) - 1) * spread) / sum(tokens)
