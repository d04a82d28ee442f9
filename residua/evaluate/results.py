"""Task scores from likelihoods, with standard errors; results of `residua eval` as tables and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from residua.errors import UserError
from residua.evaluate.prompts import Question
from residua.evaluate.tasks import GROUPS, Task
from residua.files import refuse_blocked
from residua.reading import counted, inside
from residua.report.terminal import new_table

if TYPE_CHECKING:
    from residua.evaluate.score import Likelihood, Scorer, TextScore
    from residua.report.terminal import Progress


@dataclass(frozen=True)
class Accuracy:
    """The fraction of correct answers and its standard error, s / √n; None if there is only one question."""

    value: float
    error: float | None

    @classmethod
    def of(cls, right: list[bool]) -> Accuracy:
        """Compute it from whether each answer was correct."""
        n = len(right)
        mean = sum(right) / n
        return cls(mean, math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None)


@dataclass(frozen=True)
class Perplexity:
    """e^(−mean log p) of continuations, each counted as one, and its standard error; None if there is only one."""

    value: float
    error: float | None

    @classmethod
    def of(cls, logs: list[float]) -> Perplexity:
        """Compute it from log p of each continuation. The error is the mean's, times the slope of the exponential."""
        mean = -statistics.fmean(logs)
        value = math.exp(mean) if mean < 700 else math.inf
        return cls(value, value * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None)


@dataclass(frozen=True)
class TaskScore:
    """Results of one task.

    acc takes the choice with the highest log-likelihood, acc_norm the highest per character. `metric` names the one
    that papers report. `chance` is the accuracy of guessing. `perplexity` is set if every question has a single choice,
    as in LAMBADA.
    """

    task: str
    split: str
    shots: int
    questions: int
    acc: Accuracy
    acc_norm: Accuracy
    metric: str
    chance: float
    perplexity: Perplexity | None = None

    @property
    def reported(self) -> Accuracy:
        """The accuracy that papers report."""
        return {"acc": self.acc, "acc_norm": self.acc_norm}[self.metric]


def score_task(scorer: Scorer, task: Task, progress: Progress | None = None) -> TaskScore:
    """Score every choice of every question, batched by length across the task."""
    choices = (zip(question.contexts, question.continuations, strict=True) for question in task.questions)
    scores = scorer.score(scorer.pairs(chain.from_iterable(choices)), progress)
    single = all(len(question.contexts) == 1 for question in task.questions)
    each = iter(scores)
    answers = [_is_right(question, [next(each) for _ in question.contexts]) for question in task.questions]
    plain, normalised = ([answer[i] for answer in answers] for i in range(2))
    chance = sum(1 / len(question.contexts) for question in task.questions if len(question.contexts) > 1)
    return TaskScore(
        task=task.name,
        split=task.split,
        shots=task.shots,
        questions=len(task.questions),
        acc=Accuracy.of(plain),
        acc_norm=Accuracy.of(normalised),
        metric=task.metric,
        chance=chance / len(task.questions),
        perplexity=Perplexity.of([score.log for score in scores]) if single else None,
    )


def _is_right(question: Question, scores: list[Likelihood]) -> tuple[bool, bool]:
    """Whether the answer wins, by likelihood and per character; a single choice must be the greedy output."""
    if len(scores) == 1:
        return scores[0].greedy, scores[0].greedy
    plain = [score.log for score in scores]
    normalised = [score.log / length for score, length in zip(scores, question.lengths, strict=True)]
    return _first_best(plain) == question.answer, _first_best(normalised) == question.answer


def _first_best(values: list[float]) -> int:
    return values.index(max(values))


def group_means(reported: Mapping[str, Accuracy], names: list[str]) -> dict[str, Accuracy]:
    """For each named group with scored tasks: the mean of the reported metrics, with its standard error.

    If tasks of a group are missing, its title says so.
    """
    means = {}
    for name in names:
        group = GROUPS[name].tasks if name in GROUPS else ()
        members = [reported[task] for task in group if task in reported]
        if members:
            errors = [m.error for m in members if m.error is not None]
            error = math.sqrt(sum(e**2 for e in errors)) / len(members) if len(errors) == len(members) else None
            title = name if len(members) == len(group) else f"{name}, {len(members)} of {len(group)} tasks"
            means[title] = Accuracy(sum(m.value for m in members) / len(members), error)
    return means


