"""`residua eval`: score a trained model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from residua.cli.options import (
    Checkpoint,
    Device,
    Precision,
    Shots,
    TaskDir,
    Threads,
    argument,
    option,
    say,
    split_names,
    use_threads,
)
from residua.errors import UserError

if TYPE_CHECKING:
    from typing import Literal

    from residua.evaluate.results import Results
    from residua.evaluate.score import Scorer, TextScore
    from residua.evaluate.tasks import Task
    from residua.model.decoder import Decoder
    from residua.report.terminal import ProgressBars

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(name="eval")
def evaluate(
    model: Annotated[Path, argument("A folder written by `residua train` or `residua export`.", metavar="RUN")],
    data: Annotated[
        Path | None, option("A folder made by `residua data prepare`.", default="the run's own, if no --tasks")
    ] = None,
    split: Annotated[
        str | None,
        option("Split to evaluate.", default="validation; for tasks test, or validation if there is no test split"),
    ] = None,
    tokens: Annotated[int | None, option("Tokens to score, rounded to whole windows.", default="all", min=1)] = None,
    tasks: Annotated[
        str | None,
        option(
            "Tasks from lm-eval or --task-dir; `exoformer` stands for the six tasks of the ExoFormer paper.",
            metavar="TASK,TASK,...",
        ),
    ] = None,
    task_dir: TaskDir = None,
    shots: Shots = None,
    limit: Annotated[int | None, option("Questions per task, spread over its subjects.", default="all", min=1)] = None,
    allow_code: Annotated[
        bool, option("Allow tasks such as mbpp to run programs written by the model.", "--allow-code")
    ] = False,
    checkpoint: Checkpoint = "last",
    batch_tokens: Annotated[
        int | None, option("Tokens scored per batch.", default="65,536 on a GPU, else 4,096", min=1)
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    out: Annotated[Path | None, option("JSON file for the results.", default="RUN/evaluations/TIME.json")] = None,
    threads: Threads = None,
) -> None:
    """Measure perplexity and bits per byte on prepared text, and accuracy on tasks.

    \b
    residua eval runs/tiny
    residua eval runs/tiny --data data/wiki --tokens 1000000
    residua eval runs/tiny --tasks exoformer --task-dir tasks
    residua eval runs/tiny --tasks arc_easy,lambada_openai
    residua eval runs/tiny --tasks mbpp --allow-code

    Without --task-dir, tasks come from lm-evaluation-harness, which downloads its data
    (pip install 'residua[eval]').
    """
    names = split_names(tasks)
    if task_dir is not None and not names:
        raise UserError("--task-dir needs --tasks: name the tasks, or a group such as exoformer.")
    from residua.evaluate.tasks import open_tasks, refuse_text, text_advice

    if data is not None and data.is_file():
        raise UserError(f"--data {data} is a file, not a prepared folder: {text_advice(data, model)}")
    refuse_text(model, "a run")
    for name in names:
        refuse_text(Path(name), "a task")
    local = open_tasks(task_dir, names, shots=shots, split=split, limit=limit) if task_dir is not None else []
    manager = _known_tasks(names, allow_code) if names and not local else None
    import torch

    from residua.evaluate import results as work
    from residua.evaluate.score import Scorer
    from residua.machine import choose_device
    from residua.report.terminal import ProgressBars, open_console
    from residua.storage.model_folder import open_model, place

    use_threads(threads)
    where = choose_device(device, "--device")
    target = work.new_file(model, out)
    loaded, tokenizer = open_model(model, cast("Literal['last', 'best']", checkpoint))
    loaded = place(loaded, where, precision)
    settings = {
        "checkpoint": checkpoint, "shots": shots, "limit": limit, "device": str(where), "torch": torch.__version__,
        "weights": str(loaded.embed.weight.dtype).removeprefix("torch."),
    }  # fmt: skip
    results = work.Results(str(model), settings)
    console = open_console()
    with ProgressBars(console) as bars:
        if data is not None or not names:
            results.text = _text(loaded, model, data, split, tokens, batch_tokens, bars.track("text"))
        if names:
            scorer = Scorer(loaded, tokenizer, batch_tokens)
            if local:
                _run_local(results, scorer, local, names, bars)
            else:
                _run_harness(results, scorer, names, manager, shots=shots, limit=limit, allow_code=allow_code)
    from residua.files import keeping, write_atomically

    work.show(console, results)
    with keeping("the results are printed above"):
        write_atomically(target, results.to_json(), parents=True)
    if split is not None and results.harness:
        say(console, f"--split {split} was ignored: lm-eval's tasks define their own splits.")
    say(console, f"Results: {target}")
    if not names:
        say(
            console,
            f"Next: multiple-choice tasks, residua eval {shlex.quote(str(model))} --tasks exoformer --task-dir FOLDER "
            "(without a folder, lm-eval downloads them)",
        )


def _text(
    model: Decoder,
    folder: Path,
    data: Path | None,
    split: str | None,
    tokens: int | None,
    batch_tokens: int | None,
    progress: Callable[[int, int], None],
) -> TextScore:
    from residua.evaluate.score import score_text
    from residua.storage.model_folder import open_text

    if data is None and not (folder / "config.toml").exists():
        raise UserError(f"{folder} does not record the text that it was trained on: give --data or --tasks.")
    dataset, config = open_text(folder, model.config, data)
    return score_text(
        model, dataset, split=split or "validation", tokens=tokens, sequence=config.sequence,
        segments=config.data.masking == "documents", batch_tokens=batch_tokens, progress=progress,
    )  # fmt: skip


def _known_tasks(names: list[str], allow_code: bool) -> Any:
    """The tasks of lm-eval; unknown and disallowed tasks are refused before the model is loaded."""
    from residua.report.terminal import open_console

    with open_console(stderr=True).status("reading the task list of lm-eval"):
        from residua.evaluate.harness import find_tasks

        return find_tasks(names, allow_code=allow_code)[0]


def _run_local(results: Results, scorer: Scorer, tasks: list[Task], names: list[str], bars: ProgressBars) -> None:
    from residua.evaluate.results import group_means, score_task

    results.tasks = [score_task(scorer, task, bars.track(task.name)) for task in tasks]
    results.means = group_means({task.task: task.reported for task in results.tasks}, names)


def _run_harness(results: Results, scorer: Scorer, names: list[str], manager: Any, **settings: Any) -> None:
    from residua.evaluate.harness import evaluate_with_harness, reported
    from residua.evaluate.results import group_means
    from residua.generate.generator import Generator

    generator = Generator(scorer.model, scorer.tokenizer)
    results.harness = evaluate_with_harness(scorer, generator, names, task_manager=manager, **settings)
    results.means = group_means(reported(results.harness), names)
