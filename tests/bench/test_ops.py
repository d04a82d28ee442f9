import io
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from residua import ops
from residua.bench import suite
from residua.bench.cases import Shape, _chosen, depth_paths, operators
from residua.bench.operators import Ceilings, OpResult, bench_operator, measure_ceilings
from residua.bench.show import print_operators, write_json
from residua.bench.suite import peers
from residua.cli.bench import app
from residua.ops.expert_slots import sort_slots
from residua.train.timing import Sample

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL = Shape(tokens=24, width=32, streams=3, sources=4, rank=2, vocabulary=50, sublayers=8, dtype=torch.float32)
QUICK = ["--tokens", "16", "--width", "32", "--repeats", "2", "--implementations", "reference"]
SETTINGS = {"tokens": 16, "width": 32, "streams": 3, "sources": 4, "sublayers": 8, "vocabulary": 50}


@pytest.fixture(autouse=True)
def ceilings(monkeypatch):
    """Measuring them takes half a second; the test of the command does."""
    monkeypatch.setattr(suite, "measure_ceilings", lambda device: Ceilings(1e9, 1e9, "float32"))


@pytest.mark.parametrize("name", operators(SMALL, CPU))
def test_every_operator_runs_both_passes_and_reports_its_limit(name):
    case = operators(SMALL, CPU)[name]()
    ceilings = Ceilings(1e9, 1e9, "float32")
    (result,) = bench_operator(case, {"reference": case.function}, CPU, ceilings, repeats=2, peers={})
    limit = case.flops or case.forward_bytes + case.backward_bytes
    assert result.both_share == pytest.approx(limit / result.both.median / 1e9)
    assert (result.forward_bytes, result.both_bytes) == (case.forward_bytes, case.forward_bytes + case.backward_bytes)
    assert 0 < result.forward_bytes < result.both_bytes


def test_slot_experts_are_recovered_from_sorted_slots():
    chosen = torch.rand(24, 16).topk(3).indices
    slots = sort_slots(chosen, 16)
    assert torch.equal(_chosen(slots.order, slots.ends, 3).long(), chosen)


def test_bytes_count_every_input_and_output_once():
    row = SMALL.tokens * SMALL.width * 4
    made = operators(SMALL, CPU)
    gates = made["multi_gate"]()
    assert (gates.forward_bytes, gates.backward_bytes) == ((2 * 3 + 2) * row, (3 * 3 + 3) * row)
    attention = made["depth_attention"]()
    assert (attention.forward_bytes, attention.backward_bytes) == ((4 + 1) * row, (2 * 4 + 1) * row)
    head = made["linear_cross_entropy"]()
    assert head.flops == 6 * SMALL.tokens * SMALL.width * SMALL.vocabulary
    assert head.forward_bytes == row + SMALL.vocabulary * SMALL.width * 4 == head.backward_bytes // 2
    assert made["mix_heads"]().forward_bytes == 3 * 4 * row