FOLDER = "evaluations"
SHOTS = "shots"
"""The key of a task's number of worked examples in the harness's results."""


@dataclass
class Results:
    """All scores of one model; `harness` holds the results in lm-evaluation-harness's format."""

    model: str
    settings: dict[str, Any]
    text: TextScore | None = None
    tasks: list[TaskScore] = field(default_factory=list)
    means: dict[str, Accuracy] = field(default_factory=dict)
    harness: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        text = None
        if self.text is not None:
            derived = {"perplexity": self.text.perplexity, "word_perplexity": self.text.word_perplexity}
            text = asdict(self.text) | derived | {"bits_per_byte": self.text.bits_per_byte}
        content: dict[str, Any] = {"model": self.model, "settings": self.settings, "text": text}
        content["tasks"] = [asdict(task) for task in self.tasks]
        content["means"] = {name: asdict(mean) for name, mean in self.means.items()}
        content["harness"] = self.harness
        return json.dumps(_finite(content), indent=1, default=str) + "\n"


def _finite(value: Any) -> Any:
    """Replace non-finite numbers in the value with None, since JSON cannot represent infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_file(model: Path, out: Path | None) -> Path:
    """The path for the results, which must not exist; by default in the model's folder, named by timestamp."""
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")[:-3]
        out = inside(model, FOLDER) / f"{stamp}.json"
    if out.exists():
        raise UserError(f"{out} exists: choose another --out.")
    refuse_blocked(out.parent)
    return out


def show(console: Console, results: Results) -> None:
    """Print the scores."""
    text = results.text
    if text is not None:
        estimated = " (bytes estimated from the mean of the split, since the tokenizer is not byte-level)"
        console.print(
            f"{text.data}, {text.split}: {counted(text.tokens, 'token')}, loss {text.loss:.4f} nats per token, "
            f"perplexity {text.perplexity:.3f} ({text.word_perplexity:.5g} by word), "
            f"{text.bits_per_byte:.4f} bits per byte{estimated * (not text.exact_bytes)}",
            soft_wrap=True,
            markup=False,
        )
    if results.tasks:
        console.print(_table(results))
    if results.harness:
        console.print(_harness_table(results))


def _table(results: Results) -> Table:
    last = ("perplexity",) if any(task.perplexity for task in results.tasks) else ()
    table = new_table(("task",), ("split", "shots", "questions", "acc", "acc_norm", "chance", "reported", *last))
    for task in results.tasks:
        table.add_row(
            task.task, task.split, str(task.shots), f"{task.questions:,}", _percent(task.acc), _percent(task.acc_norm),
            f"{100 * task.chance:.1f}", task.metric, *(_perplexity(task.perplexity) for _ in last),
        )  # fmt: skip
    for name, mean in results.means.items():
        table.add_row(f"mean of {name}", "", "", "", "", _percent(mean), "", "", *("" for _ in last), style="bold")
    return table


def _perplexity(perplexity: Perplexity | None) -> str:
    if perplexity is None:
        return ""
    return f"{perplexity.value:.4g} ± {'?' if perplexity.error is None else f'{perplexity.error:.2g}'}"


def _harness_table(results: Results) -> Table:
    table = new_table(("task",), ("shots", "metric", "value", "± standard error"))
    for task, metrics in results.harness.items():
        for name, value in metrics.items():
            metric, _, rest = name.partition(",")
            if isinstance(value, float) and "_stderr" not in metric:
                error = metrics.get(f"{metric}_stderr,{rest}")
                table.add_row(task, str(metrics.get(SHOTS, "")), metric, f"{value:.4f}", _four(error))
    for name, mean in results.means.items():
        table.add_row(f"mean of {name}", "", "", f"{mean.value:.4f}", _four(mean.error), style="bold")
    return table


def _four(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else ""


def _percent(accuracy: Accuracy) -> str:
    error = "?" if accuracy.error is None else f"{100 * accuracy.error:.2f}"
    return f"{100 * accuracy.value:.2f} ± {error}"
