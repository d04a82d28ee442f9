"""A run that is stopped and resumed ends with the same bits as one that never stopped."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from residua.config.run import RunConfig
from residua.storage.run import read_metrics
from tests.distributed.launch import start
from tests.soak.runs import curves, differences
from tests.train.conftest import Lab, after_each_step

pytestmark = pytest.mark.slow

LOGGED = {"loss": 9.0, "seconds": 1.0, "tokens_per_second": 64.0, "memory_gib": 0.5}


def assert_same_run(one: Path, other: Path) -> None:
    """Same weights, same optimizer state, same data position and random state, same curves, no other files."""
    assert differences(other, one) == []


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab = Lab(config, tmp_path_factory.mktemp("trained"))
    lab.train(out="whole")
    return lab / "whole"


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A run that was not interrupted; tests may change it."""
    return Path(shutil.copytree(trained, tmp_path / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("steps", [3, 4], ids=["between saves", "at a save"])
def test_run_resumed_after_a_signal_equals_the_uninterrupted(lab: Lab, whole: Path, number: int, steps: int) -> None:
    assert lab.stop(steps, number=number) == 128 + number
    assert lab.saved()[-1] == steps
    lab.resume()
    assert_same_run(whole, lab / "run")


def test_random_numbers_resume_where_they_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, as a model with dropout would draw them."""
    drawn: list[float] = []
    after_each_step(monkeypatch, lambda step, done: drawn.append(float(torch.rand(()))))
    lab.train(out="whole")
    whole = drawn.copy()
    drawn.clear()
    lab.stop(3)
    lab.resume()
    assert drawn == whole


def test_run_can_be_stopped_many_times(lab: Lab, whole: Path) -> None:
    for turn in range(5):
        lab.stop(1, resume=turn > 0)
    lab.resume()
    assert_same_run(whole, lab / "run")
    sessions = lab.sessions()
    assert [session["from_step"] for session in sessions] == [0, 1, 2, 3, 4, 5]
    assert sessions[-2]["stopped"] == "stopped by a signal at step 5" and "stopped" not in sessions[-1]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["model.topology.kind=full_attnres"], id="attnres", marks=pytest.mark.nightly),
        pytest.param(["data.masking=documents"], id="documents"),
        pytest.param(["train.optimizer.kind=adamw"], id="adamw"),
        pytest.param(
            ["train.device=cuda", "train.determinism=exact", "model.width=128", "model.context=64"],
            id="exact on a GPU",
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_other_configurations_also_resume_exactly(lab: Lab, changes: list[str]) -> None:
    lab.train(*changes, out="whole")
    lab.stop(3, *changes)
    lab.resume(*changes)
    assert_same_run(lab / "whole", lab / "run")


@pytest.mark.parametrize("where", ["save_file", "rename"])
def test_run_killed_during_a_save_resumes_exactly(lab: Lab, whole: Path, where: str) -> None:
    source, out = lab / "run.toml", lab / "run"
    source.write_text(lab.config.to_toml())
    (killed,) = start(1, "tests.train.killed", source, out, where)
    said = killed.wait()
    assert killed.process.exitcode == -signal.SIGKILL, said
    assert lab.saved() == [2]
    assert list((out / "checkpoints").glob(".unfinished-*"))
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 4
    lab.resume()
    assert not list((out / "checkpoints").glob(".unfinished-*"))
    assert_same_run(whole, out)


def test_leftovers_and_a_torn_metrics_line_are_discarded(lab: Lab, whole: Path) -> None:
    """A kill during a save leaves an incomplete folder, and metrics newer than the checkpoint."""
    lab.stop(4)
    half = lab / "run" / "checkpoints" / ".unfinished-step-6"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with (lab / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "train", "step": 6, **LOGGED}) + '\n{"kind": "tr')
    lab.resume()
    assert_same_run(whole, lab / "run")


def test_resuming_a_finished_run_changes_nothing(lab: Lab, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    assert lab.resume(out="whole").steps == 6 and (whole / "metrics.jsonl").read_bytes() == before


def test_run_killed_before_its_first_checkpoint_starts_over(lab: Lab, whole: Path) -> None:
    (lab / "run").mkdir()
    (lab / "run" / "config.toml").write_text(lab.config.to_toml())
    (lab / "run" / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, **LOGGED}) + "\n")
    lab.resume()
    assert_same_run(whole, lab / "run")


def test_run_that_lost_its_checkpoints_keeps_the_old_metrics(lab: Lab, whole: Path) -> None:
    for turn in (1, 2):
        old = (whole / "metrics.jsonl").read_bytes()
        shutil.rmtree(whole / "checkpoints")
        lab.resume(out="whole")
        assert f"{whole} holds no checkpoint: starting again at step 1" in lab.printed
        assert f"the metrics up to step 6 are kept in metrics-lost-{turn}.jsonl" in lab.printed
        assert (whole / f"metrics-lost-{turn}.jsonl").read_bytes() == old
    assert [r["step"] for r in read_metrics(whole / "metrics.jsonl") if r["kind"] == "train"] == [1, 2, 4, 6]


def test_lengthened_run_continues_from_its_old_end(lab: Lab, whole: Path) -> None:
    assert lab.resume("train.steps=8", out="whole").steps == 8
    assert RunConfig.from_toml(whole / "config.toml").train.steps == 8
    assert lab.sessions("whole")[-1]["changes"] == {"train.steps": [6, 8]}


def test_smaller_micro_batches_keep_the_data_order(lab: Lab, whole: Path) -> None:
    """After running out of memory a person halves train.micro_batch and doubles train.accumulate."""
    lab.stop(3)
    lab.resume("train.micro_batch=1", "train.accumulate=4")
    losses = [[r["loss"] for r in curves(folder) if r["kind"] == "train"] for folder in (whole, lab / "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_same_seed_gives_bit_identical_runs(lab: Lab, whole: Path) -> None:
    lab.train()
    assert_same_run(whole, lab / "run")
    lab.train("train.seed=1", out="other")
    assert curves(lab / "other")[0]["loss"] != curves(whole)[0]["loss"]
