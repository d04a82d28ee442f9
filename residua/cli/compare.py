"""`residua compare`: train variants × seeds on identical data and compare them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residua.cli.options import command_line, complain, parse_tune, split_names

if TYPE_CHECKING:
    from rich.console import Console

    from residua.study import StudyConfig

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def compare(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT...|STUDY.toml|FOLDER|RESULTS.json",
            show_default=False,
            help="Names from --list, joined with + to combine them; the first is the baseline. Or one study file or "
            "folder, or a file of --results to show.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(show_default="tiny", help="The preset or run TOML that the variants change.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", show_default=False, help="Begin every variant with the weights of this run."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, show_default="3", help="Seeds per variant.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(show_default="the embedded corpus", help="A folder made by `residua data prepare`."),
    ] = None,
    out: Annotated[Path | None, typer.Option(show_default="runs/NAME", help="The study's folder.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            show_default=False,
            help="Also keep the numbers in this file; if it exists, extend it, without training its runs again.",
        ),
    ] = None,
    baseline: Annotated[str | None, typer.Option(show_default="the first", help="Compare with this variant.")] = None,
    match: Annotated[
        str | None,
        typer.Option(show_default="ffn", help="Match parameters within 0.5 % by `ffn` width or `depth`, or `none`."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", show_default=False, help="Fit compute scaling over these presets or run TOMLs."
        ),
    ] = None,
    tokens_per_parameter: Annotated[
        float | None,
        typer.Option(show_default="each size's own steps", help="Training tokens per parameter, with --sizes."),
    ] = None,
    ladder: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,1,...",
            show_default=False,
            help="Also train the baseline with these shares of the steps, for gains in equivalent tokens.",
        ),
    ] = None,
    time_alone: Annotated[
        bool | None,
        typer.Option("--time-alone", show_default=False, help="Time every step alone; always with several workers."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, show_default="1", help="Runs at the same time.")] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, show_default="cores / workers, at most OMP_NUM_THREADS", help="CPU threads of each run."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="fp8,nvfp4,...",
            show_default=False,
            help="Also measure each model's loss in low precision, as in fp8,nvfp4+smooth.",
        ),
    ] = None,
    calibration: Annotated[
        int | None, typer.Option(min=1, show_default="4096", help="Sequences that SmoothQuant calibrates on.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,TASK,...",
            show_default=False,
            help="Also score each model on tasks of lm-eval or of --task-dir, as `residua eval` does.",
        ),
    ] = None,
    task_dir: Annotated[
        Path | None, typer.Option(show_default=False, help="Local multiple-choice files, TASK.jsonl or .jsonl.xz.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, show_default="the task's own", help="Worked examples before each question.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="Questions per task.")] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="lr=0.5x,1x,...",
            show_default=False,
            help="Try these multiples of each variant's learning rate on short runs, and train with the best.",
        ),
    ] = None,
    diagnose: Annotated[
        bool | None,
        typer.Option("--diagnose", show_default=False, help="Also diagnose every trained model; each gets a page."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            show_default=False,
            help="A change to every run, on top of the study's own.",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Four tiny models on the embedded corpus, in minutes.")] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Show the planned runs and stop; with --results, complete runs of --out are added to it."
        ),
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the known variants and stop.")] = False,
) -> None:
    """Does a depth architecture pay on your data, per step and per second?

    \b
    residua compare --demo
    residua compare prenorm block_attnres mgr exoformer --base mini --seeds 3 --data data/wiki --out runs/wiki
    residua compare prenorm mgr mgr+exoformer gatednorm --set train.steps=1000
    residua compare prenorm mgr --ladder 0.5,1,1.5,2 --workers 4
    residua compare prenorm mgr --sizes tiny,mini --tokens-per-parameter 20
    residua compare prenorm gated_attention preaffine gatednorm --quantize fp8,nvfp4,nvfp4+smooth
    residua compare prenorm mgr --tune lr=0.5x,1x,2x
    residua compare prenorm mgr --tasks exoformer --task-dir tasks
    residua compare prenorm mgr --diagnose
    residua compare base block_attnres mgr --from runs/qwen3 --data data/wiki --set train.steps=500
    residua compare study.toml
    residua compare study.toml --results docs/results/wiki.json
    residua compare docs/results/wiki.json

    Ctrl-C saves and stops; the same command continues. Complete runs are reused.
    """
    from residua.report.terminal import open_console

    console = open_console()
    if listing:
        _list(console)
        return
    given = {
        "base": base, "seeds": seeds, "data": None if data is None else str(data), "baseline": baseline,
        "match": None if match is None else {"kind": match}, "workers": workers, "threads": threads,
        "set": change, "scaling": _scaling(sizes, tokens_per_parameter), "calibration": calibration,
        "diagnose": diagnose, "ladder": _budgets(ladder), "time_alone": time_alone,
        "quantize": None if quantize is None else split_names(quantize),
        "tasks": _tasks(tasks, task_dir, shots, limit), "tune": parse_tune(tune),
    }  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    if what and len(what) == 1 and what[0].endswith(".json"):
        _show(Path(what[0]), out, console, [*chosen, *(["from"] * bool(start)), *(["results"] * bool(results))])
        return
    if start is not None:
        _refuse_other_shapes(chosen)
    folder = Path(what[0]) if what and len(what) == 1 and Path(what[0]).is_dir() else None
    if folder is not None and results is None and out in (None, folder):
        results = _remembered(folder, console)
    study = _study(what or [], demo, chosen, start, folder, results)
    _conduct(study, out or folder or Path("runs") / study.name, console, plan, results)


def _remembered(folder: Path, console: Console) -> Path | None:
    """The results file that a folder's study was extended by; tells if it is used, or is gone."""
    from rich.text import Text

    from residua.study.remembered import remembered_results

    found = remembered_results(folder)
    if found is None:
        return None
    there = found.is_file()
    told = (
        f"{folder} goes on with its results file {found}, as if --results named it."
        if there
        else f"{found}, the results file of {folder}, is gone: runs that only it had are trained again."
    )
    console.print(Text(f"• {told}"), soft_wrap=True)
    return found if there else None


