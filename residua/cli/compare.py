"""`residua compare`: train variants × seeds on identical data and compare them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residua.cli.options import (
    Calibration,
    Data,
    Shots,
    TaskDir,
    Tune,
    argument,
    command_line,
    complain,
    option,
    parse_tune,
    resumable_study,
    say,
    split_names,
)
from residua.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from residua.study import StudyConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def compare(
    what: Annotated[
        list[str] | None,
        argument(
            "Variants from --list, joined with + to combine them; the first is the baseline. Or a study file, a "
            "study folder, or files written by --results, shown as one study.",
            metavar="VARIANT...|STUDY.toml|FOLDER|RESULTS.json...",
        ),
    ] = None,
    base: Annotated[str | None, option("The preset or run TOML that the variants change.", default="tiny")] = None,
    start: Annotated[
        Path | None, option("Initialize every variant with the weights of this run.", "--from", metavar="RUN")
    ] = None,
    seeds: Annotated[int | None, option("Seeds per variant.", default="3", min=1)] = None,
    data: Data = None,
    out: Annotated[Path | None, option("Folder of the study.", default="runs/NAME")] = None,
    results: Annotated[
        Path | None,
        option(
            "Also save the numbers in this file. If it exists, extend it without retraining its runs.",
            metavar="FILE.json",
        ),
    ] = None,
    baseline: Annotated[str | None, option("The variant that others are compared with.", default="the first")] = None,
    match: Annotated[
        str | None,
        option(
            "Match parameters within 0.5 % by changing the `ffn` width or the `depth`, match `flops` instead, "
            "or `none`.",
            default="ffn",
        ),
    ] = None,
    sizes: Annotated[
        str | None, option("Fit compute scaling over these presets or run TOMLs.", metavar="A,B,...")
    ] = None,
    tokens_per_parameter: Annotated[
        float | None, option("Training tokens per parameter, with --sizes.", default="each size's own steps")
    ] = None,
    ladder: Annotated[
        str | None,
        option(
            "Also train the baseline for these multiples of the steps, to state gains in equivalent tokens.",
            metavar="0.5,1,...",
        ),
    ] = None,
    time_alone: Annotated[
        bool | None,
        option(
            "Time each variant's step with no other run on the machine; always on with several workers.", "--time-alone"
        ),
    ] = None,
    target: Annotated[
        float | None,
        option(
            "Race to this validation loss: report and test the tokens and seconds that each variant needs.",
            metavar="LOSS",
        ),
    ] = None,
    workers: Annotated[int | None, option("Runs to train at the same time.", default="1", min=1)] = None,
    threads: Annotated[
        int | None, option("CPU threads per run.", default="cores / workers, at most OMP_NUM_THREADS", min=1)
    ] = None,
    quantize: Annotated[
        str | None,
        option(
            "Also measure each model's loss in low precision, for example fp8,nvfp4+smooth.", metavar="fp8,nvfp4,..."
        ),
    ] = None,
    calibration: Calibration = None,
    tasks: Annotated[
        str | None,
        option(
            "Also score each model on tasks from lm-eval or --task-dir, as `residua eval` does.",
            metavar="TASK,TASK,...",
        ),
    ] = None,
    task_dir: TaskDir = None,
    shots: Shots = None,
    limit: Annotated[int | None, option("Questions per task.", default="all", min=1)] = None,
    tune: Tune = None,
    diagnose: Annotated[
        bool | None, option("Also diagnose every trained model and write a page for each.", "--diagnose")
    ] = None,
    change: Annotated[
        list[str] | None,
        option("A change to every run, added to those of the study.", "--set", metavar="SECTION.KEY=VALUE"),
    ] = None,
    demo: Annotated[
        bool,
        option(
            "Train tiny models on the embedded corpus in minutes: prenorm and block_attnres unless variants are named.",
            "--demo",
        ),
    ] = False,
    plan: Annotated[
        bool,
        option(
            "Show the planned runs and stop. With --results, first add the complete runs in --out to the file.",
            "--plan",
        ),
    ] = False,
    listing: Annotated[bool, option("List the known variants and stop.", "--list")] = False,
) -> None:
    """Does a depth architecture pay on your data, per step and per second?

    \b
    residua compare --demo
    residua compare prenorm block_attnres mgr exoformer --base mini --seeds 3 --data data/wiki --out runs/wiki
    residua compare prenorm mgr mgr+exoformer gatednorm --set train.steps=1000
    residua compare prenorm mgr --ladder 0.5,1,1.5,2 --workers 4
    residua compare prenorm mgr --target 3.28 --seeds 10
    residua compare prenorm mgr --sizes tiny,mini --tokens-per-parameter 20
    residua compare prenorm gated_attention preaffine gatednorm --quantize fp8,nvfp4,nvfp4+smooth
    residua compare prenorm mgr --tune lr=0.5x,1x,2x
    residua compare prenorm mgr --tasks exoformer --task-dir tasks
    residua compare prenorm mgr --diagnose
    residua compare base block_attnres mgr --from runs/qwen3 --data data/wiki --set train.steps=500
    residua compare study.toml
    residua compare study.toml --results docs/results/wiki.json
    residua compare docs/results/wiki.json
    residua compare docs/results/wiki.json --baseline mgr
    residua compare small.json large.json --out runs/page
    residua compare first-machine.json second-machine.json --results both.json

    Ctrl-C saves and stops; the same command continues. Complete runs are reused.
    """
    from residua.report.terminal import open_console

    console = open_console()
    if listing:
        _list(console)
        return
    options = {
        "base": base, "seeds": seeds, "data": None if data is None else str(data), "baseline": baseline,
        "match": None if match is None else {"kind": match}, "workers": workers, "threads": threads,
        "set": change, "scaling": _scaling(sizes, tokens_per_parameter), "calibration": calibration,
        "diagnose": diagnose, "ladder": _budgets(ladder), "time_alone": time_alone,
        "target": target,
        "quantize": None if quantize is None else split_names(quantize),
        "tasks": _tasks(tasks, task_dir, shots, limit), "tune": parse_tune(tune),
    }  # fmt: skip
    chosen = {key: value for key, value in options.items() if value is not None}
    if what and all(word.endswith(".json") for word in what):
        ignored = [*(key for key in chosen if key != "baseline"), *["from"] * bool(start)]
        _show([Path(word) for word in what], out, results, console, baseline, ignored)
        return

    from residua.cli.compare_study import resolve_study

    folder = Path(what[0]) if what and len(what) == 1 and Path(what[0]).is_dir() else None
    if folder is not None and results is None and out in (None, folder):
        results = _remembered(folder, console)
    study = resolve_study(what or [], demo, chosen, start, folder, results)
    _run_study(study, out or folder or Path("runs") / study.name, console, plan, results)


def _remembered(folder: Path, console: Console) -> Path | None:
    """The results file that the folder's study last used; prints whether it is used again or missing."""
    from rich.text import Text

    from residua.study.extend_study import linked_results

    path = linked_results(folder)
    if path is None:
        return None
    sentence = f"{folder} resumes with its results file {path}, as if you had given it with --results."
    if not path.is_file():
        sentence = f"{path}, the results file of {folder}, is missing: runs recorded only there are trained again."
    console.print(Text(f"• {sentence}"), soft_wrap=True)
    return path if path.is_file() else None


