"""Multiple-choice tasks from local files: JSON Lines, one question per line, `.jsonl` or `.jsonl.xz`.

    {"task", "id", "split", "question" and/or "context", "choices": [...], "answer": index, "subject"}

Prompts are in `prompts.py`. Worked examples are the first questions of the file's `train` split, from the question's
own subject if there are subjects.
"""

from __future__ import annotations

import lzma
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from residua.errors import UserError
from residua.evaluate.prompts import Question, find_prompt, subject_of
from residua.reading import Count, Shape, check, counted, json_lines, reason, refuse, require_file

EXOFORMER = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "winogrande")
"""The tasks of the ExoFormer paper (arXiv 2601.08131)."""


class Group(NamedTuple):
    """A named group of tasks, and the number of worked examples that their paper uses."""

    tasks: tuple[str, ...]
    shots: int | None = None


GROUPS = {"exoformer": Group(EXOFORMER, shots=5)}
EVALUATED = ("test", "validation")
EXTENSIONS = (".jsonl", ".jsonl.xz")
TEXT_EXTENSIONS = (".txt", ".md", ".txt.xz", ".txt.gz")
_HINT = "a task file has one question per line, as docs/evaluate.md says"


@dataclass(frozen=True)
class Task:
    """Questions of one split, each preceded by its worked examples; `metric` is the one that papers report."""

    name: str
    split: str
    shots: int
    questions: list[Question]
    metric: str


class Wanted(NamedTuple):
    """A requested task: the name given, and the shots of its group."""

    name: str
    shots: int | None


def expand(names: Sequence[str]) -> dict[str, Wanted]:
    """The requested tasks, with groups expanded."""
    wanted: dict[str, Wanted] = {}
    for name in names:
        group = GROUPS.get(name, Group((name,)))
        for task in group.tasks:
            wanted.setdefault(task, Wanted(name, group.shots))
    return wanted


def open_tasks(
    folder: Path, names: list[str], *, shots: int | None, split: str | None, limit: int | None
) -> list[Task]:
    """Tasks by name, or a group of them, from the files of a folder.

    Without `shots`, a group uses its paper's number of worked examples, and any other task none, as in lm-eval.
    """
    if not folder.is_dir():
        refuse_text(folder, "a folder with task files")
        raise UserError(f"{folder} is not a folder: name one that contains task files such as piqa.jsonl.")
    files = {path.name.split(".")[0]: path for path in sorted(folder.iterdir()) if path.name.endswith(EXTENSIONS)}
    wanted = expand(names)
    for task, (name, _) in wanted.items():
        if task not in files:
            for text in (folder / f"{task}{end}" for end in TEXT_EXTENSIONS):
                refuse_text(text, "a file with questions")
            raise UserError(f"{folder} holds no task {_hint(task, name, list(files))}")
    return [
        read_task(task, files[task], shots=(usual or 0) if shots is None else shots, split=split, limit=limit)
        for task, (_, usual) in wanted.items()
    ]


def read_task(name: str, path: Path, *, shots: int, split: str | None = None, limit: int | None = None) -> Task:
    """Read one task from its file. Without `split`, take the test questions, or else the validation questions.

    `limit` questions are spread across the subjects and the file.
    """
    records = _records(path)
    splits = {record["split"] for record in records}
    chosen = split or next((s for s in EVALUATED if s in splits), "")
    if chosen not in splits:
        raise UserError(f"{path} has no {split or 'test or validation'} split, only {', '.join(sorted(splits))}.")
    rows = [record for record in records if record["split"] == chosen]
    if limit is not None and limit < len(rows):
        rows = [rows[i] for i in spread([subject_of(record) for record in rows], limit)]
    prompt = find_prompt(name)
    solved = _worked_examples(name, path, shots, [record for record in records if record["split"] == "train"])
    questions = []
    for record in rows:
        before, question = prompt.describe(record) + solved(subject_of(record)), _form(name, record, path)
        questions.append(question._replace(contexts=[before + context for context in question.contexts]))
    return Task(name, chosen, shots, questions, prompt.metric)


