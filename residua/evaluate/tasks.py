"""Multiple-choice tasks from local files: JSON Lines, one question per line, `.jsonl` or `.jsonl.xz`.

    {"task", "id", "split", "question" and/or "context", "choices": [...], "answer": index}

Prompts are those of lm-evaluation-harness, so that results are comparable; a task that it does not have is asked as
`Question: … Answer:`. Worked examples are the first questions of the file's `train` split.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from residua.reading import Count, Shape, check, counted, json_lines, reason, refuse, require_file

EXOFORMER = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "winogrande")
"""The tasks of the ExoFormer paper (arXiv 2601.08131)."""
GROUPS = {"exoformer": EXOFORMER}
EVALUATED = ("test", "validation")
EXTENSIONS = (".jsonl", ".jsonl.xz")
_HINT = "a task file has one question per line, as docs/evaluate.md says"


class Question(NamedTuple):
    """Each choice as a context and a continuation to score; the normalised score is divided by `lengths`."""

    contexts: list[str]
    continuations: list[str]
    lengths: list[int]
    answer: int

    @property
    def solved(self) -> str:
        """The question with its answer, as a worked example."""
        return self.contexts[self.answer] + self.continuations[self.answer]


@dataclass(frozen=True)
class Task:
    """Questions of one split, each after the same worked examples; `metric` is the one that papers report."""

    name: str
    split: str
    shots: int
    questions: list[Question]
    metric: str


def open_tasks(folder: Path, names: list[str], *, shots: int, split: str | None, limit: int | None) -> list[Task]:
    """Tasks by name, or a group of them, from the files of a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name one with task files such as piqa.jsonl.")
    files = {path.name.split(".")[0]: path for path in sorted(folder.iterdir()) if path.name.endswith(EXTENSIONS)}
    wanted = {task: name for name in names for task in GROUPS.get(name, (name,))}
    for task, name in wanted.items():
        if task not in files:
            raise ValueError(f"{folder} holds no task {_hint(task, name, list(files))}")
    return [read_task(name, files[name], shots=shots, split=split, limit=limit) for name in wanted]


def read_task(name: str, path: Path, *, shots: int, split: str | None = None, limit: int | None = None) -> Task:
    """One task from its file. Without `split`, takes the test questions, or else the validation questions."""
    records = _records(path)
    splits = {record["split"] for record in records}
    chosen = split or next((s for s in EVALUATED if s in splits), "")
    if chosen not in splits:
        raise ValueError(f"{path} has no {split or 'test or validation'} split, only {', '.join(sorted(splits))}.")
    examples = [_form(name, record, path) for record in records if record["split"] == "train"][:shots]
    if len(examples) < shots:
        have = counted(len(examples), "worked example")
        raise ValueError(
            f"{path} has {have} in its train split and {shots} were asked for: use --shots {len(examples)}."
        )
    prefix = "".join(f"{example.solved}\n\n" for example in examples)
    questions = [_form(name, record, path) for record in records if record["split"] == chosen][:limit]
    shown = [q._replace(contexts=[prefix + context for context in q.contexts]) for q in questions]
    return Task(name, chosen, shots, shown, reported_metric(name))


def reported_metric(name: str) -> str:
    """The metric of a task that papers report."""
    return "acc" if name in WITHOUT_NORMALISATION else "acc_norm"


def _records(path: Path) -> list[dict[str, Any]]:
    require_file(path, _HINT)
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig") as lines:
            records = [_checked(record, where) for where, record in json_lines(lines, path, _HINT, lenient=True)]
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, OSError) as error:
        refuse(f"{path} cannot be read as JSON Lines ({reason(error)})", _HINT)
    if not records:
        raise ValueError(f"{path} holds no questions.")
    return records


class _Record(Shape):
    choices: list[str] = Field(min_length=1)
    answer: Count
    split: str = "validation"
    question: str | None = None
    context: str | None = None


def _checked(record: Any, where: str) -> dict[str, Any]:
    """Check a question against the schema; an error names the line."""
    checked = check(record, _Record, where, _HINT)
    if not all(choice.strip() for choice in checked.choices):
        refuse(f"{where}: one of the choices is empty", _HINT)
    if checked.answer >= len(checked.choices):
        many = len(checked.choices)
        refuse(f"{where}: answer is {checked.answer}, expected the index of one of {many} choices", _HINT)
    return {**record, "split": checked.split}


def _form(name: str, record: Mapping[str, Any], path: Path) -> Question:
    try:
        return FORMS.get(name, _question)(record)
    except KeyError as lacking:
        raise ValueError(f"{path}: question {record.get('id', '?')} has no {lacking.args[0]}.") from None


def _ask(context: str, record: Mapping[str, Any]) -> Question:
    """Score every choice after the same context and a space."""
    choices = [str(choice) for choice in record["choices"]]
    return Question([context] * len(choices), [f" {c}" for c in choices], [len(c) for c in choices], record["answer"])


def _question(record: Mapping[str, Any]) -> Question:
    context = f"{record['context']}\n" if record.get("context") else ""
    question = record.get("question", "") if context else record["question"]
    return _ask(f"{context}Question: {question}\nAnswer:", record)


def _bare(record: Mapping[str, Any]) -> Question:
    return _ask(str(record.get("question") or record["context"]), record)


def _yes_or_no(record: Mapping[str, Any]) -> Question:
    return _ask(f"{record['context']}\nQuestion: {record['question']}?\nAnswer:", record)


def _sentence(record: Mapping[str, Any]) -> Question:
    """The choices are whole sentences."""
    choices = [str(choice) for choice in record["choices"]]
    return Question([""] * len(choices), choices, [len(c) for c in choices], record["answer"])


def _ending(record: Mapping[str, Any]) -> Question:
    """HellaSwag: the activity and the context, without the marks of its WikiHow part."""
    context = str(record["context"])
    if "ctx_a" in record:
        context = f"{record['ctx_a']} {str(record.get('ctx_b', '')).capitalize()}"
    if record.get("activity_label"):
        context = f"{record['activity_label']}: {context}"
    return _ask(_without_marks(context), {**record, "choices": [_without_marks(c) for c in record["choices"]]})


def _without_marks(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _blank(record: Mapping[str, Any]) -> Question:
    """WinoGrande: fill the blank with each choice and score the text after it."""
    before, _, after = str(record["context"]).partition("_")
    contexts = [before + str(choice) for choice in record["choices"]]
    rest = after.strip()
    return Question(contexts, [f" {rest}"] * len(contexts), [len(rest)] * len(contexts), record["answer"])


FORMS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "openbookqa": _bare,
    "hellaswag": _ending,
    "winogrande": _blank,
    "boolq": _yes_or_no,
    "blimp": _sentence,
    "lambada": _bare,
}
WITHOUT_NORMALISATION = {"winogrande", "boolq", "blimp", "lambada"}


def _hint(task: str, asked: str, files: list[str]) -> str:
    """`arc_esay: did you mean arc_easy?` for a misspelled name, else the list of tasks."""
    near = get_close_matches(task, [*files, *GROUPS], n=1) if task == asked else []
    member = "" if task == asked else f", one of {asked}"
    return f"{task}{member}: " + (
        f"did you mean {near[0]}?" if near else f"it has {', '.join(files) or 'no file such as piqa.jsonl'}."
    )
