"""`residua bench decode` and `bench prefill`: a step, or the time to the first token, next to the additive model."""

import io
import json
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from residua.bench.inference import STEPS, bench_decode, bench_prefill, prefill_flops
from residua.bench.show import BenchProgress
from residua.bench.step import read_cases
from residua.cli.bench import app
from residua.config.run import RunConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS = 2 * (4 * 16 * 16 + 2 * 16 * 32)
"""Weights of the matrices of the tiny model's layers."""
GAINS = 5 * 16 + 2 * 2 * 8


def test_decoding_cases_are_timed_in_turn_and_compared(model):
    cases = read_cases(RunConfig.from_toml(model), ["prenorm", "mgr"])
    results = bench_decode("tiny", cases, CPU, batch=3, filled=8, engine="auto", rounds=4)
    assert [r.case for r in results] == ["prenorm", "mgr"]
    assert [r.step.count for r in results] == [4, 4]
    assert results[0].ratio == 1
    assert results[1].ratio == pytest.approx(results[1].step.median / results[0].step.median)
    plain = results[0]
    assert plain.weight_bytes == 4 * (64 * 16 + LAYERS + GAINS)
    assert plain.cache_bytes == 2 * 2 * 3 * 8 * 16 * 4
    assert plain.bytes_per_second == (plain.weight_bytes + plain.cache_bytes) / plain.step.median
    assert STEPS == 8


def test_prefill_cases_are_timed_in_turn_and_compared(model):
    cases = read_cases(RunConfig.from_toml(model), ["prenorm", "mgr"])
    results = bench_prefill("tiny", cases, CPU, batch=3, length=9, engine="auto", rounds=4, peers=False)
    assert [(r.case, r.engine, r.first_token.count) for r in results] == [("prenorm", "eager", 4), ("mgr", "eager", 4)]
    assert results[0].ratio == 1
    assert results[1].ratio == pytest.approx(results[1].first_token.median / results[0].first_token.median)
    assert results[0].tokens_per_second == 27 / results[0].first_token.median
    assert results[0].first_call > 0
    assert results[0].mfu is None


def test_prefill_flops_count_the_head_only_for_the_last_token(model):
    config = RunConfig.from_toml(model).model
    attention = 2 * 2 * 16 * 9 / 2  # layers, scores and values, width, half of the length
    assert prefill_flops(config, 3, 9) == 3 * (9 * (2 * (LAYERS + GAINS) + 2 * attention) + 2 * 64 * 16)


@pytest.mark.parametrize(
    ("verb", "settings", "varied", "said"),
    [
        ("decode", ["--filled", "4"], {"batch": (1, 2)}, "tiny, batch 1: building prenorm (0 of 2)"),
        ("prefill", ["--batch", "1", "--no-peers"], {"length": (4, 6)}, "1 × 4"),
    ],
)
def test_the_command_prints_a_table_and_writes_its_results(model, tmp_path, verb, settings, varied, said):
    ((key, values),) = varied.items()
    out = tmp_path / "results.json"
    chosen = [word for value in values for word in (f"--{key}", str(value))]
    arguments = [verb, str(model), "--compare", "prenorm,block_attnres", *settings, *chosen]
    done = CliRunner().invoke(app, [*arguments, "--rounds", "2", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["kind"] == verb
    measured = [(r["case"], r[key]) for r in report["results"]]
    assert measured == [(case, value) for value in values for case in ("prenorm", "block_attnres")]
    assert "block_attnres" in done.output and said in done.output + done.stderr


def test_progress_shows_time_left_and_logs_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = io.StringIO()
    with BenchProgress(2, Console(file=log, width=120)) as progress:
        for what, share in (("building", 0.0), ("round 1 of 2", 0.5), ("round 2 of 2", 0.75)):
            progress.tell(what, share)
            now += 6
        progress.finish_part()
        progress.tell("building")
    assert log.getvalue().splitlines() == ["building (0 of 2)", "round 2 of 2 (0 of 2, 0:20 left)"]


@pytest.mark.nightly
def test_llama_of_the_same_shape_is_also_timed(model):
    pytest.importorskip("transformers")
    cases = read_cases(RunConfig.from_toml(model), ["prenorm"])
    ours, llama = bench_prefill("tiny", cases, CPU, batch=2, length=5, engine="auto", rounds=2)
    assert (llama.case, llama.engine, llama.flops) == ("transformers Llama", "eager", ours.flops)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("graph", "engine graph replays CUDA graphs, but this device is a CPU: use eager."),
        ("compile", "engine compile is for decoding: choose auto, eager or graph."),
    ],
)
def test_an_engine_that_cannot_prefill_here_is_refused(model, engine, words):
    done = CliRunner().invoke(app, ["prefill", str(model), "--engine", engine, "--device", "cpu"])
    assert isinstance(done.exception, ValueError) and str(done.exception) == words
