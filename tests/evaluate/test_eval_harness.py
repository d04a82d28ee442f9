"""lm-evaluation-harness on local files gives the numbers that Residua computes itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from residua.evaluate.accuracy import score_task
from residua.evaluate.score import Scorer
from residua.evaluate.tasks import read_task
from residua.generate.generator import Generator, Request
from tests.evaluate.test_eval_scores import TOKENIZER, log_likelihood, model, write_task
from tests.trained import residua

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/validation.jsonl, train: {folder}/train.jsonl}}}}
output_type: multiple_choice
validation_split: validation
fewshot_split: train
fewshot_config: {{sampler: first_n}}
doc_to_text: "{text}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def harness(context: int = 700) -> Any:
    from residua.evaluate.harness import ResiduaLM

    built = model(context=context)
    return ResiduaLM(Scorer(built, TOKENIZER), Generator(built, TOKENIZER))


@pytest.mark.parametrize("shots", [0, 3])
def test_local_tasks_score_the_same_in_the_harness_and_directly(tmp_path: Path, shots: int) -> None:
    from lm_eval.tasks import TaskManager

    from residua.evaluate.harness import evaluate_with_harness

    path = write_task(tmp_path, "arc_easy", questions=20)
    lines = path.read_text().splitlines(keepends=True)
    for split in ("validation", "train"):
        (tmp_path / f"{split}.jsonl").write_text("".join(line for line in lines if f'"split": "{split}"' in line))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    text = "Question: {{question}}\\nAnswer:"
    (tasks / "local.yaml").write_text(TASK.format(name="local_arc", folder=tmp_path, text=text))
    lm = harness()
    found = evaluate_with_harness(
        lm.scorer, lm.generator, ["local_arc"], shots=shots, limit=None,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["local_arc"]  # fmt: skip
    score = score_task(lm.scorer, read_task("arc_easy", path, shots=shots))
    for metric in ("acc", "acc_norm"):
        ours = getattr(score, metric)
        assert found[f"{metric},none"] == pytest.approx(ours.value)
        assert found[f"{metric}_stderr,none"] == pytest.approx(ours.error)


def instance(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_requests_of_the_harness_equal_direct_computations() -> None:
    lm = harness()
    built = lm.scorer.model
    requests = [instance("a cat", " sat"), instance("", "the dog"), instance("under the ", "mat")]
    expected = [
        log_likelihood(built, TOKENIZER.encode("a cat"), TOKENIZER.encode(" sat")),
        log_likelihood(built, [TOKENIZER.end_of_text], TOKENIZER.encode("the dog")),
        log_likelihood(built, TOKENIZER.encode("under the"), TOKENIZER.encode(" mat")),
    ]
    for (log, greedy), (exact, also) in zip(lm.loglikelihood(requests, disable_tqdm=True), expected, strict=True):
        assert log == pytest.approx(exact, abs=1e-4)
        assert greedy == also


def test_rolling_likelihood_follows_the_harness_own_windows() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    lm = harness(context=16)
    text = "the cat sat on the mat and the dog ran under the hat"
    exact = 0.0
    for window in get_rolling_token_windows(TOKENIZER.encode(text), TOKENIZER.end_of_text, 16, 1):
        context, continuation = make_disjoint_window(window)
        exact += log_likelihood(lm.scorer.model, context, continuation)[0]
    (total,) = lm.loglikelihood_rolling([instance(text)])
    assert total == pytest.approx(exact, abs=1e-3)


def test_generate_until_writes_greedily_up_to_its_stops() -> None:
    lm = harness()
    settings = {"until": ["\n\n"], "max_gen_toks": 12}
    prompts = ["the cat", "a", "the red dog ran"]
    texts = lm.generate_until([instance(prompt, settings) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == lm.generator([prompt], Request(12, stop=("\n\n",)))[0][0].text


def test_a_task_that_the_harness_does_not_have_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    from residua.evaluate.harness import evaluate_with_harness

    lm = harness()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    with pytest.raises(ValueError, match="lm-eval has no task nonsense"):
        evaluate_with_harness(lm.scorer, lm.generator, ["nonsense"], shots=0, limit=1, task_manager=manager)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_without_a_network_local_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.evaluate import harness

    def unreachable(**_: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(harness, "simple_evaluate", unreachable)
    scorer = Scorer(model(), TOKENIZER)
    with pytest.raises(ValueError, match=r"could not download a task \(Couldn.t reach the Hub\): --task-dir"):
        harness.evaluate_with_harness(
            scorer, Generator(scorer.model, TOKENIZER), ["mine"], shots=0, limit=1,
            task_manager=SimpleNamespace(all_tasks=["mine"]),
        )  # fmt: skip


def test_a_task_that_the_harness_does_not_have_is_refused_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from residua.evaluate import harness

    monkeypatch.setattr(harness, "TaskManager", lambda: SimpleNamespace(all_tasks=["arc_easy", "piqa"]))
    assert residua(monkeypatch, "eval", "nowhere", "--tasks", "arc_esay") == 2
    assert "residua: lm-eval has no task arc_esay: did you mean arc_easy?" in capsys.readouterr().err
