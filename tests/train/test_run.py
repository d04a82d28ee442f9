"""The files of a finished run, and its output."""

import io
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import residua
from residua.config.model import ModelConfig
from residua.config.run import DataConfig, RunConfig, TrainConfig, differences
from residua.config.settings import KEY_ALIASES
from residua.data import Dataset
from residua.storage.run import read_metrics
from residua.train import environment
from residua.train.environment import code_commit
from residua.train.result import inspect_model
from residua.train.sinks import Display, duration, short
from residua.train.timing import mfu, peak_flops
from tests.train.conftest import Lab

from .test_step import batch


@pytest.mark.slow
def test_a_run_is_one_folder_with_all_its_files(trained: Lab, config: RunConfig, data: Path) -> None:
    run = trained / "run"
    assert RunConfig.from_toml(run / "config.toml") == config
    environment = json.loads((run / "environment.json").read_text())
    assert environment["residua"] and environment["torch"] == torch.__version__ and environment["device"] == "cpu"
    assert environment["text"] == Dataset.open(data).fingerprint
    assert (run / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 6 and result["tokens"] == 6 * 2 * 2 * 16 and result["mfu"] is None
    assert (run / "inspection.json").exists()


@pytest.mark.slow
def test_metrics_hold_one_line_per_log_step_and_validation(trained: Lab) -> None:
    records = read_metrics(trained / "run" / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 1), ("train", 2), ("validation", 2), ("validation", 3), ("train", 4), ("validation", 4), ("train", 6),
        ("validation", 6),
    ]  # fmt: skip
    first = records[0]
    assert first["loss"] == pytest.approx(math.log(320), abs=0.2)
    assert first.keys() == {
        "kind", "step", "loss", "smoothed", "z", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "mfu",
        "memory_gib",
    }  # fmt: skip
    assert first["lr"] == pytest.approx(0.005) and first["tokens"] == 64
    last = records[-1]
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) * 61 / 60, rel=0.05)


@pytest.mark.slow
def test_training_prints_summary_progress_and_next_steps(trained: Lab) -> None:
    for words in (
        "matrices: Muon", "rest: AdamW", "FLOP a token", "2 x 2 x 16 = 64 tokens a step, 6 steps", "step 4/6  loss",
        "tokens/s", "ETA", "bits/byte", "residua compare", "--resume",
    ):  # fmt: skip
        assert words in trained.printed


