"""Judge an entry from an existing study: nothing is trained, and the page says where the numbers come from.

The study's variants are matched with the entry's rows by their resolved configurations, not by name. A row is a change
to the paper's baseline. Its match is the variant that differs from the study's counterpart of that baseline by the same
change, ignoring keys that only equalise parameters: the paper may change the number of layers for that, and the study
the feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from residua.config import variants
from residua.config.model import ModelConfig
from residua.config.run import RunConfig, differences, settings
from residua.config.settings import ConfigError
from residua.files import refuse_used
from residua.reproduce.claims import Measured, Verdict, by_reason, verdicts
from residua.reproduce.comparison import Comparison
from residua.reproduce.entry import AnyClaim, Gain, Inside, Row, Size, Study, Unmeasured
from residua.reproduce.request import Request, selected
from residua.reproduce.run_entry import Reproduced, trained
from residua.study.config import StudyConfig
from residua.study.page import REPORT, Outcome, provenance, show_saved
from residua.study.plan import PLACE, TunedRate
from residua.study.results import StudyResult
from residua.study.results_file import NOWHERE, SavedModel, SavedRun, SavedStudy
from residua.study.statistics import count
from residua.study.tables import print_study

Part = TypeVar("Part", SavedModel, SavedRun, TunedRate)
RECIPE = (
    "model.layers", "model.width", "model.context", "model.attention.kind", "model.attention.qk_norm", "model.ffn.kind",
    "train.optimizer.kind",
)  # fmt: skip
"""Keys whose differences between the study's and the paper's baseline the page reports."""
NOT_THERE, NOT_RUN = "not in this study", "without complete runs in this study"
BY_WIDTH = ("model.ffn.hidden",)
MATCHED = {"none": (), "ffn": BY_WIDTH, "flops": BY_WIDTH, "depth": (*BY_WIDTH, "model.layers")}
"""The keys that each kind of parameter matching changes."""
RATES = ("train.optimizer.lr", "train.optimizer.rest.lr")
"""The keys that a learning-rate search changes."""
MATCHED_BY = {
    "ffn": "Parameters are matched by the width of the feed-forward",
    "flops": "FLOPs per token are matched by the width of the feed-forward",
    "depth": "Parameters are matched by the number of layers",
    "none": "Parameters are not matched",
}


@dataclass(frozen=True)
class Shared:
    """An entry with the study's sizes, and the study with the entry's rows, both under the entry's names.

    `about` identifies the study. `notes` say how it differs from the paper.
    """

    name: str
    entry: Study
    saved: SavedStudy
    rows: Rows
    about: str
    notes: tuple[str, ...]

    def comparison(self, out: Path) -> Comparison:
        """The paper's section of the page in `out`."""
        notes = tuple(f"About the entry in general: {note}" for note in self.entry.notes)
        entry = self.entry.model_copy(update={"notes": (*self.notes, *notes)})
        return Comparison(self.name, entry, self.about, out, self.rows.variants, self.rows.absent)

    def verdicts(self, result: StudyResult | None = None) -> list[Verdict]:
        """A verdict on every claim; pass the result of `saved` as `result` if it is already known."""
        return verdicts(Measured(self.entry, result or show_saved(self.saved), NOWHERE, self.rows.absent))


def share(name: str, saved: SavedStudy, rows: Sequence[str] = ()) -> Shared:
    """Match an entry with a study; ConfigError if the study cannot answer it."""
    entry = selected(trained(name), Request(rows=tuple(rows)))
    if isinstance(entry, Inside) and not entry.claims:
        raise ConfigError(
            f"{name} diagnoses models, but the results of a study contain none: name a model with --run FOLDER."
        )
    matches = match_rows(entry, saved)
    _refuse_useless(name, entry, saved, matches)
    view = _renamed(saved, matches.variants, entry.baseline)
    paper = _paper_sizes(entry, saved)
    notes = [_size_sentence(paper), _recipe_sentence(view, paper), _name_sentence(matches)]
    notes += [f"Missing rows: {by_reason(matches.absent)}."] if matches.absent else []
    resized, sentences = _resized(entry, paper, saved), tuple(note for note in notes if note)
    return Shared(name, resized, view, matches, _about(view), sentences)


