import json
import re
import sys
from warnings import formatwarning

import pytest
import torch
from typer.testing import CliRunner

from residua.bench import turns
from residua.bench.step import bench_step, read_cases, read_models
from residua.bench.turns import bench_turns
from residua.cli.bench import app
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model.size import measure
from residua.train.compile import cuda_graphs
from residua.train.timing import random_batches, release_memory
from residua.train.turns import Turn
from tests.bench.conftest import MODEL, RECIPE

CPU = torch.device("cpu")


@pytest.fixture
def run(model):
    model.write_text(MODEL + RECIPE)
    return model


@pytest.fixture
def base(run):
    return RunConfig.from_toml(run)


def test_step_is_timed_the_requested_number_of_times(base):
    (result,) = bench_step(read_cases(base, []), CPU, steps=3, warmup=1)
    assert result.step is not None and result.step.count == 3
    assert 0 < result.step.p10 <= result.step.median <= result.step.p90
    assert result.tokens == 2 * 2 * 16
    assert result.tokens_per_second == pytest.approx(64 / result.step.median)
    assert result.loss is not None and 0 < result.loss < 10


def test_flops_are_counted_at_the_benchmarked_length(base):
    longer = base.override(["data.sequence=32"])
    (result,) = bench_step(read_cases(longer, []), CPU, steps=1, warmup=0)
    assert result.flops_per_token - measure(base.model).flops_per_token == 6 * 2 * 16 * (32 - 16)


def test_cases_combine_variants_overrides_and_a_backend(base):
    plain, gated = read_cases(base, ["prenorm", "mgr model.topology.streams=2 backend=reference"])
    assert plain.config.model.topology.kind == "additive" and plain.backend == "auto"
    assert gated.config.model.topology.kind == "multi_gate" and gated.config.model.topology.streams == 2
    assert gated.backend == "reference"


def test_every_model_has_the_same_cases_under_its_own_name(run, base):
    models = read_models(["mini", str(run)], ["prenorm", "mgr"])
    assert {name: [case.name for case in cases] for name, cases in models.items()} == {
        "mini": ["prenorm", "mgr"], "tiny": ["prenorm", "mgr"]
    }  # fmt: skip
    assert models["tiny"] == read_cases(base, ["prenorm", "mgr"])


@pytest.mark.parametrize("case", ["mrg", "prenorm backend=trion", "model.topology.kind=blok_attnres", ""])
def test_a_case_that_does_not_exist_is_refused_before_timing(base, case):
    with pytest.raises((ConfigError, ValueError), match=r"\w"):
        read_cases(base, [case])


def test_every_case_gets_the_same_random_tokens(base):
    first, again = random_batches(base), random_batches(base)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0].tokens[:, 1:], first[0].targets[:, :-1])
    assert first[0].tokens.unique().numel() > 10


@pytest.mark.slow
def test_the_command_prints_ratios_and_writes_json(run, tmp_path):
    out = tmp_path / "new" / "step.json"
    cases = ["--compare", "prenorm,mgr model.topology.streams=2", "--steps", "2", "--micro-batch", "1"]
    arguments = ["step", str(run), *cases, "--accumulate", "1", "--out", str(out)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(out.read_text())
    first, second = report["results"]
    ratio = second["step"]["median"] / first["step"]["median"]
    assert first["time_ratio"] == 1 and second["time_ratio"] == pytest.approx(ratio)
    assert first["tokens"] == 16
    assert report["ceilings"]["copy_bytes_per_second"] > 0 and report["environment"]["torch"]
    assert "prenorm" in done.output and "TB/s" in done.output


def test_memory_is_released_without_importing_the_compiler(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setitem(sys.modules, "torch._dynamo", object())
    release_memory(CPU)
    assert resets == [1]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    release_memory(CPU)
    assert resets == [1]


def test_timed_process_without_a_cuda_graph_says_so(tmp_path):
    log = tmp_path / "log"
    with pytest.warns(UserWarning) as warned:
        cuda_graphs._warn("update", RuntimeError("operation not permitted\nwhen stream is capturing"))
    log.write_text(f"compiling\n{formatwarning(warned[0].message, UserWarning, __file__, 1)}")
    assert Turn("mgr", None, log).warnings() == [str(warned[0].message)]
    log.write_text("nothing to say\n")
    assert Turn("mgr", None, log).warnings() == []


@pytest.mark.nightly
def test_interleaved_cases_train_exactly_as_they_do_alone(base):
    cases = read_cases(base, ["prenorm", "mgr backend=reference"])
    alone = bench_step(cases, CPU, steps=5, warmup=1)
    taken = bench_turns(cases, rounds=2, steps=2, warmup=2)
    for one, other in zip(alone, taken, strict=True):
        assert other.step is not None and other.step.count == 4
        assert other.first_step is not None and other.first_step > 0
        assert (one.name, one.parameters, one.tokens) == (other.name, other.parameters, other.tokens)
        assert one.loss == other.loss  # seven steps of each, from the same weights on the same tokens


@pytest.mark.nightly
def test_case_that_cannot_be_timed_is_named(run, monkeypatch):
    monkeypatch.setenv("RESIDUA_PLUGINS", "no_such_plugin")
    result = CliRunner().invoke(app, ["step", str(run), "--compare", "prenorm,mgr", "--rounds", "1"])
    assert isinstance(result.exception, ValueError), result.exception
    assert re.fullmatch(r"prenorm could not be timed \(exit status 1\): .*no_such_plugin.*", str(result.exception))


@pytest.mark.nightly
def test_a_case_that_dies_between_turns_is_named(base, monkeypatch):
    def ask(turn, steps):
        turn.child.kill()
        turn.child.wait()
        return own(turn, steps)

    own = turns.Turn.ask
    monkeypatch.setattr(turns.Turn, "ask", ask)
    with pytest.raises(ValueError, match=r"prenorm could not be timed \(exit status -9\)"):
        bench_turns(read_cases(base, ["prenorm"]), rounds=1, steps=1, warmup=0)


def test_all_cases_run_on_one_device(base):
    with pytest.raises(ConfigError, match="applies to all cases"):
        read_cases(base, ["prenorm", "mgr train.device=cpu"])
