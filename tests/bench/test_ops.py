import json

import pytest
import torch
from typer.testing import CliRunner

from residua.bench import suite
from residua.bench.cases import Shape, operators
from residua.bench.ceilings import Ceilings
from residua.bench.operators import bench_operator
from residua.bench.peers import peers
from residua.bench.timing import Sample
from residua.cli.bench import app

CPU = torch.device("cpu")
SMALL = Shape(tokens=24, width=32, streams=3, sources=4, rank=2, vocabulary=50, sublayers=8, dtype=torch.float32)
SETTINGS = {"tokens": 16, "width": 32, "streams": 3, "sources": 4, "sublayers": 8, "vocabulary": 50}


@pytest.mark.parametrize("name", operators(SMALL, CPU))
def test_every_operator_runs_both_ways_and_is_measured_against_its_limit(name):
    case = operators(SMALL, CPU)[name]()
    ceilings = Ceilings(1e9, 1e9, "float32")
    (result,) = bench_operator(case, {"reference": case.function}, CPU, ceilings, repeats=2)
    assert result.forward is not None and result.both is not None
    limit = case.flops or case.forward_bytes + case.backward_bytes
    assert result.both_share == pytest.approx(limit / result.both.median / 1e9)


def test_bytes_are_every_input_once_and_every_output_once():
    row = SMALL.tokens * SMALL.width * 4
    made = operators(SMALL, CPU)
    gates = made["multi_gate"]()
    assert (gates.forward_bytes, gates.backward_bytes) == ((2 * 3 + 2) * row, (3 * 3 + 3) * row)
    attention = made["depth_attention"]()
    assert (attention.forward_bytes, attention.backward_bytes) == ((4 + 1) * row, (2 * 4 + 1) * row)
    assert made["linear_cross_entropy"]().flops == 6 * SMALL.tokens * SMALL.width * SMALL.vocabulary


def test_whole_depths_read_once_per_sublayer_and_reach_every_parameter():
    asked = suite.plan(["depth"], ["reference"], "float32", SETTINGS)
    for name, make in asked.cases.items():
        case = make()
        leaves = [t.detach().requires_grad_() for t in case.inputs]
        read = case.function(*leaves)
        assert len(read) == 8 and name.startswith("8 sublayers, ")
        grads = torch.autograd.grad(sum(h.square().sum() for h in read), leaves[:9], allow_unused=True)
        assert all(g is not None for g in grads)


@pytest.mark.parametrize(
    "wrong", [(["multi_gat"], ["fused"], ""), ([], ["fast"], ""), ([], ["reference"], "float8")], ids=str
)
def test_a_word_that_means_nothing_is_refused(wrong):
    names, ways, precision = wrong
    with pytest.raises(ValueError, match="does not exist"):
        suite.plan(names, ways, precision, SETTINGS)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr("residua.bench.peers.find_spec", lambda name: None if name == "fla" else object())
    assert list(peers("depth_attention")) == ["liger_kernel"] and peers("gated_norm") == {}


def test_the_spread_is_from_the_tenth_to_the_ninetieth_percentile():
    sample = Sample.of([float(i) for i in range(11)])
    assert (sample.median, sample.p10, sample.p90, sample.count) == (5.0, 1.0, 9.0, 11)


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "ops.json"
    sizes = ["--tokens", "16", "--width", "32", "--repeats", "2", "--precision", "float32"]
    done = CliRunner().invoke(app, ["ops", "gated_norm", *sizes, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "gated_norm, rank 16" in done.output
    report = json.loads(out.read_text())
    assert report["shape"]["dtype"] == "float32" and len(report["results"]) >= 1
