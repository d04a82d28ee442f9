"""The configuration of a study: variants × seeds (× sizes) of a base run, compared with a baseline.

Parameters are matched: a variant that adds parameters elsewhere gets a narrower feed-forward network, and vice versa.
The papers compare models with equal parameter counts (ExoFormer drops layers; Attention Residuals change nothing, since
they add almost no parameters). Here every variant is brought within a tolerance of the baseline, and the change is
reported.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError, Frozen, Positive, Seed, WholeConfig, of_file, read_toml
from residua.errors import UserError
from residua.files import is_plain_name
from residua.quantize.recipe import Recipe
from residua.reading import shown

if TYPE_CHECKING:
    from residua.model.size import Size

DEMO = Path(__file__).with_name("demo.toml")
"""The study of `residua compare --demo`: tiny models on the embedded corpus, without a network or a GPU."""
MAX_SEEDS = 1000
LOCAL = "local files"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class _MatchParameters(Frozen):
    """The keys of `ffn` and `depth`.

    Tables that tokens look up besides the embedding (value embeddings) are parameters without FLOPs: `tables` says
    whether they count.
    """

    unit: ClassVar[str] = "parameters"

    tolerance: float = Field(0.005, gt=0, lt=1)
    """The largest relative difference that is accepted."""
    tables: Literal["free", "counted"] = "free"

    def measured(self, size: Size) -> int:
        """The number that is matched."""
        return size.parameters - (size.tables if self.tables == "free" else 0)


class MatchFFN(_MatchParameters):
    """Change the feed-forward width until the parameter count is within `tolerance` of the baseline's."""

    kind: Literal["ffn"] = "ffn"


class MatchDepth(_MatchParameters):
    """Change the number of layers first, then the feed-forward width for the rest."""

    kind: Literal["depth"] = "depth"


class MatchFLOPs(Frozen):
    """Change the feed-forward width until training FLOPs per token, attention's included, are the baseline's."""

    unit: ClassVar[str] = "FLOPs per token"

    kind: Literal["flops"] = "flops"
    tolerance: float = Field(0.005, gt=0, lt=1)
    """The largest relative difference that is accepted."""

    def measured(self, size: Size) -> int:
        """The number that is matched."""
        return size.flops_per_token


class NoMatch(Frozen):
    """Leave every variant as configured; the table shows by how much the parameters differ."""

    kind: Literal["none"] = "none"

    def measured(self, size: Size) -> int:
        """The number that the table compares."""
        return size.parameters


Match = Annotated[MatchFFN | MatchDepth | MatchFLOPs | NoMatch, Field(discriminator="kind")]


class Scaling(Frozen):
    """Several sizes: the names of presets or the paths of run TOMLs, smallest first.

    With `tokens_per_parameter`, every size trains on that many tokens per parameter of its baseline (20 is common);
    without it, for the number of steps in its own configuration. `parameters` says which ones count: all of them, or
    those that a token is multiplied with, matrices and head, as compute does. `warmup` is a share of a size's steps.
    `batch` is the exponent p of tokens per step ∝ (a size's tokens)^p: the smallest size has its own batch, the others
    one that grows with their budget (0.5 is common, nanochat has 0.383).
    """

    sizes: tuple[str, ...] = Field(min_length=2)
    """The sizes."""
    tokens_per_parameter: float | None = Field(None, gt=0)
    parameters: Literal["all", "matrices"] = "all"
    warmup: float | None = Field(None, ge=0, lt=1)
    batch: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _batch_has_a_budget(self) -> Self:
        if self.batch is not None and self.tokens_per_parameter is None:
            raise UserError(
                f"scaling.batch = {self.batch:g} depends on the budget of each size: also set "
                "scaling.tokens_per_parameter."
            )
        return self


class Tasks(Frozen):
    """Tasks that every trained model is scored on, as `residua eval` does.

    `folder` has local files, TASK.jsonl or TASK.jsonl.xz; without it, the tasks are those of lm-evaluation-harness.
    `shots` are the worked examples before each question, the task's own unless given; `limit` the questions per task.
    """

    names: tuple[str, ...] = Field(min_length=1)
    """The tasks."""
    folder: str | None = None
    shots: int | None = Field(None, ge=0)
    limit: Positive | None = None

    @property
    def anywhere(self) -> Tasks:
        """The same tasks without the path of the files, which differs between machines."""
        return self if self.folder is None else self.model_copy(update={"folder": LOCAL})


