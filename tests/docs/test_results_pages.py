"""Tables and pictures of the documentation match the output of `make results`."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from residua.config import variants
from residua.config.run import RunConfig
from residua.model.size import measure
from residua.study.config import StudyConfig, Tasks
from residua.study.plan import base_run
from residua.study.results_file import SavedStudy
from tests.docs.commands import load_module
from tests.reproduce.pretend import STEPS, saved_study, with_peaks

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs" / "results" / "learning-rates.json"


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_module("tools/results.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one study, whose second seed only pre-norm has, and no page."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    study = SavedStudy.read(STUDY)
    begun = tuple(run for run in study.runs if run.seed == 0 or run.variant == "prenorm")
    study.model_copy(update={"runs": begun}).write(tmp_path / "docs" / "results" / "rates.json")
    (tmp_path / "docs" / "results" / "other.json").write_text('{"step": 3}')
    (tmp_path / "README.md").write_text("# A title\n")
    return tmp_path


def made_of(results: ModuleType, root: Path, *blocks: str) -> tuple[str, dict[str, str]]:
    """The README with these blocks filled in, and every file that is made, by name."""
    (root / "README.md").write_text("".join(f"<!-- study {block} -->\nstale\n<!-- end -->\n" for block in blocks))
    made = results.made(root)
    return made[root / "README.md"], {path.name: content for path, content in made.items()}


def test_studies_not_started_yet_are_valid(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "lab" / "to-measure.md").read_text()
    for path in sorted((ROOT / "docs" / "results" / "studies").glob("*.toml")):
        if "[variants]" in path.read_text():  # others are sizes of a study
            study = StudyConfig.from_toml(path)
            assert study.name == path.stem and path.stem in page
            for size in study.sizes:
                base = base_run(study, size)
                for changes in study.variants.values():
                    assert base.override(variants.overrides(changes, base.model)).model.layers == base.model.layers


@pytest.mark.slow
def test_committed_results_pages_match_the_studies(results: ModuleType) -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, content in results.made(ROOT).items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    assert stale == [], "run `make results` and commit what it writes"


MOST_WORDS = 900
COMMIT = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b")


def _faults(text: str) -> list[str]:
    """Missing parts of a results page (question, answer, limits, commands), and excessive ones."""
    question, answer = text.split("\n\n")[:2]
    heads = [head for head in ("## Limits", "## Data and commands") if f"\n{head}\n" in text]
    words = [word for word in re.sub(r"<!--.*?-->", "", text).split() if re.search(r"\w", word)]
    faults = {
        "no question": not re.fullmatch(r"# .*\?", question),
        "no answer": not answer.startswith("**"),
        "no limits": "## Limits" not in heads,
        "no commands": heads[-1:] != ["## Data and commands"] or "```bash\nresidua " not in text,
        f"{len(words)} words": len(words) > MOST_WORDS,
        "a commit": COMMIT.search(re.sub(r"\]\([^)]*\)", "", text)),
    }
    return [fault for fault, present in faults.items() if present]


def test_results_pages_are_short_and_share_one_structure() -> None:
    pages = {page.name: page.read_text("utf-8") for page in (ROOT / "docs" / "results").glob("*.md")}
    assert {f"{path.stem}.md" for path in STUDY.parent.glob("*.json") if '"models"' in path.read_text()} < set(pages)
    assert {name: faults for name, text in pages.items() if (faults := _faults(text))} == {}


def test_committed_studies_survive_a_round_trip() -> None:
    for path in (STUDY, STUDY.with_name("depth-32.json")):  # without outliers, and with them
        assert SavedStudy.read(path).text() == path.read_text(encoding="utf-8")


def test_study_without_a_page_gets_a_stable_one(results: ModuleType, root: Path) -> None:
    (page, text), *others = results.made(root).items()
    assert (page, others) == (root / "docs" / "results" / "rates.md", [])
    assert "| prenorm (baseline) | 3.9758 ± 0.0013 | — | — |" in text and "throughput" not in text  # no run has a speed
    assert "Not run yet: mgr_exo seed 1" in text and "--results docs/results/rates.json" in text
    assert _faults(text.replace("does rates show?", "is it?\n\n**Yes.**")) == []
    page.write_text(text)
    assert results.made(root) == {page: text}


def test_a_block_is_replaced_and_the_text_around_it_stays(results: ModuleType, root: Path) -> None:
    readme = root / "README.md"
    readme.write_text("before\n<!-- study rates rates -->\nstale\n<!-- end -->\nafter\n")
    text = results.made(root)[readme]
    assert text.startswith("before\n<!-- study rates rates -->\n\n| variant | 0.5× | 1× | 2× |\n")
    assert "| prenorm | 3.9976 | **3.9758** (n = 2) | 3.9839 |" in text
    assert text.endswith("\n<!-- end -->\nafter\n") and "stale" not in text


def test_a_study_judges_the_claims_of_a_papers_table(results: ModuleType, root: Path) -> None:
    ends = {"prenorm": 3.0, "full_attnres": 2.9, "mgr": 2.95}
    saved_study(ends, {"mhc_lite": ["mhc_lite"]}).write(root / "docs" / "results" / "pretended.json")
    readme = root / "README.md"
    readme.write_text("before\n<!-- study pretended claims 004:table1 -->\nstale\n<!-- end -->\nafter\n")
    text = results.made(root)[readme]
    start = "before\n<!-- study pretended claims 004:table1 -->\n\n| claim | direction | magnitude | ours | paper |\n"
    assert text.startswith(start) and text.endswith("\n<!-- end -->\nafter\n") and "stale" not in text
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    ours = "-0.0999 [-0.1001, -0.0997]"  # by hand: ± 4.303 · 1e-4 / √3
    assert rows["Full AttnRes outperforms pre-norm"].endswith(f"| confirmed | larger | {ours} | -0.0374 |")
    assert "| contradicted |" in rows["At n=4 competitive MGR outperforms Full AttnRes"]
    lacking = "| not shown | not shown | without complete runs in this study | -0.0295 |"
    assert rows["mHC-lite outperforms pre-norm"].endswith(lacking)
    assert "- The paper's values next to ours: tiny is nearest to the paper's S.\n" in text
    readme.write_text(text)
    assert results.made(root)[readme] == text


def test_claims_that_a_study_cannot_judge_are_counted(results: ModuleType, root: Path) -> None:
    ends = {"prenorm": 3.0, "full_attnres": 2.9}
    saved_study(ends).write(root / "docs" / "results" / "pretended.json")
    text, _ = made_of(results, root, *(f"pretended claims {entry}" for entry in ("004:table1", "003:table1")))
    directions = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")]
    assert directions == ["direction", "not shown", "confirmed"]
    assert "- Claims about rows that are not in this study, left out: 9 of 11.\n" in text
    assert "Not judged yet: the study pretended has no complete run of the rows that 003:table1 compares" in text


def test_a_page_can_compare_with_another_variant(results: ModuleType, root: Path) -> None:
    ends = {"prenorm": 3.0, "mgr": 2.9, "exoformer": 2.85, "resformer": 2.95}
    saved_study(ends).write(root / "docs" / "results" / "pretended.json")
    every, chosen = "pretended against mgr", "pretended against mgr,exoformer"
    (text, _), (part, _) = made_of(results, root, every), made_of(results, root, chosen)
    names = [[line.split(" ")[1] for line in page.splitlines()[4:] if line.startswith("| ")] for page in (text, part)]
    assert names == [["exoformer", "mgr", "resformer", "prenorm"], ["exoformer", "mgr"]], "the lowest loss first"
    row = next(line for line in part.splitlines() if line.startswith("| exoformer"))
    assert row in text and float(row.split(" | ")[2].split()[0]) == pytest.approx(-0.05, abs=1e-3)
    assert "| mgr (baseline) |" in part and "own baseline is prenorm: models were matched to it." in part
    assert "After Holm's correction for 3 comparisons" in text and "The best was selected" not in part
    assert "Holm's correction covers all 3 comparisons with mgr, also those not shown." in part
    for block, words in (("lost", "no complete run of 'lost'"), ("mgr,lost", "has no run of lost")):
        with pytest.raises(ValueError, match=words):
            made_of(results, root, f"pretended against {block}")


def test_peaks_of_chosen_variants_are_drawn_and_listed(results: ModuleType, root: Path) -> None:
    saved = with_peaks(saved_study({"prenorm": 3.0, "gatednorm": 2.9}), {"prenorm": (2.0, 3.0, 4.0)})
    saved.write(root / "docs" / "results" / "pretended.json")
    text, files = made_of(results, root, "pretended peaks prenorm,gatednorm")
    assert "<svg" in files["pretended-peaks.svg"] and "](docs/img/pretended-peaks.svg)" in text
    assert "| prenorm | 2.02 (2 to 2.04) |" in text and "| gatednorm |" not in text
    with pytest.raises(ValueError, match="has no variant mgr"):
        made_of(results, root, "pretended peaks mgr")


@pytest.mark.slow
def test_a_ladder_can_include_longer_runs_of_another_study(results: ModuleType, root: Path) -> None:
    shutil.copy(STUDY.with_name("main-s.json"), root / "docs" / "results")
    study = SavedStudy.read(STUDY.with_name("mini-39m.json"))
    models = tuple(m.model_copy(update={"timings": {}}) if m.variant == "naive" else m for m in study.models)
    study.model_copy(update={"models": models}).write(root / "docs" / "results" / "mini-39m.json")
    longer = SavedStudy.read(STUDY.with_name("main-mini.json"))
    first = tuple(run for run in longer.runs if (run.variant, run.budget) == ("prenorm", 1.0) and run.seed < 2)
    curve = first[0].validation.model_copy(update={"step": tuple(2 * step for step in first[0].validation.step)})
    changes = {"budget": 2.0, "steps": 2 * first[0].steps, "validation": curve}
    twice = first[0].model_copy(update=changes)  # reads its text twice, so it is left out
    longer.model_copy(update={"runs": (*first, twice)}).write(root / "docs" / "results" / "main-mini.json")
    text, _ = made_of(results, root, "mini-39m ladder main-mini")
    # By hand: L(D) = 3.014963 + 466.9694·D^−0.353655 has mgr_resformer's 3.887065 at 1.3214 · 39.32 M tokens.
    assert "| mgr_resformer | -0.0904 [-0.1046, -0.0762] | 1.32× [1.27, 1.37] | 0.88× | 1.16× [1.11, 1.20] |" in text
    assert "Tokens of prenorm: 19.66 M (n = 3), 39.32 M (n = 3), 116.98 M (n = 2); the last is of [main-mini](" in text
    assert "| prenorm" not in text and "| naive" not in text  # the baseline, and a variant without speeds
    for other, words in (("lost", "asks for the study lost"), ("main-s", r"budgets of main-s: model\.\S+ differs")):
        with pytest.raises(ValueError, match=words):
            made_of(results, root, f"mini-39m ladder {other}")


@pytest.mark.slow
def test_studies_are_compared_on_their_common_variants(results: ModuleType, root: Path) -> None:
    shutil.copy(STUDY.with_name("mini-39m.json"), root / "docs" / "results")
    saved_study({"prenorm": 3.0, "mgr": 2.9, "mgr2": 2.8}).write(root / "docs" / "results" / "deep.json")
    text, files = made_of(results, root, "deep beside mini-39m")
    rows, drawn = [line for line in text.splitlines() if line.startswith("|")], files["deep-depths.svg"]
    assert "](docs/img/deep-depths.svg)" in text and ">mgr<" in drawn and ">mgr2<" not in drawn
    assert rows[0] == "| Δ loss [95 %] | 8 layers of 512, mini-39m | 4 layers of 128, deep |"
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| mgr", "| mgr2"]
    assert rows[2].split(" | ")[1] == "-0.0568 [-0.0693, -0.0442]" and rows[3].split(" | ")[1] == "—"
    assert [float(row.split(" | ")[2].split()[0]) for row in rows[2:]] == pytest.approx([-0.1, -0.2], abs=1e-3)
    # for any order of the studies, lines go from few layers to many; with one depth there is no picture
    assert "gains over 2 depths" in made_of(results, root, "mini-39m beside deep")[1]["mini-39m-depths.svg"]
    text, files = made_of(results, root, "rates beside mini-39m")
    assert "rates-depths.svg" not in files and "rates-depths.svg" not in text
    with pytest.raises(ValueError, match="deep beside lost: studies are"):
        made_of(results, root, "deep beside lost")


def test_results_file_is_filled_from_folders_without_weights(results: ModuleType, root: Path, tmp_path: Path) -> None:
    saved = with_peaks(saved_study({"prenorm": 3.0, "mgr": 2.9}), {"mgr": (1.0, 1.0, 1.0)})
    plan = saved.plan(tmp_path)
    for run, record in saved.records(plan).items():
        if run.variant == "prenorm" and run.seed < 2:
            rows = [{**row, "kind": "validation"} for row in record.validation]
            rows[-1]["step"] -= run.seed  # seed 1 was interrupted
            figures = {"peak": [7.0, 8.0], "sink_ratio": [1.0]}
            rows.append({"kind": "telemetry", "step": STEPS, "tokens": 1, "figures": figures})
            run.folder.mkdir(parents=True)
            (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (run.folder / "accuracies.json").write_text('{"wanted": ["arc"], "tasks": {"arc": {"value": 0.5}}}')
    asked = saved.config.model_copy(update={"tasks": Tasks(names=("arc",), folder="/there", shots=0, limit=9)})
    (tmp_path / "study.toml").write_text(asked.to_toml())
    before = saved.text()
    again = results.supplemented(saved, tmp_path)
    peaks = {(run.variant, run.seed): run.peaks and run.peaks.peak for run in again.runs}
    assert peaks["prenorm", 0] == (8.0,) and peaks["prenorm", 1] is peaks["prenorm", 2] is None
    assert [peaks["mgr", seed] for seed in range(3)] == [run.peaks.peak for run in saved.runs if run.variant == "mgr"]
    assert [(run.variant, run.seed) for run in again.runs if run.accuracies is not None] == [("prenorm", 0)]
    assert saved.text() == before and "/there" not in again.text()
    again.write(root / "docs" / "results" / "again.json")
    page, _ = made_of(results, root, "again also tasks")
    assert "**Tasks**\n\n| variant | arc | Δ arc [95 %] |" in page and "| prenorm | 50.00 (n=1) | — |" in page
    with pytest.raises(ValueError, match=r"study again has no table races: there are .*tasks"):
        made_of(results, root, "again also tasks,races")
    other = saved_study({"prenorm": 3.1, "mgr": 2.9})
    with pytest.raises(ValueError, match="holds another run than the study"):
        results.supplemented(other, tmp_path)


@pytest.mark.parametrize("block", ["lost rates", "rates sum", "rates claims", "rates table 004:table1", "rates peaks"])
def test_a_block_of_an_unknown_study_or_part_is_refused(results: ModuleType, root: Path, block: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md asks for part"):
        made_of(results, root, block)


CHEAPER = ["anchors.mixing.kind=static", "topology.streams=2"]
"""Keeps nine tenths of the gain at 20 tokens a parameter (docs/results/twenty.md)."""


@pytest.mark.parametrize(
    ("preset", "study", "variant", "changes"),
    [
        ("recommended-mini", "mini-39m", "mgr_resformer", []),
        ("recommended-mini-per-token", "main-mini", "mgr_exo", [*CHEAPER, "ffn.hidden=1656"]),
        ("recommended-s", "main-s", "mgr2_resformer", []),
        ("recommended-s-per-token", "main-s", "mgr_exo", [*CHEAPER, "ffn.hidden=2552"]),
    ],
)
def test_a_recommended_preset_follows_from_its_studies(
    preset: str, study: str, variant: str, changes: list[str]
) -> None:
    """But for `changes` to it that another study found nearly as good and faster."""
    saved = SavedStudy.read(ROOT / "docs" / "results" / f"{study}.json")
    (measured,) = (RunConfig(**model.config).model for model in saved.models if model.variant == variant)
    recommended = RunConfig.find(preset).model.override([f"vocab_size={measured.vocab_size}"])
    assert recommended == measured.override(changes)
    assert measure(recommended).parameters == pytest.approx(measure(measured).parameters, rel=0.001)


@pytest.mark.parametrize("kind", ["", "-per-token"])
def test_recommended_large_model_uses_the_measured_choices(kind: str) -> None:
    small, large = (RunConfig.find(f"recommended-{size}{kind}").model for size in "sl")
    assert (large.topology, large.anchors, large.norm) == (small.topology, small.anchors, small.norm)
    assert large.attention == small.attention.model_copy(update={"heads": 10})
    plain = RunConfig.find("mgr-l-prenorm").model
    assert (large.layers, large.width, large.ffn.kind) == (plain.layers, plain.width, plain.ffn.kind)
    assert measure(large).parameters == pytest.approx(measure(plain).parameters, rel=0.001)
