"""Write the tables and pictures of the documentation from the studies in docs/results: `make results`.

In README.md and the pages under docs, the lines between `<!-- study NAME PART -->` and `<!-- end -->` are made from
docs/results/NAME.json, which `residua compare --results` wrote; `page_parts.py` lists the parts. A study without a page
docs/results/NAME.md gets one of this form, which a person completes with the answer and its limits:

    # A question?            picture, answer table        ## Limits        ## Data and commands

What is made depends on the files alone.

    python tools/results.py NAME FOLDER ...

adds to docs/results/NAME.json what the folders of its study hold of its runs beyond it: telemetry's peaks, outliers,
accuracies, low precision, inspections, and in study.toml which tasks were asked. They need metrics.jsonl and the JSON
files of each run, and no weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from residua.study.extend_study import both_tasks, with_earlier
from residua.study.figures import picture
from residua.study.page import show_saved
from residua.study.records import Inspection, Peaks, both, read_run
from residua.study.results import StudyResult
from residua.study.results_file import FORMAT, SavedRun, SavedStudy

sys.path.append(str(Path(__file__).parent))
from page_parts import PARTS, WITH_A_WORD, pictures_of
from study_extras import sizes_picture

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- study (\S+) (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.S)


def made(root: Path = ROOT) -> dict[Path, str]:
    """Every page that comes from the studies, and every picture that a page shows, with its content."""
    studies = {path.stem: SavedStudy.read(path) for path in _study_files(root)}
    results = {name: show_saved(saved) for name, saved in studies.items()}
    files = {}
    for name, result in results.items():
        drawn = picture(result)
        if drawn is not None:
            files[root / "docs" / "img" / f"{name}.svg"] = drawn
        if (over_sizes := sizes_picture(result)) is not None:
            files[root / "docs" / "img" / f"{name}-sizes.svg"] = over_sizes
        page = root / "docs" / "results" / f"{name}.md"
        if not page.exists():
            files[page] = _new_page(name, drawn is not None)
    pages = {page: page.read_text(encoding="utf-8") for page in _pages(root)}
    for page, text in {**files, **pages}.items():
        if page.suffix == ".md" and BLOCK.search(text):
            files[page] = BLOCK.sub(partial(_filled, page.relative_to(root), studies, results), text)
            drawn = pictures_of(text, BLOCK, studies, results)
            files |= {root / "docs" / "img" / f"{name}.svg": svg for name, svg in drawn.items()}
    shown = "".join(files.get(page, text) for page, text in pages.items())
    shown += "".join(text for page, text in files.items() if page.suffix == ".md")
    return {path: text for path, text in files.items() if path.suffix != ".svg" or f"img/{path.name})" in shown}


def _study_files(root: Path) -> list[Path]:
    """The results of studies; other measurements may lie beside them."""
    found = sorted((root / "docs" / "results").glob("*.json"))
    return [path for path in found if f'"{FORMAT}"' in path.read_text(encoding="utf-8")[:100]]


def _pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def _new_page(name: str, drawn: bool) -> str:
    def block(part: str) -> str:
        return f"<!-- study {name} {part} -->\n<!-- end -->\n"

    parts = [
        f"# What does {name} show?\n",
        *([block("picture")] if drawn else []),
        block("answer"),
        "## Limits\n\n- Nobody has written an answer and its limits yet.\n",
        f"## Data and commands\n\n{block('made')}",
    ]
    return "\n".join(parts)


def _filled(page: Path, studies: dict[str, SavedStudy], results: dict[str, StudyResult], found: re.Match[str]) -> str:
    start, name, part, word, end = found.groups()
    if name not in studies or part not in (PARTS if word is None else WITH_A_WORD):
        parts = [*PARTS, *(f"{known} {what}" for known, (what, _) in WITH_A_WORD.items())]
        known = f"studies are {', '.join(studies)}, parts are {', '.join(parts)}"
        raise ValueError(f"{page} asks for part {part} of study {name}: {known}.")
    up = "../" * (len(page.parts) - 1)
    if word is None:
        lines = PARTS[part](name, studies[name], results[name], up)
    else:
        lines = WITH_A_WORD[part][1](word, name, studies, results, up)
    return "\n".join([start + "", *lines, "", end]) if lines else start + end


def supplemented(saved: SavedStudy, folder: Path) -> SavedStudy:
    """The study with what a folder has of its trained models, where it has none; another run is refused."""
    plan = saved.plan(folder)
    records = saved.records(plan)
    runs = []
    for run, kept in zip(plan.runs, saved.runs, strict=True):
        own = read_run(run.folder, run.config)
        if own.validation and own.validation[-1]["step"] >= kept.steps:
            if own.loss_curve != records[run].loss_curve:
                raise ValueError(f"{run.folder} holds another run than the study: its losses differ.")
            found = {
                "peaks": Peaks.of(own.telemetry), "outliers": own.outliers, "accuracies": own.accuracies,
                "quantized": own.quantized, "inspection": Inspection.rounded(own.inspection), "final": own.final,
            }  # fmt: skip
            kept = _with_missing(kept, {key: value for key, value in found.items() if value is not None})
        runs.append(kept)
    asked = with_earlier(saved.config, folder).tasks
    return saved.model_copy(update={"runs": tuple(runs), "tasks": both_tasks(saved.tasks, asked and asked.anywhere)})


def _with_missing(run: SavedRun, found: dict[str, object]) -> SavedRun:
    return run.model_copy(update={key: both(getattr(run, key), value) for key, value in found.items()})


def add(path: Path, folders: Sequence[Path]) -> None:
    """Add what folders hold to a results file, and say what it has then."""
    saved = SavedStudy.read(path)
    for folder in folders:
        saved = supplemented(saved, folder)
    saved.write(path)
    keys = ("peaks", "outliers", "accuracies", "quantized", "inspection")
    has = (f"{sum(getattr(run, key) is not None for run in saved.runs)} with {key}" for key in keys)
    print(f"{path.name}: {len(saved.runs)} runs, {', '.join(has)}")


def main() -> None:
    """Write every page and picture that has changed, and name it."""
    if sys.argv[1:]:
        add(ROOT / "docs" / "results" / f"{sys.argv[1]}.json", [Path(word) for word in sys.argv[2:]])
        return
    for path, content in made().items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
