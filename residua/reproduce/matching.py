"""Which variants of a study that exists are the rows of an entry: by what they resolve to, whatever they are called.

A row is a change of the paper's baseline. Its match is the variant that differs from the study's counterpart of that
baseline by the same change, but for what makes parameters equal: the paper may do so with the number of layers where
the study does it with the width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from residua.config import variants
from residua.config.model import ModelConfig
from residua.config.run import RunConfig, differences, settings
from residua.config.settings import ConfigError
from residua.reproduce.entry import Row, Size, Study
from residua.study.config import StudyConfig
from residua.study.saved import SavedStudy
from residua.study.trials import PLACE

NOT_THERE, NOT_RUN = "not in this study", "without a complete run in this study"
MATCHED = {"none": (), "ffn": ("model.ffn.hidden",), "depth": ("model.ffn.hidden", "model.layers")}
"""The keys that each kind of parameter matching changes."""
RATES = ("train.optimizer.lr", "train.optimizer.rest.lr")
"""The keys that a search of learning rates changes."""


@dataclass(frozen=True)
class Rows:
    """The study's variant of each row that it has, and of the other rows why there is none."""

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
    found = {baseline.name: [reference]}
    for row in entry.rows:
        if row is not baseline:
            same = _same_everywhere(row, reference, paper, models, study)
            found[row.name] = sorted(same, key=lambda name: (name not in trained, study.variants[name] != row.variant))
    matched = {row: names[0] for row, names in found.items() if names and names[0] in trained}
    absent = {row: NOT_RUN if names else NOT_THERE for row, names in found.items() if row not in matched}
    return Rows(matched, absent)


def published_run(size: Size, row: Row | None = None) -> RunConfig:
    """The run of an entry's size as published, with the changes of a row."""
    run = RunConfig.find(size.base).override(list(size.set))
    return run if row is None else run.override(variants.overrides(row.variant, run.model))


def _counterparts(
    study: StudyConfig, models: Mapping[tuple[str, str], RunConfig], paper: ModelConfig, any_mixer: bool = False
) -> list[str]:
    """Variants that can stand for the paper's baseline: shape and recipe may differ, what the papers vary may not.

    With `any_mixer`, a model of softmax attention stands for a hybrid: rows are then changes of another model.
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
    """The study's variants that are the row at every size: the reference with the row's change."""
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
    """The reference with the row's change: as the paper has it, and without what makes its parameters equal."""
    own = [entry for entry in row.variant if not entry.startswith(tuple(f"{key}=" for key in MATCHED["depth"]))]
    for entries in (row.variant, own) if len(own) < len(row.variant) else (own,):
        try:
            yield reference.override(variants.overrides(entries, reference.model))
        except ConfigError:  # this row cannot be made of the study's base
            continue


def _begins_alike(changed: Iterable[str], reference: RunConfig, paper: RunConfig) -> bool:
    """Whether what the row replaces is of the same kind in the study as in the paper: GLU for SwiGLU, not for ReLU²."""
    ours, theirs = settings(reference), settings(paper)
    return all(ours.get(key) == theirs.get(key) for key in changed if key.endswith(".kind"))
