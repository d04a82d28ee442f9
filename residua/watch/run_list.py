"""The runs, studies and folders that a page watches, and their changes since the page's last request."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from residua.errors import UserError
from residua.files import UNFINISHED
from residua.reading import ReadError, inside, read_toml
from residua.report import theme
from residua.storage.formats import CONFIG, METRICS
from residua.watch.run_follower import FAR, LOGS, Follower, read_tail

MOST = 64
"""The most runs that one page shows; it shows the newest."""
RUNS, CONFIGS, STUDY = "runs", "configs", "study.toml"
LOG_LINES = 8


@dataclass(frozen=True)
class Place:
    """A run's folder, its name on the page, its series, and that series' index among the colours."""

    folder: Path
    name: str
    series: str
    place: int

    @property
    def study(self) -> Path | None:
        folder = self.folder.parent.parent
        return folder if self.folder.parent.name == RUNS and is_study(folder) else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a started or finished run."""
    return (folder / METRICS).exists() or ((folder / CONFIG).exists() and not (folder / STUDY).exists())


def is_study(folder: Path) -> bool:
    """Whether a folder is a study's: its runs are in `runs`, next to their configurations or the study's own."""
    return (folder / RUNS).is_dir() and ((folder / CONFIGS).is_dir() or (folder / STUDY).exists())


def check(folders: Sequence[Path]) -> None:
    """Refuse a folder that does not exist, or holds neither a run nor a study."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: name a run, a study, or a folder that contains some.")
        if not _inside(folder, "", 2):
            raise UserError(f"{folder} contains no run or study: name the --out of `residua train` or `compare`.")


def find(folders: Sequence[Path]) -> list[Place]:
    """The runs in the given folders; a folder that does not exist yet counts as a future run."""
    titles = [folder.resolve().name for folder in folders]
    places: dict[Path, tuple[str, str]] = {}
    for folder, title in zip(folders, titles, strict=True):
        shown = "" if len(folders) == 1 else title if titles.count(title) == 1 else str(folder)
        inner = _inside(folder, shown, 2) or [(folder, shown or title, shown or title)]
        places |= {path: (name, series) for path, name, series in inner}
    newest = sorted(places, key=_changed)[-MOST:]
    recent = {path: names for path, names in places.items() if path in newest}
    first = 0 if len(folders) == 1 and is_study(folders[0]) else 1  # grey is for a study's baseline
    order = {series: first + i for i, series in enumerate(dict.fromkeys(series for _, series in recent.values()))}
    return [Place(path, name, series, order[series]) for path, (name, series) in recent.items()]


def _inside(folder: Path, shown: str, depth: int) -> list[tuple[Path, str, str]]:
    """Runs in a folder, as (folder, name, series); `shown` is the folder's own name on the page."""
    prefix = f"{shown}/" if shown else ""
    if is_study(folder):
        return [(path, f"{prefix}{name}", f"{prefix}{series}") for path, name, series in _runs_of_study(folder)]
    if is_run(folder):
        name = shown or folder.resolve().name
        return [(folder, name, name)]
    children = _children(folder) if depth else []
    return [run for child in children for run in _inside(child, f"{prefix}{child.name}", depth - 1)]


