"""The results of `residua eval` as tables and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from residua.errors import UserError
from residua.evaluate.accuracy import Accuracy, Perplexity, TaskScore
from residua.evaluate.perplexity import TextScore
from residua.files import refuse_blocked
from residua.reading import counted, inside
from residua.report.terminal import new_table

FOLDER = "evaluations"
SHOTS = "shots"
"""The key that a task's number of worked examples has among the harness's results."""


@dataclass
class Results:
    """All scores of one model; `harness` holds the results as lm-evaluation-harness reports them."""

    model: str
    settings: dict[str, Any]
    text: TextScore | None = None
    tasks: list[TaskScore] = field(default_factory=list)
    means: dict[str, Accuracy] = field(default_factory=dict)
    harness: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content of the results file."""
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
    """The value with None for what is not finite: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_file(model: Path, out: Path | None) -> Path:
    """The path for the results, which must not exist; by default in the model's folder, named after the time."""
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
        about = "" if text.exact_bytes else " (bytes estimated from the split's mean: the tokenizer is not byte-level)"
        console.print(
            f"{text.data}, {text.split}: {counted(text.tokens, 'token')}, loss {text.loss:.4f} nats per token, "
            f"perplexity {text.perplexity:.3f} ({text.word_perplexity:.5g} by word), "
            f"{text.bits_per_byte:.4f} bits per byte{about}",
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