def _show(path: Path, out: Path | None, console: Console, given: list[str]) -> None:
    """Print the tables of a results file; with --out, also write its page there."""
    from residua.config.settings import ConfigError
    from residua.files import refuse_used
    from residua.study.conduct import show_saved
    from residua.study.saved import SavedStudy
    from residua.study.tables import print_study

    if given:
        raise ConfigError(f"{path} holds results, which are only shown: --{given[0].replace('_', '-')} has no effect.")
    if out is not None:
        refuse_used(out)
    print_study(console, show_saved(SavedStudy.read(path), out))
    if out is not None:
        console.print(f"\nReport: {(out / 'report.html').resolve()}", soft_wrap=True)


def _refuse_other_shapes(given: dict[str, Any]) -> None:
    """Refuse options that give the variants of --from other shapes than the weights have."""
    from residua.config.settings import ConfigError

    if "base" in given or "scaling" in given:
        raise ConfigError("--from gives the base and its size: leave --base and --sizes out.")
    if given.get("match", {"kind": "none"}) != {"kind": "none"}:
        raise ConfigError("variants that begin with given weights have their shapes: leave --match out.")


def _study(
    what: list[str], demo: bool, given: dict[str, Any], start: Path | None, folder: Path | None, results: Path | None
) -> StudyConfig:
    """The study that is named, with what the command line changes in it."""
    from residua.config.settings import of_file
    from residua.study.config import StudyConfig
    from residua.study.given import changed, started

    file, study = _written(what, demo, folder, results, "tasks" in given)
    if start is not None:
        study = started(_without_shapes(study) if demo else study, start)
    with nullcontext() if file is None else of_file(file):
        study = changed(study, given)
        _require_names(study.get("tasks"), given)
        return StudyConfig(**study)


def _without_shapes(study: dict[str, Any]) -> dict[str, Any]:
    """The demo for given weights, without its own shapes, which they do not have."""
    return {**study, "set": [change for change in study["set"] if not change.startswith("model.")]}


def _written(
    what: list[str], demo: bool, folder: Path | None, results: Path | None, asks: bool
) -> tuple[str | Path | None, dict[str, Any]]:
    """The demo, a study file, the study of a folder or of a results file, or named variants; and the file it is in.

    A results file's tasks are part of its study only if the command `asks` tasks: their files are elsewhere.
    """
    from residua.config.settings import ConfigError, read_toml
    from residua.study.config import DEMO
    from residua.study.plan import STARTED, STUDY
    from residua.study.saved import SavedStudy

    files = [name for name in what if name.endswith(".toml")]
    if demo and what:
        raise ConfigError("--demo has its own variants: give either --demo or names.")
    if demo:
        return None, read_toml(DEMO)
    if files:
        if len(what) > 1:
            raise ConfigError(f"{files[0]} is a whole study: give either one study file or names of variants.")
        study = read_toml(files[0])
        _refuse_run(files[0], study)
        return files[0], {"name": Path(files[0]).stem, **study}
    if folder is not None:
        file = folder / (STARTED if (folder / STARTED).exists() else STUDY)
        if not file.exists():
            raise ConfigError(f"{folder} holds no study (no {STUDY}): name the study file it was made from.")
        return file, read_toml(file)
    if not what and results is not None and results.exists():
        saved = SavedStudy.read(results)
        named = {} if saved.tasks is None or not asks else {"tasks": saved.tasks.model_dump(exclude_none=True)}
        return None, {**saved.study, **named}
    if not what and results is not None:
        raise ConfigError(
            f"{results} does not exist, so there is no study to continue: name its variants, or another file."
        )
    _refuse_other_words(what)
    if len(what) < 2:
        raise ConfigError("name two variants or more, a study file, or --demo; `residua compare --list` has the names.")
    return None, {"variants": what}


