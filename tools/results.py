"""Write the tables and pictures of the documentation from the studies in docs/results: `make results`.

In README.md and the pages under docs, the lines between `<!-- study NAME PART -->` and `<!-- end -->` are made from
docs/results/NAME.json, which `residua compare --results` wrote. The parts:

    table    the study's tables
    answer   what is run so far, the lowest loss first: how much lower, what it costs, what it is worth
    rates    the loss of each variant by learning rate
    losses   the loss of every run
    picture  the cost of a step against what its tokens are worth (docs/img/NAME.svg)
    sizes    how much lower than the baseline's losses are, over the sizes of models (docs/img/NAME-sizes.svg)
    made     text, software, hardware and commands, and what is not run yet
    claims   what the study says about the claims of a paper's table, which is named after it:
             `<!-- study NAME claims 004:table1 -->`
    peaks    the largest |h| over tokens of the variants named after it (docs/img/NAME-peaks.svg), and how it grew:
             `<!-- study NAME peaks prenorm,gatednorm -->`
    ladder   the gains if the ladder's largest budget were the baseline's runs in the study named after it, which has
             more text: `<!-- study NAME ladder OTHER -->`
    beside   how much lower the losses of its variants are than in the studies named after it:
             `<!-- study NAME beside OTHER,ANOTHER -->`; and over the layers of their models (docs/img/NAME-depths.svg)
    over     the law of sizes and budgets of the study together with those in the files named after it, seen from
             docs/results: `<!-- study NAME over NAME/8x384,NAME/8x512 -->`

A study without a page docs/results/NAME.md gets one. What is made depends on the files alone.

    python tools/results.py NAME FOLDER ...

adds to docs/results/NAME.json what the folders of its study hold of its runs beyond it: telemetry's peaks, outliers,
accuracies, low precision, inspections, and in study.toml which tasks were asked. They need metrics.jsonl and the JSON
files of each run, and no weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from residua.config.settings import ConfigError
from residua.reading import counted
from residua.report import Column, Value, plain
from residua.report.tables import markdown_table
from residua.reproduce.comparison import claims_table
from residua.reproduce.entry import Order
from residua.reproduce.existing_study import NOT_THERE, share
from residua.study.config import Tasks
from residua.study.extend_study import both_tasks, unite, with_earlier
from residua.study.figures import picture
from residua.study.page import show_saved
from residua.study.records import Inspection, Peaks, both, read_run
from residua.study.results import StudyResult, VariantResult
from residua.study.results_file import FORMAT, SavedRun, SavedStudy
from residua.study.statistics import count, mean
from residua.study.tables import cells, columns, joint_table, markdown_tables, peak_table
from residua.study.verdicts import comparisons_sentence, validation_sentence

sys.path.append(str(Path(__file__).parent))
from study_extras import depths_picture, peak_picture, sizes_picture, with_external_ladder

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- study (\S+) (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.S)
RATE = "train.optimizer."


def made(root: Path = ROOT) -> dict[Path, str]:
    """Every page and picture that comes from the studies, with its content."""
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
            files |= _pictures(root, text, studies, results)
    return files


def _study_files(root: Path) -> list[Path]:
    """The results of studies; other measurements may lie beside them."""
    found = sorted((root / "docs" / "results").glob("*.json"))
    return [path for path in found if f'"{FORMAT}"' in path.read_text(encoding="utf-8")[:100]]


def _pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def _new_page(name: str, drawn: bool) -> str:
    parts = ["table", *(["picture"] if drawn else []), "losses", "made"]
    blocks = "\n\n".join(f"<!-- study {name} {part} -->\n<!-- end -->" for part in parts)
    return f"# {name}\n\n{blocks}\n"


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


def _table(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    return [*markdown_tables(result), *_caption(result), *_compared(result)]


def _caption(*results: StudyResult) -> list[str]:
    """On how many validation tokens the losses above are."""
    said = list(dict.fromkeys(sentence for result in results if (sentence := validation_sentence(result))))
    return ["", " ".join(said)] if said else []


def _compared(result: StudyResult) -> list[str]:
    """How many gains are clear of 1 after correction, and the best shrunk."""
    return ["", said] if (said := comparisons_sentence(result)) else []


def _answer(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    """Of the largest size."""
    dropped = ("parameters", "bits/byte", "memory", "training loss")
    kept = [(i, column) for i, column in enumerate(columns(result)) if column.title not in dropped]
    losses = [(row.loss.value, row) for row in result.rows(result.sizes[-1]) if row.loss is not None]
    rows = [row for _, row in sorted(losses, key=lambda pair: pair[0])]
    cells_of = [cells(row, result) for row in rows]
    table = markdown_table([column for _, column in kept], [[row[i] for i, _ in kept] for row in cells_of])
    return [*table, *_caption(result), *_compared(result)]


def _picture(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    return [f"![{name}: what a step costs and what it is worth]({up}docs/img/{name}.svg)"] if picture(result) else []


def _sizes(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    return (
        [f"![{name}: gains over the sizes of models]({up}docs/img/{name}-sizes.svg)"] if sizes_picture(result) else []
    )


def _rates(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    """Rows are variants without their changes of the learning rate, columns the rate over that of the base."""
    study = saved.config
    rates = {model.variant: _rate(model.config) for model in saved.models}
    plain = {tuple(e for e in entries if not e.startswith(RATE)): v for v, entries in reversed(study.variants.items())}
    own = {variant: plain[tuple(e for e in entries if not e.startswith(RATE))]
           for variant, entries in study.variants.items()}  # fmt: skip
    losses: dict[tuple[str, float], list[float]] = {}
    for run in result.runs:
        if run.loss is not None and run.budget == 1.0:
            key = own[run.variant], round(rates[run.variant] / rates[own[run.variant]], 6)
            losses.setdefault(key, []).append(run.loss)
    factors = sorted({factor for _, factor in losses})
    columns = [Column("variant", numeric=False), *(Column(f"{factor:g}×", numeric=True) for factor in factors)]
    rows = []
    for variant in dict.fromkeys(own.values()):
        cells = [losses.get((variant, factor), []) for factor in factors]
        best = min((mean(cell) for cell in cells if cell), default=None)
        rows.append([Value(variant), *(Value(_mean_loss(cell, best)) for cell in cells)])
    return [*_unescaped(markdown_table(columns, rows)), *_caption(result)]


def _mean_loss(losses: list[float], best: float | None) -> str:
    if not losses:
        return "—"
    words = f"{mean(losses):.4f}"
    return (f"**{words}**" if mean(losses) == best else words) + (f" (n = {len(losses)})" if len(losses) > 1 else "")


def _unescaped(lines: list[str]) -> list[str]:
    return [line.replace("\\*", "*") for line in lines]


def _rate(config: dict[str, dict[str, dict[str, float]]]) -> float:
    return config["train"]["optimizer"]["lr"]


def _losses(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    """One row per size, variant and budget, one column per seed."""
    seeds = sorted({run.seed for run in result.runs})
    found: dict[tuple[str, str, float], dict[int, float]] = {}
    for run in result.runs:
        if run.loss is not None:
            found.setdefault((run.size, run.variant, run.budget), {})[run.seed] = run.loss
    columns = [Column("variant", numeric=False), *(Column(f"seed {seed}", numeric=True) for seed in seeds)]
    rows = []
    order = list(saved.config.variants)
    for (size, variant, budget), losses in sorted(found.items(), key=lambda item: _place(result, order, *item[0])):
        title = f"{size} {variant}" if len(result.sizes) > 1 else variant
        title += f", {budget:g}× tokens" if budget != 1.0 else ""
        rows.append([Value(title), *(Value(f"{losses[s]:.4f}" if s in losses else "—") for s in seeds)])
    return [*markdown_table(columns, rows), *_caption(result)]


def _place(
    result: StudyResult, order: list[str], size: str, variant: str, budget: float
) -> tuple[int, bool, int, float]:
    """By size, the ladder last, variants as the study names them."""
    return result.sizes.index(size), budget != 1.0, order.index(variant), budget


def _made(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    lines = [f"Numbers and curves: [{name}.json]({up}docs/results/{name}.json), {len(saved.runs)} runs."]
    if saved.dataset is not None:
        facts = saved.dataset
        lines.append(
            f"Text: {count(facts.train_tokens)} training tokens, vocabulary {facts.vocab_size:,}, fingerprint "
            f"`{saved.fingerprint}`."
        )
    if saved.tasks is not None:
        lines.append(f"Tasks: {_asked(saved.tasks)}.")
    for index, about in enumerate(saved.environments):
        runs = sum(run.environment == index for run in saved.runs)
        software = ", ".join(f"{key} {about[key]}" for key in ("torch", "triton", "cuda", "python") if key in about)
        place = about.get("gpu") or about.get("processor", "unknown hardware")
        commit = str(about.get("commit", "unknown"))[:10]
        lines.append(f"{runs} runs: Residua {about.get('residua', '?')} at {commit}, {software}; {place}.")
    lines += [f"Made by `{command}`." for command in dict.fromkeys(saved.commands)]
    missing = _missing(saved)
    if missing:
        shown = ", ".join(missing[:12]) + (f" and {len(missing) - 12} more" if len(missing) > 12 else "")
        again = f"`residua compare --results docs/results/{name}.json --data FOLDER`"
        lines.append(f"Not run yet: {shown}. {again} trains them.")
    return [f"- {line}" for line in lines]


def _asked(tasks: Tasks) -> str:
    shots = "the worked examples of each task" if tasks.shots is None else counted(tasks.shots, "worked example")
    limit = "all questions" if tasks.limit is None else f"at most {counted(tasks.limit, 'question')} each"
    return f"{', '.join(tasks.names)} ({tasks.folder or 'lm-evaluation-harness'}), {shots}, {limit}"


def _missing(saved: SavedStudy) -> list[str]:
    study = saved.config
    asked = [(variant, budget) for variant in study.variants for budget in study.budgets_of(variant)]
    done = {(run.size, run.variant, run.budget, run.seed) for run in saved.runs}
    return [
        f"{f'{size} ' if len(study.sizes) > 1 else ''}{variant}{f' {budget:g}×' if budget != 1.0 else ''} seed {seed}"
        for size in study.sizes
        for variant, budget in asked
        for seed in study.seeds
        if (size, variant, budget, seed) not in done
    ]


Studies, Results = dict[str, SavedStudy], dict[str, StudyResult]


def _claims(entry: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """The verdicts on claims about rows that the study has, and how it differs from the paper."""
    try:
        shared = share(entry, studies[name])
    except ConfigError as problem:
        return [f"Not judged yet: {problem}"]
    strange = {row for row, why in shared.rows.absent.items() if why == NOT_THERE}
    claims = shared.entry.claims
    kept = tuple(claim for claim in claims if isinstance(claim, Order) or not strange & set(claim.named))
    notes = list(shared.notes)
    if left := len(claims) - len(kept):
        notes.append(f"Claims about rows that are not in this study, left out: {left} of {len(claims)}.")
    judged = replace(shared, entry=shared.entry.model_copy(update={"claims": kept}))
    return [*claims_table(judged.verdicts()), "", *(f"- {note}" for note in notes)]


def _peaks(variants: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Of the largest size."""
    chosen, result = variants.split(","), results[name]
    stranger = next((variant for variant in chosen if variant not in studies[name].config.variants), None)
    if stranger is not None:
        raise ValueError(f"the study {name} has no variant {stranger}, whose peaks a page asks for.")
    table = peak_table(result, result.sizes[-1], chosen)
    if table is None:
        return []
    drawn = f"![{name}: peak |h| while training]({up}docs/img/{name}-peaks.svg)"
    return [drawn, "", *table.markdown()]