def spread(subjects: Sequence[str], limit: int) -> list[int]:
    """`limit` indices into a list of questions, given the subject of each.

    Every subject gets its share, evenly spaced within it, and at least one question if `limit` allows.
    """
    places: dict[str, list[int]] = {}
    for place, subject in enumerate(subjects):
        places.setdefault(subject, []).append(place)
    turns = sorted((i / len(rows), rows[i], subject) for subject, rows in places.items() for i in range(len(rows)))
    quotas = Counter(subject for *_, subject in turns[:limit])
    return sorted(
        rows[j * len(rows) // quotas[subject]] for subject, rows in places.items() for j in range(quotas[subject])
    )


def _worked_examples(name: str, path: Path, shots: int, records: Sequence[Mapping[str, Any]]) -> Callable[[str], str]:
    """The text of a subject's worked examples, by subject; those without a subject serve all others."""
    by_subject: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_subject.setdefault(subject_of(record), []).append(record)

    @cache
    def solved(subject: str) -> str:
        examples = by_subject.get(subject, by_subject.get("", []))[:shots]
        if len(examples) < shots:
            have, about = counted(len(examples), "worked example"), f" about {subject}" if subject else ""
            raise UserError(
                f"{path} has {have}{about} in its train split, but --shots asks for {shots}: use --shots "
                f"{len(examples)}."
            )
        return "".join(f"{_form(name, example, path).solved}\n\n" for example in examples)

    return solved


def refuse_text(path: Path, expected: str) -> None:
    """Refuse a text file if something else was expected, and say how to score text."""
    if path.name.endswith(TEXT_EXTENSIONS) and path.is_file():
        raise UserError(f"{path} is text, not {expected}: {text_advice(path)}")


def text_advice(path: Path, model: Path | str = "RUN") -> str:
    """How to score a text file."""
    file, tokenizer = shlex.quote(str(path)), shlex.quote(str(model))
    return (
        f"prepare it with `residua data prepare {file} --tokenizer {tokenizer} --holdout 0 --out DIR` "
        "and give --data DIR --split train."
    )


def _records(path: Path) -> list[dict[str, Any]]:
    require_file(path, _HINT)
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig") as lines:
            records = [_checked(record, where) for where, record in json_lines(lines, path, _HINT, lenient=True)]
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, OSError) as error:
        refuse(f"{path} cannot be read as JSON Lines ({reason(error)})", _HINT)
    if not records:
        raise UserError(f"{path} holds no questions.")
    return records


class _Record(Shape):
    choices: list[str] = Field(min_length=1)
    answer: Count
    split: str = "validation"
    question: str = ""  # optional, but a null would put the text "None" into a prompt
    context: str = ""
    subject: str | None = None
    paradigm: str | None = None


def _checked(record: Any, where: str) -> dict[str, Any]:
    """Check a question against the schema; an error names the line."""
    if isinstance(record, dict) and "text" in record and "choices" not in record:
        refuse(f"{where} holds text, not a question", "prepare the file with residua data prepare and use --data")
    checked = check(record, _Record, where, _HINT)
    if not all(choice.strip() for choice in checked.choices):
        refuse(f"{where}: one of the choices is empty", _HINT)
    if checked.answer >= len(checked.choices):
        many = len(checked.choices)
        refuse(f"{where}: answer is {checked.answer}, expected the index of one of {many} choices", _HINT)
    return {**record, "split": checked.split}


def _form(name: str, record: Mapping[str, Any], path: Path) -> Question:
    try:
        return find_prompt(name).ask(record)
    except KeyError as lacking:
        raise UserError(f"{path}: question {record.get('id', '?')} has no field {lacking.args[0]}.") from None
    except UserError as error:
        refuse(f"{path}, question {record.get('id', '?')}: {error}", _HINT)


def _hint(task: str, request: str, files: list[str]) -> str:
    """`arc_esay: did you mean arc_easy?` for a misspelled name, else the list of tasks."""
    near = get_close_matches(task, [*files, *GROUPS], n=1) if task == request else []
    member = "" if task == request else f", one of {request}"
    return f"{task}{member}: " + (
        f"did you mean {near[0]}?" if near else f"it has {', '.join(files) or 'no file such as piqa.jsonl'}."
    )
