"""`residua bench prefill`: the time to the first token, by batch and length, next to the additive model and peers."""

import json

import pytest
import torch
from typer.testing import CliRunner

from residua.bench.inference import bench_prefill, prefill_flops
from residua.bench.step import read_cases
from residua.cli.bench import app
from residua.config.run import RunConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_cases_are_timed_in_turn_and_compared_with_the_first(model):
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
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 5 * 16 + 2 * 2 * 8
    attention = 2 * 2 * 16 * 9 / 2  # layers, scores and values, width, half of the length
    assert prefill_flops(config, 3, 9) == 3 * (9 * (2 * weights + 2 * attention) + 2 * 64 * 16)


def test_the_command_prints_a_table_and_writes_its_results(model, tmp_path):
    out = tmp_path / "prefill.json"
    arguments = ["prefill", str(model), "--compare", "prenorm,block_attnres", "--batch", "1", "--length", "4"]
    more = ["--length", "6", "--rounds", "2", "--no-peers", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["kind"] == "prefill"
    measured = [(r["case"], r["batch"], r["length"]) for r in report["results"]]
    assert measured == [(case, 1, length) for length in (4, 6) for case in ("prenorm", "block_attnres")]
    assert "1 × 4" in done.output


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
