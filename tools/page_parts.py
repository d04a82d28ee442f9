"""The parts of a study's page that its data make; `results.py` puts them in their places.

    answer   what is run so far, the lowest loss first: how much lower, what it costs, what it is worth
    rates    the loss of each variant by learning rate
    picture  the cost of a step against what its tokens are worth (docs/img/NAME.svg)
    sizes    how much lower than the baseline's losses are, over the sizes of models (docs/img/NAME-sizes.svg)
    made     what was run, on what, and the commands that show it and run it again

and those that take a word:

    against NAMES    the answer relative to the first variant named; of all, or of those named after it
    also TITLES      further tables of the study, by title: `also low-precision,tasks`
    claims ENTRY     what the study says about the claims of a paper's table: `claims 004:table1`
    peaks VARIANTS   the largest |h| over tokens (docs/img/NAME-peaks.svg), and how it grew
    ladder STUDY     the gains if the ladder's largest budget were the baseline's runs in that study, on more text
    beside STUDIES   how much lower the losses of its variants are than in other studies (docs/img/NAME-depths.svg)
    over STUDIES     the law of sizes and budgets together with those files, named from docs/results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from residua.config.settings import ConfigError
from residua.reading import counted
from residua.report import Column, Value, plain
from residua.report.tables import markdown_table
from residua.reproduce.claims import Verdict
from residua.reproduce.entry import Order
from residua.reproduce.existing_study import NOT_THERE, share
from residua.study.extend_study import unite
from residua.study.figures import picture
from residua.study.gains import comparisons
from residua.study.results import StudyResult, VariantResult
from residua.study.results_file import SavedStudy
from residua.study.statistics import count, mean
from residua.study.tables import (
    EQUIVALENT,
    NONE,
    SPARED,
    STEPWISE,
    UNSTATED,
    cells,
    columns,
    joint_table,
    peak_table,
    study_tables,
)
from residua.study.verdicts import comparisons_sentence, own_baseline_sentence, validation_sentence

sys.path.append(str(Path(__file__).parent))
from study_extras import depths_picture, peak_picture, sizes_picture, with_external_ladder

ROOT = Path(__file__).parents[1]
RATE = "train.optimizer."
MAX_NAMED = 3
"""Missing runs."""
Studies, Results = dict[str, SavedStudy], dict[str, StudyResult]


def _short_table(result: StudyResult, rows: Sequence[VariantResult], without: Iterable[str]) -> list[str]:
    """Some columns of the study's table: none that is empty, and of speeds the ratio alone."""
    titles = [column.title for column in columns(result)]
    spared = {*without, STEPWISE} if EQUIVALENT in titles else {*without}
    table = [cells(row, result) for row in rows]
    others = [shown for shown, row in zip(table, rows, strict=True) if row.name != result.baseline]
    kept = [
        index for index, title in enumerate(titles)
        if title not in spared and any(shown[index].main not in (NONE, UNSTATED) for shown in others)
    ]  # fmt: skip
    if "throughput" in titles:
        place = titles.index("throughput")
        for shown in table:
            shown[place] = Value(shown[place].main)
    return markdown_table([columns(result)[i] for i in kept], [[shown[i] for i in kept] for shown in table])


def _caption(*results: StudyResult) -> list[str]:
    """On how many validation tokens the losses above are."""
    sentences = list(dict.fromkeys(sentence for result in results if (sentence := validation_sentence(result))))
    return ["", " ".join(sentences)] if sentences else []


def _compared(result: StudyResult) -> list[str]:
    """How many gains are clear of 1 after correction, and the best shrunk."""
    return ["", sentence] if (sentence := comparisons_sentence(result)) else []


