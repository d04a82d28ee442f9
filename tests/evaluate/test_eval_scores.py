"""Likelihoods, tasks, perplexity, and lm-evaluation-harness, against direct computations."""

import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import residua
from residua.data import Dataset, open_corpus, prepare
from residua.data.tokenizer import Tokenizer
from residua.evaluate.results import Accuracy, TaskScore, group_means, score_task
from residua.evaluate.score import AHEAD, Pair, Scorer, score_text, windows
from residua.evaluate.tasks import EXOFORMER, open_tasks, read_task
from residua.generate.generator import Generator, Request
from residua.generate.transfer import Arrival
from residua.model.decoder import Decoder
from residua.model.inference import Forward
from tests.model.small import small

pytestmark = pytest.mark.slow

TOKENIZER = Tokenizer.bytes()
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "hat", "red", "blue", "slowly", "fast"]


def model(context: int = 160, **tables: Any) -> Decoder:
    torch.manual_seed(3)
    return residua.build(small(vocab_size=257, context=context, **tables)).eval()


def phrase(generator: np.random.Generator, words: int) -> str:
    return " ".join(generator.choice(WORDS, words))


def record(task: str, split: str, number: int, generator: np.random.Generator) -> dict[str, Any]:
    """A question in the schema of the task, with nonsense in it."""
    choices = [phrase(generator, int(generator.integers(1, 4))) for _ in range(4)]
    made: dict[str, Any] = {"task": task, "id": f"{split}-{number}", "split": split, "choices": choices}
    if task == "hellaswag":
        context = {"context": f"{phrase(generator, 2)} [title] he", "ctx_a": phrase(generator, 2), "ctx_b": "he"}
        made |= context | {"activity_label": "Running", "choices": [f"{c} [step] on." for c in choices]}
    elif task == "winogrande":
        made |= {"context": f"{phrase(generator, 2)} _ {phrase(generator, 2)}.", "choices": choices[:2]}
    else:
        made["question"] = f"{phrase(generator, 3)}?"
    return made | {"answer": int(generator.integers(len(made["choices"])))}


def write_task(folder: Path, task: str, questions: int = 12, shots: int = 5, packed: bool = False) -> Path:
    generator = np.random.default_rng(sum(map(ord, task)))
    splits = ["validation"] * questions + ["train"] * shots
    lines = "".join(json.dumps(record(task, split, i, generator)) + "\n" for i, split in enumerate(splits))
    path = folder / f"{task}.jsonl{'.xz' if packed else ''}"
    path.write_bytes(lzma.compress(lines.encode()) if packed else lines.encode())
    return path


