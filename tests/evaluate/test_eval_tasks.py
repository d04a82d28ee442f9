"""Local tasks: which questions `--limit` takes, worked examples by subject, text where questions are expected."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residua.data.tokenizer import Tokenizer
from residua.evaluate.results import Perplexity, Results
from residua.evaluate.score import TextScore, WordCount
from residua.evaluate.tasks import open_tasks, read_task, spread
from tests.trained import residua

SUBJECTS = ["law"] * 60 + ["anatomy"] * 30 + ["virology"] * 10


def question(subject: str, split: str, number: int) -> dict[str, Any]:
    made = {"split": split, "id": number, "question": f"{subject} {number}?", "choices": ["x", "y", "z", "w"]}
    return made | {"answer": number % 4, "subject": subject}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("limit", "shares"),
    [
        (1, {"law": 1}),
        (3, {"law": 1, "anatomy": 1, "virology": 1}),
        (10, {"law": 6, "anatomy": 3, "virology": 1}),
        (50, {"law": 30, "anatomy": 15, "virology": 5}),
        (100, {"law": 60, "anatomy": 30, "virology": 10}),
    ],
)
def test_a_limit_is_shared_among_subjects(limit: int, shares: dict[str, int]) -> None:
    places = spread(SUBJECTS, limit)
    assert places == sorted(set(places)) and len(places) == limit
    assert Counter(SUBJECTS[place] for place in places) == shares


def test_a_limit_without_subjects_is_spread_over_the_file() -> None:
    assert spread([""] * 12, 4) == [0, 3, 6, 9]


def test_limited_questions_cover_all_subjects(tmp_path: Path) -> None:
    records = [question(subject, "test", i) for i, subject in enumerate(SUBJECTS)]
    records += [question(subject, "train", 100 + i) for i, subject in enumerate(["law", "anatomy", "virology"])]
    task = read_task("mmlu", write(tmp_path / "mmlu.jsonl", records), shots=1, limit=10)
    contexts = [q.contexts[0] for q in task.questions]
    assert len(contexts) == 10
    for context in contexts:
        head, example, asked = context.split("\n\n")
        subject = head.removesuffix(".").rpartition(" ")[2]
        assert example.startswith(f"{subject} 10") and asked.startswith(f"{subject} ")
    assert [c.split("\n\n")[2].split()[0] for c in contexts] == ["law"] * 6 + ["anatomy"] * 3 + ["virology"]


def test_shared_examples_serve_every_subject(tmp_path: Path) -> None:
    shared = question("law", "train", 7) | {"subject": None}
    task = read_task("mmlu", write(tmp_path / "a.jsonl", [question("law", "test", 0), shared]), shots=1)
    assert "law 7?" in task.questions[0].contexts[0]
    lacking = write(tmp_path / "b.jsonl", [question("law", "test", 0), question("anatomy", "train", 1)])
    with pytest.raises(ValueError, match=r"has 0 worked examples about law in its train split, but --shots asks for 2"):
        read_task("mmlu", lacking, shots=2)


def test_default_shots_are_the_groups_or_zero(tmp_path: Path) -> None:
    from residua.evaluate.tasks import EXOFORMER

    for name in (*EXOFORMER, "mine"):
        rows = [question("", split, i) | {"context": "a _ b"} for i, split in enumerate(["train"] * 5 + ["test"])]
        write(tmp_path / f"{name}.jsonl", rows)
    folder = {"split": None, "limit": None}
    tasks = open_tasks(tmp_path, ["exoformer", "mine"], shots=None, **folder)
    assert {task.name: task.shots for task in tasks} == {**dict.fromkeys(EXOFORMER, 5), "mine": 0}
    assert {task.shots for task in open_tasks(tmp_path, ["exoformer", "mine"], shots=2, **folder)} == {2}


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("copa", {"context": "It rained.", "question": "why"}, "question is 'why', expected cause or effect"),
        ("mmlu", {"choices": ["x"] * 27}, "it has 27 choices, but at most 26 are supported"),
        ("mmlu", {"subject": ["law"]}, "subject is a list of 1 entry"),
        ("mine", {"question": None}, "question is null, expected a text"),
        ("winogrande", {"context": None}, "context is null, expected a text"),
    ],
)
def test_a_question_that_does_not_fit_its_prompt_is_refused(
    task: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"{task}.jsonl", [question("law", "test", 3) | change])
    with pytest.raises(ValueError) as refused:
        read_task(task, path, shots=0)
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_text_given_as_a_run_or_task_suggests_data_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Once upon a time.")
    write(tmp_path / "corpus.jsonl", [{"text": "Once upon a time."}])
    prepare = f"residua data prepare {book} --tokenizer RUN --holdout 0 --out DIR` and give --data DIR --split train."
    cases = {
        (book,): f"{book} is text, not a run: prepare it with `{prepare}",
        ("RUN", "--data", book): f"--data {book} is a file, not a prepared folder: prepare it with `{prepare}",
        ("RUN", "--tasks", book): f"{book} is text, not a task: prepare it with `{prepare}",
        ("RUN", "--tasks", "book", "--task-dir", tmp_path): f"{book} is text, not a file with questions: prepare",
        ("RUN", "--tasks", "book", "--task-dir", book): f"{book} is text, not a folder with task files: prepare",
        ("RUN", "--tasks", "corpus", "--task-dir", tmp_path): f"{tmp_path / 'corpus.jsonl'}, line 1 holds text, not a "
        "question: prepare the file with residua data prepare and use --data.",
    }
    for arguments, sentence in cases.items():
        assert residua(monkeypatch, "eval", *arguments) == 2
        assert capsys.readouterr().err.startswith(f"residua: {sentence}")


TEXTS = ["The cat  sat;\ton the mat.\n", " Ünïcode – “quotes” here", "", "one"]


def tokenizers() -> dict[str, Tokenizer]:
    return {"bytes": Tokenizer.bytes(), "bpe": Tokenizer.train(TEXTS, 290)}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_word_count_does_not_depend_on_chunk_borders(kind: str, at_once: int) -> None:
    tokenizer = tokenizers()[kind]
    stream = np.array([token for text in TEXTS for token in (*tokenizer.encode(text), tokenizer.end_of_text)])
    count = WordCount(tokenizer)
    for start in range(0, len(stream), at_once):
        count.add(stream[start : start + at_once])
    assert count.close() == sum(len(text.split()) for text in TEXTS) == 11


def test_word_perplexity_is_exp_of_nats_per_word() -> None:
    score = TextScore("d", "validation", tokens=120, bytes=500, exact_bytes=True, loss=2.5, words=80)
    assert score.word_perplexity == pytest.approx(math.exp(2.5 * 120 / 80))
    hopeless = TextScore("d", "validation", tokens=9000, bytes=500, exact_bytes=True, loss=2.5, words=1)
    written = json.loads(Results("m", {}, text=hopeless).to_json())["text"]
    assert written["word_perplexity"] is None and written["words"] == 1
    assert written["perplexity"] == pytest.approx(math.exp(2.5))


def test_word_perplexity_error_follows_the_error_of_the_mean() -> None:
    logs = [-1.0, -2.5, -0.5, -4.0]
    mean, spread_ = statistics.fmean(logs), np.std(logs, ddof=1)
    found = Perplexity.of(logs)
    assert found.value == pytest.approx(math.exp(-mean))
    assert found.error == pytest.approx(math.exp(-mean) * spread_ / 2)
    assert Perplexity.of([-1.0]).error is None