def _answer(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    """Of the largest size."""
    return [*_short_table(result, _by_loss(result), SPARED), *_caption(result), *_compared(result)]


def _by_loss(result: StudyResult) -> list[VariantResult]:
    """The rows of the largest size, the lowest loss first."""
    losses = [(row.loss.value, row) for row in result.rows(result.sizes[-1]) if row.loss is not None]
    return [row for _, row in sorted(losses, key=lambda pair: pair[0])]


def _against(named: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Of the largest size. Variants that are not shown still count as comparisons."""
    baseline, *chosen = named.split(",")
    result = studies[name].result(baseline=baseline)
    rows = _by_loss(result)
    stranger = next((variant for variant in chosen if variant not in {row.name for row in rows}), None)
    if stranger is not None:
        raise ValueError(f"the study {name} has no run of {stranger}, which a page compares with {baseline}.")
    table = _short_table(result, [row for row in rows if not chosen or row.name in (baseline, *chosen)], SPARED)
    compared = _compared(result)
    if chosen and compared:
        every = counted(comparisons(result.sizes[-1], result), "comparison")
        compared = ["", f"Holm's correction covers all {every} with {baseline}, also those not shown."]
    return [*table, *_caption(result), "", own_baseline_sentence(result), *compared]


def _picture(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    return [f"![{name}: what a step costs and what it is worth]({up}docs/img/{name}.svg)"] if picture(result) else []


def _sizes(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    if not sizes_picture(result):
        return []
    differences = {size: _differences(result, size) for size in result.sizes}
    head = [Column("Δ loss [95 %]", numeric=False), *(Column(size, numeric=True) for size in result.sizes)]
    rows = [
        [Value(variant), *(of_size.get(variant, Value(NONE)) for of_size in differences.values())]
        for variant in differences[result.sizes[-1]]
    ]
    drawn = f"![{name}: gains over the sizes of models]({up}docs/img/{name}-sizes.svg)"
    return [drawn, "", *markdown_table(head, rows), *_caption(result)]


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
        return NONE
    words = f"{mean(losses):.4f}"
    return (f"**{words}**" if mean(losses) == best else words) + (f" (n = {len(losses)})" if len(losses) > 1 else "")


def _unescaped(lines: list[str]) -> list[str]:
    return [line.replace("\\*", "*") for line in lines]


def _rate(config: dict[str, dict[str, dict[str, float]]]) -> float:
    return config["train"]["optimizer"]["lr"]


def _made(name: str, saved: SavedStudy, result: StudyResult, up: str) -> list[str]:
    facts = [f"{len(saved.runs)} runs of {counted(len({run.variant for run in saved.runs}), 'variant')}"]
    if saved.dataset is not None:
        facts.append(f"{count(saved.dataset.train_tokens)} training tokens, vocabulary {saved.dataset.vocab_size:,}")
    software = [_software(about) for about in saved.environments]
    facts += dict.fromkeys(words for words in software if words)
    lines = [f"{'; '.join(facts)}. [{name}.json]({up}docs/results/{name}.json) has every run with curve and commit."]
    missing = _missing(saved)
    if missing:
        named = ", ".join(missing[:MAX_NAMED]) + f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
        lines += ["", f"Not run yet: {named}."]
    return [*lines, "", "```bash", *_commands(name, saved, bool(missing)), "```"]


def _software(about: dict[str, Any]) -> str:
    versions = " ".join(f"{key} {about[key]}" for key in ("torch", "triton") if key in about)
    return f"{about.get('gpu') or about.get('processor', 'unknown hardware')}, {versions}"


def _commands(name: str, saved: SavedStudy, incomplete: bool) -> list[str]:
    """Those that show the study, train it again where a file or one command line states it, and complete it."""
    lines = [f"residua compare docs/results/{name}.json   # all tables"]
    stated = [command for command in dict.fromkeys(saved.commands) if ".toml" not in command]
    if (ROOT / "docs" / "results" / "studies" / f"{name}.toml").exists():
        lines.append(f"residua compare docs/results/studies/{name}.toml --data TEXT --out runs/{name}   # train it")
    elif len(stated) == len(saved.commands) == 1:
        lines += stated
    if incomplete:
        lines.append(f"residua compare --results docs/results/{name}.json --data TEXT   # train the missing runs")
    return lines


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


def _also(titles: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    tables = {re.sub(r"[ ,]+", "-", table.title): table for table in study_tables(results[name])}
    stranger = next((title for title in titles.split(",") if title not in tables), None)
    if stranger is not None:
        raise ValueError(f"the study {name} has no table {stranger}: there are {', '.join(tables)}.")
    lines: list[str] = []
    for title in titles.split(","):
        lines += ["", f"**{tables[title].title[0].upper()}{tables[title].title[1:]}**", "", *tables[title].markdown()]
    return lines[1:]


CLAIMS = [Column(title, numeric=False) for title in ("claim", "direction", "magnitude", "ours", "paper")]


def _claims(entry: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """The verdicts on claims about rows that the study has, and how its recipe differs from the paper's."""
    try:
        shared = share(entry, studies[name])
    except ConfigError as problem:
        return [f"Not judged yet: {problem}"]
    strange = {row for row, why in shared.rows.absent.items() if why == NOT_THERE}
    claims = shared.entry.claims
    kept = tuple(claim for claim in claims if isinstance(claim, Order) or not strange & set(claim.named))
    notes = [note for note in shared.notes if not note.startswith(("In the study", "Rows that are missing"))]
    if left := len(claims) - len(kept):
        notes.append(f"Claims about rows that are not in this study, left out: {left} of {len(claims)}.")
    judged = replace(shared, entry=shared.entry.model_copy(update={"claims": kept}))
    rows = [_claim(verdict) for verdict in judged.verdicts()]
    return [*markdown_table(CLAIMS, rows), "", *(f"- {note}" for note in notes)]


def _claim(verdict: Verdict) -> list[Value]:
    """A verdict with the numbers alone: the claim names the rows and the measure."""
    ours = re.search(r"[-+]?\d+\.\d+×?(?: \[[^]]*\]| \(n=1[^)]*\))?$", verdict.found)
    paper = re.match(r"[-+]?\d+(?:\.\d+)?×?", verdict.printed)
    is_order = ";" in verdict.found
    return [
        Value(verdict.claim), Value(verdict.direction), Value(verdict.magnitude or NONE),
        Value(NONE if is_order else ours[0] if ours else verdict.found.rpartition(": ")[2]),
        Value(paper[0] if paper else NONE),
    ]  # fmt: skip


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
    rows = sorted((row for row in result.rows(result.sizes[-1]) if row.wall_clock_gain is not None), key=_seconds)
    budgets = ", ".join(f"{count(tokens)} (n = {len(losses)})" for tokens, losses in sorted(rungs.items()))
    return [
        *_short_table(result, rows, (*SPARED, "validation loss")),
        "",
        f"Tokens of {result.baseline}: {budgets}; the last is of [{other}]({up}docs/results/{other}.md).",
        *_caption(result),
        *_compared(result),
    ]


def _seconds(row: VariantResult) -> float:
    return 0.0 if row.wall_clock_gain is None else -row.wall_clock_gain.value


def _beside(others: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Each of the largest size: how much lower the loss of the study's variants is than the baseline's."""
    asked = [*others.split(","), name]
    stranger = next((other for other in asked if other not in results), None)
    if stranger is not None:
        raise ValueError(f"{name} beside {stranger}: studies are {', '.join(results)}.")
    differences = {other: _differences(results[other], results[other].sizes[-1]) for other in asked}
    shapes = {other: _shape(studies[other], results[other]) for other in asked}
    titles = [f"{shape['layers']} layers of {shape['width']}, {other}" for other, shape in shapes.items()]
    head = [Column("Δ loss [95 %]", numeric=False), *(Column(title, numeric=True) for title in titles)]
    rows = [
        [Value(variant), *(differences[other].get(variant, Value(NONE)) for other in asked)]
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


def _differences(result: StudyResult, size: str) -> dict[str, Value]:
    place = next(i for i, column in enumerate(columns(result)) if column.title.startswith("Δ loss"))
    rows = [row for row in result.rows(size) if row.difference is not None]
    return {row.name: cells(row, result)[place] for row in rows}


def _over(others: str, name: str, studies: Studies, results: Results, up: str) -> list[str]:
    """Gains at every size, and projected; and the sentence about their law."""
    folder = ROOT / "docs" / "results"
    result = unite([folder / f"{word}.json" for word in (name, *others.split(","))]).result()
    table = joint_table(result)
    if table is None:
        return ["No law of sizes and budgets can be fitted yet: a size lacks runs of the baseline."]
    rows = [row for row in table.rows if sum(cell.main != NONE for cell in row[1:]) > 1]  # at one size only: no news
    filled = [i for i in range(len(table.columns)) if any(row[i].main != NONE for row in rows)]
    head = [table.columns[i] for i in filled]
    return [*markdown_table(head, [[row[i] for i in filled] for row in rows]), "", plain.markdown(table.look_for)]


def pictures_of(text: str, block: re.Pattern[str], studies: Studies, results: Results) -> dict[str, str]:
    """Those that a page asks for by a word of its own, by name."""
    drawn: dict[str, str | None] = {}
    for _, name, part, word, _ in block.findall(text):
        if part == "peaks":
            drawn[f"{name}-peaks"] = peak_picture(results[name], word.split(","))
        if part == "beside":
            drawn[f"{name}-depths"] = _depths([*word.split(","), name], name, studies, results)
    return {name: svg for name, svg in drawn.items() if svg is not None}


PARTS: dict[str, Callable[[str, SavedStudy, StudyResult, str], list[str]]] = {
    "answer": _answer, "rates": _rates, "picture": _picture, "sizes": _sizes, "made": _made,
}  # fmt: skip
WITH_A_WORD: dict[str, tuple[str, Callable[[str, str, Studies, Results, str], list[str]]]] = {
    "against": ("NAMES", _against), "also": ("TITLES", _also), "claims": ("ENTRY", _claims),
    "peaks": ("VARIANTS", _peaks), "ladder": ("STUDY", _ladder), "beside": ("STUDIES", _beside),
    "over": ("STUDIES", _over),
}  # fmt: skip
