"""`residua reproduce`: a table or figure of a paper as one command, with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import (
    Calibration,
    Data,
    Tune,
    argument,
    command_line,
    option,
    parse_tune,
    resumable_study,
    say,
    split_names,
)
from residua.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from residua.reproduce.request import Request
    from residua.reproduce.run_entry import Reproduced

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SCALE = "1/32"
DEMO_OPTIONS = (
    "demo", "data", "sizes", "rows", "seeds", "set", "workers", "threads", "task-dir", "limit", "plan", "results",
)  # fmt: skip


@app.command()
def reproduce(
    entry: Annotated[str | None, argument("A table or figure, such as 004:table1.", metavar="ENTRY")] = None,
    scale: Annotated[
        str | None,
        option("Fraction of the paper's parameters and tokens; 1 is full size.", default=SCALE, metavar="1/32"),
    ] = None,
    data: Data = None,
    out: Annotated[Path | None, option("The study's folder.", default="runs/ENTRY, of a demo runs/ENTRY-demo")] = None,
    sizes: Annotated[str | None, option("Sizes of the table to train.", default="all", metavar="A,B,...")] = None,
    rows: Annotated[
        str | None, option("Which rows to train; the baseline is always included.", default="all", metavar="A,B,...")
    ] = None,
    seeds: Annotated[int | None, option("Seeds per row.", default="the entry's", min=1)] = None,
    workers: Annotated[int, option("Runs to train at the same time.", min=1)] = 1,
    threads: Annotated[int | None, option("CPU threads per run.", default="cores / workers", min=1)] = None,
    task_dir: Annotated[
        Path | None,
        option(
            "Local files, TASK.jsonl or .jsonl.xz, for the tasks in the table.",
            default="lm-eval, if it is installed",
        ),
    ] = None,
    limit: Annotated[int | None, option("Questions per task.", default="all", min=1)] = None,
    no_tasks: Annotated[bool, option("Skip the accuracies on tasks.", "--no-tasks")] = False,
    calibration: Calibration = None,
    tune: Tune = None,
    run: Annotated[list[Path] | None, option("Diagnose this model instead of training.", metavar="FOLDER")] = None,
    study: Annotated[
        Path | None,
        option(
            "Judge the claims from this file, written by `residua compare --results`, instead of training.",
            metavar="FILE.json",
        ),
    ] = None,
    change: Annotated[
        list[str] | None, option("Change a configuration key in every run.", "--set", metavar="SECTION.KEY=VALUE")
    ] = None,
    results: Annotated[Path | None, option("Save the numbers in this file, or extend it.", metavar="FILE")] = None,
    demo: Annotated[
        bool, option("Train tiny models on a CPU in minutes: a preview of the page, not evidence.", "--demo")
    ] = False,
    plan: Annotated[bool, option("Show the runs, tokens, FLOPs and hours, and stop.", "--plan")] = False,
) -> None:
    """Reproduce a table or figure of a paper on your machine, with the paper's numbers next to yours.

    \b
    residua reproduce
    residua reproduce 004:table1 --demo
    residua reproduce 004:table1 --plan
    residua reproduce 004:table1 --scale 1/32 --sizes S --data data/wiki --out runs/mgr
    residua reproduce 004:table1 --rows full_attnres,mgr --seeds 5
    residua reproduce 000:table1 --task-dir tasks --data data/wiki
    residua reproduce 004:table1 --tune lr=0.5x,1x,2x
    residua reproduce 003:fig1 --run models/Qwen3-0.6B
    residua reproduce 004:table1 --study wiki.json --out runs/mgr-wiki

    Without an entry, lists all entries and their costs. Ctrl-C saves and stops; the same command continues.
    """
    from residua.report.terminal import open_console
    from residua.reproduce.request import Request
    from residua.reproduce.scale import parse_scale

    console = open_console()
    share = parse_scale(scale or SCALE)
    request = Request(
        scale=share, sizes=tuple(split_names(sizes)), rows=tuple(split_names(rows)), seeds=seeds,
        set=tuple(change or ()), data=None if data is None else str(data), workers=workers, threads=threads,
        task_dir=None if task_dir is None else str(task_dir), limit=limit, no_tasks=no_tasks,
        tune=tuple((parse_tune(tune) or {}).get("lr", ())), calibration=calibration, demo=demo,
    )  # fmt: skip
    others = {"study": study, "run": run, "results": results, "plan": plan}  # a request with the options for training
    options = [*request.given, *(name for name, value in others.items() if value)]
    options += [] if scale is None else ["scale"]
    if entry is None:
        from residua.reproduce.run_entry import print_list

        options += [] if out is None else ["out"]
        _refuse(options, ("scale",), "--{} needs an entry, such as 004:table1: `residua reproduce` lists them.")
        print_list(console, share)
        return
    folder = out or Path("runs") / f"{entry.replace(':', '-')}{'-demo' if demo else ''}"
    if study is not None:
        from residua.reproduce.existing_study import reproduce_from

        _refuse(options, ("study", "rows"), "--study uses existing numbers and trains nothing: leave --{} out.")
        _tell(reproduce_from(entry, study, folder, console, request.rows), console)
        return
    from residua.reproduce import run_entry as work

    if demo:
        _refuse(options, DEMO_OPTIONS, "--demo sets its own size: leave --{} out.")
    if run:
        _refuse(options, ("run",), "--run diagnoses an existing model and trains nothing: leave --{} out.")
        page = work.look_inside(entry, run, folder, console)
        say(console, f"Report: {page.resolve()}")
        return
    if plan:
        work.show_plan(entry, request, folder, console)
        return
    _run_entry(entry, request, folder, results, console)


def _refuse(options: Sequence[str], but: Sequence[str], sentence: str) -> None:
    """Refuse options that would be ignored."""
    ignored = next((name for name in options if name not in but), None)
    if ignored is not None:
        raise UserError(sentence.format(ignored))


def _run_entry(entry: str, request: Request, folder: Path, results: Path | None, console: Console) -> None:
    from residua.reproduce.run_entry import reproduce

    with resumable_study():
        reproduced = reproduce(entry, request, folder, console, results, command_line())
    _tell(reproduced, console)
    if reproduced.outcome.diagnosis is not None:
        say(console, f"Inside the models: {reproduced.outcome.diagnosis.resolve()}")
    if not reproduced.complete:
        raise typer.Exit(1)


def _tell(reproduced: Reproduced, console: Console) -> None:
    for line in reproduced.lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    say(console, f"\nReport: {reproduced.outcome.report.resolve()}")
