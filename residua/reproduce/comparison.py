"""The paper's values next to ours, and the verdicts: for the study's page, results.md and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from residua.report import Column, Link, Page, Value, plain
from residua.report.tables import markdown_table
from residua.reproduce.claims import BAND, Measured, Verdict, verdicts
from residua.reproduce.entry import DOCUMENTS, Inside, Study, printed_place
from residua.reproduce.measures import MEASURES
from residua.study.measurements import SIDE_BY_SIDE
from residua.study.results import StudyResult
from residua.study.statistics import estimate
from residua.study.tables import NONE

LOOK_FOR = (
    "Look at the verdicts, not at absolute values: losses depend on text and size, so claims are about "
    "differences between rows. Direction and magnitude are judged separately: for a cost that is real but ten "
    "times the paper's, the direction is confirmed and the magnitude is larger. Not shown means that the interval "
    "contains 0, or that there is no interval."
)
CLAIMS = [
    Column("claim of the paper", numeric=False),
    Column("size", numeric=False),
    Column(
        "direction",
        "confirmed: the whole interval agrees with the claim; contradicted: it lies on the other side",
        False,
    ),
    Column(
        "magnitude",
        f"agrees: the paper's number is inside our interval, or ours within {BAND:.0%} of the paper's effect; "
        "larger, smaller, opposite: our effect compared with the paper's",
        False,
    ),
    Column("ours", numeric=False),
    Column("paper", numeric=False),
]


@dataclass(frozen=True)
class Comparison:
    """Adds the paper's values to the page and results.md of a study compared with an entry.

    `about` says where the numbers come from. For a study that was not made for the entry, `called` names the variant of
    each row, and `absent` says why a row has none.
    """

    name: str
    entry: Study
    about: str
    out: Path
    called: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The table or figure with the paper's number for it."""
        return f"{self.name}: {printed_place(self.name)}"

    def draw(self, page: Page, result: StudyResult) -> None:
        """Draw the first section of the page."""
        measured = self._measured(result)
        section = page.section(f"Paper, {self.title}", LOOK_FOR)
        section.text(f"{DOCUMENTS[self.name[:3]]}: {self.entry.title}.")
        section.text(self.about)
        judged = verdicts(measured)
        if judged:
            section.table(CLAIMS, [_claim_cells(verdict) for verdict in judged])
        for size, columns, rows in self._tables(measured):
            if len(self.entry.sizes) > 1:
                section.subheading(f"Size {size}")
            section.table(columns, rows)
        if (shown := self._shown(result)) is not None:
            section.facts({"shown in": shown})
        for note in self._notes():
            section.note(note)

    def markdown(self, result: StudyResult) -> str:
        measured = self._measured(result)
        parts = [f"## Paper, {self.title}", "", f"{self.entry.title}. {self.about} {LOOK_FOR}", ""]
        judged = verdicts(measured)
        if judged:
            parts += [*markdown_table(CLAIMS, [_claim_cells(verdict) for verdict in judged]), ""]
        for size, columns, rows in self._tables(measured):
            parts += [f"### Size {size}", "", *markdown_table(columns, rows), ""]
        if (shown := self._shown(result)) is not None:
            parts += [f"Shown in [{shown.text}]({plain.link(shown.target)}).", ""]
        return "\n".join([*parts, *(f"- {note}" for note in self._notes())]) + "\n"

    def _measured(self, result: StudyResult) -> Measured:
        return Measured(self.entry, result, self.out, self.absent)

    def _notes(self) -> list[str]:
        missing = [self.entry.missing] if isinstance(self.entry, Inside) and self.entry.missing else []
        unmeasured = [f"{name} is not measured: {reason}." for name, reason in self.entry.unmeasured.items()]
        return [*missing, *unmeasured, *self.entry.notes]

    def _tables(self, measured: Measured) -> list[tuple[str, list[Column], list[list[Value]]]]:
        """Per size: the paper's rows, with each column twice."""
        columns = [Column("row", numeric=False), Column("variant", numeric=False)]
        for name in self.entry.columns:
            measure = measured.measure(name)
            columns += [Column(f"{MEASURES[name].title}, paper"), Column(f"{measure.title}, ours", measure.meaning)]
        columns += [Column(f"{name}, paper") for name in self.entry.unmeasured]
        return [
            (size.name, columns, [self._cells(measured, size.name, row.name) for row in self.entry.rows])
            for size in self.entry.sizes
        ]

    def _cells(self, measured: Measured, size: str, row: str) -> list[Value]:
        printed = next(known.printed for known in self.entry.rows if known.name == row)
        cells = [Value(printed), Value(self.absent.get(row) or self.called.get(row, row))]
        for name in self.entry.columns:
            cells += [self._published(measured, size, row, name), _ours(measured, size, row, name)]
        return [*cells, *(self._published(measured, size, row, name) for name in self.entry.unmeasured)]

    @staticmethod
    def _published(measured: Measured, size: str, row: str, column: str) -> Value:
        value = measured.published(size, row, column)
        return Value(NONE if value is None else f"{value:g}")

    def _shown(self, result: StudyResult) -> Link | None:
        """A link to the figure: on the page with the models side by side, or on the only model's page."""
        page = f"{SIDE_BY_SIDE}/report.html"
        pages = [page] * (self.out / page).exists() + [run.diagnosis for run in result.runs if run.diagnosis]
        return Link(", ".join(self.entry.shows), pages[0]) if pages and isinstance(self.entry, Inside) else None


def _ours(measured: Measured, size: str, row: str, column: str) -> Value:
    measure = measured.measure(column)
    values = list(measured.values(size, row, measure).values())
    if not values:
        return Value(NONE)
    mean = estimate(values, measured.result.confidence)
    return Value(measure.shown(mean.value), "(n=1)" if mean.error is None else f"± {measure.shown(mean.error)}")


def _claim_cells(verdict: Verdict) -> list[Value]:
    words = (verdict.claim, verdict.size, verdict.direction, verdict.magnitude, verdict.found, verdict.printed)
    return [Value(word or NONE) for word in words]
