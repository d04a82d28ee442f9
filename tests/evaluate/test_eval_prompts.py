"""The prompts of local task files are those that lm-evaluation-harness makes from its own YAML files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residua.evaluate.prompts import PROMPTS, find_prompt
from residua.evaluate.tasks import read_task

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

Record = dict[str, Any]
LETTERS = "ABCDE"


def labelled(record: Record) -> Record:
    """Choices and answer as the datasets of AI2 have them."""
    choices = record["choices"]
    return {"choices": {"text": choices, "label": [*LETTERS[: len(choices)]]}, "answerKey": LETTERS[record["answer"]]}


def spelled(*names: str) -> Callable[[Record], Record]:
    """Every choice under a separate key."""
    return lambda record: dict(zip(names, record["choices"], strict=True))


def keys(*more: Callable[[Record], Record], **names: str) -> Callable[[Record], Record]:
    """A record of the harness: our keys under its names, plus the keys that `more` computes from ours."""
    return lambda record: (
        {theirs: record[ours] for theirs, ours in names.items()}
        | {key: value for make in more for key, value in make(record).items()}
    )


def options(record: Record) -> str:
    return " , ".join(f"{letter} ) {c}" for letter, c in zip("abcde", record["choices"], strict=True))


PAIR = {"label": "answer", "question": "question"}
CASES: dict[str, tuple[str, int, Callable[[Record], Record]]] = {
    "anli_r1": ("anli/anli_r1.yaml", 3, keys(premise="context", hypothesis="question", label="answer")),
    "arc_challenge": ("arc/arc_challenge.yaml", 4, keys(labelled, question="question")),
    "arc_easy": ("arc/arc_easy.yaml", 4, keys(labelled, question="question")),
    "blimp": ("blimp/adjunct_island.yaml", 2, spelled("sentence_good", "sentence_bad")),
    "boolq": ("super_glue/boolq/default.yaml", 2, keys(passage="context", **PAIR)),
    "cb": ("super_glue/cb/default.yaml", 3, keys(premise="context", hypothesis="question", label="answer")),
    "commonsense_qa": ("commonsense_qa/default.yaml", 5, keys(labelled, question="question")),
    "copa": ("super_glue/copa/default.yaml", 2, keys(spelled("choice1", "choice2"), premise="context", **PAIR)),
    "hellaswag": (
        "hellaswag/hellaswag.yaml", 4,
        keys(lambda r: {"label": str(r["answer"])}, ctx_a="ctx_a", ctx_b="ctx_b", activity_label="activity_label",
             endings="choices"),
    ),
    "lambada": ("lambada/lambada_openai.yaml", 1, lambda r: {"text": f"{r['context']} {r['choices'][0]}"}),
    "logiqa": (
        "logiqa/logiqa.yaml", 4,
        keys(lambda r: {"label": "abcd"[r["answer"]]}, context="context", question="question", options="choices"),
    ),
    "mathqa": (
        "mathqa/mathqa.yaml", 5,
        keys(lambda r: {"correct": "abcde"[r["answer"]], "options": options(r)}, Problem="question"),
    ),
    "medmcqa": (
        "medmcqa/medmcqa.yaml", 4, keys(spelled("opa", "opb", "opc", "opd"), question="question", cop="answer")
    ),
    "mmlu": ("mmlu/default/mmlu_anatomy.yaml", 4, keys(question="question", choices="choices", answer="answer")),
    "openbookqa": ("openbookqa/openbookqa.yaml", 4, keys(labelled, question_stem="question")),
    "piqa": ("piqa/piqa.yaml", 2, keys(spelled("sol1", "sol2"), goal="question", label="answer")),
    "rte": ("glue/rte/default.yaml", 2, keys(sentence1="context", sentence2="question", label="answer")),
    "sciq": (
        "sciq/sciq.yaml", 4,
        keys(spelled("distractor1", "distractor2", "distractor3", "correct_answer"), support="context",
             question="question"),
    ),
    "social_iqa": (
        "siqa/siqa.yaml", 3,
        keys(lambda r: {"label": str(r["answer"] + 1)}, spelled("answerA", "answerB", "answerC"), context="context",
             question="question"),
    ),
    "swag": (
        "swag/swag.yaml", 4,
        keys(spelled("ending0", "ending1", "ending2", "ending3"), startphrase="context", label="answer"),
    ),
    "truthfulqa_mc1": (
        "truthfulqa/truthfulqa_mc1.yaml", 4,
        keys(lambda r: {"mc1_targets": {"choices": r["choices"]}}, question="question"),
    ),
    "winogrande": (
        "winogrande/default.yaml", 2,
        keys(lambda r: {"answer": str(r["answer"] + 1)}, spelled("option1", "option2"), sentence="context"),
    ),
}  # fmt: skip
ALIASES = {
    "siqa": "social_iqa", "lambada_openai": "lambada", "lambada_standard": "lambada", "anli_r2": "anli_r1",
    "anli_r3": "anli_r1", "sglue_rte": "rte",
}  # fmt: skip
WITHOUT_SHOTS = ("blimp", "lambada", "truthfulqa_mc1")
FIXED_ANSWERS = {"blimp": 0, "lambada": 0, "sciq": 3, "truthfulqa_mc1": 0}
FIXED_CHOICES = {
    "anli_r1": ["True", "Neither", "False"], "boolq": ["no", "yes"], "cb": ["True", "False", "Neither"],
    "lambada": ["Signs"], "rte": ["True", "False"],
}  # fmt: skip
WITHOUT_CONTEXT = ("arc_challenge", "arc_easy", "mathqa", "piqa")
WITHOUT_QUESTION = ("blimp", "hellaswag", "lambada", "swag", "winogrande")


def record(task: str, split: str, number: int) -> Record:
    """A question in our schema, with spaces, capitals and marks where prompts might treat them in another way."""
    many = CASES[task][1]
    choices = FIXED_CHOICES.get(
        task, [f"{'The' if i % 2 else 'an'} Answer {number}.{i} [step] so" for i in range(many)]
    )
    made: Record = {"split": split, "id": number, "choices": choices, "answer": FIXED_ANSWERS.get(task, number % many)}
    if task not in WITHOUT_CONTEXT:
        made["context"] = f" On day {number}  it rained. [header] It was  a long day."
    if task not in WITHOUT_QUESTION:
        made["question"] = f" What  happened on day {number}? "
    if task == "copa":
        made["question"] = "cause" if number % 2 else "effect"
    if task == "winogrande":
        made["context"] = f"On day {number} the _ was wet,  because of _ rain. "
    if task == "hellaswag":
        made |= {"ctx_a": f"Day {number} [title] Rain.", "ctx_b": "they Run", "activity_label": "Running Away"}
    if task == "mmlu":
        made["subject"] = "anatomy"
    return made


def harness_task(task: str, records: list[Record], shots: int) -> Any:
    """The harness's own task, on these questions instead of its download."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from lm_eval import tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    disable_progress_bar()
    yaml, _, as_theirs = CASES[task]
    config = load_yaml(Path(tasks.__file__).parent / yaml)
    parts = {
        split: Dataset.from_list([as_theirs(r) for r in records if r["split"] == split])
        for split in ("train", "validation")
    }
    evaluated = parts["validation"]
    splits = {config.get("training_split") or "train": parts["train"], "dev": parts["train"]}
    splits |= {config.get(kind): evaluated for kind in ("validation_split", "test_split")}
    config |= {"num_fewshot": shots, "custom_dataset": lambda **_: splits, "fewshot_config": {"sampler": "first_n"}}
    for structural in ("tag", "group"):
        config.pop(structural, None)
    return ConfigurableTask(config=config)


