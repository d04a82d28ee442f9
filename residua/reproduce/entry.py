"""What an entry of `residua reproduce` says: one TOML file per table or figure of a paper, in `entries/DOCUMENT/`.

A `study` trains the rows of a table. An entry that looks `inside` also diagnoses the trained models. `none` stands for
what cannot be had or is no measurement, with the nearest thing that can. docs/reproduce.md describes the keys.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from residua.config.settings import Frozen, Positive
from residua.errors import UserError
from residua.reproduce.measures import MEASURES
from residua.study.config import Match, NoMatch

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
Words = Annotated[str, Field(min_length=1)]


class Size(Frozen):
    """One size of the table: a preset with changes. `tokens` are the published ones, unless the preset has them."""

    name: Name
    base: str
    set: tuple[str, ...] = ()
    tokens: float | None = Field(None, gt=0)


class Row(Frozen):
    """One row: its name here, the paper's words, the variant, and the printed values by size and column."""

    name: Name
    printed: Words
    variant: tuple[str, ...]
    published: dict[str, dict[str, float]] = Field(default_factory=dict)


class Claim(Frozen):
    """What every claim has: the paper's statement, and the sizes it is about (all unless named)."""

    text: Words
    sizes: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """The rows it is about."""
        return ()


class Below(Claim):
    """Row `row` has a lower value than row `than`.

    `published` is the number that the claim itself states: the ratio of the two, or row − than; where more is better,
    the gain of `than`. With `or_more` the claim is that it is at least so large. Without it, the magnitude is that of
    the paper's values.
    """

    kind: Literal["below"]
    row: str
    than: str
    measure: str = "loss"
    published: float | None = None
    or_more: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        return (self.row, self.than)


class Order(Claim):
    """The rows' values rise in this order."""

    kind: Literal["order"]
    rows: tuple[str, ...] = Field(min_length=2)
    measure: str = "loss"

    @property
    def named(self) -> tuple[str, ...]:
        return self.rows


Gained = Literal["step_gain", "equivalent_tokens", "compute_advantage", "throughput_ratio"]


class Gain(Claim):
    """Row `row` has this ratio to the baseline: tokens or compute for the same loss, or tokens per second."""

    kind: Literal["gain"]
    row: str
    measure: Gained
    published: float = Field(gt=0)

    @property
    def named(self) -> tuple[str, ...]:
        return (self.row,)


class Diverges(Claim):
    """Training of row `row` diverges."""

    kind: Literal["diverges"]
    row: str

    @property
    def named(self) -> tuple[str, ...]:
        return (self.row,)


class Falls(Claim):
    """A ratio of row `row` is below 1; with `rises`, above it."""

    kind: Literal["falls"]
    row: str
    measure: str
    rises: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        return (self.row,)


class Unmeasured(Claim):
    """A claim that no study can judge yet; `reason` says why, and how to see for oneself.

    `published` is the ratio that it states, if it does.
    """

    kind: Literal["unmeasured"]
    reason: Words
    published: float | None = Field(None, gt=0)


AnyClaim = Annotated[Below | Order | Gain | Falls | Diverges | Unmeasured, Field(discriminator="kind")]


class Nothing(Frozen):
    """What cannot be had, or is no measurement: the reason, and the nearest thing that can be had."""

    kind: Literal["none"]
    title: Words
    reason: Words
    nearest: Words


class Study(Frozen):
    """A table whose rows are trained and compared. `columns` are measured, `unmeasured` are printed beside them only.

    `notes` say where the paper is silent or where the recipe differs from it. `tasks` are those of the accuracies, with
    `shots` worked examples. Keys that a study file has too mean the same here.
    """

    kind: Literal["study"]
    title: Words
    sizes: tuple[Size, ...] = ()
    rows: tuple[Row, ...] = ()
    baseline: str = ""
    columns: tuple[str, ...] = ("loss",)
    unmeasured: dict[str, str] = Field(default_factory=dict)
    claims: tuple[AnyClaim, ...] = ()
    notes: tuple[str, ...] = ()
    match: Match = NoMatch()
    seeds: Positive = 3
    ladder: tuple[float, ...] = ()
    quantize: tuple[str, ...] = ()
    time_alone: bool = False
    tasks: tuple[str, ...] = ()
    shots: int | None = Field(None, ge=0)

    @property
    def diagnosed(self) -> bool:
        """Whether trained models are diagnosed."""
        return any(MEASURES[name].diagnosed for name in self.columns)

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; otherwise it looks at models that a person has."""
        return bool(self.rows)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        sizes, rows = [size.name for size in self.sizes], [row.name for row in self.rows]
        for what, names in (("sizes", sizes), ("rows", rows)):
            if len(set(names)) != len(names):
                raise UserError(f"{what} uses a name twice: {', '.join(names)}.")
        if bool(sizes) != bool(rows):
            raise UserError("sizes and rows go together: give both or neither.")
        if self.baseline and self.baseline not in rows:
            raise UserError(f"baseline = {self.baseline!r} is not a row: choose one of {', '.join(rows)}.")
        for name in (*self.columns, *(m for claim in self.claims if (m := getattr(claim, "measure", "")))):
            if name not in MEASURES and name not in get_args(Gained):
                raise UserError(f"{name!r} is not measured: choose one of {', '.join(MEASURES)}.")
        if not self.quantize and any(MEASURES[name].quantized for name in self.columns):
            raise UserError("quantize is empty, and a column needs low precision: name a recipe, such as nvfp4.")
        if not self.tasks and any(MEASURES[name].tasked for name in self.columns):
            raise UserError("tasks is empty, and a column needs accuracies: name tasks, such as exoformer.")
        for claim in self.claims:
            stranger = next((name for name in claim.named if name not in rows), None)
            stranger = stranger or next((name for name in claim.sizes if name not in sizes), None)
            if stranger is not None:
                raise UserError(f"the claim {claim.text!r} names {stranger!r}, which is neither a row nor a size.")
        for row in self.rows:
            _check_published(row, sizes, {*self.columns, *self.unmeasured})
        return self


class Inside(Study):
    """A figure that looks inside trained models: train the rows, or take a person's own; then diagnose.

    `shows` names the sections of the diagnosis page that show it, `missing` what the paper's picture has beyond them.
    """

    kind: Literal["inside"]  # type: ignore[assignment]
    shows: tuple[Words, ...] = Field(min_length=1)
    missing: str = ""
    seeds: Positive = 1

    @property
    def diagnosed(self) -> bool:
        return True


Entry = Annotated[Study | Inside | Nothing, Field(discriminator="kind")]


def _check_published(row: Row, sizes: list[str], columns: set[str]) -> None:
    for size, values in row.published.items():
        if size not in sizes:
            raise UserError(f"row {row.name!r} has values for {size!r}: choose one of {', '.join(sizes)}.")
        strange = next((column for column in values if column not in columns), None)
        if strange is not None:
            raise UserError(f"row {row.name!r} has a value for {strange!r}, which is no column of the entry.")
