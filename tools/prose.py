"""Check the English that people read, and the length of pages: `python tools/prose.py` (in `make lint`).

`--list PATH…` shows every finding, `--words` the words of each page and of its average sentence.

It reads the pages in docs, README, CHANGELOG, the docstrings, comments and messages of the package, and the docstrings,
comments and names of tests. A finding is one of the habits below, or a sentence of more than 30 words.
`tools/prose.json` has the number of findings of each file: more than that fails, and a new file may have none. After
improving a file, `--write` records the lower numbers; it refuses to record a higher total.

A page has at most 1,500 words, code and tables included, and a guide 900. References and lab notes may be longer.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tools" / "prose.json"
WORD = r"[^\W\d_][\w’'-]*"
LONGEST = 30
"""Words of a sentence."""
PAGE, GUIDE = 1_500, 900
"""Words of a page, by the section of mkdocs.yml that it is in."""
NAME = 60
"""Characters of a test's name."""
HABITS = {
    r"(?<!here )\b(?:is|are|was|were) no "
    r"(?!longer|more|less|better|worse|slower|faster|larger|smaller|other|way|need)\w+": (
        'say "is not a …", or what it must be'
    ),
    r"(?:^|[.;:,(] )[Ww]hat (?!is|are|was|were|if|to|it is|does|do|did)\w+[^?.]*[.;]": (
        "name the thing instead of a what-clause"
    ),
    r"\bbeside\b": 'say "next to", "in addition to", "while … runs" or "with"',
    r"\b(?:is|are|was|were) (?:told|heard|heeded)\b": "say who reports it",
    r"\bcan be told\b": 'say "is visible" or "lets us convert"',
    r"\bby (?:night|day)\b": 'say "in the nightly tests" or "in make test"',
    r"\b(?:bears?|heeds?) (?:it|them|that|this)\b": 'say "tolerates", "obeys"',
    r"\bmade of it\b": "name the verb",
    r"\bgoes? on\b": 'say "continues" or "resumes"',
    r"\bone after the other\b": 'say "in turn" or "sequentially"',
    r"\bso as to\b": 'say "to"',
    r"\bmends?\b|\bmended\b": 'say "fixes"',
    r"\blooks? for itself\b|\bfor want of\b": "say what is missing",
    r"\b(?:is|are) missing here\b": 'say "is not supported"',
    r"\bdo(?:es)? not go with\b": 'say "cannot be combined with"',
    r"\b(?:is|are) made of\b": 'say "consists of" or "is computed from"',
    r"\banew\b|\bany more\b": 'say "again", "no longer"',
    r"\bwithout a word\b": 'say "silently"',
    r"\blikeliest\b": 'say "most likely"',
    r"\b(?:stays?|stayed|left|goe?s? over) as (?:it is|they are)\b": 'say "unchanged"',
}
STRING_OR_COMMENT = re.compile(
    r"""(?P<quotes>\"{3}|'{3})(?:\\.|.)*?(?P=quotes)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.S,
)
"""Several times as fast as `tokenize`. Strings are matched only so that a "#" in them does not begin a comment."""


class Finding(NamedTuple):
    """A place and what to do there."""

    file: str
    line: int
    text: str
    advice: str


def findings(path: Path) -> Iterator[Finding]:
    """Habits and long sentences of one file."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    pieces = markdown(text) if path.suffix == ".md" else python(text, tests=name.startswith("tests/"))
    for line, piece, prose in pieces:
        for habit, advice in HABITS.items():
            for match in re.finditer(habit, piece):
                yield Finding(name, line + piece.count("\n", 0, match.start()), match[0][:60], advice)
        for sentence in sentences(piece) if prose else ():
            words = len(re.findall(WORD, sentence))
            if words > LONGEST:
                yield Finding(name, line, sentence[:60] + "…", f"{words} words in a sentence")


def markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    """Line number, text and whether it has sentences, of each paragraph or table row; code blocks are left out."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    number = 1
    for block in re.split(r"(\n\s*\n|\n(?=[|#>]|\s*[-*] |\s*\d+\. ))", text):
        plain = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>]*>", "code", block)
        plain = re.sub(r"\bcode(, code)+", "code", plain)  # a list of names is not a sentence
        if plain.strip():
            yield (
                number + len(block) - len(block.lstrip("\n")),
                plain.strip(),
                not plain.lstrip().startswith(("|", "#")),
            )
        number += block.count("\n")


def python(text: str, *, tests: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Docstrings and comments as prose, other strings of at least four words as messages; of tests names instead."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):  # an expression comes before its value
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif tests and isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.removeprefix("test_").replace("_", " ") + ".", False
        elif tests and id(node) not in docstrings:
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
            # equations and examples stand apart, indented; so do tables
            kept = node.value
            if id(node) in docstrings:
                kept = re.sub(r"^( {4,}|\|).*$", "", inspect.cleandoc(kept), flags=re.M)
            for paragraph in re.split(r"\n\s*\n", re.sub(r"`[^`\n]*`", "code", kept)):
                if not paragraph.startswith("\b"):  # commands in a help text
                    yield node.lineno, paragraph.strip(), id(node) in docstrings
    for match in STRING_OR_COMMENT.finditer(text):
        if match["comment"]:
            yield text.count("\n", 0, match.start()) + 1, match["comment"].lstrip("# "), False


def sentences(text: str) -> list[str]:
    """Parts between full stops, colons and semicolons."""
    return re.split(r"(?<=[.!?:;])\s+", re.sub(r"\s+", " ", text.replace("**", "")))


def sections() -> dict[str, str]:
    """The section of the site that each page is in; pages from outside docs are left out."""
    found, section = {}, ""
    for line in (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].splitlines():
        if heading := re.match(r"  - (.+):$", line):
            section = heading[1]
        elif page := re.search(r"([\w/-]+\.md)$", line):
            found[f"docs/{page[1]}"] = section
    return {name: section for name, section in found.items() if (ROOT / name).exists()}


def long_pages() -> Iterator[str]:
    """A sentence for each page with too many words."""
    for name, section in sections().items():
        words = len((ROOT / name).read_text("utf-8").split())
        limit = GUIDE if section == "Guides" else PAGE
        if section != "Reference" and words > limit:
            yield f"{name} has {words:,} words, {limit:,} are enough: shorten it, or move details."


def long_names() -> Iterator[str]:
    """A sentence for each test whose name is too long."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8")):
            if len(name) > NAME:
                yield f"{path.relative_to(ROOT)}: {name} has {len(name)} characters, {NAME} are enough."


