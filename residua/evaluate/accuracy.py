"""Accuracy on multiple-choice tasks and perplexity of last words, with standard errors, by likelihoods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from residua.evaluate.prompts import Question
from residua.evaluate.tasks import GROUPS, Task

if TYPE_CHECKING:
    from residua.evaluate.score import Likelihood, Scorer
    from residua.report.terminal import Progress


@dataclass(frozen=True)
class Accuracy:
    """The share of right answers and its standard error, s / √n; None if there is only one question."""

    value: float
    error: float | None

    @classmethod
    def of(cls, right: list[bool]) -> Accuracy:
        """From whether each question was answered right."""
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
        """From log p of each continuation. The error is that of the mean, times the slope of the exponential."""
        mean = -statistics.fmean(logs)
        value = math.exp(mean) if mean < 700 else math.inf
        return cls(value, value * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None)


@dataclass(frozen=True)
class TaskScore:
    """Results of one task.

    acc takes the choice with the highest log-likelihood, acc_norm the highest per character. `metric` names the one
    that papers report. `chance` is the accuracy of guessing. `perplexity` is there where every
    question has a single choice, as in LAMBADA.
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
    """Score every choice of every question, batched by length over the whole task."""
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
