"""The entries of `residua reproduce`: one TOML file per table or figure of a paper, `entries/004/table1.toml`.

A `study` trains the rows of a table. An `inside` entry also diagnoses the trained models. `none` stands for an
unavailable measurement and names the nearest available one. The keys are in docs/reference/extending.md.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, RootModel, ValidationError, model_validator

from residua.config.settings import ConfigError, Frozen, Positive, explain, of_file, read_toml, suggest
from residua.errors import UserError
from residua.reproduce.measures import MEASURES
from residua.study.config import Match, NoMatch

FOLDER = Path(str(files("residua") / "reproduce" / "entries"))
DOCUMENTS = {
    "000": "Attention Projection Mixing and Exogenous Anchors (ExoFormer)",
    "001": "Attention Residuals: Teaching transformers to choose which layers matter (article)",
    "002": "Attention Residuals (the authors' summary)",
    "003": "A Unified View of Attention and Residual Sinks (outlier-driven rescaling)",
    "004": "Multi-Gate Residuals",
}
"""The documents. 002 does not number its pictures or its table: they are counted in order of appearance."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
Words = Annotated[str, Field(min_length=1)]


class Size(Frozen):
    """One size of the table: a preset with overrides. `tokens` is the published number, unless the preset has it."""

    name: Name
    base: str
    set: tuple[str, ...] = ()
    tokens: float | None = Field(None, gt=0)


class Row(Frozen):
    """One row: its name here, the paper's name for it, the variant, and the printed values by size and column."""

    name: Name
    printed: Words
    variant: tuple[str, ...]
    published: dict[str, dict[str, float]] = Field(default_factory=dict)


class Claim(Frozen):
    """The common part of claims: the paper's statement, and the sizes it is about (by default all)."""

    text: Words
    sizes: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """The rows that the claim is about."""
        return ()

    @property
    def over_sizes(self) -> bool:
        """Whether the claim has one verdict for all sizes together."""
        return False


class RowClaim(Claim):
    """A claim about one row."""

    row: str

    @property
    def named(self) -> tuple[str, ...]:
        return (self.row,)


class Below(Claim):
    """Row `row` has a lower value than row `than`.

    `published` is the number stated by the claim itself: the ratio of the two, or row − than; if more is better, the
    gain of `than`. With `or_more`, the claim is that it is at least this large. Without `published`, the magnitude is
    that of the paper's values.
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
    """The rows' values increase in this order."""

    kind: Literal["order"]
    rows: tuple[str, ...] = Field(min_length=2)
    measure: str = "loss"

    @property
    def named(self) -> tuple[str, ...]:
        return self.rows


Gained = Literal["step_gain", "equivalent_tokens", "compute_advantage", "throughput_ratio"]


class Gain(RowClaim):
    """Row `row` has this ratio to the baseline: tokens or compute for the same loss, or tokens per second."""

    kind: Literal["gain"]
    measure: Gained
    published: float = Field(gt=0)

    @property
    def over_sizes(self) -> bool:
        return self.measure == "compute_advantage"


class Diverges(RowClaim):
    """Training of row `row` diverges."""

    kind: Literal["diverges"]


class Falls(RowClaim):
    """A ratio of row `row` is below 1; with `rises`, above it."""

    kind: Literal["falls"]
    measure: str
    rises: bool = False


class Unmeasured(Claim):
    """A claim that no study can judge yet; `reason` says why, and how to check it by hand.

    `published` is the ratio that it states, if any.
    """

    kind: Literal["unmeasured"]
    reason: Words
    published: float | None = Field(None, gt=0)

    @property
    def over_sizes(self) -> bool:
        return True


AnyClaim = Annotated[Below | Order | Gain | Falls | Diverges | Unmeasured, Field(discriminator="kind")]


class Nothing(Frozen):
    """An unavailable measurement: the reason, and the nearest available one."""

    kind: Literal["none"]
    title: Words
    reason: Words
    nearest: Words


