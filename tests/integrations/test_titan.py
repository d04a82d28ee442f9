"""torchtitan's ranks train like one process of Residua: the same losses and gradient norms on every mesh."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.storage.run import read_metrics
from residua.train.trainer import train
from tests.integrations.cases import MODELS, run_config, train_alone
from tests.integrations.titan import Engine, engine, needs_torchtitan
from tests.nightly import only_nightly
from tests.trained import prepare_words

pytestmark = [pytest.mark.slow, *needs_torchtitan]

PIPELINE = ("--parallelism.pipeline_parallel_degree", "2")
INTERLEAVED = (*PIPELINE, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
HSDP = ("--parallelism.data_parallel_replicate_degree", "2")
TENSOR = ("--parallelism.tensor_parallel_degree", "2")
CONTEXT = ("--parallelism.context_parallel_degree", "2")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "fsdp": (2, ()),
    "hsdp": (4, HSDP),
    "1f1b": (2, PIPELINE),
    "interleaved": (2, INTERLEAVED),
    "pipeline-fsdp": (4, PIPELINE),
    "tensor": (2, TENSOR),
    "context": (2, CONTEXT),
    "tensor-fsdp": (4, TENSOR),
    "tensor-context": (4, (*TENSOR, *CONTEXT)),
    "tensor-pipeline": (4, (*TENSOR, *PIPELINE)),
    "context-pipeline": (4, (*CONTEXT, *INTERLEAVED)),
    "recomputed": (2, ("activation-checkpoint:full",)),
    "compiled": (1, ("--compile.enable",)),
    "divided-experts": (4, (*HSDP, "--parallelism.expert_parallel_degree", "2")),
}
NORMAL = [("hyper-experts", "fsdp"), ("exo-block", "interleaved"), ("grouped", "context")]
"""Balance of experts, and scalars that FSDP2 leaves whole; all that crosses stages or is shared; positions and
documents across ranks."""
CASES = [
    (model, way)
    for model in MODELS
    for way in WAYS
    if ("experts" in model or way != "divided-experts")
    and (model, way) != ("hybrid", "tensor-context")  # its two heads are not enough
    and (way != "compiled" or model in ("additive", "mgr"))
]


@pytest.fixture(scope="module")
def titan() -> Iterator[Engine]:
    with engine() as started:
        yield started


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_words(tmp_path_factory.mktemp("text"))


def written(run: RunConfig, folder: Path) -> str:
    (folder / "run.toml").write_text(run.to_toml())
    return str(folder / "run.toml")


def assert_same(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    losses, norms = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    known, sizes = (torch.tensor(column, dtype=torch.float64) for column in zip(*expected, strict=True))
    torch.testing.assert_close(losses, known, rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, sizes, rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", only_nightly(CASES, but=NORMAL), ids="-".join)
def test_torchtitan_trains_like_one_process(titan: Engine, text: Path, tmp_path: Path, case: tuple[str, str]) -> None:
    model, way = case
    run = run_config(model, text)
    ranks, flags = WAYS[way]
    losses = titan.train(written(run, tmp_path), ranks, "--checkpoint.no-enable", *flags)
    assert_same(losses, train_alone(run)[0])


def test_another_mesh_finishes_the_run_of_a_killed_rank(titan: Engine, text, tmp_path) -> None:
    """FSDP2 dies in step 3, tensor-parallel ranks resume from step 2, and their last checkpoint becomes a run."""
    from residua.integrations.torchtitan.convert import convert, dump_checkpoints

    run, dump = run_config("grouped", text), tmp_path / "dump"
    name = written(run, tmp_path)
    expected, model = train_alone(run)
    titan.train(f"{name} train.steps=9", 2, "--training.steps", "4", dump=dump, die=(1, 3), fails=True)
    assert RunConfig.from_toml(dump / "config.toml").train == run.train
    assert [c.step for c in dump_checkpoints(dump)] == [2]
    assert_same(titan.train(name, 2, *TENSOR, dump=dump), expected[2:])
    convert(dump, tmp_path / "run")
    with pytest.raises(ValueError, match=r"run is not empty: name a new folder\.$"):
        convert(dump, tmp_path / "run")
    for found, known in zip(residua.load(tmp_path / "run").parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_every_mesh_reads_checkpoints_of_every_other(titan: Engine, text: Path, tmp_path: Path) -> None:
    """One step each on shards, heads, stages, heads and shards, positions, and one rank: one curve."""
    run = run_config("grouped", text, steps=6, save_every=1)
    name, found = written(run, tmp_path), []
    meshes = ["fsdp", "tensor", "interleaved", "tensor-fsdp", "context", "one"]
    for step, (ranks, flags) in enumerate((WAYS[mesh] for mesh in meshes), 1):
        schedule = ("--training.steps", str(step), "--lr_scheduler.total_steps", "6")
        found += titan.train(name, ranks, *schedule, *flags, dump=tmp_path / "dump")
    assert_same(found, train_alone(run)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["block", "experts"])
def test_run_resumes_in_torchtitan_and_back(titan: Engine, text: Path, tmp_path: Path, model: str) -> None:
    """Steps 1 and 2 by Residua, 3 by torchtitan, 4 by Residua: one curve."""
    from residua.integrations.torchtitan.convert import convert

    level = {"kind": "linear_decay", "warmup": 1, "decay_share": 0.0}
    run = run_config(model, text, log_every=1, telemetry="off", schedule=level)
    expected = [loss for loss, _ in train_alone(run)[0]]
    train(run.override(["train.steps=2"]), tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "dump")
    third = titan.train(written(run, tmp_path), 2, "--training.steps", "3", dump=tmp_path / "dump")
    convert(tmp_path / "dump", tmp_path / "last")
    train(run, tmp_path / "last", resume=True)
    fourth = [r["loss"] for r in read_metrics(tmp_path / "last/metrics.jsonl") if r["kind"] == "train"]
    assert [loss for loss, _ in third] + fourth == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.nightly
def test_the_documented_command_trains(text: Path, tmp_path: Path) -> None:
    from residua.integrations.torchtitan.convert import dump_checkpoints

    name = written(run_config("mgr", text), tmp_path)
    module = ["--module", "residua.integrations.torchtitan", "--config", f"{name} train.steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "torchtitan.train", *module, "--dump_folder", str(tmp_path / "dump"), "--metrics.enable_tensorboard"],
        capture_output=True, text=True, cwd=Path(residua.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert [c.step for c in dump_checkpoints(tmp_path / "dump")] == [2, 3]
    assert list((tmp_path / "dump").glob("tb/*/*"))
