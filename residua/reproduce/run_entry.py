"""`residua reproduce`: list the entries, plan one, run it as a study, or diagnose the user's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.text import Text

from residua.bench.operators import measure_ceilings
from residua.config.settings import ConfigError
from residua.machine import choose_device
from residua.reading import counted
from residua.report.terminal import ProgressBars
from residua.reproduce.claims import DIVERGED, Measured, verdicts
from residua.reproduce.comparison import Comparison
from residua.reproduce.entry import DOCUMENTS, Inside, Nothing, Study, load, names
from residua.reproduce.request import Cost, Request, build_study, demo_of, estimated_cost, selected, tasks_sentence
from residua.reproduce.scale import sentence
from residua.study.config import StudyConfig
from residua.study.extend_study import plan_study
from residua.study.page import Outcome
from residua.study.plan import StudyPlan, open_dataset
from residua.study.run_study import run_study
from residua.study.statistics import count
from residua.study.tables import print_study
from residua.study.train_runs import announce, refuse_strangers

NEEDS_MODELS = "--run FOLDER"
MAX_STATED_HOURS = 30 * 24.0
TOO_LONG = "over a month"  # no exact number for a time that nobody would wait for
TRAINING_SHARE = 0.4
"""Training reaches about this share of a large matrix product's FLOP/s; used to convert FLOPs into hours."""


@dataclass(frozen=True)
class Reproduced:
    """The study run for an entry, and the lines with the verdicts on the paper's claims."""

    outcome: Outcome
    lines: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every run completed or diverged (some papers claim divergence)."""
        runs = self.outcome.result.runs
        return all(run.status == "complete" or DIVERGED.search(run.problem) for run in runs)


def reproduce(
    name: str, request: Request, out: Path, console: Console, results: Path | None = None, command: str = ""
) -> Reproduced:
    """Run an entry as a study in `out`; its page and results.md show the paper's values and the verdicts."""
    entry, study = _study(name, request, out)
    console.print(Text(f"{name}: {entry.title}. {request.sentence}"), soft_wrap=True)
    if line := tasks_sentence(entry, study):
        console.print(Text(line), soft_wrap=True)
    comparison = Comparison(name, entry, request.sentence, out)
    outcome = run_study(study, out, console, results, command, supplement=comparison)
    print_study(console, outcome.result)
    lines = [f"• {verdict.sentence}" for verdict in verdicts(Measured(entry, outcome.result, out))]
    return Reproduced(outcome, tuple(lines))


def _study(name: str, request: Request, out: Path) -> tuple[Study, StudyConfig]:
    """Select the entry and build its study; refuse a folder with other content."""
    whole = trained(name)
    if request.demo:
        whole, request = demo_of(whole, request)
    entry = selected(whole, request)
    refuse_strangers(out)
    return entry, build_study(name, entry, request)


def show_plan(name: str, request: Request, out: Path, console: Console) -> None:
    """Print the planned runs, tokens, FLOPs and hours on this device; write and train nothing."""
    entry, study = _study(name, request, out)
    plan = plan_study(study, out, open_dataset(study, progress=console.is_terminal), None)
    console.print(Text(f"{name}: {entry.title}. {request.sentence}"), soft_wrap=True)
    announce(console, study, plan)
    if line := tasks_sentence(entry, study):
        console.print(Text(line), soft_wrap=True)
    cost = planned_cost(plan)
    line = (
        f"{counted(cost.runs, 'run')}, {count(cost.tokens)} tokens, {cost.flops:.2g} FLOPs: about "
        f"{duration(cost.flops / training_rate())} of training steps on this device, one run at a time; "
        "validation and the measurements afterwards take additional time."
    )
    console.print(Text(line), soft_wrap=True)
    longest = max(run.config.tokens for run in plan.runs) / plan.text_tokens
    repeats = f"The longest run reads the text {longest:.1f} times: use a longer text if possible."
    for note in (*([repeats] if longest > 1 else []), *entry.notes):
        console.print(Text(f"• {note}"), soft_wrap=True)