class Tune(Frozen):
    """A search of each variant's learning rate: `lr` are multiples of its own, each tried on one short run.

    A trial has `share` of the steps, with a whole schedule, and the seed `seed`, which is none of the study's. The rate
    with the lowest validation loss is that of all the variant's runs. With `sizes`, only so many of the smallest sizes
    are searched: the others follow the law lr = c·N^p through the best rates of the two largest searched ones.
    """

    lr: tuple[float, ...] = Field(min_length=2)
    sizes: int | None = Field(None, ge=2)
    share: float = Field(0.25, gt=0, le=1)
    seed: Seed = MAX_SEEDS

    @field_validator("lr", mode="before")
    @classmethod
    def _multiples(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise UserError(
                f"the learning rates to try are {shown(value)}: give a list of multiples, as in [0.5, 1, 2]."
            )
        if len(value) < 2:
            named = ", ".join(shown(entry) for entry in value) or "none"
            raise UserError(
                f"there are too few learning rates to try ({named}): give at least two, as in 0.5x, 1x, 2x."
            )
        return tuple(_multiple(entry) for entry in value)

    @field_validator("lr")
    @classmethod
    def _rates_differ(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not _differ(value):
            raise UserError(f"the learning rates to try are {list(value)}: use distinct positive multiples.")
        return tuple(sorted(value))


def _differ(multiples: tuple[float, ...]) -> bool:
    return all(0 < factor < math.inf for factor in multiples) and len(set(multiples)) == len(multiples)


def _multiple(entry: Any) -> Any:
    """Parse `2x` or `2` as the number 2; type checking rejects other types later."""
    if isinstance(entry, str):
        try:
            return float(entry.strip().removesuffix("x"))
        except ValueError:
            raise UserError(
                f"the learning rates to try contain {shown(entry)}: write multiples as 0.5x, 1x, 2x."
            ) from None
    return entry


class StudyConfig(WholeConfig):
    """What to compare. `variants` maps a name to a list of overrides or known names (`residua compare --list`).

    `base` is a preset's name or the path of a run's TOML; `set` are overrides of every run. The baseline is the first
    variant unless named. `seeds` is a list, or a number n for 0 … n−1. `workers` runs train at the same time, each with
    `threads` threads (default: cores / workers). `data` is a prepared folder (default: the embedded corpus).
    `quantize` names recipes (`fp8`, `nvfp4`, `nvfp4+smooth`) to measure every trained model with;
    `calibration` is the number of sequences for SmoothQuant. `diagnose` also diagnoses every trained model. `tasks` are
    those that every trained model is scored on, `tune` is a search of each variant's learning rate.
    `ladder` are budgets, as multiples of a run's steps, that the baseline is also trained with, each with its own full
    schedule: they turn a loss into equivalent tokens. `ladder_of = "all"` trains the variants with them too. Shorter
    budgets branch off the longest one where their learning rate begins to fall, so a ladder costs little more than its
    longest run. With several workers, `time_alone` or `target`, every variant's step is timed alone once its runs are
    complete. `target` is the validation loss of a race: how many tokens and seconds each variant needs for it.
    `bases` holds the run of every file that `base` or `sizes` names; it is written when a study begins, so that it can
    be continued where the files are not.
    """

    name: str = "study"
    """The study's folder is named after it."""
    base: str = "tiny"
    bases: dict[str, dict[str, Any]] | None = None
    set: tuple[str, ...] = ()
    variants: dict[str, tuple[str, ...]]
    baseline: str = ""
    """The variant that the others are compared with."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    data: str | None = None
    match: Match = MatchFFN()
    scaling: Scaling | None = None
    ladder: tuple[float, ...] = ()
    ladder_of: Literal["baseline", "all"] = "baseline"
    time_alone: bool = False
    target: float | None = Field(None, gt=0)
    workers: Positive = 1
    threads: Positive | None = None
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """The level of the intervals."""
    quantize: tuple[str, ...] = ()
    calibration: Positive = 4096
    diagnose: bool = False
    tasks: Tasks | None = None
    tune: Tune | None = None

    @classmethod
    def from_toml(cls, path: str | Path) -> StudyConfig:
        with of_file(path):
            return cls(**read_toml(path))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The base runs of this study: one, or one per size."""
        return self.scaling.sizes if self.scaling else (self.base,)

    def budgets_of(self, variant: str) -> list[float]:
        """The budgets that a variant is trained with, longest first."""
        climbs = variant == self.baseline or self.ladder_of == "all"
        return sorted({1.0, *(self.ladder if climbs else ())}, reverse=True)

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_of_seeds(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SEEDS:
            raise UserError(
                f"seeds = {shown(value)} should be a list such as [0, 1, 2], or a number of seeds from 1 to "
                f"{MAX_SEEDS}."
            )
        return tuple(range(value))

    @field_validator("ladder")
    @classmethod
    def _budgets_differ(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not _differ(value):
            raise UserError(f"ladder = {list(value)} must be distinct positive multiples, as in [0.5, 1, 1.5, 2].")
        if value and set(value) == {1.0}:
            raise UserError("ladder = [1] adds no budget to that of the study: name others, as in [0.5, 1, 1.5, 2].")
        return tuple(sorted(value))

    @field_validator("quantize")
    @classmethod
    def _recipes_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(Recipe.parse(text)) for text in value)

    @field_validator("tasks", mode="before")
    @classmethod
    def _task_names_only(cls, value: Any) -> Any:
        return {"names": value} if isinstance(value, list | tuple) else value

    @field_validator("variants", mode="before")
    @classmethod
    def _names_only(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise UserError(
                f"variants = {shown(value)} should be a table or a list of names: `residua compare --list` shows them."
            )
        twice = next((name for name in value if value.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"variants names {twice!r} twice: name each variant once.")
        return {name: (name,) for name in value}

    @model_validator(mode="before")
    @classmethod
    def _first_is_baseline(cls, data: Any) -> Any:
        variants = data.get("variants") if isinstance(data, dict) else None
        if isinstance(variants, dict | list | tuple) and variants and not data.get("baseline"):
            return {**data, "baseline": next(iter(variants))}
        return data

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not is_plain_name(value):
            raise UserError(
                f"name = {value!r} must be a plain name, because it names the folder of the study: remove the path."
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.baseline not in self.variants:
            raise UserError(
                f"baseline = {self.baseline!r} is not one of the variants: choose one of {', '.join(self.variants)}."
            )
        for name in self.variants:
            if not _FILE_NAME.fullmatch(name):
                raise UserError(
                    f"variants.{name} must be usable as a folder name: use letters, digits and any of '_', '.', "
                    "'+', '-'."
                )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds = {list(self.seeds)} must be one or more distinct numbers.")
        if self.tune is not None and self.tune.seed in self.seeds:
            raise UserError(
                f"tune.seed = {self.tune.seed} is one of the study's seeds, but learning rates must be chosen "
                "on other runs: use another seed."
            )
        odd = next((size for size in self.sizes if not is_plain_name(Path(size).stem)), None)
        if odd is not None:
            raise UserError(f"{odd!r} cannot be a folder name, but each size gets a folder: rename the file.")
        if len({Path(size).stem for size in self.sizes}) != len(self.sizes):
            raise UserError(
                f"scaling.sizes = {list(self.sizes)} uses a name twice, but each size gets a folder: rename one of "
                "the files."
            )
        return self


def match(name: str, model: ModelConfig, target: int, rule: Match) -> tuple[ModelConfig, str]:
    """Change `model` by `rule` until the matched number is within tolerance of `target`; ConfigError if that fails.

    Returns the model and the change in words, empty if there is none.
    """
    if isinstance(rule, NoMatch):
        return model, ""
    candidate = model
    if isinstance(rule, MatchDepth) and _off(_measured(model, rule), target) > rule.tolerance:
        candidate = _nearest_depth(model, target, rule)
    if _off(_measured(candidate, rule), target) > rule.tolerance:
        candidate = _nearest_width(name, candidate, target, rule)
    return candidate, _change(model, candidate, rule)


def _measured(model: ModelConfig, rule: Match) -> int:
    from residua.model.size import measure  # imports torch, which most readers of a study file do not need

    return rule.measured(measure(model))


def _off(measured: int, target: int) -> float:
    return abs(measured / target - 1.0)


def _nearest_depth(model: ModelConfig, target: int, rule: MatchDepth) -> ModelConfig:
    """Add or remove layers as long as that brings the parameter count closer to the target."""
    step = 1 if _measured(model, rule) < target else -1
    best = model
    while best.layers + step >= 1:
        candidate = best.override([f"layers={best.layers + step}"])
        if _off(_measured(candidate, rule), target) >= _off(_measured(best, rule), target):
            break
        best = candidate
    return best


def _nearest_width(name: str, model: ModelConfig, target: int, rule: MatchFFN | MatchDepth | MatchFLOPs) -> ModelConfig:
    """Parameters and FLOPs are affine in the feed-forward width: solve, round to a multiple of 8, or of 1 if needed."""
    hidden = model.ffn.hidden
    measured = _measured(model, rule)
    per_unit = _measured(_hidden(model, hidden + 1), rule) - measured
    exact = hidden + (target - measured) / per_unit
    for multiple in (8, 1):
        rounded = multiple * round(exact / multiple)
        if rounded < 1:
            continue
        candidate = _hidden(model, rounded)
        if _off(_measured(candidate, rule), target) <= rule.tolerance:
            return candidate
    raise ConfigError(
        f"variant {name!r} has {measured:,} {rule.unit}, which cannot be brought within {100 * rule.tolerance:.3g} % "
        f"of the baseline's {target:,} by changing ffn.hidden = {hidden}: widen the base's ffn.hidden, or set "
        "match.kind to 'none'."
    )


def _hidden(model: ModelConfig, hidden: int) -> ModelConfig:
    return model.override([f"ffn.hidden={hidden}"])


FOR_FLOPS = " for equal FLOPs"
NOT_COUNTED = " in token tables excluded"


def _change(before: ModelConfig, after: ModelConfig, rule: MatchFFN | MatchDepth | MatchFLOPs) -> str:
    pairs = {"layers": (before.layers, after.layers), "FFN width": (before.ffn.hidden, after.ffn.hidden)}
    changes = [f"{what} {old} → {new}" for what, (old, new) in pairs.items() if old != new]
    if isinstance(rule, MatchFLOPs):
        return ", ".join(changes) + FOR_FLOPS * bool(changes)
    uncounted = _measured(after, NoMatch()) - _measured(after, rule)
    return ", ".join([*changes, *[f"{uncounted:,}{NOT_COUNTED}"] * bool(uncounted)])
