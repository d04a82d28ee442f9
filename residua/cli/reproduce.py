"""`residua reproduce`: a table or figure of a paper as one command, the paper's number beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import command_line, parse_tune, split_names

if TYPE_CHECKING:
    from rich.console import Console

    from residua.reproduce.build import Request
    from residua.reproduce.conduct import Reproduced

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SCALE = "1/32"


@app.command()
def reproduce(
    entry: Annotated[
        str | None,
        typer.Argument(metavar="ENTRY", show_default=False, help="A table or figure, such as 004:table1."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="1/32",
            show_default=SCALE,
            help="Share of the paper's parameters and tokens; 1 is its size.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(show_default="the embedded corpus", help="A folder made by `residua data prepare`."),
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default="runs/ENTRY", help="The study's folder.")] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="A,B,...", show_default="all", help="Sizes of the table to train.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", show_default="all", help="Rows to train; the baseline is always one."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, show_default="the entry's", help="Seeds per row.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="cores / workers", help="CPU threads of each run.")
    ] = None,
    task_dir: Annotated[
        Path | None,
        typer.Option(
            show_default="lm-eval, if it is installed",
            help="Local files, TASK.jsonl or .jsonl.xz, of the tasks whose accuracies a table has.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="Questions per task.")] = None,
    no_tasks: Annotated[bool, typer.Option("--no-tasks", help="Measure no accuracies.")] = False,
    calibration: Annotated[
        int | None, typer.Option(min=1, show_default="4096", help="Sequences that SmoothQuant calibrates on.")
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="lr=0.5x,1x,...",
            show_default=False,
            help="Try these multiples of each row's learning rate on short runs, and train with the best.",
        ),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", show_default=False, help="Look inside this model instead of training."),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            show_default=False,
            help="Judge from this file of `residua compare --results` instead of training.",
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", show_default=False, help="A change to every run."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Keep the numbers in this file, and extend it."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show runs, tokens, FLOPs and hours, and stop.")] = False,
) -> None:
    """See a table or figure of a paper on your machine, the paper's number beside yours.

    \b
    residua reproduce
    residua reproduce 004:table1 --plan
    residua reproduce 004:table1 --scale 1/32 --sizes S --data data/wiki --out runs/mgr
    residua reproduce 004:table1 --rows full_attnres,mgr --seeds 5
    residua reproduce 000:table1 --task-dir tasks --data data/wiki
    residua reproduce 004:table1 --tune lr=0.5x,1x,2x
    residua reproduce 003:fig1 --run models/Qwen3-0.6B
    residua reproduce 004:table1 --study wiki.json --out runs/mgr-wiki

    Without an entry, lists all of them with what they cost. Ctrl-C saves and stops; the same command continues.
    """
    from residua.report.terminal import open_console
    from residua.reproduce.build import Request
    from residua.reproduce.scale import parse_scale

    console = open_console()
    share = parse_scale(scale or SCALE)
    request = Request(
        scale=share, sizes=_names(sizes), rows=_names(rows), seeds=seeds, set=tuple(change or ()),
        data=None if data is None else str(data), workers=workers, threads=threads,
        task_dir=None if task_dir is None else str(task_dir), limit=limit, no_tasks=no_tasks, tune=_multiples(tune),
        calibration=calibration,
    )  # fmt: skip
    own = {"study": study, "run": run, "results": results, "plan": plan}  # a request has the options of a training
    given = [*request.given(but=("scale",)), *(name for name, value in own.items() if value)]
    given += [] if scale is None else ["scale"]
    if entry is None:
        from residua.reproduce.listing import print_list

        given += [] if out is None else ["out"]
        _refuse(given, ("scale",), "--{} needs an entry, such as 004:table1: `residua reproduce` lists them.")
        print_list(console, share)
        return
    folder = out or Path("runs") / entry.replace(":", "-")
    if study is not None:
        from residua.reproduce.shared import reproduce_from

        _refuse(given, ("study", "rows"), "--study takes numbers that exist and trains nothing: leave --{} out.")
        _tell(reproduce_from(entry, study, folder, console, request.rows), console)
        return
    from residua.reproduce import conduct as work

    if run:
        _refuse(given, ("run",), "--run looks inside a model that exists and trains nothing: leave --{} out.")
        page = work.look_inside(entry, run, folder, console)
        console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)
        return
    if plan:
        work.show_plan(entry, request, folder, console)
        return
    _conduct(entry, request, folder, results, console)


def _refuse(given: Sequence[str], but: Sequence[str], sentence: str) -> None:
    """Refuse options that would be ignored: those that were given, but for the ones that have a meaning here."""
    from residua.errors import UserError

    ignored = next((name for name in given if name not in but), None)
    if ignored is not None:
        raise UserError(sentence.format(ignored))


def _conduct(entry: str, request: Request, folder: Path, results: Path | None, console: Console) -> None:
    from residua.files import keeping
    from residua.reproduce.conduct import reproduce as conduct
    from residua.study.runner import StudyInterrupted

    try:
        with keeping("trained runs are kept, and the same command goes on from them"):
            made = conduct(entry, request, folder, console, results, command_line())
    except StudyInterrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(130) from None
    _tell(made, console)
    if made.outcome.diagnosis is not None:
        console.print(f"Inside the models: {made.outcome.diagnosis.resolve()}", soft_wrap=True, markup=False)
    if not made.complete:
        raise typer.Exit(1)


def _tell(made: Reproduced, console: Console) -> None:
    for line in made.lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"\nReport: {made.outcome.report.resolve()}", soft_wrap=True, markup=False)


def _multiples(text: str | None) -> tuple[str, ...]:
    found = parse_tune(text)
    return () if found is None else tuple(found["lr"])


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(split_names(text))
