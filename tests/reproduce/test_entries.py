"""Entries are data: every file is valid, every row is a run at every scale, and mistakes are named."""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import residua
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.config.variants import overrides
from residua.data import Dataset
from residua.model.size import measure
from residua.reproduce.entry import FOLDER, Inside, Nothing, Study, load, names, read_entry
from residua.reproduce.request import DEMO_LAYERS, Request, build_study, demo_of, selected, size_changes
from residua.reproduce.scale import changes, parse_scale
from residua.study.plan import make_plan
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

ENTRIES = {name: load(name) for name in names()}
TRAINED = {name: entry for name, entry in ENTRIES.items() if not isinstance(entry, Nothing) and entry.trains}
SMALLEST = Fraction(1, 10**6)


@pytest.mark.parametrize("name", TRAINED)
def test_every_row_is_a_valid_run_at_full_and_smallest_scale(name: str) -> None:
    entry = TRAINED[name]
    for size in entry.sizes:
        for scale in (Fraction(1), SMALLEST):
            base = RunConfig.find(size.base).override(size_changes(size, scale))
            for row in entry.rows:
                assert base.override(overrides(row.variant, base.model)).model.width == base.model.width


@pytest.mark.parametrize("name", only_nightly(TRAINED, but=["001:fig28", "004:fig2", "000:fig5"]))
def test_every_entry_can_be_planned_at_the_smallest_scale(name: str, dataset: Dataset, tmp_path: Path) -> None:
    request = Request(scale=SMALLEST, data=str(dataset.path))
    entry = selected(TRAINED[name], request)
    study = build_study(name, entry, request)
    plan = make_plan(study, tmp_path / "study", dataset)
    assert len(plan.compared) == len(entry.rows) * len(entry.sizes) * entry.seeds
    assert len(entry.sizes) == 1 or list(study.sizes) == [size.name for size in entry.sizes]
    assert study.diagnose == (isinstance(entry, Inside) or entry.diagnosed)


@pytest.mark.parametrize("name", only_nightly(TRAINED, but=["000:fig5", "003:table2"]))
def test_demo_of_an_entry_is_a_shallow_study_of_its_first_size(name: str, dataset: Dataset, tmp_path: Path) -> None:
    whole, request = demo_of(TRAINED[name], Request(data=str(dataset.path), demo=True))
    entry = selected(whole, request)
    plan = make_plan(build_study(name, entry, request), tmp_path / "study", dataset)
    assert len(plan.compared) == len(TRAINED[name].rows)
    assert [size.name for size in entry.sizes] == [TRAINED[name].sizes[0].name]
    assert {run.config.model.layers for run in plan.runs} == {DEMO_LAYERS}
    assert {run.config.model.width for run in plan.runs} == {32} and {run.seed for run in plan.runs} == {0}


def test_figures_name_existing_sections_of_the_diagnosis_page() -> None:
    folder = Path(residua.__file__).parent / "diagnose" / "metrics"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    shown = {title for entry in ENTRIES.values() if isinstance(entry, Inside) for title in entry.shows}
    assert shown and [title for title in shown if f'"{title}"' not in source] == []
    notes = " ".join(note for entry in ENTRIES.values() if isinstance(entry, Inside) for note in entry.notes)
    views = re.findall("“(.*?)”", notes)
    assert "Block by block" in views and [view for view in views if f'"{view}"' not in source] == []


@pytest.mark.parametrize("base", ["mgr-s-prenorm", "exoformer-base", "outlier-2b-full", "outlier-2b-hybrid"])
def test_scale_multiplies_parameters_and_tokens_not_depth(base: str) -> None:
    whole = RunConfig.find(base)
    part = whole.override(changes(whole, Fraction(1, 4)))
    before, after = measure(whole.model), measure(part.model)
    outside = [size.parameters - size.embedding - size.head for size in (before, after)]
    assert outside[1] / outside[0] == pytest.approx(0.25, rel=0.01)
    assert part.tokens / whole.tokens == pytest.approx(0.25, rel=0.01)
    assert (part.model.layers, part.model.context) == (whole.model.layers, whole.model.context)
    assert part.train.steps / whole.train.steps == pytest.approx(math.sqrt(0.25), rel=0.01)
    assert part.train.optimizer == whole.train.optimizer


def test_full_scale_changes_only_the_tokens_of_a_preset() -> None:
    run = RunConfig.find("outlier-2b-full")
    assert run.override(changes(run, Fraction(1))) == run
    longer = run.override(changes(run, Fraction(1), tokens=120e9))
    assert longer.train.steps * longer.tokens_per_step == pytest.approx(120e9, rel=1e-4)


@pytest.mark.parametrize("text", ["0", "2", "-1/2", "much", "1/0"])
def test_a_scale_must_be_a_fraction(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as 1/32"):
        parse_scale(text)


VALID: dict[str, Any] = {
    "kind": '"study"',
    "title": '"Two rows"',
    "sizes": '[{ name = "S", base = "tiny" }]',
    "rows": '[{ name = "a", printed = "A", variant = ["base"] }, { name = "b", printed = "B", variant = ["mgr"] }]',
}


def written(folder: Path, **keys: str) -> Path:
    path = folder / "entry.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in {**VALID, **keys}.items()))
    return path


def test_a_new_table_needs_only_a_file(tmp_path: Path) -> None:
    assert isinstance(read_entry(written(tmp_path)), Study)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"kind": '"table"'}, "kind = 'table' does not exist|kind"),
        ({"columns": '["lose"]'}, "'lose' is not measured"),
        ({"baseline": '"c"'}, "baseline = 'c' is not a row"),
        ({"claims": '[{ kind = "below", text = "A claim", row = "a", than = "c" }]'}, "'A claim' names 'c'"),
        ({"columns": '["nvfp4_cost"]'}, "quantize is empty"),
        ({"columns": '["accuracy"]'}, "tasks is empty"),
        ({"sizes": '[{ name = "S", base = "tiny" }, { name = "S", base = "mini" }]'}, "uses a name twice"),
        ({"sizes": "[]"}, "sizes and rows go together"),
        ({"seed": "3"}, "seed"),
        (
            {"rows": '[{ name = "a", printed = "A", variant = ["base"], published = { M = { loss = 1.0 } } }]'},
            "has values for 'M'",
        ),
    ],
)
def test_an_invalid_entry_is_named(keys: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_entry(written(tmp_path, **keys))


def test_chosen_rows_and_sizes_keep_their_claims() -> None:
    entry = TRAINED["004:table1"]
    part = selected(entry, Request(sizes=("S",), rows=("mgr", "full_attnres")))
    assert [row.name for row in part.rows] == ["prenorm", "full_attnres", "mgr"]
    assert {claim.text for claim in part.claims} == {
        "At n=4 competitive MGR outperforms Full AttnRes",
        "Competitive MGR (n=4) outperforms pre-norm",
        "Full AttnRes outperforms pre-norm",
    }
    with pytest.raises(ConfigError, match="--rows mrg is not in this entry"):
        selected(entry, Request(rows=("mrg",)))
    with pytest.raises(ConfigError, match="only the baseline"):
        selected(entry, Request(rows=("prenorm",)))


def test_entry_files_are_in_the_package() -> None:
    assert FOLDER.is_dir() and len(list(FOLDER.glob("*/*.toml"))) == len(names())