class Study(Frozen):
    """A table whose rows are trained and compared. We measure `columns`; `unmeasured` ones only show paper values.

    `notes` say where the paper is silent or the recipe differs from it. Accuracies are measured on `tasks` with `shots`
    worked examples. Keys that also exist in a study file mean the same here.
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
        """Whether there is anything to train; otherwise the entry diagnoses models that the user already has."""
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
        for name in (*self.columns, *(c.measure for c in self.claims if isinstance(c, Below | Order | Gain | Falls))):
            if name not in MEASURES and name not in get_args(Gained):
                raise UserError(f"{name!r} is not measured: choose one of {', '.join(MEASURES)}.")
        if not self.quantize and any(MEASURES[name].quantized for name in self.columns):
            raise UserError("quantize is empty, but a column needs low precision: name a recipe, such as nvfp4.")
        if not self.tasks and any(MEASURES[name].tasked for name in self.columns):
            raise UserError("tasks is empty, but a column needs accuracies: name tasks, such as exoformer.")
        for claim in self.claims:
            stranger = next((name for name in claim.named if name not in rows), None)
            stranger = stranger or next((name for name in claim.sizes if name not in sizes), None)
            if stranger is not None:
                raise UserError(f"the claim {claim.text!r} names {stranger!r}, which is neither a row nor a size.")
        for row in self.rows:
            for size, values in row.published.items():
                if size not in sizes:
                    raise UserError(f"row {row.name!r} has values for {size!r}: choose one of {', '.join(sizes)}.")
                strange = next((name for name in values if name not in {*self.columns, *self.unmeasured}), None)
                if strange is not None:
                    raise UserError(f"row {row.name!r} has a value for {strange!r}, not a column of the entry.")
        return self


class Inside(Study):
    """A figure about the inside of trained models: train the rows or take the user's models, then diagnose them.

    `shows` names the sections of the diagnosis page that show it, `missing` the parts of the paper's picture they lack.
    """

    kind: Literal["inside"]  # type: ignore[assignment]
    shows: tuple[Words, ...] = Field(min_length=1)
    missing: str = ""
    seeds: Positive = 1

    @property
    def diagnosed(self) -> bool:
        return True


Entry = Annotated[Study | Inside | Nothing, Field(discriminator="kind")]
KINDS: dict[str, type[BaseModel]] = {"study": Study, "inside": Inside, "none": Nothing}


class _File(RootModel[Entry]):
    """The content of one file."""


@cache
def names() -> tuple[str, ...]:
    """Every entry, by document, figures first, in numerical order."""
    return tuple(sorted((f"{path.parent.name}:{path.stem}" for path in FOLDER.glob("*/*.toml")), key=_place))


def load(name: str) -> Study | Inside | Nothing:
    """Load an entry by name, such as `004:table1`."""
    if name not in names():
        raise ConfigError(f"there is no entry {name!r}: {suggest(name, names(), 'residua reproduce')}")
    document, _, place = name.partition(":")
    return read_entry(FOLDER / document / f"{place}.toml")


def read_entry(path: Path) -> Study | Inside | Nothing:
    """Read and check an entry's file."""
    with of_file(path):
        tables: dict[str, Any] = read_toml(path)
        try:
            return _File.model_validate(tables).root
        except ValidationError as error:
            raise ConfigError(explain(error, KINDS.get(str(tables.get("kind")), Study))) from None


def printed_place(name: str) -> str:
    """`004:table1` as the paper writes it: Table 1."""
    match = re.fullmatch(r"(table|fig)(\d+)", name.partition(":")[2])
    assert match is not None
    return f"{'Table' if match[1] == 'table' else 'Figure'} {match[2]}"


def _place(name: str) -> tuple[str, str, int]:
    document, _, place = name.partition(":")
    letters = place.rstrip("0123456789")
    return document, letters, int(place[len(letters) :] or 0)