def planned_cost(plan: StudyPlan) -> Cost:
    """Runs, tokens and FLOPs of a plan."""
    runs = (*plan.runs, *plan.trials)
    flops = sum(run.config.tokens * plan.models[run.size, run.variant].flops_per_token for run in runs)
    return Cost(len(runs), float(sum(run.config.tokens for run in runs)), flops)


def duration(seconds: float) -> str:
    """Format a time for people."""
    for unit, size, least in (("years", 365 * 86400.0, 1.0), ("days", 86400.0, 2.0), ("hours", 3600.0, 1.0)):
        if seconds >= least * size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"


def training_rate() -> float:
    """Expected training FLOP/s on this device, from a matrix product timed now."""
    return TRAINING_SHARE * measure_ceilings(choose_device("auto")).matmul_flops_per_second


def look_inside(name: str, runs: Sequence[Path], out: Path, console: Console) -> Path:
    """Diagnose the user's models for an `inside` entry; returns the page."""
    from residua.diagnose import diagnose

    entry = load(name)
    if not isinstance(entry, Inside):
        raise ConfigError(f"--run is for entries that diagnose a model, but {name} does not: leave it out.")
    with ProgressBars(console) as bars:
        diagnose(list(runs), out, progress=bars.stages())
    console.print(Text(inside_sentence(name, entry)), soft_wrap=True)
    return out / "report.html"


def inside_sentence(name: str, entry: Inside) -> str:
    """Where a diagnosis page shows the paper's figure."""
    sections = ", ".join(f"“{title}”" for title in entry.shows)
    return f"{name} is in the section {sections} of the page. {entry.missing}".rstrip()


def trained(name: str) -> Study:
    """Load an entry with rows to train; refuse others and name an alternative."""
    entry = load(name)
    if isinstance(entry, Nothing):
        raise ConfigError(f"{name} cannot be reproduced: {entry.reason}. Nearest: {entry.nearest}.")
    if not entry.trains:
        raise ConfigError(f"{name} diagnoses existing models: name a model with --run FOLDER.")
    return entry


def by_use(document: str) -> dict[str, Study | Inside]:
    """A document's runnable entries: those that train first, then those that diagnose the user's models."""
    known = {name: load(name) for name in names() if name.startswith(document)}
    runnable = {name: entry for name, entry in known.items() if not isinstance(entry, Nothing)}
    return dict(sorted(runnable.items(), key=lambda item: not item[1].trains))


def print_list(console: Console, scale: Fraction) -> None:
    """Print one line per entry: its title, its runs and their time at `scale`; unavailable entries come last."""
    rate = training_rate()
    for document, title in DOCUMENTS.items():
        console.print(Text(f"{document}: {title}", style="bold"), soft_wrap=True)
        _line(console, "entry", "runs", f"at {scale}", "what")
        for name, entry in by_use(document).items():
            _line(console, name, *_cells(entry, scale, rate))
        console.print()
    console.print(Text("Not available", style="bold"))
    for name in names():
        if isinstance(lacking := load(name), Nothing):
            _print(console, f"{name:<11} {lacking.title} ({lacking.reason}). Nearest: {lacking.nearest}")
    console.print()
    console.print(Text(sentence(scale)), soft_wrap=True)
    console.print(
        "Next: residua reproduce ENTRY --demo trains tiny models in minutes; --plan shows tokens, FLOPs and time.",
        soft_wrap=True,
    )


def _line(console: Console, name: str, runs: str, cost: str, what: str) -> None:
    _print(console, f"{name:<11} {runs:>4}  {cost:<13} {what}")


def _print(console: Console, words: str) -> None:
    """Print a line, truncated to a terminal's width but whole in a file."""
    if console.is_terminal:
        console.print(Text(words), no_wrap=True, overflow="ellipsis", highlight=False)
    else:
        console.print(Text(words), soft_wrap=True, highlight=False)


def _cells(entry: Study | Inside, scale: Fraction, rate: float) -> tuple[str, str, str]:
    """An entry's number of runs, training time at the scale, and title."""
    if not entry.trains:
        return "", NEEDS_MODELS, entry.title
    cost = estimated_cost(entry, scale)
    seconds = cost.flops / rate
    return str(cost.runs), TOO_LONG if seconds > 3600 * MAX_STATED_HOURS else duration(seconds), entry.title
