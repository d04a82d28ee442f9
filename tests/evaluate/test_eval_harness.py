"""lm-evaluation-harness on local files gives the numbers that Residua computes itself."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from residua.evaluate.results import score_task
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
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # starts processes to ask for versions


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


def test_harness_requests_equal_direct_computations() -> None:
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


def test_rolling_likelihood_uses_the_harness_windows() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    lm = harness(context=16)
    text = "the cat sat on the mat and the dog ran under the hat"
    exact = 0.0
    for window in get_rolling_token_windows(TOKENIZER.encode(text), TOKENIZER.end_of_text, 16, 1):
        context, continuation = make_disjoint_window(window)
        exact += log_likelihood(lm.scorer.model, context, continuation)[0]
    (total,) = lm.loglikelihood_rolling([instance(text)])
    assert total == pytest.approx(exact, abs=1e-3)


def test_windows_of_all_texts_are_batched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, calls = harness(context=16), []
    score = lm.scorer.score
    monkeypatch.setattr(lm.scorer, "score", lambda pairs: calls.append(len(pairs)) or score(pairs))
    texts = ["the cat sat on the mat and the dog ran", "a hat"]
    together = lm.loglikelihood_rolling([instance(text) for text in texts])
    assert len(calls) == 1
    assert together == pytest.approx([lm.loglikelihood_rolling([instance(text)])[0] for text in texts], abs=1e-4)


def test_generate_until_decodes_greedily_up_to_its_stops() -> None:
    lm = harness()
    settings = {"until": ["\n\n"], "max_gen_toks": 12}
    prompts = ["the cat", "a", "the red dog ran"]
    texts = lm.generate_until([instance(prompt, settings) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == lm.generator([prompt], Request(12, stop=("\n\n",)))[0][0].text


def test_missing_network_error_suggests_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.evaluate import harness

    def unreachable(**_: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(harness, "simple_evaluate", unreachable)
    scorer = Scorer(model(), TOKENIZER)
    with pytest.raises(ValueError, match=r"could not download a task \(Couldn.t reach the Hub\): use --task-dir"):
        harness.evaluate_with_harness(
            scorer, Generator(scorer.model, TOKENIZER), ["mine"], shots=0, limit=1,
            task_manager=SimpleNamespace(all_tasks=["mine"], task_index={}),
        )  # fmt: skip


def test_unknown_task_is_refused_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from residua.evaluate import harness

    monkeypatch.setattr(harness, "TaskManager", lambda: SimpleNamespace(all_tasks=["arc_easy", "piqa"], task_index={}))
    assert residua(monkeypatch, "eval", "nowhere", "--tasks", "arc_esay") == 2
    assert "residua: lm-eval has no task arc_esay: did you mean arc_easy?" in capsys.readouterr().err


def test_a_long_answer_leaves_half_the_context_for_the_prompt() -> None:
    lm = harness(context=32)
    prompt = "the cat sat on the mat and the dog ran under the hat"
    (text,) = lm.generate_until([instance(prompt, {"until": ["@"], "max_gen_toks": 1024})])
    kept = TOKENIZER.encode(prompt)[-16:]
    assert text == lm.generator([kept], Request(16, stop=("@",)))[0][0].text


WRITER = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 2
fewshot_config: {{sampler: first_n, samples: [{{question: one, answer: a}}, {{question: two, answer: b}}]}}
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
{more}
"""


def writers(folder: Path) -> Any:
    """Tasks of the harness: one that runs code, one that includes it, one that does not, a group and a tag of them."""
    from lm_eval.tasks import TaskManager

    (folder / "test.jsonl").write_text('{"question": "three", "answer": "c"}\n')
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, more in {"coder": "unsafe_code: true\ntag: coders", "writer": ""}.items():
        (tasks / f"{name}.yaml").write_text(WRITER.format(name=name, folder=folder, more=more))
    (tasks / "coder_again.yaml").write_text("include: coder.yaml\ntask: coder_again\n")
    (tasks / "all.yaml").write_text("group: everything\ntask: [writer, {group: inner, task: [coder]}]\n")
    return TaskManager(include_path=str(tasks), include_defaults=False)


def test_tasks_that_run_code_need_permission(tmp_path: Path) -> None:
    from residua.evaluate.harness import find_tasks

    manager = writers(tmp_path)
    for name in ("coder", "coder_again", "coders", "everything"):
        with pytest.raises(ValueError, match=rf"^{name} runs programs written by the model.*give --allow-code\.$"):
            find_tasks([name], manager)
        assert find_tasks([name], manager, allow_code=True)[1] == [name]
    assert find_tasks(["writer"], manager)[1] == ["writer"]


