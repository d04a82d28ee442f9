import io
import json
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from residua.bench.inference import STEPS, bench_decode
from residua.bench.show import BenchProgress
from residua.bench.step import read_cases
from residua.cli.bench import app
from residua.config.run import RunConfig

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_cases_are_timed_in_turn_and_compared_with_the_first(model):
    cases = read_cases(RunConfig.from_toml(model), ["prenorm", "mgr"])
    results = bench_decode("tiny", cases, CPU, batch=3, filled=8, engine="auto", rounds=4)
    assert [r.case for r in results] == ["prenorm", "mgr"]
    assert [r.step.count for r in results] == [4, 4]
    assert results[0].ratio == 1
    assert results[1].ratio == pytest.approx(results[1].step.median / results[0].step.median)
    plain = results[0]
    matrices = 64 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 32)
    gains = 5 * 16 + 2 * 2 * 8
    assert plain.weight_bytes == 4 * (matrices + gains)
    assert plain.cache_bytes == 2 * 2 * 3 * 8 * 16 * 4
    assert plain.bytes_per_second == (plain.weight_bytes + plain.cache_bytes) / plain.step.median
    assert STEPS == 8


def test_the_command_prints_a_table_and_writes_its_results(model, tmp_path):
    out = tmp_path / "decode.json"
    arguments = ["decode", str(model), "--compare", "prenorm,block_attnres", "--batch", "1", "--batch", "2"]
    done = CliRunner().invoke(app, [*arguments, "--filled", "4", "--rounds", "2", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["kind"] == "decode"
    measured = [(r["case"], r["batch"]) for r in report["results"]]
    assert measured == [(case, batch) for batch in (1, 2) for case in ("prenorm", "block_attnres")]
    assert "block_attnres" in done.output
    assert "tiny, batch 1: building prenorm (0 of 2)" in done.stderr


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