def reproduce_from(name: str, path: Path, out: Path, console: Console, rows: Sequence[str] = ()) -> Reproduced:
    """Judge an entry from a study's results file, and write the page and tables into `out`."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder: name a file that `residua compare {path} --results FILE.json --plan` writes from it."
        )
    shared = share(name, SavedStudy.read(path), rows)
    refuse_used(out)
    for sentence in (f"{name}: {shared.entry.title}. {shared.about}", *shared.notes):
        console.print(Text(sentence), soft_wrap=True)
    result = show_saved(shared.saved, out, shared.comparison(out))
    print_study(console, result)
    lines = [f"• {verdict.sentence}" for verdict in shared.verdicts(result)]
    return Reproduced(Outcome(result, out / REPORT), tuple(lines))


def _refuse_useless(name: str, entry: Study, saved: SavedStudy, matches: Rows) -> None:
    study = saved.config.name
    if entry.baseline in matches.absent:
        why = "no such variant" if matches.absent[entry.baseline] == NOT_THERE else "no complete run of it"
        raise ConfigError(
            f"{name} compares with {entry.baseline}, and the study {study} has {why}: name another study, or leave "
            "--study out to train the rows."
        )
    if len(matches.variants) < 2:
        others = ", ".join(row.name for row in entry.rows if row.name != entry.baseline)
        raise ConfigError(
            f"the study {study} has no complete run of the rows that {name} compares with {entry.baseline} "
            f"({others}): name another study, or leave --study out to train them."
        )


def _renamed(saved: SavedStudy, names: dict[str, str], baseline: str) -> SavedStudy:
    """The study with only the variants in `names`, under the names of their rows."""
    changes = saved.config.variants
    return saved.model_copy(
        update={
            "study": {
                **saved.study,
                "variants": {r: changes[name] for r, name in names.items()},
                "baseline": baseline,
            },
            "models": _named(saved.models, names),
            "runs": _named(saved.runs, names),
            "tuning": _named(saved.tuning or (), names) or None,
        }
    )


def _named(parts: Sequence[Part], names: dict[str, str]) -> tuple[Part, ...]:
    return tuple(
        part.model_copy(update={"variant": row})
        for row, variant in names.items()
        for part in parts
        if part.variant == variant
    )


def _paper_sizes(entry: Study, saved: SavedStudy) -> dict[str, tuple[Size, bool]]:
    """For each of the study's sizes: the matching paper size (True), else the nearest (False)."""
    study, models = saved.config, saved.plan(NOWHERE).models
    shapes = [(size, published_run(size).model) for size in entry.sizes]
    nearest_sizes = {}
    for size in study.sizes:
        model = models[size, study.baseline].config.model
        same = [paper for paper, shape in shapes if paper.name == Path(size).stem or _shape(shape) == _shape(model)]
        nearest, _ = min(shapes, key=lambda pair: abs(math.log(_bulk(pair[1]) / _bulk(model))))
        nearest_sizes[Path(size).stem] = (same[0], True) if same else (nearest, False)
    return nearest_sizes


def _shape(model: ModelConfig) -> tuple[int, int]:
    return model.layers, model.width


def _bulk(model: ModelConfig) -> float:
    """A measure that parameters outside the embedding scale with."""
    return float(model.layers * model.width**2)


def _resized(entry: Study, paper: dict[str, tuple[Size, bool]], saved: SavedStudy) -> Study:
    """The entry with the study's sizes, each with the values of the matching paper size."""
    return entry.model_copy(
        update={
            "sizes": tuple(size.model_copy(update={"name": name}) for name, (size, _) in paper.items()),
            "rows": tuple(
                row.model_copy(
                    update={"published": {name: row.published.get(size.name, {}) for name, (size, _) in paper.items()}}
                )
                for row in entry.rows
            ),
            "claims": tuple(_claim(claim, paper, saved) for claim in entry.claims),
        }
    )


def _claim(claim: AnyClaim, paper: dict[str, tuple[Size, bool]], saved: SavedStudy) -> AnyClaim:
    """Judge a claim about all sizes at the study's sizes, and one about certain sizes only at those."""
    if not claim.sizes:
        return claim
    sizes = tuple(name for name, (size, exact) in paper.items() if exact and size.name in claim.sizes)
    if sizes:
        return claim.model_copy(update={"sizes": sizes})
    reason = f"it is about size {', '.join(claim.sizes)}, and the study {saved.config.name} has {', '.join(paper)}"
    stated = claim.published if isinstance(claim, Gain) else None
    return Unmeasured(kind="unmeasured", text=claim.text, reason=reason, published=stated)


def _about(view: SavedStudy) -> str:
    """Describe the study: its name, sizes, length, seeds, and the hardware and software it was trained with."""
    study, plan = view.config, view.plan(NOWHERE)
    facts = provenance(show_saved(view), list(view.records(plan).values()), ())
    sizes = [f"{Path(s).stem} ({count(plan.models[s, study.baseline].parameters)} parameters)" for s in study.sizes]
    seeds = ", ".join(map(str, study.seeds))
    place = ", ".join(str(facts.get(key, f"{key} unknown")) for key in ("hardware", "software"))
    return (
        f"Nothing was trained for this page: the numbers are from the study {study.name}, base {', '.join(sizes)}, "
        f"{facts['seen by a run']} a run, seeds {seeds}; {place}, commit {facts.get('commit', 'unknown')}."
    )


def _size_sentence(paper: dict[str, tuple[Size, bool]]) -> str:
    parts = [
        f"{name} {'is' if exact else 'is nearest to'} the paper's {size.name}" for name, (size, exact) in paper.items()
    ]
    return f"The paper's values next to ours: {', '.join(parts)}."


