import json

import pytest
import torch
from typer.testing import CliRunner

from residua.bench import curve
from residua.bench.curve import Curve, CurveResult, bench_curve
from residua.cli.bench import app
from residua.config.run import RunConfig
from residua.data import open_corpus, prepare
from residua.data.source import open_data
from residua.ops._runtime.backend import chosen_backend
from tests.bench.conftest import MODEL, RECIPE

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EXACT = 'determinism = "exact"\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curve")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"the depth of {number} layers is how far they talk " * 5)
    prepare(open_corpus([folder / "texts"], holdout=0.3), folder / "data", "bytes", workers=1)
    path = folder / "tiny.toml"
    bytes_model = MODEL.replace("vocab_size = 64", "vocab_size = 320")
    path.write_text(bytes_model + RECIPE + EXACT + f"[data]\npath = {json.dumps(str(folder / 'data'))}\n")
    return path


@pytest.fixture
def config(run):
    return RunConfig.from_toml(run)


@pytest.fixture
def short(config, monkeypatch):
    """Two means: of two steps and of one."""
    monkeypatch.setattr(curve, "WINDOW", 2)
    return config.override(["train.steps=3", "train.schedule.warmup=1"])


def spoil(monkeypatch, when):
    """Perturb the initial weights of runs for which `when(number, backend)` holds; return the backend of each run."""
    ran = []
    build = curve.build_step

    def build_spoilt(model, *rest):
        ran.append((chosen_backend(), torch.are_deterministic_algorithms_enabled()))
        if when(len(ran), chosen_backend()):
            with torch.no_grad():
                model.embed.weight.mul_(1.01)
        return build(model, *rest)

    monkeypatch.setattr(curve, "build_step", build_spoilt)
    return ran


def test_curve_compares_two_fused_runs_with_one_reference_run(config, monkeypatch):
    ran = spoil(monkeypatch, lambda number, backend: False)
    result = bench_curve(config, open_data(config), CPU)
    assert ran == [("auto", True), ("auto", True), ("reference", True)]
    assert [len(c.losses) for c in result.curves.values()] == [2, 2, 2]
    assert result.same_bits and result.differences == [0, 0]  # on a CPU all run the reference
    assert result.curves["fused"].losses[1] < result.curves["fused"].losses[0] < 7


def test_each_loss_is_the_mean_over_its_steps(config, monkeypatch):
    monkeypatch.setattr(curve, "RUNS", {"reference": "reference"})
    means = bench_curve(config, open_data(config), CPU).curves["reference"].losses
    monkeypatch.setattr(curve, "WINDOW", 1)
    steps = bench_curve(config, open_data(config), CPU).curves["reference"].losses
    assert len(steps) == 12
    assert means == pytest.approx([sum(steps[:10]) / 10, sum(steps[10:]) / 2], rel=1e-6)


def test_diverging_run_changes_bits_or_differences(short, monkeypatch):
    with monkeypatch.context() as patch:
        spoil(patch, lambda number, backend: backend == "reference")
        result = bench_curve(short, open_data(short), CPU)
    assert result.same_bits and max(result.differences) > 1e-4
    spoil(monkeypatch, lambda number, backend: number == 2)
    result = bench_curve(short, open_data(short), CPU)
    assert not result.same_bits and result.differences == [0, 0]


@pytest.mark.parametrize("other", [Curve([2.0, 1.0], "other"), Curve([2.0, 1.5], "same")], ids=["weights", "losses"])
def test_same_bits_compares_losses_and_weights(other):
    first = Curve([2.0, 1.0], "same")
    assert not CurveResult({"fused": first, "fused again": other, "reference": first}).same_bits


def test_digest_includes_scalar_weights():
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    before = curve._digest(model)
    model.scale.data += 1
    assert curve._digest(model) != before


def test_short_curve_warms_up_for_a_quarter_of_its_steps(run):
    asked = ["curve", str(run), "train.schedule.warmup=9", "--steps", "8"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0 and "in steps 1–8" in done.output


def test_curve_command_prints_and_writes_json(run, tmp_path):
    out = tmp_path / "curve.json"
    done = CliRunner().invoke(app, ["curve", str(run), "--steps", "11", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "largest difference between 10-step means: 0.00000 nats, in steps 1–10" in done.output
    assert "two fused runs: losses and weights are identical bit for bit" in done.output
    assert "No GPU: all three" in done.output
    report = json.loads(out.read_text())
    assert report["same_bits"] is True and report["largest_difference"] == 0
    assert report["config"]["train"]["steps"] == 11 and report["config"]["train"]["determinism"] == "exact"
    assert len(report["curves"]["fused again"]["losses"]) == 2