# Rows that 8 sublayers move, counted by hand: the reads and writes of each junction in turn.
DEPTHS = {
    "additive": (8 * 3, 8 * 3),
    # four blocks of two: a second sublayer also reads and writes the sum, whose gradient is passed on
    "block_attnres, 4 blocks": (
        (2 + 2 + 3 + 3 + 4 + 4 + 5 + 5) + 8 + 4 * 2,
        (8 + 1 + 7 + 1 + 5 + 1 + 3 + 1 + 1) + 9 * 2 + 4,
    ),
    "full_attnres": ((2 + 3 + 4 + 5 + 6 + 7 + 8 + 9) + 8, (8 + 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1) + 9 * 2),
    # the first two outputs become streams
    "multi_gate, 3 streams": (3 + 4 + 6 * 8, 7 + 10 + 6 * 12),
    "mhc, 3 streams": (8 * 8, 8 * 12),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_full_depth_case_moves_the_bytes_of_its_junctions(name):
    row = SMALL.tokens * SMALL.width * 4
    case = depth_paths(SMALL, CPU)[f"8 sublayers, {name}"]()
    assert (case.forward_bytes / row, case.backward_bytes / row) == DEPTHS[name]


def test_a_peer_that_raises_gets_a_row_and_others_are_timed():
    case = operators(SMALL, CPU)["add_norm"]()

    refuses = raising(RuntimeError("Hopper is not supported.\nUpgrade."))
    backward_breaks = {"backward": lambda *inputs: [t.detach() for t in inputs]}
    others = {"refuses": refuses, **backward_breaks, "works": case.function}
    ours = {"reference": case.function}
    results = [*bench_operator(case, ours, CPU, Ceilings(1e9, 1e9, "float32"), repeats=1, peers=others)]
    assert [result.implementation for result in results] == ["reference", *others]
    assert results[1].problem == "RuntimeError: Hopper is not supported." and results[1].both is None
    assert results[2].problem is not None and "\n" not in results[2].problem
    assert results[0].both is not None and results[3].both is not None
    console = Console(file=io.StringIO(), width=180)
    print_operators(console, results)
    assert "add_norm, refuses: RuntimeError: Hopper is not supported." in console.file.getvalue()
    with pytest.raises(RuntimeError, match="Hopper"):
        next(bench_operator(case, {"fused": refuses}, CPU, Ceilings(1e9, 1e9, "float32"), repeats=1, peers={}))


def test_an_exception_in_a_peer_does_not_end_the_suite(monkeypatch):
    install(monkeypatch, raising(NotImplementedError()))
    asked = suite.plan(["depth_attention", "add_norm"], ["reference"], "float32", SETTINGS)
    report = suite.run(asked, repeats=1)
    assert [(r.case.split(",")[0], r.implementation, r.problem) for r in report.results] == [
        ("depth_attention", "reference", None),
        ("depth_attention", "fla", "NotImplementedError"),
        ("add_norm", "reference", None),
        ("add_norm", "fla", "NotImplementedError"),
    ]


def test_full_depth_case_reaches_every_parameter():
    asked = suite.plan(["depth"], ["reference"], "float32", SETTINGS)
    for name, make in asked.cases.items():
        case = make()
        leaves = [t.detach().requires_grad_() for t in case.inputs]
        read = case.function(*leaves)
        assert len(read) == 8 and name.startswith("8 sublayers, ")
        grads = torch.autograd.grad(sum(h.square().sum() for h in read), leaves[:9], allow_unused=True)
        assert all(g is not None for g in grads)


def test_full_depth_case_through_a_peer_gives_equal_reads(monkeypatch):
    def read(query, gain, *sources):
        return [ops.depth_attention(sources, query, norm_weight=gain)]

    monkeypatch.setattr(suite, "peers", lambda name: {"fla": read} if name == "depth_attention" else {})
    found = 0
    for name, make in depth_paths(SMALL, CPU).items():
        case = make()
        others = suite._others(name, case)
        assert list(others) == ["fla"] * ("attnres" in name)
        for other in others.values():
            ours, theirs = case.function(*case.inputs), other(*case.inputs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            found += 1
    assert found == 2


@pytest.mark.parametrize(
    ("names", "ways", "precision", "words"),
    [
        (["multi_gat"], ["fused"], "", "does not exist"),
        ([], ["fast"], "", "does not exist"),
        ([], ["reference"], "float8", "does not exist"),
        (["add_norm"], ["fused"], "", "needs a GPU, and PyTorch sees none: choose reference or compiled"),
    ],
)
def test_a_suite_that_cannot_be_measured_is_refused(names, ways, precision, words):
    with pytest.raises(ValueError, match=words):
        suite.plan(names, ways, precision, SETTINGS)


def test_a_peer_that_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setattr("residua.bench.suite.find_spec", lambda name: None if name == "fla" else object())
    assert list(peers("depth_attention")) == ["liger_kernel"] and peers("gated_norm") == {}


def test_spread_is_the_10th_to_90th_percentile():
    sample = Sample.of([float(i) for i in range(11)])
    assert (sample.median, sample.p10, sample.p90, sample.count) == (5.0, 1.0, 9.0, 11)


def test_the_command_prints_a_table_and_writes_json(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure_ceilings", measure_ceilings)
    out = tmp_path / "ops.json"
    sizes = ["--tokens", "16", "--width", "32", "--repeats", "2", "--precision", "float32"]
    done = CliRunner().invoke(app, ["ops", "gated_norm", *sizes, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "gated_norm, rank 16" in done.output
    report = json.loads(out.read_text())
    assert report["shape"]["dtype"] == "float32" and len(report["results"]) >= 1
    assert report["results"][0]["forward_bytes"] == 2 * 16 * 32 * 4
    assert report["results"][0]["both_bytes"] == 5 * 16 * 32 * 4
    assert "MiB" in done.output


def install(monkeypatch: pytest.MonkeyPatch, peer) -> None:
    """A peer for every operator, also measured here."""
    monkeypatch.setattr(suite, "peers", lambda name: {"fla": peer})
    monkeypatch.setattr(suite, "WITH_PEERS", ("cpu", "cuda"))


def raising(error: BaseException):
    def fail(*inputs: object) -> None:
        raise error

    return fail


def rows(out: Path) -> list[tuple[str, str]]:
    return [(row["case"].split(",")[0], row["implementation"]) for row in json.loads(out.read_text())["results"]]


def test_every_row_is_in_the_file_before_the_next_is_measured(tmp_path, monkeypatch):
    out, seen = tmp_path / "made" / "ops.json", []

    def looks(*inputs: torch.Tensor) -> list[torch.Tensor]:
        seen.append((rows(out), json.loads(out.read_text())["planned_rows"]))
        raise RuntimeError("seen")

    install(monkeypatch, looks)
    CliRunner().invoke(app, ["ops", "add_norm", "multi_gate", *QUICK, "--out", str(out)], catch_exceptions=False)
    first = [("add_norm", "reference")]
    assert seen == [(first, 4), ([*first, ("add_norm", "fla"), ("multi_gate", "reference")], 4)]
    assert len(rows(out)) == 4 and [file.name for file in out.parent.iterdir()] == ["ops.json"]


def test_ctrl_c_prints_and_keeps_the_finished_rows(tmp_path, monkeypatch):
    install(monkeypatch, raising(KeyboardInterrupt()))
    out = tmp_path / "ops.json"
    done = CliRunner().invoke(app, ["ops", "add_norm", "multi_gate", *QUICK, "--out", str(out)])
    assert done.exit_code == 130
    assert re.search(r"add_norm +reference +\d", done.stdout) and "multi_gate" not in done.stdout
    assert "stopped early: 1 of 4 rows were measured" in done.stdout
    assert rows(out) == [("add_norm", "reference")]


def test_ctrl_c_before_the_first_row_keeps_an_older_file(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure_ceilings", raising(KeyboardInterrupt()))
    out = tmp_path / "ops.json"
    out.write_text("older")
    done = CliRunner().invoke(app, ["ops", "add_norm", *QUICK, "--out", str(out)])
    assert done.exit_code == 130 and done.stdout == "" and out.read_text() == "older"


def test_our_own_bug_keeps_the_rows_measured_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ops.multi_gate, "reference", raising(RuntimeError("defect")))
    done = CliRunner().invoke(app, ["ops", "add_norm", "multi_gate", *QUICK])
    assert isinstance(done.exception, RuntimeError)
    assert re.search(r"add_norm +reference +\d", done.stdout) and "1 of 2 rows" in done.stdout


def test_a_log_gets_one_line_per_row(monkeypatch):
    install(monkeypatch, raising(RuntimeError("[sm_90] is not supported")))
    done = CliRunner().invoke(app, ["ops", "gated_norm", *QUICK], catch_exceptions=False)
    timed, refused = done.stderr.splitlines()
    times = r"[\d.e+-]+ ms forward, [\d.e+-]+ ms both"
    assert re.fullmatch(rf"gated_norm, rank 16: reference {times} \(1 of 2, \d+:\d\d left\)", timed)
    assert refused == "gated_norm, rank 16: fla not timed, RuntimeError: [sm_90] is not supported (2 of 2)"
    assert "stopped" not in done.stdout


def test_row_count_is_known_before_measuring(monkeypatch):
    install(monkeypatch, None)
    monkeypatch.setattr(suite, "peers", lambda name: {"fla": None} if name in ("depth_attention", "add_norm") else {})
    asked = suite.plan(["depth", "add_norm"], ["reference", "compiled"], "float32", SETTINGS)
    reads = sum("attnres" in name for name in asked.cases)
    assert suite.count_rows(asked) == 5 * 2 + reads + 2 + 1 == 15


def test_a_terminal_gets_a_status_line_with_the_time_left(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    sample = Sample(1e-3, 1e-3, 1e-3, 1)
    row = OpResult("add_norm", "fused", 1, 1, forward=sample, both=sample)
    with suite.SuiteProgress(3, None, console) as progress:
        progress.tell("add_norm: fused")
        now += 61
        progress.keep(suite.Report(SMALL, {}, Ceilings(1, 1, "float32"), [row], 3))
        progress.tell("add_norm: reference")
    said = console.file.getvalue()
    assert "add_norm: reference (1 of 3, 2:02 left)" in said and "ms forward" not in said


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "ops.json"
    write_json(out, {"rows": 1})
    monkeypatch.setattr("residua.files.flush", raising(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_json(out, {"rows": 2})
    assert json.loads(out.read_text()) == {"rows": 1}


def test_results_are_written_through_links_and_pipes(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    write_json(tmp_path / "link.json", {"rows": 1})
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "file.json").read_text()) == {"rows": 1}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_json(pipe, {"rows": 1})
    assert json.loads(os.read(end, 1000)) == {"rows": 1}
    os.close(end)


def test_a_pipe_receives_the_report_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    command = ["ops", "add_norm", "gated_norm", *QUICK, "--out", str(pipe)]
    CliRunner().invoke(app, command, catch_exceptions=False)
    assert len(json.loads(os.read(end, 1 << 16))["results"]) == 2
    os.close(end)