def _runs_of_study(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The runs of a study, including those not yet started, variant by variant."""
    begun = {path.name for path in _children(folder / RUNS)}
    planned = {path.stem for path in _listed(folder / CONFIGS) if re.search(r"-seed\d+$", path.stem)}
    since = {name: _changed(folder / CONFIGS / f"{name}.toml") for name in begun | planned}
    named = {name: re.sub(r"-seed\d+$", "", name) for name in since}
    first = {series: min(since[n] for n in named if named[n] == series) for series in named.values()}
    wanted = _variants(folder)

    def order(name: str) -> tuple[int, float, str, str]:
        series = named[name]
        return (wanted.index(series) if series in wanted else len(wanted)), first[series], series, name

    for name in sorted(since, key=order):
        yield folder / RUNS / name, name, named[name]


def _variants(folder: Path) -> list[str]:
    """The variants of a finished study in its order; empty until it is finished."""
    with suppress(ReadError):
        variants = read_toml(inside(folder, STUDY), "").get("variants")
        return [str(name) for name in variants] if isinstance(variants, dict | list) else []
    return []


def _children(folder: Path) -> list[Path]:
    """Folders inside a folder, except links that leave it and unfinished folders."""
    folders = []
    for path in _listed(folder):
        with suppress(ReadError, OSError):
            if not path.name.startswith((".", UNFINISHED)) and inside(folder, path.name).is_dir():
                folders.append(path)
    return folders


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _changed(path: Path) -> float:
    """When a path was last changed; in the far future if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


class RunList:
    """The runs of one page, safe for concurrent requests."""

    def __init__(self, folders: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self.folders = [Path(folder) for folder in folders]
        self._clock = clock
        self._lock = Lock()
        self._epoch = secrets.token_hex(4)
        self._change = 0
        self._followers: dict[Path, Follower] = {}
        self._places: list[Place] = []

    def news(self, epoch: str = "", since: int = 0) -> dict[str, Any]:
        """All summaries, and the curves of runs that changed after `since`, the `change` of an earlier response.

        The `epoch` of that response shows whether it came from this process.
        """
        with self._lock:
            now = self._clock()
            self._refresh()
            known = since if epoch == self._epoch else -1
            runs = [self._described(place, now, known) for place in self._places]
            return {
                "epoch": self._epoch,
                "change": self._change,
                "title": self.title(now),
                "left": self._left(now),
                "runs": runs,
                "logs": self._logs(),
            }

    def _refresh(self) -> None:
        places = find(self.folders)
        gone = [place for place in self._places if place.folder not in {p.folder for p in places}]
        self._places = [*places, *(place for place in gone if self._followers[place.folder].rows["train"])][:MOST]
        for place in self._places:
            follower = self._followers.setdefault(place.folder, Follower(place.folder, place.study, version=-1))
            if follower.refresh() or follower.version < 0:
                self._change += 1
                follower.version = self._change

    def _described(self, place: Place, now: float, known: int) -> dict[str, Any]:
        follower = self._followers[place.folder]
        summary = follower.summary(now)
        look = {"colour": theme.colour(place.place), "dash": theme.dash(place.place)}
        summary |= {"name": place.name, "series": place.series, **look}
        return summary | ({"curves": follower.curves()} if follower.version > known else {})

    def title(self, now: float) -> str:
        states = [self._followers[place.folder].state(now) for place in self._places]
        where = ", ".join(folder.resolve().name for folder in self.folders)
        if len(states) == 1:
            return {"training": f"{where} is training", "finished": f"{where} has finished"}.get(
                states[0], f"{where}: {states[0]}"
            )
        trained = len(states) - states.count("imported")
        progress = f"{states.count('training')} training, {states.count('finished')} of {trained} finished"
        words = [progress] if trained else []
        words += [
            f"{states.count(state)} {state}" for state in ("quiet", "crashed", "stopped", "imported") if state in states
        ]
        return f"{where}: {', '.join(words)}"

    def _left(self, now: float) -> float | None:
        """Seconds until all runs are done, at the speed of those in progress; None if unknown."""
        followers = [self._followers[place.folder] for place in self._places]
        active = [f for f in followers if f.state(now) == "training" and f.remaining() is not None]
        waiting = [f for f in followers if f.state(now) == "waiting"]
        if not active:
            return None
        whole = [f.remaining() or 0.0 for f in active]
        lengths = [(f.last.get("seconds") or 0.0) + (f.remaining() or 0.0) for f in active]
        left = max(max(whole), (sum(whole) + len(waiting) * sum(lengths) / len(lengths)) / len(active))
        return left if left < FAR else None

    def _logs(self) -> list[dict[str, Any]]:
        """The last lines printed by a study's trainers, newest log first."""
        entries = []
        for folder in self.folders:
            logs = [path for path in _listed(folder / LOGS) if path.suffix == ".log"] if is_study(folder) else []
            for path in sorted(logs, key=_changed)[-2:]:
                with suppress(OSError, ReadError):
                    lines = read_tail(inside(folder, f"{LOGS}/{path.name}"))[-LOG_LINES:]
                    entries.append({"name": path.name, "lines": lines})
        return [log for log in reversed(entries) if log["lines"]]