def _recipe_sentence(view: SavedStudy, paper: dict[str, tuple[Size, bool]]) -> str:
    """How the recipe of the study's largest size differs from the paper's."""
    study = view.config
    ours = view.plan(NOWHERE).models[study.sizes[-1], study.baseline].config
    size, _ = paper[Path(study.sizes[-1]).stem]
    theirs = published_run(size)
    changed = differences(theirs, ours)
    parts = [f"{key} {changed[key][1]} ({changed[key][0]})" for key in RECIPE if key in changed]
    parts.append(f"tokens {count(ours.tokens)} ({count(size.tokens or theirs.tokens)})")
    matched = MATCHED_BY[study.match.kind]
    return f"The study's recipe, in brackets the paper's at {size.name}: {', '.join(parts)}. {matched}."


def _name_sentence(matches: Rows) -> str:
    parts = [f"{row} is called {variant}" for row, variant in matches.variants.items() if row != variant]
    return f"In the study, {', '.join(parts)}." if parts else ""


@dataclass(frozen=True)
class Rows:
    """The study's variant for each row that it has, and the reasons why other rows are absent."""

    variants: dict[str, str]
    absent: dict[str, str]


def match_rows(entry: Study, saved: SavedStudy) -> Rows:
    """Match the rows of an entry, whose baseline is named, with the variants of a study.

    Without a counterpart of the baseline no row has a match, since rows are changes of it.
    """
    study = saved.config
    models = {key: model.config for key, model in saved.plan(Path()).models.items()}
    trained = {run.variant for run in saved.runs if run.budget == 1.0}
    baseline = next(row for row in entry.rows if row.name == entry.baseline)
    paper = published_run(entry.sizes[0], baseline)
    alike = _counterparts(study, models, paper.model) or _counterparts(study, models, paper.model, any_mixer=True)
    if not alike:
        return Rows({}, dict.fromkeys((row.name for row in entry.rows), NOT_THERE))
    words = baseline.variant
    reference = min(alike, key=lambda v: (v not in trained, v != study.baseline, study.variants[v] != words))
    candidates = {baseline.name: [reference]}
    for row in entry.rows:
        if row is not baseline:
            same = _same_everywhere(row, reference, paper, models, study)
            candidates[row.name] = sorted(
                same, key=lambda name: (name not in trained, study.variants[name] != row.variant)
            )
    matched = {row: names[0] for row, names in candidates.items() if names and names[0] in trained}
    absent = {row: NOT_RUN if names else NOT_THERE for row, names in candidates.items() if row not in matched}
    return Rows(matched, absent)


def published_run(size: Size, row: Row | None = None) -> RunConfig:
    """The run of an entry's size as published, with a row's changes."""
    run = RunConfig.find(size.base).override(list(size.set))
    return run if row is None else run.override(variants.overrides(row.variant, run.model))


def _counterparts(
    study: StudyConfig, models: Mapping[tuple[str, str], RunConfig], paper: ModelConfig, any_mixer: bool = False
) -> list[str]:
    """Variants that can represent the paper's baseline: only shape and recipe may differ.

    With `any_mixer`, a softmax-attention model may represent a hybrid: rows are then changes to a different model.
    """
    wanted = _architecture(paper, any_mixer)
    return [
        name
        for name in study.variants
        if all(_architecture(models[size, name].model, any_mixer) == wanted for size in study.sizes)
    ]


def _architecture(model: ModelConfig, any_mixer: bool) -> tuple[object, ...]:
    softmax = model.softmax
    gate = None if softmax is None else (softmax.gate, softmax.sink)
    mixer = None if any_mixer else model.attention.kind
    return model.topology, model.anchors, model.norm.kind, model.placement, mixer, gate


def _same_everywhere(
    row: Row, reference: str, paper: RunConfig, models: Mapping[tuple[str, str], RunConfig], study: StudyConfig
) -> list[str]:
    """The study's variants that equal the row at every size: the reference with the row's change."""
    keys = [*PLACE, *MATCHED[study.match.kind]]
    if study.tune is not None and not any(entry.startswith("train.optimizer.") for entry in row.variant):
        keys += RATES
    changed = differences(paper, paper.override(variants.overrides(row.variant, paper.model)))
    same = list(study.variants)
    for size in study.sizes:
        base = models[size, reference]
        if not _begins_alike(changed, base, paper):
            return []
        wanted = [settings(config, without=tuple(keys)) for config in _resolved(row, base)]
        same = [name for name in same if settings(models[size, name], without=tuple(keys)) in wanted]
    return same


def _resolved(row: Row, reference: RunConfig) -> Iterator[RunConfig]:
    """The reference with the row's change: as in the paper, and without keys that only equalise parameters."""
    unmatched = [entry for entry in row.variant if not entry.startswith(tuple(f"{key}=" for key in MATCHED["depth"]))]
    for entries in (row.variant, unmatched) if len(unmatched) < len(row.variant) else (unmatched,):
        try:
            yield reference.override(variants.overrides(entries, reference.model))
        except ConfigError:  # this row cannot be built from the study's base
            continue


def _begins_alike(changed: Iterable[str], reference: RunConfig, paper: RunConfig) -> bool:
    """Whether the part that the row replaces has the same kind in study and paper: GLU for SwiGLU, not for ReLU²."""
    ours, theirs = settings(reference), settings(paper)
    return all(ours.get(key) == theirs.get(key) for key in changed if key.endswith(".kind"))