@torch.no_grad()
def log_likelihood(built: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One continuation, directly."""
    tokens = [*context, *continuation]
    logits: Tensor = built(torch.tensor([tokens[:-1]]))[0, -len(continuation) :].double()
    targets = torch.tensor(continuation)
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_likelihoods_do_not_depend_on_the_rest_of_the_batch(batch_tokens: int) -> None:
    linear = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
    built = model(attention=linear, logit_softcap=1.5)
    pairs = [
        Pair(list(range(1, 1 + n)), list(range(40, 40 + m))) for n, m in ((3, 2), (17, 1), (1, 9), (8, 8), (17, 3))
    ]
    scores = Scorer(built, TOKENIZER, batch_tokens).score(pairs)
    for pair, score in zip(pairs, scores, strict=True):
        log, greedy = log_likelihood(built, *pair)
        assert score.log == pytest.approx(log, abs=1e-4)
        assert score.greedy == greedy


def noting(order: list[str], name: str, work: Any) -> Any:
    def noted(*given: Any) -> Any:
        order.append(name)
        return work(*given)

    return noted


def test_next_batch_starts_before_the_previous_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("_start", "_likelihoods"):
        monkeypatch.setattr(Scorer, name, noting(order, name, getattr(Scorer, name)))
    done: list[tuple[int, int]] = []
    pairs = [Pair([1, 2, 3], [4, 5])] * 3
    scores = Scorer(model(), TOKENIZER, batch_tokens=4).score(pairs, lambda *counts: done.append(counts))
    assert order == ["_start", "_start", "_likelihoods", "_start", "_likelihoods", "_likelihoods"]
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert scores == [scores[0]] * 3


def test_batches_are_queued_ahead_of_their_results(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for owner, name in ((Forward, "hidden"), (Arrival, "wait")):
        monkeypatch.setattr(owner, name, noting(order, name, getattr(owner, name)))
    score_text(model(context=16), dataset, tokens=64, batch_tokens=16)
    assert order == ["hidden"] * (AHEAD + 1) + ["wait", "hidden"] + ["wait"] * 3


def test_greedy_flag_matches_greedy_generation() -> None:
    built = model()
    prompt = TOKENIZER.encode("a cat")
    written = Generator(built, TOKENIZER)([prompt], Request(4))[0][0].tokens
    likely, unlikely = Scorer(built, TOKENIZER).score([Pair(prompt, written), Pair(prompt, [*written[:-1], 0])])
    assert (likely.greedy, unlikely.greedy) == (True, False)


def test_a_long_pair_drops_the_beginning_of_its_context() -> None:
    built = model(context=8)
    context, continuation = list(range(30)), [7, 9, 11]
    (score,) = Scorer(built, TOKENIZER).score([Pair(context, continuation)])
    assert score.log == pytest.approx(log_likelihood(built, context[-6:], continuation)[0], abs=1e-4)


def test_spaces_belong_to_the_continuation() -> None:
    scorer = Scorer(model(), TOKENIZER)
    moved, plain, alone, blank, again = scorer.pairs([("ab ", "c"), ("ab", " c"), ("", "c"), ("  ", "c"), ("ab", "d")])
    assert moved == plain == Pair(TOKENIZER.encode("ab"), TOKENIZER.encode(" c"))
    assert alone == Pair([TOKENIZER.end_of_text], TOKENIZER.encode("c"))
    assert blank == Pair([TOKENIZER.end_of_text], TOKENIZER.encode("  c"))
    assert again == Pair(TOKENIZER.encode("ab"), TOKENIZER.encode("abd")[len(TOKENIZER.encode("ab")) :])
    assert scorer.pairs([]) == []


@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_windows_score_every_token_once(length: int) -> None:
    pairs = windows(list(range(length)), 99, 4)
    assert [token for pair in pairs for token in pair.continuation] == list(range(length))
    assert all(len(pair.context) >= 1 and len(pair.context) + len(pair.continuation) - 1 <= 4 for pair in pairs)
    last = pairs[-1]
    assert len(last.context) + len(last.continuation) - 1 == min(4, length)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    texts = [f"{phrase(generator, 3)} ümlaut" for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return prepare(open_corpus([folder / "text.jsonl"], holdout=0.5), folder / "data", TOKENIZER, workers=1)


@pytest.mark.parametrize("segments", [False, True])
def test_perplexity_and_bits_cover_the_scored_tokens(dataset: Dataset, segments: bool) -> None:
    built = model(context=16)
    score = score_text(built, dataset, tokens=100, segments=segments, batch_tokens=32)
    split = dataset.split("validation")
    total, targets = 0.0, []
    for start in range(0, 96, 16):
        ids = torch.from_numpy(split.read(start, 17))
        for t in range(16):
            begin = 0
            if segments:
                ends = [i + 1 for i in range(t) if ids[i] == TOKENIZER.end_of_text]
                begin = max(ends, default=0)
                if ids[t] == TOKENIZER.end_of_text:
                    continue
            with torch.no_grad():
                logits = built(ids[None, begin : t + 1])[0, -1].double()
            total -= float(logits.log_softmax(-1)[ids[t + 1]])
            targets.append(int(ids[t + 1]))
    size = sum(t != TOKENIZER.end_of_text for t in targets)
    assert (score.tokens, score.bytes, score.exact_bytes) == (len(targets), size, True)
    assert score.loss == pytest.approx(total / len(targets), abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(total / len(targets)), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-4)


def test_last_partial_window_is_scored_in_any_split(dataset: Dataset) -> None:
    built, split = model(context=16), dataset.split("train")
    score = score_text(built, dataset, split="train", batch_tokens=32)
    last = (split.tokens - 1) // 16 * 16
    assert (split.tokens - 1) % 16 and score.tokens == split.tokens - 1
    total = 0.0
    for start in (*range(0, last, 16), last):
        ids = torch.from_numpy(split.read(start, min(17, split.tokens - start)))
        with torch.no_grad():
            logits = built(ids[None, :-1])[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    assert score.loss == pytest.approx(total / (split.tokens - 1), abs=1e-4)


def direct(built: Decoder, task: Any) -> tuple[list[bool], list[bool]]:
    """Which questions are right, plainly and per character, one choice at a time."""
    plain, normalised = [], []
    for question in task.questions:
        logs = []
        for context, continuation in zip(question.contexts, question.continuations, strict=True):
            whole, first = TOKENIZER.encode(context + continuation), TOKENIZER.encode(context)
            logs.append(log_likelihood(built, first, whole[len(first) :])[0])
        plain.append(int(np.argmax(logs)) == question.answer)
        normalised.append(int(np.argmax(np.array(logs) / question.lengths)) == question.answer)
    return plain, normalised


@pytest.mark.parametrize("name", ["arc_easy", "hellaswag", "winogrande"])
def test_task_score_equals_scoring_choices_one_by_one(name: str, tmp_path: Path) -> None:
    built = model(context=600)
    task = read_task(name, write_task(tmp_path, name, packed=name == "arc_easy"), shots=2)
    score = score_task(Scorer(built, TOKENIZER), task)
    plain, normalised = direct(built, task)
    for right, accuracy in ((plain, score.acc), (normalised, score.acc_norm)):
        assert accuracy.value == pytest.approx(np.mean(right))
        assert accuracy.error == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
    assert score.metric == ("acc" if name == "winogrande" else "acc_norm")
    assert score.chance == pytest.approx(0.5 if name == "winogrande" else 0.25)


def test_a_random_model_scores_at_chance_within_its_error(tmp_path: Path) -> None:
    path = write_task(tmp_path, "arc_easy", questions=300, shots=0)
    score = score_task(Scorer(model(), TOKENIZER), read_task("arc_easy", path, shots=0))
    for accuracy in (score.acc, score.acc_norm):
        assert abs(accuracy.value - score.chance) < 3 * accuracy.error
        assert accuracy.error == pytest.approx(math.sqrt(0.25 * 0.75 / 300), rel=0.15)


def test_exoformer_group_has_six_tasks_and_their_mean(tmp_path: Path) -> None:
    for name in EXOFORMER:
        write_task(tmp_path, name, questions=3)
    tasks = open_tasks(tmp_path, ["exoformer"], shots=5, split=None, limit=2)
    assert [task.name for task in tasks] == list(EXOFORMER)
    assert all(len(task.questions) == 2 and task.shots == 5 for task in tasks)
    scores = [
        TaskScore(name, "test", 5, 100, Accuracy(0.4, 0.03), Accuracy(0.1 * i, 0.02), metric, 0.25)
        for i, (name, metric) in enumerate(zip(EXOFORMER, ["acc_norm"] * 5 + ["acc"], strict=True))
    ]
    mean = group_means({score.task: score.reported for score in scores}, ["exoformer"])["exoformer"]
    assert mean.value == pytest.approx((0.0 + 0.1 + 0.2 + 0.3 + 0.4 + 0.4) / 6)
    assert mean.error == pytest.approx(math.sqrt(5 * 0.02**2 + 0.03**2) / 6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions."),
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 holds a list of 1 entry, expected an object: a task file has"),
        ('{"choices": ["a"], "answer": 1}', "line 1: answer is 1, expected the index of one of 1 choices: a task"),
        ('{"choices": ["a", ""], "answer": 0}', "line 1: one of the choices is empty: a task file"),
        ('{"choices": ["a"], "answer": 0, "split": "train"}', "has no test or validation split, only train."),
        (
            '{"choices": ["a"], "answer": 0}',
            "has 0 worked examples in its train split, but --shots asks for 1: use --shots 0.",
        ),
    ],
)
def test_a_bad_task_file_is_refused_in_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "arc_easy.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as refused:
        read_task("arc_easy", path, shots=1)
    assert message in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("task", "lacking"), [("mine", "question"), ("openbookqa", "context")])
def test_a_question_with_a_missing_field_is_refused(task: str, lacking: str, tmp_path: Path) -> None:
    path = tmp_path / f"{task}.jsonl"
    path.write_text('{"id": 7, "choices": ["a", "b"], "answer": 0}\n')
    with pytest.raises(ValueError, match=f"question 7 has no field {lacking}"):
        read_task(task, path, shots=0)


def test_a_single_question_has_no_standard_error() -> None:
    assert Accuracy.of([True]) == Accuracy(1.0, None)
    single = dict.fromkeys(EXOFORMER, Accuracy(1, None))
    assert group_means(single, ["exoformer"])["exoformer"] == Accuracy(1.0, None)
    assert list(group_means({"piqa": Accuracy(1.0, None)}, ["exoformer"])) == ["exoformer, 1 of 6 tasks"]


@pytest.mark.parametrize(
    ("held", "asked", "message"),
    [
        ("arc_easy", "arc_esay", "holds no task arc_esay: did you mean arc_easy?"),
        ("mine", "exoformer", "holds no task arc_challenge, one of exoformer: it has mine."),
        ("mine", "exoforme", "holds no task exoforme: did you mean exoformer?"),
        ("", "mine", "holds no task mine: it has no file such as piqa.jsonl."),
        (None, "arc_easy", "is not a folder"),
    ],
)
def test_task_missing_from_a_folder_is_refused_with_a_hint(
    held: str | None, asked: str, message: str, tmp_path: Path
) -> None:
    if held:
        write_task(tmp_path, held)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_tasks(tmp_path / ("nowhere" if held is None else ""), [asked], shots=0, split=None, limit=None)


def test_too_few_worked_examples_names_the_available_shots(tmp_path: Path) -> None:
    path = write_task(tmp_path, "mine", shots=1)
    found = "has 1 worked example in its train split, but --shots asks for 5: use --shots 1."
    with pytest.raises(ValueError, match=re.escape(found)):
        read_task("mine", path, shots=5)
    assert read_task("mine", path, shots=1).shots == 1
