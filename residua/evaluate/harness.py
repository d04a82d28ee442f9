"""Residua models in lm-evaluation-harness: its `LM` interface, served by `Scorer` and `Generator`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise ImportError(
        "tasks of lm-evaluation-harness need lm-eval: pip install 'residua[eval]', or give --task-dir for local files."
    ) from None

from residua.evaluate.accuracy import Accuracy
from residua.evaluate.score import Pair, Scorer, windows
from residua.evaluate.tasks import GROUPS, reported_metric
from residua.generate.generator import Generator, Request
from residua.generate.sample import Sampling

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256
BOOTSTRAPS = 1000
"""Resamples for standard errors that have no closed form."""
ROWS = 16
"""Prompts per batch."""


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
        totals = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = windows(tokens, self.prefix_token_id, self.context)
            totals.append(sum(score.log for score in self.scorer.score(pairs)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate in batches of equal settings; a prompt that leaves no room for an answer loses its beginning."""
        texts = [""] * len(requests)
        groups: dict[Request, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_request(request.args[1]), []).append(i)
        for settings, indices in groups.items():
            room = max(1, self.context - settings.tokens)
            prompts = {i: (self.tok_encode(requests[i].args[0]) or [self.eot_token_id])[-room:] for i in indices}
            order = sorted(indices, key=lambda i: -len(prompts[i]))
            for at in range(0, len(order), ROWS):
                batch = order[at : at + ROWS]
                done, _ = self.generator([prompts[i] for i in batch], settings)
                for i, completion in zip(batch, done, strict=True):
                    texts[i] = completion.text
        return texts


def _request(settings: dict[str, Any]) -> Request:
    """The harness's generation settings as a Request; it samples only if `do_sample` is set."""
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


def find_tasks(names: list[str], manager: TaskManager | None = None) -> tuple[TaskManager, list[str]]:
    """The harness's own list of tasks, which is local, and the names that are asked for, one of our groups written out.

    Raises `ValueError` for a name that is not in the list; nothing is downloaded.
    """
    manager = manager or TaskManager()
    wanted = list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))
    known = set(manager.all_tasks)
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"lm-eval has no task {name}: {meant}`lm_eval ls tasks` lists them; --task-dir reads local files."
            )
    return manager, wanted


def evaluate_with_harness(
    scorer: Scorer,
    generator: Generator,
    names: list[str],
    *,
    shots: int | None,
    limit: int | None,
    task_manager: TaskManager | None = None,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Run tasks of the harness, or one of our groups; returns the harness's results by task."""
    manager, wanted = find_tasks(names, task_manager)
    try:
        made = simple_evaluate(
            model=ResiduaLM(scorer, generator), tasks=wanted, num_fewshot=shots, limit=limit, task_manager=manager,
            log_samples=False, bootstrap_iters=BOOTSTRAPS, **settings,
        )  # fmt: skip
    except ConnectionError as error:
        raise ValueError(f"lm-eval could not download a task ({error}): --task-dir reads local files.") from None
    assert made is not None
    return dict(made["results"])


def reported(results: dict[str, dict[str, Any]]) -> dict[str, Accuracy]:
    """From the harness's results, the metric of each task that papers report."""
    found = {}
    for task, metrics in results.items():
        name = reported_metric(task)
        value, error = metrics.get(f"{name},none"), metrics.get(f"{name}_stderr,none")
        if isinstance(value, float):
            found[task] = Accuracy(value, error if isinstance(error, float) else None)
    return found
