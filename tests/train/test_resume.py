"""A run that is stopped and resumed ends with the same bits as one that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from residua.config.run import RunConfig
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from residua.train.health import Interrupted
from residua.train.step import Step
from residua.train.trainer import train
from tests.distributed.launch import start

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
LOGGED = {"loss": 9.0, "seconds": 1.0, "tokens_per_second": 64.0, "memory_gib": 0.5}
TIMES = ("seconds", "tokens_per_second", "memory_gib", "took")


def curves(folder: Path) -> list[dict[str, Any]]:
    """The metrics without times and speeds."""
    return [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def assert_same_run(one: Path, other: Path) -> None:
    """Same weights, same optimizer state, same data position and random state, same curves."""
    first, second = checkpoints(one)[-1], checkpoints(other)[-1]
    assert first.step == second.step
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors, others = load_file(first.path / name), load_file(second.path / name)
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, others[key]), key
    state, other_state = first.state, second.state
    assert {k: v for k, v in state.items() if k != "clock"} == {k: v for k, v in other_state.items() if k != "clock"}
    assert curves(one) == curves(other)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal while it trains step `steps`."""
    call, done = Step.__call__, 0

    def counted(self: Step, *arguments: Any) -> None:
        nonlocal done
        call(self, *arguments)
        done += 1
        if done == steps:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Step, "__call__", counted)