def _show(
    files: list[Path],
    out: Path | None,
    results: Path | None,
    console: Console,
    baseline: str | None,
    ignored: list[str],
) -> None:
    """Print the tables of results files, several as one study; write its page to `out` and its file to `results`."""
    from residua.files import refuse_used
    from residua.study.extend_study import unite
    from residua.study.page import show_saved
    from residua.study.tables import print_study

    if ignored:
        option = ignored[0].replace("_", "-")
        raise UserError(f"{files[0]} holds results, which can only be shown: --{option} has no effect.")
    if baseline is not None and results is not None:
        raise UserError("--baseline only changes what is shown, and a file keeps its own: leave --results out.")
    if out is not None:
        refuse_used(out)
    if results is not None and results.exists():
        raise UserError(f"{results} exists: name a new file for the joined results.")
    whole = unite(files)
    if results is not None:
        whole.write(results)
    print_study(console, show_saved(whole, out, baseline=baseline))
    if results is not None:
        say(console, f"\nAll {len(whole.runs)} runs are in {results}")
    if out is not None:
        say(console, f"\nReport: {(out / 'report.html').resolve()}")


def _run_study(study: StudyConfig, out: Path, console: Console, plan_only: bool, results: Path | None) -> None:
    from residua.reading import counted
    from residua.study.run_study import preview, run_study
    from residua.study.tables import print_study

    if plan_only:
        preview(study, out, console, results)
        return
    with resumable_study():
        outcome = run_study(study, out, console, results, command_line())
    print_study(console, outcome.result)
    say(console, f"\nReport: {outcome.report.resolve()}")
    if outcome.diagnosis is not None:
        say(console, f"Inside the models: {outcome.diagnosis.resolve()}")
    say(console, f"Next: open it in a browser; numbers are in {out / 'results.json'}")
    if not outcome.complete:
        missing = [run for run in outcome.result.runs if run.status != "complete"]
        for run in missing:
            complain(f"{run.folder} did not complete{f': {run.problem}' * bool(run.problem)}")
        complain(f"{len(missing)} of {counted(len(outcome.result.runs), 'run')} did not complete: see above.")
        raise typer.Exit(1)


def _scaling(sizes: str | None, tokens_per_parameter: float | None) -> dict[str, Any] | None:
    if sizes is None:
        if tokens_per_parameter is not None:
            raise UserError("--tokens-per-parameter needs --sizes: it sets the training length of each size.")
        return None
    names = split_names(sizes)
    if len(names) < 2:
        raise UserError(f"--sizes {sizes} is too few for a fit: name at least two sizes, as in tiny,mini.")
    if tokens_per_parameter is None:
        return {"sizes": names}
    if not 0 < tokens_per_parameter < math.inf:
        raise UserError(f"--tokens-per-parameter {tokens_per_parameter:g} must be above 0.")
    return {"sizes": names, "tokens_per_parameter": tokens_per_parameter}


def _tasks(tasks: str | None, folder: Path | None, shots: int | None, limit: int | None) -> dict[str, Any] | None:
    options = {"folder": None if folder is None else str(folder), "shots": shots, "limit": limit}
    chosen = {key: value for key, value in options.items() if value is not None}
    return {"names": split_names(tasks), **chosen} if tasks is not None else chosen or None


def _budgets(ladder: str | None) -> list[float] | None:
    try:
        return None if ladder is None else [float(word) for word in ladder.split(",") if word.strip()]
    except ValueError:
        raise UserError(f"--ladder {ladder} is not a list of numbers: write it as 0.5,1,1.5,2.") from None


def _list(console: Console) -> None:
    from residua.config.variants import KNOWN, NUMBERED

    width = max(len(name) for name in KNOWN)
    for name, variant in KNOWN.items():
        console.print(f"{name:<{width}}  {variant.summary}")
    console.print(f"{', '.join(NUMBERED)}: these take any number N, as in block6", highlight=False)