def readability() -> Iterator[str]:
    """For every page its words, those of an average sentence, and the longest; then the sums by section."""
    sums: dict[str, int] = {}
    for name, section in sections().items():
        text = (ROOT / name).read_text("utf-8")
        prose = [sentence for _, piece, is_prose in markdown(text) if is_prose for sentence in sentences(piece)]
        counts = [count for sentence in prose if (count := len(re.findall(WORD, sentence))) > 2]
        mean = sum(counts) / max(1, len(counts))
        sums[section] = sums.get(section, 0) + len(text.split())
        yield f"{len(text.split()):6,}  {mean:4.1f} words a sentence, at most {max(counts, default=0):2}  {name}"
    yield from (f"{words:6,}  {section}" for section, words in {**sums, "all": sum(sums.values())}.items())


def files() -> list[Path]:
    """Every page and every file of the package and its tests."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return sorted([*pages, *(ROOT / "residua").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])


def main() -> None:
    """Compare the findings with the recorded numbers, or list or record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", metavar="PATH", help="show every finding of these files or folders")
    parser.add_argument("--write", action="store_true", help="record the present numbers, if their total is not higher")
    parser.add_argument("--words", action="store_true", help="show the words of every page")
    asked = parser.parse_args()
    if asked.words:
        print(*readability(), sep="\n")
        return
    chosen = [Path(path).resolve() for path in asked.list or ()]
    paths = [file for file in files() if not chosen or any(file == c or c in file.parents for c in chosen)]
    by_file = {path.relative_to(ROOT).as_posix(): list(findings(path)) for path in paths}
    limits = json.loads(LIMITS.read_text("utf-8")) if LIMITS.exists() else {}
    counts = {name: len(listed) for name, listed in by_file.items() if listed}
    if asked.write:
        if LIMITS.exists() and sum(counts.values()) > sum(limits.values()):
            sys.exit(f"{sum(counts.values())} findings, {sum(limits.values())} recorded: rewrite some sentences first.")
        LIMITS.write_text(json.dumps(counts, indent=0, sort_keys=True) + "\n", "utf-8")
        return
    shown = by_file if chosen else {n: by_file[n] for n, count in counts.items() if count > limits.get(n, 0)}
    for name, listed in shown.items():
        for finding in listed:
            print(f"{name}:{finding.line}: {finding.text!r}: {finding.advice}")
    if shown and not chosen:
        over = ", ".join(f"{name} {counts[name]} (recorded {limits.get(name, 0)})" for name in shown)
        sys.exit(f"More findings than recorded in tools/prose.json: {over}. Rewrite as many as were added.")
    if not chosen and (too_long := [*long_pages(), *long_names()]):
        sys.exit("\n".join(too_long))
    print(f"{sum(counts.values())} findings in {len(counts)} files, none above its recorded number.")


if __name__ == "__main__":
    main()
