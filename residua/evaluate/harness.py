"""Residua models in lm-evaluation-harness: its `LM` interface, implemented with `Scorer` and `Generator`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from residua.errors import UserError

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise UserError(
        "tasks of lm-evaluation-harness need lm-eval: pip install 'residua[eval]', or give --task-dir for local files."
    ) from None

from residua.evaluate.prompts import find_prompt
from residua.evaluate.results import SHOTS, Accuracy
from residua.evaluate.score import Pair, Scorer, windows
from residua.evaluate.tasks import expand
from residua.generate.generator import Generator, Request
from residua.generate.sample import Sampling
from residua.machine import environment_variable

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256
BOOTSTRAPS = 1000
"""Resamples for standard errors that have no closed form."""
ROWS = 16
ROWS_ON_GPU = 64
"""The most prompts per batch; fewer if they are long."""
TOKENS = 65_536
"""The most tokens of a batch, prompts and answers together."""
CODE_SWITCH = "HF_ALLOW_CODE_EVAL"
"""The environment variable that the metric of `mbpp` and `humaneval` requires before it runs code."""


class ResiduaLM(TemplateLM):  # type: ignore[misc]
    """The three requests of the harness: loglikelihood, loglikelihood_rolling, generate_until."""

    def __init__(self, scorer: Scorer, generator: Generator) -> None:
        super().__init__()
        self.scorer, self.generator = scorer, generator
        self.context = scorer.model.config.context

    @property
    def eot_token_id(self) -> int:
        return self.scorer.tokenizer.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.scorer.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self.scorer.score([Pair(context, rest) for _, context, rest in requests])
        return [(score.log, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.context) for request in requests]
        # pool the windows of all texts, so that batches are full
        scores = iter(self.scorer.score([pair for pairs in texts for pair in pairs]))
        return [sum(next(scores).log for _ in pairs) for pairs in texts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate in batches of equal settings; a prompt that leaves no room for an answer is truncated at the left.

        An answer may be as long as the task allows, but displaces a long prompt from at most half of the context.
        """
        texts = [""] * len(requests)
        groups: dict[Request, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_request(request.args[1]), []).append(i)
        for settings, indices in groups.items():
            room = max(1, self.context - settings.tokens, self.context // 2)
            prompts = {i: (self.tok_encode(requests[i].args[0]) or [self.eot_token_id])[-room:] for i in indices}
            order = sorted(indices, key=lambda i: -len(prompts[i]))
            while order:
                longest = min(self.context, len(prompts[order[0]]) + settings.tokens)
                rows = ROWS_ON_GPU if self.scorer.device.type == "cuda" else ROWS
                rows = max(1, min(rows, TOKENS // longest))
                batch, order = order[:rows], order[rows:]
                done, _ = self.generator([prompts[i] for i in batch], settings)
                for i, completion in zip(batch, done, strict=True):
                    texts[i] = completion.text
        return texts


def _request(settings: dict[str, Any]) -> Request:
    """Convert the harness's generation settings to a Request; it samples only if `do_sample` is set."""
    until = settings.get("until") or []
    sampling = Sampling()
    if settings.get("do_sample"):
        sampling = Sampling(
            settings.get("temperature", 1.0), settings.get("top_k") or None, settings.get("top_p") or 1.0
        )
    return Request(
        tokens=settings.get("max_gen_toks", NEW_TOKENS),
        sampling=sampling,
        stop=(until,) if isinstance(until, str) else tuple(u for u in until if u),
    )


def find_tasks(
    names: list[str], manager: TaskManager | None = None, *, allow_code: bool = False
) -> tuple[TaskManager, list[str]]:
    """The harness's local list of tasks, and the requested names, with one of our groups expanded.

    Raises `ValueError` for a name that is not in the list and, without `allow_code`, for a task that runs code written
    by the model. Downloads nothing.
    """
    manager = manager or TaskManager()
    wanted = list(expand(names))
    known = set(manager.all_tasks)
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"lm-eval has no task {name}: {suggestion}`lm_eval ls tasks` lists them; --task-dir reads local files."
            )
        if not allow_code and runs_code(name, manager.task_index):
            raise UserError(
                f"{name} runs programs written by the model, with your privileges: use a container or a machine "
                "without valuable data, and give --allow-code."
            )
    return manager, wanted


def runs_code(name: str, index: Mapping[str, Any]) -> bool:
    """Whether a harness task, or a task in a group or tag, is marked as running code.

    The index of older lm-eval versions lacks this mark: there lm-eval itself refuses after loading the task.
    """
    entry = index.get(name)
    config = getattr(entry, "cfg", None) or {}
    if config.get("unsafe_code"):
        return True
    listed = config.get("task")
    members = [*(listed if isinstance(listed, list) else ()), *(() if config else getattr(entry, "tags", ()))]
    return any(_member_runs_code(member, index) for member in members)


def _member_runs_code(member: str | dict[str, Any], index: Mapping[str, Any]) -> bool:
    """The same for a group's member: a name, or a table that modifies a task or holds further members."""
    if isinstance(member, str):
        return runs_code(member, index)
    inner = member.get("task")
    further = inner if isinstance(inner, list) else [inner]
    return bool(member.get("unsafe_code")) or any(_member_runs_code(m, index) for m in further if m is not None)


def evaluate_with_harness(
    scorer: Scorer,
    generator: Generator,
    names: list[str],
    *,
    shots: int | None,
    limit: int | None,
    allow_code: bool = False,
    task_manager: TaskManager | None = None,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Run harness tasks or one of our groups; returns the harness's results by task, with the shots of each.

    Without `shots`, a task uses its own number of worked examples, and a group uses its paper's.
    """
    manager, _ = find_tasks(names, task_manager, allow_code=allow_code)
    rounds: dict[int | None, list[str]] = {}
    for task, wanted in expand(names).items():
        rounds.setdefault(wanted.shots if shots is None else shots, []).append(task)
    results: dict[str, dict[str, Any]] = {}
    for number, tasks in rounds.items():
        try:
            with environment_variable(CODE_SWITCH, "1" if allow_code else "0"):
                report = simple_evaluate(
                    model=ResiduaLM(scorer, generator), tasks=tasks, num_fewshot=number, limit=limit,
                    task_manager=manager, log_samples=False, bootstrap_iters=BOOTSTRAPS,
                    confirm_run_unsafe_code=allow_code, **settings,
                )  # fmt: skip
        except ConnectionError as error:
            raise UserError(f"lm-eval could not download a task ({error}): use --task-dir for local files.") from None
        assert report is not None
        n_shot = report.get("n-shot", {})
        for task, scores in report["results"].items():
            results[task] = {**scores, **({SHOTS: n_shot[task]} if task in n_shot else {})}
    return results


def reported(results: dict[str, dict[str, Any]]) -> dict[str, Accuracy]:
    """Extract each task's metric that papers report from the harness's results."""
    accuracies = {}
    for task, metrics in results.items():
        name = find_prompt(task).metric
        value, error = metrics.get(f"{name},none"), metrics.get(f"{name}_stderr,none")
        if isinstance(value, float):
            accuracies[task] = Accuracy(value, error if isinstance(error, float) else None)
    return accuracies
