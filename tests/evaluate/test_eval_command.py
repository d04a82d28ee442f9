"""`residua eval` at the command line."""

import json
from pathlib import Path

import pytest

from residua.data import open_corpus, prepare
from tests.evaluate.test_eval_scores import write_task
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[{"sequence": 16}, {"masking": "documents"}])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("eval"), **request.param)


def test_eval_of_a_run_gives_the_loss_that_training_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    assert residua(monkeypatch, "eval", run, "--tokens", 512, "--out", out) == 0
    text = json.loads(out.read_text())["text"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["kind"] == "validation"][-1]
    assert text["loss"] == pytest.approx(measured["loss"], abs=2e-6)
    assert text["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], abs=2e-6)
    assert text["tokens"] == measured["tokens"]
    printed = capsys.readouterr().out
    assert f"loss {text['loss']:.4f} nats" in printed and f"Results: {out}" in printed
    assert f"residua eval {run} --tasks exoformer --task-dir FOLDER" in printed


def test_text_shorter_than_the_context_is_fully_scored(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (12, 100):
        (tmp_path / f"{length}.txt").write_text("a" * length)
        data = prepare(open_corpus([tmp_path / f"{length}.txt"], holdout=0), tmp_path / str(length), "bytes", workers=1)
        out = tmp_path / f"{length}.json"
        assert residua(monkeypatch, "eval", run, "--data", data.path, "--split", "train", "--out", out) == 0
        assert json.loads(out.read_text())["text"]["tokens"] == data.split("train").tokens - 1


def test_task_results_are_a_table_and_a_new_file_each_time(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("arc_easy", "winogrande"):
        write_task(tmp_path, task)
    before = len(list((run / "evaluations").glob("*.json")))
    for _ in range(2):
        arguments = ("--tasks", "arc_easy,winogrande", "--task-dir", tmp_path, "--limit", 6, "--shots", 5)
        assert residua(monkeypatch, "eval", run, *arguments) == 0
    written = sorted((run / "evaluations").glob("*.json"))
    assert len(written) == before + 2
    tasks = json.loads(written[-1].read_text())["tasks"]
    assert [(task["task"], task["questions"], task["shots"]) for task in tasks] == [
        ("arc_easy", 6, 5),
        ("winogrande", 6, 5),
    ]
    printed = capsys.readouterr().out
    assert f"{100 * tasks[0]['acc_norm']['value']:.2f} ± {100 * tasks[0]['acc_norm']['error']:.2f}" in printed


def test_harness_exoformer_group_has_six_tasks_and_a_mean(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")

    from residua.evaluate import harness
    from residua.evaluate.tasks import EXOFORMER

    asked: list[str] = []

    def evaluate(tasks: list[str], **_: object) -> dict[str, dict[str, dict[str, object]]]:
        asked.extend(tasks)
        scores: dict[str, dict[str, object]] = {
            task: {"alias": task, "acc,none": 0.9, "acc_stderr,none": 0.9, "acc_norm,none": 0.2 + 0.1 * i,
                   "acc_norm_stderr,none": 0.02} for i, task in enumerate(tasks)
        }  # fmt: skip
        scores["winogrande"] = {"acc,none": 0.5, "acc_stderr,none": 0.02}
        return {"results": scores}

    monkeypatch.setattr(
        harness, "TaskManager", lambda: type("Manager", (), {"all_tasks": list(EXOFORMER), "task_index": {}})
    )
    monkeypatch.setattr(harness, "simple_evaluate", evaluate)
    out = tmp_path / "scores.json"
    assert residua(monkeypatch, "eval", run, "--tasks", "exoformer", "--split", "test", "--out", out) == 0
    assert asked == list(EXOFORMER)
    mean = json.loads(out.read_text())["means"]["exoformer"]
    assert mean == {
        "value": pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6 + 0.5) / 6),
        "error": pytest.approx(0.02 * 6**0.5 / 6),
    }
    printed = capsys.readouterr().out
    assert "mean of exoformer" in printed and f"{mean['value']:.4f}" in printed and f"{mean['error']:.4f}" in printed
    assert "--split test was ignored: lm-eval's tasks" in printed


def test_mistakes_print_one_sentence_and_write_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path, "piqa")
    (tmp_path / "taken.json").write_text("mine")
    cases = {
        f"--tasks piqua --task-dir {tmp_path}": f"{tmp_path} holds no task piqua: did you mean piqa?",
        f"--task-dir {tmp_path}": "--task-dir needs --tasks: name the tasks, or a group such as exoformer.",
        f"--out {tmp_path}/taken.json": f"{tmp_path}/taken.json exists: choose another --out.",
        f"--data {tmp_path}": f"{tmp_path} is not a prepared dataset (it has no dataset.json): "
        "make one with residua data prepare",
        "--split tset": f"the dataset {run.parent / 'data'} has no split 'tset', only train, validation",
    }
    for arguments, sentence in cases.items():
        out = () if "--out" in arguments else ("--out", tmp_path / "new" / "scores.json")
        assert residua(monkeypatch, "eval", run, *arguments.split(), *out) == 2
        assert capsys.readouterr().err == f"residua: {sentence}\n"
    assert (tmp_path / "taken.json").read_text() == "mine"
    assert not list(tmp_path.rglob("scores.json"))