@pytest.mark.parametrize(("name", "leave", "shots", "used"), [("coder", True, None, 2), ("writer", False, 1, 1)])
def test_permitted_code_task_uses_its_own_shots(
    name: str, leave: bool, shots: int | None, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from residua.evaluate.harness import CODE_SWITCH, evaluate_with_harness

    monkeypatch.delenv(CODE_SWITCH, raising=False)
    lm = harness()
    seen: list[tuple[str, str]] = []

    def generate(prompts: list[list[int]], request: Request) -> Any:
        seen.extend((TOKENIZER.decode(prompt), os.environ[CODE_SWITCH]) for prompt in prompts)
        return lm.generator(prompts, request)

    found = evaluate_with_harness(
        lm.scorer, generate, [name], shots=shots, limit=None, allow_code=leave, task_manager=writers(tmp_path)
    )[name]  # fmt: skip
    assert found["shots"] == used and found["exact_match,none"] in (0.0, 1.0)
    assert seen == [("\n\n".join(["one a", "two b"][:used] + ["three"]), "1" if leave else "0")]
    assert CODE_SWITCH not in os.environ


def test_task_group_uses_the_shots_of_its_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.evaluate import harness
    from residua.evaluate.tasks import EXOFORMER

    calls: list[tuple[int | None, list[str]]] = []

    def evaluate(tasks: list[str], num_fewshot: int | None, **_: Any) -> Any:
        calls.append((num_fewshot, tasks))
        return {
            "results": {task: {"acc,none": 0.5} for task in tasks},
            "n-shot": dict.fromkeys(tasks, num_fewshot or 3),
        }

    monkeypatch.setattr(harness, "simple_evaluate", evaluate)
    manager = SimpleNamespace(all_tasks=[*EXOFORMER, "mine"], task_index={})
    scorer = Scorer(model(), TOKENIZER)
    run = {"limit": None, "task_manager": manager}
    found = harness.evaluate_with_harness(scorer, None, ["exoformer", "mine"], shots=None, **run)
    assert calls == [(5, [*EXOFORMER]), (None, ["mine"])]
    assert {task: metrics["shots"] for task, metrics in found.items()} == {**dict.fromkeys(EXOFORMER, 5), "mine": 3}
    calls.clear()
    harness.evaluate_with_harness(scorer, None, ["exoformer", "mine"], shots=1, **run)
    assert calls == [(1, [*EXOFORMER, "mine"])]


def test_code_is_refused_before_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from residua.evaluate import harness

    manager = writers(tmp_path)
    monkeypatch.setattr(harness, "TaskManager", lambda: manager)
    assert residua(monkeypatch, "eval", "nowhere", "--tasks", "coder") == 2
    assert "residua: coder runs programs written by the model" in capsys.readouterr().err
    assert residua(monkeypatch, "eval", "nowhere", "--tasks", "coder", "--allow-code") == 2
    assert "residua: nowhere is not a folder" in capsys.readouterr().err


def coding_tasks() -> Any:
    from lm_eval import tasks
    from lm_eval.tasks import TaskManager

    folder = Path(tasks.__file__).parent
    return TaskManager(include_path=[folder / "mbpp", folder / "humaneval"], include_defaults=False)


def test_mbpp_and_humaneval_are_marked_as_running_code() -> None:
    from residua.evaluate.harness import runs_code

    manager = coding_tasks()
    assert {"mbpp", "mbpp_plus", "humaneval", "humaneval_instruct"} <= set(manager.all_subtasks)
    assert all(runs_code(name, manager.task_index) for name in manager.all_subtasks)


def test_mbpp_uses_its_three_examples_and_runs_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own task, with one problem instead of its download and a stand-in for the metric."""
    from datasets import Dataset

    from residua.evaluate.harness import CODE_SWITCH, evaluate_with_harness

    tests = [f"assert double({n}) == {2 * n}" for n in range(3)]
    problem = {"text": "Write a function that doubles.", "test_list": tests, "code": ""}
    judged: list[tuple[str, list[list[str]], list[str]]] = []

    def compute(references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        judged.append((os.environ[CODE_SWITCH], predictions, references))
        return {"pass@1": 0.25}, {}

    library = SimpleNamespace(load=lambda name: SimpleNamespace(compute=compute))
    monkeypatch.setitem(sys.modules, "evaluate", library)
    monkeypatch.setattr("datasets.load_dataset", lambda **_: {"test": Dataset.from_list([problem])})
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.mbpp.utils", raising=False)
    lm = harness(context=4000)
    asked: list[str] = []

    def generate(prompts: list[list[int]], request: Request) -> Any:
        asked.extend(TOKENIZER.decode(prompt) for prompt in prompts)
        return [SimpleNamespace(text="def double(n): return 2 * n")], None

    settings: dict[str, Any] = {"shots": None, "limit": None, "allow_code": True, "task_manager": coding_tasks()}
    found = evaluate_with_harness(lm.scorer, generate, ["mbpp"], **settings)["mbpp"]
    assert (found["shots"], found["pass_at_1,none"]) == (3, 0.25)
    (prompt,) = asked
    assert prompt.count("You are an expert Python programmer") == 4 and prompt.endswith("[BEGIN]\n")
    assert judged[-1] == ("1", [["def double(n): return 2 * n"]], ["\n".join(tests)])
    sys.modules.pop("lm_eval.tasks.mbpp.utils", None)
