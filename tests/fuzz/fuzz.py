"""Damages one file at a time, runs a command that reads it, and checks how the command ends.

A case is known by its seed and its number: `python -m tests.fuzz --seed 0 --case 123` runs it again and shows all.
"""

import hashlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tests.fuzz.child import Done, command
from tests.fuzz.mutate import mutate
from tests.fuzz.world import FULL, QUICK, Reader, build

LINES = 6
"""Most lines of a refusal on standard error, including warnings."""

LETTERS = 1500


@dataclass(frozen=True)
class Case:
    """A damaged file and how the command that read it ended."""

    number: int
    reader: Reader
    file: str
    mutation: str
    done: Done
    wrong: tuple[str, ...]

    @property
    def outcome(self) -> str:
        return "failed" if self.wrong else "harmless" if self.done.code == 0 else "refused"

    def __str__(self) -> str:
        said = self.done.errors
        if len(said) > 3000:
            said = f"{said[:500]} … {said[-2500:]}"
        return (
            f"case {self.number}: residua {' '.join(self.reader.arguments)}, {self.file} ({self.mutation}): "
            f"{'; '.join(self.wrong) or self.outcome}, status {self.done.code}\n{said}"
        )


class Fuzzer:
    """Makes the folders in `place`, keeps an intact copy, and damages one file at a time of a fresh copy.

    Every case is in the same place, because folders name each other by paths.
    """

    def __init__(self, place: Path, *, full: bool, seed: int) -> None:
        self.box, self.whole, self.seed = place / "box", place / "whole", seed
        self.folder = self.box / "a" / "b"  # two levels up are still ours: nothing should be written there
        rounds = zip_longest(*([(reader, pattern) for pattern in reader.files] for reader in (FULL if full else QUICK)))
        self.targets = [target for targets in rounds for target in targets if target is not None]
        build(self.folder, full=full)
        self.folder.rename(self.whole)
        shutil.rmtree(self.box)

    def control(self, cases: int) -> None:
        """Check that every command of so many cases succeeds while nothing is damaged."""
        for reader in dict.fromkeys(reader for reader, _ in self.targets[:cases]):
            shutil.copytree(self.whole, self.folder)
            done = command(reader.arguments, self.folder)
            assert done.code == 0, f"residua {' '.join(reader.arguments)} ended with {done.code}: {done.errors}"
            shutil.rmtree(self.box)

    def run(self, number: int) -> Case:
        """One damaged file. Each command has its turn, then each of them again with the next file it reads."""
        chance = random.Random(f"{self.seed}/{number}")
        reader, pattern = self.targets[number % len(self.targets)]
        shutil.rmtree(self.box, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        path = chance.choice(sorted(self.folder.glob(pattern)))
        mutation = mutate(path, chance)
        before = fingerprint(self.box)
        done = command(reader.arguments, self.folder)
        wrong = tuple(self.judge(reader, path, done, before, fingerprint(self.box)))
        return Case(number, reader, str(path.relative_to(self.folder)), mutation, done, wrong)

    def judge(
        self, reader: Reader, path: Path, done: Done, before: dict[str, str], after: dict[str, str]
    ) -> Iterator[str]:
        """The invariant: exit status, one sentence that names the file, nothing changed."""
        if "Traceback" in done.errors or done.code == 70:
            yield "a traceback"
        if done.code < 0:
            yield f"ended by signal {-done.code}"
        if outside := [name for name in after.keys() - before.keys() if not name.startswith("a/b/")]:
            yield f"wrote {outside[0]}"
        if done.code == 0 or (done.code == 1 and reader.writes):
            return
        # numbers that are wrong are found in the model, where they have the names of weights
        names = (path.name, path.parent.name, *reader.also, *(["weight"] if path.suffix == ".safetensors" else []))
        sentences = [line for line in done.errors.splitlines() if line.startswith("residua: ")]
        if len(sentences) != 1:
            yield f"{len(sentences)} sentences"
        elif not any(name in done.errors for name in names):
            yield f"a sentence that does not name {path.name}"
        if len(done.errors.splitlines()) > LINES or len(done.errors) > LETTERS:
            yield f"{len(done.errors.splitlines())} lines, {len(done.errors)} letters"
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            yield f"changed {', '.join(changed[:3])}"


def fingerprint(folder: Path) -> dict[str, str]:
    """A digest of every file, and the names of empty folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name != ".lock":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir() and not any(path.iterdir()):
            found[name] = "empty"
    return found