def _ladder(other: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Of the largest size, the largest gain per second first; speeds are those of the study's own table."""
    if other not in results:
        raise ValueError(f"the ladder of {name} asks for the study {other}: studies are {', '.join(results)}.")
    result, rungs = with_external_ladder(studies[name], studies[other])
    found = sorted((row for row in result.rows(result.sizes[-1]) if row.wall_clock_gain is not None), key=_seconds)
    kept = [i for i, column in enumerate(columns(result)) if column.title.startswith(("variant", *GAINS))]
    cells_of = [cells(row, result) for row in found]
    table = markdown_table([columns(result)[i] for i in kept], [[row[i] for i in kept] for row in cells_of])
    budgets = ", ".join(f"{count(tokens)} (n = {len(losses)})" for tokens, losses in sorted(rungs.items()))
    return [
        *table,
        "",
        f"Tokens of {result.baseline}: {budgets}; the last is of [{other}]({up}docs/results/{other}.md).",
        *_compared(result),
    ]


GAINS = ("equivalent tokens", "throughput", "wall-clock gain", "pays")


def _seconds(row: VariantResult) -> float:
    return 0.0 if row.wall_clock_gain is None else -row.wall_clock_gain.value


def _beside(others: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Each of the largest size: how much lower the loss of the study's variants is than the baseline's."""
    asked = [*others.split(","), name]
    stranger = next((other for other in asked if other not in results), None)
    if stranger is not None:
        raise ValueError(f"{name} beside {stranger}: studies are {', '.join(results)}.")
    differences = {other: _differences(results[other]) for other in asked}
    shapes = {other: _shape(studies[other], results[other]) for other in asked}
    titles = [f"{shape['layers']} layers of {shape['width']}, {other}" for other, shape in shapes.items()]
    head = [Column("Δ loss [95 %]", numeric=False), *(Column(title, numeric=True) for title in titles)]
    rows = [
        [Value(variant), *(differences[other].get(variant, Value("—")) for other in asked)]
        for variant in differences[name]
    ]
    drawn = f"![{name}: gains over the layers of models]({up}docs/img/{name}-depths.svg)"
    caption = _caption(*(results[other] for other in asked))
    return [*markdown_table(head, rows), *caption, *(["", drawn] if _depths(asked, name, studies, results) else [])]


def _depths(asked: Sequence[str], name: str, studies: Studies, results: Results) -> str | None:
    layers = [(int(_shape(studies[other], results[other])["layers"]), results[other]) for other in asked]
    return depths_picture(results[name], layers)


def _shape(saved: SavedStudy, result: StudyResult) -> dict[str, Any]:
    """The model of the largest size."""
    return next(model.config["model"] for model in saved.models if model.size == result.sizes[-1])


def _differences(result: StudyResult) -> dict[str, Value]:
    place = next(i for i, column in enumerate(columns(result)) if column.title.startswith("Δ loss"))
    rows = [row for row in result.rows(result.sizes[-1]) if row.difference is not None]
    return {row.name: cells(row, result)[place] for row in rows}


def _over(others: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Gains at every size, and projected; and the sentence about their law."""
    folder = ROOT / "docs" / "results"
    result = unite([folder / f"{word}.json" for word in (name, *others.split(","))]).result()
    table = joint_table(result)
    if table is None:
        return ["No law of sizes and budgets can be fitted yet: a size lacks runs of the baseline."]
    return [*table.markdown(), "", plain.markdown(table.look_for)]


def _pictures(root: Path, text: str, studies: Studies, results: Results) -> dict[Path, str]:
    """Those that a page asks for by a word of its own."""
    drawn = {}
    for _, name, part, word, _ in BLOCK.findall(text):
        if part == "peaks":
            drawn[f"{name}-peaks"] = peak_picture(results[name], word.split(","))
        if part == "beside":
            drawn[f"{name}-depths"] = _depths([*word.split(","), name], name, studies, results)
    return {root / "docs" / "img" / f"{name}.svg": svg for name, svg in drawn.items() if svg is not None}


PARTS: dict[str, Callable[[str, SavedStudy, StudyResult, str], list[str]]] = {
    "table": _table, "answer": _answer, "rates": _rates, "losses": _losses, "picture": _picture,
    "sizes": _sizes, "made": _made,
}  # fmt: skip
WITH_A_WORD: dict[str, tuple[str, Callable[[str, str, Studies, Results, str], list[str]]]] = {
    "claims": ("ENTRY", _claims), "peaks": ("VARIANTS", _peaks), "ladder": ("STUDY", _ladder),
    "beside": ("STUDIES", _beside), "over": ("STUDIES", _over),
}  # fmt: skip


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