@pytest.fixture(scope="module")
def trained(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "whole"
    train(config, out, console=QUIET)
    return out


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A run that was not interrupted, to be changed at will."""
    return Path(shutil.copytree(trained, tmp_path / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("steps", [3, 4], ids=["between saves", "at a save"])
def test_a_signal_saves_and_the_resumed_run_equals_the_whole(
    config: RunConfig, whole: Path, tmp_path: Path, number: int, steps: int
) -> None:
    out = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=r"--resume --out .*stopped") as stop:
        stop_after(patch, steps, number)
        train(config, out, console=QUIET)
    assert stop.value.exit_code == 128 + number
    assert checkpoints(out)[-1].step == steps
    train(config, out, resume=True, console=QUIET)
    assert_same_run(whole, out)


def test_random_numbers_go_on_where_they_stopped(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers, as a model with dropout would draw them."""
    call = Step.__call__
    drawn: list[float] = []

    def drawing(self: Step, *arguments: Any) -> None:
        call(self, *arguments)
        drawn.append(float(torch.rand(())))

    monkeypatch.setattr(Step, "__call__", drawing)
    train(config, tmp_path / "whole", console=QUIET)
    whole, drawn = drawn, []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        train(config, tmp_path / "stopped", console=QUIET)
    train(config, tmp_path / "stopped", resume=True, console=QUIET)
    assert drawn == whole


def test_a_run_may_stop_many_times(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    for turn in range(5):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            stop_after(patch, 1)
            train(config, out, resume=turn > 0, console=QUIET)
    train(config, out, resume=True, console=QUIET)
    assert_same_run(whole, out)
    sessions = json.loads((out / "environment.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 1, 2, 3, 4, 5]
    assert sessions[-2]["stopped"] == "stopped by a signal at step 5" and "stopped" not in sessions[-1]


@pytest.mark.parametrize(
    "change",
    ["model.topology.kind=full_attnres", "data.masking=documents", "train.optimizer.kind=adamw"],
    ids=["attnres", "documents", "adamw"],
)
def test_other_configurations_resume_as_well(config: RunConfig, tmp_path: Path, change: str) -> None:
    config = config.override([change])
    train(config, tmp_path / "whole", console=QUIET)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        train(config, tmp_path / "stopped", console=QUIET)
    train(config, tmp_path / "stopped", resume=True, console=QUIET)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.gpu
def test_an_exact_gpu_run_resumes_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    config = config.override(["train.device=cuda", "train.determinism=exact", "model.width=128", "model.context=64"])
    train(config, tmp_path / "whole", console=QUIET)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        train(config, tmp_path / "stopped", console=QUIET)
    train(config, tmp_path / "stopped", resume=True, console=QUIET)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["save_file", "rename"])
def test_killed_inside_a_save_the_resumed_run_equals_the_whole(
    config: RunConfig, whole: Path, tmp_path: Path, where: str
) -> None:
    source, out = tmp_path / "run.toml", tmp_path / "killed"
    source.write_text(config.to_toml())
    (killed,) = start(1, "tests.train.killed", source, out, where)
    said = killed.wait()
    assert killed.process.exitcode == -signal.SIGKILL, said
    assert [c.step for c in checkpoints(out)] == [2]
    assert list((out / "checkpoints").glob(".unfinished-*"))
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 4
    train(config, out, resume=True, console=QUIET)
    assert not list((out / "checkpoints").glob(".unfinished-*"))
    assert_same_run(whole, out)


def test_leftovers_and_a_cut_metrics_line_are_forgotten(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    """A kill during a save leaves an incomplete folder, and metrics newer than the checkpoint."""
    out = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 4)
        train(config, out, console=QUIET)
    (out / "checkpoints" / ".unfinished-step-6").mkdir()
    (out / "checkpoints" / ".unfinished-step-6" / "model.safetensors").write_bytes(b"half")
    with (out / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "train", "step": 6, **LOGGED}) + '\n{"kind": "tr')
    train(config, out, resume=True, console=QUIET)
    assert_same_run(whole, out)


def test_resuming_a_finished_run_changes_nothing(config: RunConfig, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    result = train(config, whole, resume=True, console=QUIET)
    assert result.steps == 6 and (whole / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_starts_over(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "early"
    out.mkdir()
    (out / "config.toml").write_text(config.to_toml())
    (out / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, **LOGGED}) + "\n")
    train(config, out, resume=True, console=QUIET)
    assert_same_run(whole, out)


def test_a_run_that_lost_its_checkpoints_says_so_and_keeps_the_old_metrics(config: RunConfig, whole: Path) -> None:
    for turn in (1, 2):
        old = (whole / "metrics.jsonl").read_bytes()
        shutil.rmtree(whole / "checkpoints")
        console = Console(file=StringIO(), width=400)
        train(config, whole, resume=True, console=console)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{whole} holds no checkpoint: starting again at step 1" in printed
        assert f"the metrics up to step 6 are kept in metrics-lost-{turn}.jsonl" in printed
        assert (whole / f"metrics-lost-{turn}.jsonl").read_bytes() == old
    assert [r["step"] for r in read_metrics(whole / "metrics.jsonl") if r["kind"] == "train"] == [1, 2, 4, 6]


def test_a_longer_run_goes_on_from_the_old_end(config: RunConfig, whole: Path) -> None:
    result = train(config.override(["train.steps=8"]), whole, resume=True, console=QUIET)
    assert result.steps == 8
    assert RunConfig.from_toml(whole / "config.toml").train.steps == 8
    sessions = json.loads((whole / "environment.json").read_text())["sessions"]
    assert sessions[-1]["changes"] == {"train.steps": [6, 8]}


def test_smaller_micro_batches_go_on_in_the_same_data_order(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    """After running out of memory a person halves train.micro_batch and doubles train.accumulate."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, 3)
        train(config, tmp_path / "stopped", console=QUIET)
    smaller = config.override(["train.micro_batch=1", "train.accumulate=4"])
    train(smaller, tmp_path / "stopped", resume=True, console=QUIET)
    losses = [[r["loss"] for r in curves(folder) if r["kind"] == "train"] for folder in (whole, tmp_path / "stopped")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_same_seed_gives_the_same_bits(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "again", console=QUIET)
    assert_same_run(whole, tmp_path / "again")
    train(config.override(["train.seed=1"]), tmp_path / "other", console=QUIET)
    assert curves(tmp_path / "other")[0]["loss"] != curves(whole)[0]["loss"]