def test_a_terminal_gets_one_live_line(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    display = Display(config, 0, console)
    record = {"kind": "train", "step": 3, "loss": 3.5, "smoothed": 3.6, "mfu": 0.45, "memory_gib": 15.6}
    display.write({**record, "tokens_per_second": 64.0})
    display.close()
    text = console.file.getvalue()
    assert "step 3/6" in text and "MFU 0.450" in text and "15.6 GiB" in text and "ETA 3s" in text


def test_tensorboard_is_written_if_installed(trained: Lab) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (trained / "run" / "tensorboard").glob("events.*")
    events = list(EventFileLoader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2" and events[1].step == 1
    assert events[1].session_log.status == events[1].session_log.START
    values = [(event.step, value) for event in events for value in event.summary.value]
    losses = {step: value.tensor.float_val[0] for step, value in values if value.tag == "train/loss"}
    records = [r for r in read_metrics(trained / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert losses == pytest.approx({r["step"]: r["loss"] for r in records})


def test_run_trains_without_tensorboard_installed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    lab.train()
    assert not (lab / "run" / "tensorboard").exists()


def test_requesting_wandb_without_the_package_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    lab.refuse("pip install wandb", "train.track=wandb")
    assert not (lab / "run").exists()


@pytest.mark.slow
def test_wandb_gets_every_record_under_one_identity(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[int] = []
    run = SimpleNamespace(log=lambda values, step: logged.append(step), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lab.train("train.track=wandb")
    lab.resume("train.track=wandb", "train.steps=7")
    assert started[0]["name"] == "run" and started[0]["id"] == started[1]["id"]
    assert logged == [r["step"] for r in read_metrics(lab / "run" / "metrics.jsonl")]


def test_failing_wandb_prints_one_line_and_the_run_continues(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("api key not configured (no-tty). call wandb.login\nmore")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    lab.train("train.track=wandb")
    told = "Weights & Biases is off from now on: api key not configured (no-tty). call wandb.login; the run and "
    assert f"{told}metrics.jsonl continue\n" in lab.printed and "Finished" in lab.printed


def test_inspection_covers_the_parts_a_model_has(config: RunConfig) -> None:
    def inspected(*changes: str) -> dict[str, Any]:
        model = residua.build(config.override(list(changes)).model)
        shown = inspect_model(model, batch(2))
        assert all(p.grad is None for p in model.parameters())
        return shown

    assert inspected().keys() == {"tokens", "sublayers"}
    full = inspected("model.topology.kind=full_attnres", "model.attention.gate=elementwise")
    assert [row["sublayer"] for row in full["sublayers"]] == [0, 1, 2, 3]
    assert all(row["output_rms"] > 0 and row["gradient_rms"] > 0 for row in full["sublayers"])
    assert [sum(row) for row in full["depth_weights"]["mean"]] == pytest.approx([1] * 4, abs=1e-5)
    assert [gate["layer"] for gate in full["gates"]] == [0, 1]
    assert all(gate["mean"] == pytest.approx(0.5, abs=0.1) and gate["closed"] < 0.1 for gate in full["gates"])
    streams = inspected("model.topology.kind=multi_gate", "model.topology.streams=2")
    assert all(len(row["mean"]) == 2 and 0 < min(row["mean"]) < 1 for row in streams["beta"])


def test_mfu_is_relative_to_the_gpus_dense_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda")
    assert peak_flops(gpu) == 989e12
    assert mfu(1e6, 445.05e6, gpu) == pytest.approx(0.45)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some other card")
    assert mfu(1e6, 1e6, gpu) is None and mfu(1e6, 1e6, torch.device("cpu")) is None


def test_numbers_and_durations_are_abbreviated() -> None:
    assert [short(n) for n in (7, 919_000, 1_234_567, 2.1e18)] == ["7", "919k", "1.23M", "2.1E"]
    assert [duration(s) for s in (5, 65, 3723)] == ["5s", "1m05s", "1h02m"]


def test_the_recorded_commit_is_the_packages_or_none() -> None:
    commit = code_commit()
    assert commit is None or len(commit.removesuffix("+changes")) == 40


def test_querying_git_does_not_touch_the_index(tmp_path: Path) -> None:
    """`git status` would rewrite it, under index.lock, whenever a file was touched."""
    (tmp_path / "file").touch()
    for arguments in (["init"], ["add", "file"]):
        assert environment._git(tmp_path, *arguments) is not None
    os.utime(tmp_path / "file", (0, 0))
    before = (tmp_path / ".git" / "index").stat().st_mtime_ns
    assert environment._git(tmp_path, "status", "--porcelain") == "A  file"
    assert (tmp_path / ".git" / "index").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("model name\t: EPYC 9\nflags\t: fpu\n\nmodel name\t: EPYC 9\n", "EPYC 9 x 2"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n" * 2, "aarch64 (implementer 0x41, part 0xd40) x 2"),
        ("processor\t: 0\n", "aarch64"),
    ],
    ids=["x86", "arm", "unknown"],
)
def test_an_unnamed_processor_is_identified_by_its_architecture(
    cpuinfo: str, name: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(environment.platform, "processor", lambda: "")
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    cpu = torch.device("cpu")
    assert environment.describe_environment(cpu)["processor"] == name
    assert environment.device_name(cpu).startswith(f"{name}, ")


def test_configurations_survive_toml_and_list_differences(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(config.to_toml())
    assert RunConfig.from_toml(tmp_path / "a.toml") == config
    other = config.override(["train.steps=900", "train.schedule.kind=linear_decay"])
    assert differences(config, other)["train.steps"] == (6, 900)
    assert differences(config, other)["train.schedule.kind"] == ("cosine", "linear_decay")
    assert differences(config, config) == {}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("train.stpes=3", r"train\.stpes = 3 is not a known key: did you mean 'steps'"),
        ("train.batch_size=4", r"train\.batch_size = 4 is not a known key: did you mean 'micro_batch'\?$"),
        ("train.lr=1", r"train\.lr = 1 is not a known key: did you mean 'train\.optimizer\.lr'\?$"),
        ("train.seq_len=3", r"train\.seq_len = 3 is not a known key: did you mean 'data\.sequence'\?$"),
        ("model.depth=3", r"model\.depth = 3 is not a known key: did you mean 'layers'\?$"),
        ("model.ffn.hidden_size=3", r"model\.ffn\.hidden_size = 3 is not a known key: did you mean 'hidden'\?$"),
        ("model.ffn.intermediate_size=3", r"model\.ffn\.intermediate_size = 3 .*: did you mean 'hidden'\?$"),
        ("train.optimizer.rest.learning_rate=3", r"train\.optimizer\.rest\.learning_rate = 3 .*: did you mean 'lr'\?$"),
        ("model.topology.depth=3", r"model\.topology\.depth = 3 is not a known key: (?!did you mean 'model)"),
        ("model.attention={kind='gated_deltanet',heads=2}", r"heads = 2 is not a known key: (?!did you mean 'model)"),
        ("batch_size = 4", r"'batch_size = 4' has no known section: did you mean train\.micro_batch\?$"),
        ("model.n_heads=3", r"model\.n_heads = 3 is not a known key: did you mean 'model\.attention\.heads'\?$"),
        ("data.bath=4", r"data\.bath = 4 is not a known key: did you mean 'path'\?$"),
        ("data.colour=4", r"data\.colour = 4 is not a known key: choose one of 'path', "),
        ("batch_size=4", r"'batch_size=4' has no known section: did you mean train\.micro_batch\?$"),
        ("train.optimizer.kind=mion", r"train\.optimizer\.kind = 'mion' does not exist: did you mean 'muon'"),
        ("steps=3", r"'steps=3' has no known section: write train\.steps=3\.$"),
        ("topology=full_attnres", r"has no known section: write model\.topology=full_attnres\.$"),
        ("seed=1", r"has no known section: write data\.seed=1 or train\.seed=1\.$"),
        ("momentum=0.9", r"has no known section: write train\.optimizer\.momentum=0\.9\.$"),
        ("optimizer.lr=1", r"has no known section: write train\.optimizer\.lr=1\.$"),
        ("topology.streams=4", r"has no known section: write model\.topology\.streams=4\.$"),
        ("topolgy=full_attnres", r"has no known section: did you mean model\.topology\?$"),
        ("trian.steps=3", r"has no known section: did you mean train\.steps\?$"),
        ("zzzzzz=3", r"has no known section: start with model, data, train or parallel, as in train\.steps=500\.$"),
        ("train.optimizer.lr=-1", r"train\.optimizer\.lr = -1"),
    ],
)
def test_an_invalid_configuration_key_gives_one_sentence(config: RunConfig, change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config.override([change])


def test_key_aliases_point_to_keys_and_are_not_keys(config: RunConfig) -> None:
    taken = {key for table in (ModelConfig, DataConfig, TrainConfig) for key in table.model_fields}
    for key, words in KEY_ALIASES.items():
        table: object = config.model_dump()
        for part in key.split("."):
            assert isinstance(table, dict) and part in table, key
            table = table[part]
        assert not taken & set(words.split())


def test_a_file_may_extend_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "tiny"\n[train]\nsteps = 77\n')
    mine = RunConfig.find(str(tmp_path / "mine.toml"))
    assert mine.train.steps == 77 and mine.model == RunConfig.find("tiny").model
