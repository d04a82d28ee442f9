"""The commands of the documentation and of the help texts, and reasons why some cannot be run in a test."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from residua.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# These are parsed, not executed: a regular expression on "page: command", and why. A test holds the list minimal.
NOT_EXECUTED = {
    r": make ": "`make test` is what runs this",
    r": pip ": "installs packages",
    r": torchrun ": "starts several processes: tests/distributed does that",
    r"residua\.distributed\.convert ": "needs a sharded checkpoint: tests/distributed makes one",
    r"torchtitan\.convert|tools/titan_step": "needs a checkpoint of torchtitan, or a GPU: see tests/integrations",
    r"data prepare org/name": "downloads a dataset",
    r"export .* --push ": "uploads a folder: tests/export does it with a stand-in for the Hub",
    r"--tasks (arc_easy,lambada_openai|mbpp)": "lm-evaluation-harness downloads its tasks",
    r": residua watch": "serves until Ctrl-C: tests/watch does that",
    r"^docs/(results|lab)/.*\.md: ": "what was measured on a GPU, in minutes to hours",
    r"bench (fp8|decode|prefill)|--implementations fused": "needs a GPU, or is large: tests/bench runs small ones",
}


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def arguments(self) -> list[str] | None:
        """The words after `residua`; None if it is another program's command."""
        ours = "residua" in self.words and self.words[0] != "pip"
        return list(self.words[self.words.index("residua") + 1 :]) if ours else None

    @property
    def reason(self) -> str | None:
        """Why it is not executed."""
        return next((why for pattern, why in NOT_EXECUTED.items() if re.search(pattern, str(self))), None)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, language and text of every fenced block."""
    found, start, language, lines = [], 0, None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*```(\S*)\s*$", line)
        if fence and language is None:
            start, language, lines = number, fence[1], []
        elif fence:
            found.append((start, language, "\n".join(lines)))
            language = None
        elif language is not None:
            lines.append(line)
    return found


def commands(page: Path) -> list[Command]:
    """Every command in the page's bash blocks; lines that end with a backslash are joined."""
    found = []
    for start, language, text in blocks(page):
        if language != "bash":
            continue
        pending, first = "", 0
        for offset, line in enumerate(text.splitlines(), 1):
            first = first if pending else start + offset
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            if words := shlex.split(pending, comments=True):
                found.append(Command(str(page.relative_to(ROOT)), first, tuple(words)))
            pending = ""
    return found


def every_command() -> list[Command]:
    return [command for page in PAGES for command in commands(page)]


def help_commands() -> list[Command]:
    """The examples of every verb's `--help`."""
    return [
        Command(f"residua {verb} --help", number, tuple(shlex.split(line.partition(" > ")[0])))
        for verb, text in _helps("", typer.main.get_command(app))
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(r"\s*(residua [a-z]|torchrun )", line)
    ]


def _helps(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """The name and the help text of a verb, and of those below it."""
    yield name, command.help or ""
    if hasattr(command, "list_commands"):
        for below in command.list_commands(None):
            yield from _helps(f"{name} {below}".strip(), command.get_command(None, below))


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its parameters, as the command line reads them; raises its refusals."""
    command: Any = typer.main.get_command(app)
    context, names = command.make_context("residua", list(arguments)), []
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
        names.append(name)
    return " ".join(names), context.params


def load_module(path: str) -> Any:
    """A file of the repository outside its packages, such as `tools/site.py`, imported."""
    spec = importlib.util.spec_from_file_location(f"file_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module
