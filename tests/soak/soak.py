"""Injects faults into runs until all are spent, resumes after each, and compares every run with an undisturbed one."""

import platform
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from residua.train.environment import code_commit
from tests.soak.faults import FAULTS, FULL, MOMENTS, Deck, Fault, Place, SmallDisk, SmallFiles, show_shards
from tests.soak.jobs import Commanded, Forked, Job, holders
from tests.soak.runs import (
    KINDS,
    SAVE_EVERY,
    STEPS,
    Kind,
    differences,
    last_line,
    last_step,
    make_data,
    metrics_file,
    saves,
    write_config,
)
from tests.train.conftest import files

FAULTS_PER_RUN = 12


@dataclass
class Injected:
    """A fault that happened: to which run, when, its losses, and other problems."""

    kind: Kind
    fault: Fault
    moment: str
    in_save: bool
    command: bool
    lost: list[str] = field(default_factory=list)
    untidy: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return self.lost + self.untidy


class Session:
    """One start of a run. Leftovers of an earlier session, a save or lines of metrics, do not count as this one's."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.began = last_step(run)
        self._old_saves, self._old_metrics = saves(run), metrics_file(run)

    def past_start(self) -> bool:
        return metrics_file(self.run) not in (None, self._old_metrics)

    def saves(self) -> bool:
        """Whether a checkpoint is being written, or was when the processes were killed."""
        return bool(saves(self.run) - self._old_saves)


class Soak:
    """Spends the `decks`, faults and their moments by kind; `commands` is the share of starts by real commands."""

    def __init__(
        self,
        folder: Path,
        disk: SmallDisk | SmallFiles,
        decks: dict[Kind, Deck],
        *,
        chance: random.Random,
        commands: float = 0.0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.disk, self.commands, self.tell = folder, disk, commands, tell
        self.chance, self.decks = chance, {kind: list(deck) for kind, deck in decks.items()}
        self.data = make_data(folder)
        self.injected: list[Injected] = []
        self.sessions = self.runs = 0
        self.start_seconds = dict.fromkeys(decks, 1.0)

    def conduct(self) -> None:
        """All runs of all kinds in turn."""
        Forked(1, ["--help"]).end()  # the first pays for the imports
        for kind in self.decks:
            write_config(self.folder / f"{kind.name}.toml", self.data, kind)
            undisturbed = self.disk.path / f"{kind.name}-undisturbed"
            self.finish_undisturbed(kind, undisturbed)
            while self.decks[kind]:
                self.soak_run(kind, undisturbed)
            shutil.rmtree(undisturbed)

    def finish_undisturbed(self, kind: Kind, run: Path) -> None:
        """The run that the others are compared with; measures how long a start takes."""
        job = self.start(kind, run, command=False)
        began = time.monotonic()
        self.until(job, lambda: last_line(run) > 0)
        self.start_seconds[kind] = time.monotonic() - began
        if not job.end() or job.codes() != [0] * len(job.codes()):
            raise RuntimeError(f"the undisturbed run on {kind.name} failed:\n{job.said()}")

    def soak_run(self, kind: Kind, undisturbed: Path) -> None:
        """One run from its first step to its last, with faults on the way."""
        self.runs += 1
        run = self.disk.path / f"{kind.name}-{self.runs}"
        faults: list[Injected] = []
        while True:
            started = Session(run)
            job = self.start(kind, run)
            found = self.session(kind, started, job, left=FAULTS_PER_RUN - len(faults))
            faults += found
            self.injected += found
            if found and found[-1].fault.ends:
                continue
            if not job.end():
                wrong = [f"hung: {job.said()[-500:]}"]
            elif any(job.codes()):
                wrong = [f"ended with {job.codes()}: {job.said()[-1500:]}"]
            else:
                wrong = differences(run, undisturbed)
            break
        wrong += [f"process {pid} is left over" for pid in (*holders(run), *holders(job.output))]
        for fault in faults:
            fault.lost += wrong
        said = "; ".join(wrong) or "equal to the undisturbed run"
        self.tell(f"{kind.name}, run {self.runs}: {len(faults)} faults, {said}")
        if not wrong:
            shutil.rmtree(run)

    def session(self, kind: Kind, session: Session, job: Job, left: int) -> list[Injected]:
        """The faults of one start of a run: any number that it survives, and one that ends it."""
        found: list[Injected] = []
        run = session.run
        while self.decks[kind] and len(found) < left:
            fault, moment = self.decks[kind][-1]
            if not self.wait_for(kind, session, job, moment):
                break
            before = last_step(run)
            in_save = session.saves()
            place = Place(job, self.disk, self.data, self.chance)
            fault.strike(place)
            ended = not fault.ends or job.end()
            if fault.ends and not any(job.codes()):
                break  # the run was over before the fault took effect
            self.decks[kind].pop()
            told = Injected(
                kind, fault, moment, in_save or (fault.ends and session.saves()), isinstance(job, Commanded)
            )
            if ended:
                self.look(told, session, job, before)
            else:
                told.lost.append(f"hung: {job.said()[-500:]}")
            found.append(told)
            self.tell(f"{kind.name}: {fault.name} at {moment}: {'; '.join(told.wrong) or 'survived'}")
            if fault.ends:
                break
        self.disk.empty()
        show_shards(self.data)
        return found

    def look(self, told: Injected, session: Session, job: Job, before: int) -> None:
        """Record problems right after a fault."""
        run, fault = session.run, told.fault
        if last_step(run) < before:
            told.lost.append(f"the last checkpoint was that of step {before} and is that of step {last_step(run)}")
        if fault.name == "SIGTERM" and set(job.codes()) == {143} and last_step(run) != last_line(run):
            told.lost.append(f"was saved at step {last_step(run)}, after step {last_line(run)}")
        if "Traceback" in job.said():
            told.untidy.append(f"a traceback: {job.said()[-3000:]}")
        if fault is FULL and session.saves():
            told.untidy.append(f"the checkpoint that found no room is left half written: {job.said()[-1500:]}")
        if fault.refused:
            told.untidy += self.refused(told.kind, run)

    def refused(self, kind: Kind, run: Path) -> list[str]:
        """A start that must be refused in one sentence and change nothing."""
        before = files(run)
        job = self.start(kind, run, command=False)
        if not job.end():
            return [f"the next start hung: {job.said()[-500:]}"]
        sentences = job.said().strip().splitlines()
        wrong = [] if files(run) == before else ["the refused start changed the run"]
        if job.codes()[0] != 2 or len(sentences) != 1 or not sentences[0].startswith("residua: "):
            wrong.append(f"the next start ended with {job.codes()}: {job.said()[-1500:]}")
        return wrong

    def start(self, kind: Kind, run: Path, command: bool | None = None) -> Job:
        """Start or resume a run."""
        self.sessions += 1
        resumed = ["--resume"] if (run / "config.toml").exists() else [str(self.folder / f"{kind.name}.toml")]
        arguments = ["train", *resumed, "--out", str(run)]
        if self.chance.random() < self.commands if command is None else command:
            return Commanded(kind.ranks, arguments, self.folder / f"output-{self.sessions}")
        return Forked(kind.ranks, arguments)

    def wait_for(self, kind: Kind, session: Session, job: Job, moment: str) -> bool:
        """Wait for a random moment of that sort; False if the job ended before."""
        if moment == "start-up":
            until = time.monotonic() + self.chance.uniform(0, self.start_seconds[kind])
            return self.until(job, lambda: time.monotonic() > until)
        step = min(session.began + self.chance.randint(1, 3 * SAVE_EVERY), STEPS - 1)
        if not self.until(job, lambda: session.past_start() and last_line(session.run) >= step):
            return False
        if moment == "save" and not self.until(job, session.saves, pause=0.0003):
            return False
        until = time.monotonic() + self.chance.uniform(0, 0.01)
        return self.until(job, lambda: time.monotonic() > until, pause=0.0003)

    def until(self, job: Job, holds: Callable[[], bool], pause: float = 0.003) -> bool:
        """Wait; False if the job ended first."""
        while job.running():
            if holds():
                return True
            time.sleep(pause)
        return False


BEGAN = time.monotonic()


def page(soak: Soak, command: str) -> str:
    """Kinds of checkpoint × faults, and kinds × moments: injected, and in the last columns survived and lost."""
    found = soak.injected
    lost, untidy = sum(bool(f.lost) for f in found), sum(bool(f.untidy) for f in found)
    commands = sum(f.command for f in found)
    lines = [
        "# Training under faults",
        "",
        f"Made by `{command} --out docs/lab/soak.md` at commit {(code_commit() or 'unknown')[:10]}, PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}, on a CPU, in {(time.monotonic() - BEGAN) / 60:.0f} "
        "minutes.",
        "",
        f"{len(found)} faults were injected into {soak.runs} runs of {STEPS} steps, in {soak.sessions} starts; {lost} "
        f"lost anything, {untidy} left a traceback or a file. {commands} of them hit processes that "
        "`python -m residua.cli.main` or torchrun had started, "
        "the others hit ranks forked from a process that had PyTorch imported. A full disk is "
        f"{soak.disk.title}.",
        "",
        "A run survives a fault if its processes end in bounded time without a traceback, temporary files or stray "
        "processes, and the last checkpoint is still there. After SIGTERM its last step is saved. Resumed after every "
        "fault, it ends with the weights, optimizer state, data position, random state and metrics of an undisturbed "
        "run, bit for bit. After a vanished shard the next start must "
        "be refused in one sentence and change nothing; then the shard comes back. A run that lost nothing but left a "
        "traceback or a temporary file counts as untidy.",
        "",
        *_table(found, [f.name for f in FAULTS], lambda f: f.fault.name),
        "",
        "When they came:",
        "",
        *_table(found, MOMENTS, lambda f: "save" if f.in_save else "steps" if f.moment == "save" else f.moment),
        "",
        "Moments are random: `save` counts faults that found a checkpoint half written.",
        "",
    ]
    return "\n".join(lines)


def _table(found: list[Injected], columns: Sequence[str], column: Callable[[Injected], str]) -> list[str]:
    rows = ["| checkpoint | " + " | ".join(columns) + " | injected | survived | untidy | lost |"]
    rows.append("|---" * (len(columns) + 5) + "|")
    for name in (*(kind.name for kind in KINDS), "all"):
        mine = [f for f in found if name in (f.kind.name, "all")]
        counts = [sum(column(f) == title for f in mine) for title in columns]
        ends = [not f.wrong for f in mine], [bool(f.untidy and not f.lost) for f in mine], [bool(f.lost) for f in mine]
        rows.append(f"| {name} | " + " | ".join(map(str, (*counts, len(mine), *map(sum, ends)))) + " |")
    return rows