def _refuse_run(file: str, study: dict[str, Any]) -> None:
    """Refuse the configuration of a run, and a study that extends one."""
    from residua.config.settings import ConfigError

    if "variants" in study and "extends" in study:
        raise ConfigError(
            f"{file}: a study extends nothing: write base = {study['extends']!r}, which its variants change."
        )
    if "variants" not in study and ("extends" in study or isinstance(study.get("model"), dict)):
        raise ConfigError(
            f"{file} configures a run, not a study: compare variants of it with `residua compare prenorm mgr --base "
            f"{file}`."
        )


def _refuse_other_words(what: list[str]) -> None:
    """Say what to do with words that are no names of variants."""
    from residua.config.settings import ConfigError
    from residua.config.variants import is_known
    from residua.study.plan import STARTED, STUDY

    for word in what:
        if word.endswith(".json"):
            raise ConfigError(f"{word} is a file, not a variant: name a results file with --results {word}.")
        if "/" in word and len(what) == 1:
            raise ConfigError(f"{word} is no folder: name the folder of a study, a study file, or variants.")
        if "/" in word:
            raise ConfigError(f"{word} is a path, not a variant: name a study's folder alone, without variants.")
        if not is_known(word) and any((Path(word) / name).is_file() for name in (STUDY, STARTED)):
            raise ConfigError(f"{word} is the folder of a study, not a variant: name it alone, without variants.")
        if "," in word:
            names = " ".join(" ".join(what).replace(",", " ").split())
            raise ConfigError(f"{word!r} holds a comma: separate variants by spaces, as in `residua compare {names}`.")


def _conduct(study: StudyConfig, out: Path, console: Console, plan_only: bool, results: Path | None) -> None:
    from residua.files import keeping
    from residua.reading import counted
    from residua.study.conduct import conduct
    from residua.study.preview import preview
    from residua.study.runner import StudyInterrupted
    from residua.study.tables import print_study

    if plan_only:
        preview(study, out, console, results)
        return
    try:
        with keeping("trained runs are kept, and the same command goes on from them"):
            outcome = conduct(study, out, console, results, command_line())
    except StudyInterrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(130) from None
    print_study(console, outcome.result)
    console.print(f"\nReport: {outcome.report.resolve()}", soft_wrap=True)
    if outcome.diagnosis is not None:
        console.print(f"Inside the models: {outcome.diagnosis.resolve()}", soft_wrap=True)
    console.print(f"Next: open it in a browser; numbers are in {out / 'results.json'}", soft_wrap=True)
    if not outcome.complete:
        missing = [run for run in outcome.result.runs if run.status != "complete"]
        for run in missing:
            complain(f"{run.folder} did not complete{f': {run.problem}' * bool(run.problem)}")
        complain(f"{len(missing)} of {counted(len(outcome.result.runs), 'run')} did not complete: see above.")
        raise typer.Exit(1)


def _scaling(sizes: str | None, tokens_per_parameter: float | None) -> dict[str, Any] | None:
    from residua.config.settings import ConfigError

    if sizes is None:
        if tokens_per_parameter is not None:
            raise ConfigError("--tokens-per-parameter needs --sizes: it sets how long each size trains.")
        return None
    names = split_names(sizes)
    if len(names) < 2:
        raise ConfigError(f"--sizes {sizes} is too few to fit: name two sizes or more, as in tiny,mini.")
    if tokens_per_parameter is None:
        return {"sizes": names}
    if not 0 < tokens_per_parameter < math.inf:
        raise ConfigError(f"--tokens-per-parameter {tokens_per_parameter:g} is no length: use a number above 0.")
    return {"sizes": names, "tokens_per_parameter": tokens_per_parameter}


def _tasks(tasks: str | None, folder: Path | None, shots: int | None, limit: int | None) -> dict[str, Any] | None:
    given = {"folder": None if folder is None else str(folder), "shots": shots, "limit": limit}
    chosen = {key: value for key, value in given.items() if value is not None}
    return {"names": split_names(tasks), **chosen} if tasks is not None else chosen or None


def _require_names(tasks: Any, given: dict[str, Any]) -> None:
    """Refuse options of tasks if neither the command nor the study names any."""
    from residua.config.settings import ConfigError

    if "tasks" in given and "names" not in tasks:
        option = {"folder": "--task-dir"}.get(next(iter(tasks)), f"--{next(iter(tasks))}")
        raise ConfigError(f"{option} needs --tasks: name the tasks, or a group such as exoformer.")


def _budgets(ladder: str | None) -> list[float] | None:
    from residua.config.settings import ConfigError

    try:
        return None if ladder is None else [float(word) for word in ladder.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"--ladder {ladder} is not a list of numbers: write it as 0.5,1,1.5,2.") from None


def _list(console: Console) -> None:
    from residua.config.variants import KNOWN, NUMBERED

    width = max(len(name) for name in KNOWN)
    for name, variant in KNOWN.items():
        console.print(f"{name:<{width}}  {variant.summary}")
    console.print(f"{', '.join(NUMBERED)}: the same with another number N, such as block6", highlight=False)