def test_every_prompt_has_a_harness_comparison() -> None:
    assert {ALIASES.get(name, name) for name in PROMPTS} == set(CASES)
    assert all(PROMPTS[alias] == PROMPTS[name] for alias, name in ALIASES.items())


@pytest.mark.parametrize("name", CASES)
def test_prompts_and_metric_match_the_harness(name: str, tmp_path: Path) -> None:
    records = [record(name, split, i) for i, split in enumerate(["validation", "train"] * 3)]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    for shots in (0,) if name in WITHOUT_SHOTS else (0, 2):
        theirs = harness_task(name, records, shots)
        theirs.build_all_requests(rank=0, world_size=1)
        ours = read_task(name, path, shots=shots)
        pairs = [
            pair for question in ours.questions for pair in zip(question.contexts, question.continuations, strict=True)
        ]
        assert pairs == [instance.args[:2] for instance in theirs.instances]
        assert ours.metric == ("acc_norm" if "acc_norm" in theirs._metric_fn_list else "acc")
        if ours.metric == "acc_norm":
            scored = [theirs.doc_to_choice(instance.doc) for instance in theirs.instances if instance.idx == 0]
            assert [question.lengths for question in ours.questions] == [[len(c) for c in found] for found in scored]


def test_default_shots_of_local_tasks_match_the_harness() -> None:
    """Tasks of a file have no worked examples unless --shots or a group asks for them: no YAML file says otherwise."""
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    for yaml, *_ in CASES.values():
        config = load_yaml(Path(tasks.__file__).parent / yaml, resolve_func=False)
        assert not config.get("num_fewshot")


def test_mmlu_descriptions_match_the_harness() -> None:
    from lm_eval import tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    files = sorted((Path(tasks.__file__).parent / "mmlu" / "default").glob("mmlu_*.yaml"))
    assert len(files) == 57
    for file in files:
        config = load_yaml(file, resolve_func=False, recursive=False)
        assert find_prompt("mmlu").describe({"subject": config["dataset_name"]}) == config["description"]


def test_lambada_scores_match_the_harness(tmp_path: Path) -> None:
    from residua.evaluate.harness import ResiduaLM
    from residua.evaluate.results import score_task
    from residua.evaluate.score import Scorer
    from residua.generate.generator import Generator
    from tests.evaluate.test_eval_scores import TOKENIZER, model

    words = ["a", "cat", "under", "it", "mat", "slowly"]
    records = [record("lambada", "validation", i) | {"choices": [word]} for i, word in enumerate(words)]
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    scorer = Scorer(model(), TOKENIZER)
    lm = ResiduaLM(scorer, Generator(scorer.model, TOKENIZER))
    task = harness_task("lambada", records, 0)
    task.build_all_requests(rank=0, world_size=1)
    answers = lm.loglikelihood(task.instances, disable_tqdm=True)
    each = [task.process_results(asked.doc, [answer]) for asked, answer in zip(task.instances, answers, strict=True)]
    found = {name: mean([result[name] for result in each]) for name, mean in task.aggregation().items()}
    score = score_task(scorer, read_task("lambada", path, shots=0))
    assert score.perplexity is not None and score.perplexity.error is not None
    assert score.perplexity.value == pytest.approx(found["perplexity"], rel=1e-6)
    assert score.acc.value == found["acc"]
