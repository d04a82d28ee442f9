"""Memory: what is free, a model that does not fit, and running out of it, each in one sentence."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from residua import machine
from residua.cli.main import fail
from residua.config.run import RunConfig
from residua.machine import TooLarge, free_memory, out_of_memory, require_memory
from residua.train.health import TrainingStopped
from residua.train.step import Step
from residua.train.trainer import train
from tests.train.conftest import config as config
from tests.train.conftest import data as data
from tests.trained import residua, train_run

QUIET = Console(quiet=True)


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as python_error:
        bytearray(1 << 62)
    assert out_of_memory(torch_error.value) == out_of_memory(python_error.value) == "this machine"
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == "the GPU"
    assert out_of_memory(RuntimeError("shape '[2]' is invalid")) is None
    assert out_of_memory(ValueError("out of memory")) is None


def test_free_memory_is_positive_and_below_the_process_limit() -> None:
    free = free_memory()
    assert free is not None and free > 1 << 20
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, before[1]))
    try:
        limited = free_memory()
        assert limited is not None and limited < 1 << 45
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def group(folder: Path, **content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_cgroup_memory_limits_apply_at_every_level(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    group(root, memory__max="max", memory__current=5)
    group(root / "outer", memory__max=1000, memory__current=400, memory__stat="anon 300\ninactive_file 60")
    group(root / "outer/inner", memory__max=900, memory__current=100, memory__stat="anon 100")
    own.write_text("0::/outer/inner\n")
    assert sorted(machine._free_in_groups(str(root), str(own))) == [660, 800]
    group(
        root / "memory", memory__limit_in_bytes=500, memory__usage_in_bytes=200, memory__stat="total_inactive_file 10"
    )
    own.write_text("5:cpu:/x\n4:cpuset,memory:/of/the/host\n0::/nowhere\n")
    assert machine._free_in_groups(str(root), str(own)) == [310]
    assert machine._free_in_groups(str(root), str(tmp_path / "missing")) == []


def test_memory_refusal_names_both_sizes(monkeypatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device=None: 3 << 30)
    require_memory("it needs", 3 << 30, "end other programs")
    with pytest.raises(TooLarge, match=r"^it needs 3\.5 GiB of memory, but this machine has 3\.0 GiB free: end other"):
        require_memory("it needs", 7 << 29, "end other programs")
    monkeypatch.setattr(machine, "free_memory", lambda device=None: None)
    require_memory("nobody knows what is free", 1 << 60, "")


def test_training_states_are_counted_to_the_byte(config: RunConfig, monkeypatch) -> None:
    """Weights, gradients, one moment for Muon's matrices and two for AdamW's tensors."""
    from residua.model.decoder import build
    from residua.train.optimizer import hidden_matrices
    from residua.train.summary import check_memory

    model = build(config.model)
    declared = hidden_matrices(model)
    needed = sum(4 * p.numel() * (3 if name in declared else 4) for name, p in model.named_parameters())
    for free in (needed, needed - 1):
        monkeypatch.setattr(machine, "free_memory", lambda device=None, free=free: free)
        if free == needed:
            check_memory(config, torch.device("cpu"))
        else:
            with pytest.raises(TooLarge, match="training needs at least"):
                check_memory(config, torch.device("cpu"))


def test_each_rank_needs_memory_only_for_its_share(config: RunConfig, monkeypatch) -> None:
    """Plus room for one layer, or the embedding, at a time."""
    from residua.train.summary import check_memory

    asked: list[int] = []
    monkeypatch.setattr("residua.train.summary.require_memory", lambda what, needed, *rest: asked.append(needed))
    check_memory(config, torch.device("cpu"))
    check_memory(config.override(["parallel.shard=2", "train.accumulate=2"]), torch.device("cpu"))
    alone, shared = asked[:3], asked[3:]
    assert shared[0] == alone[0] // 2
    assert shared[1] == alone[1] < shared[0]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["model.width=65536", "model.vocab_size=2147483647", "train.micro_batch=1000000000"])
def test_a_model_larger_than_any_machine_is_never_built(config: RunConfig, tmp_path: Path, change: str) -> None:
    with pytest.raises(
        TooLarge, match=r"GiB of memory, but this machine has .* free: (choose a smaller|lower train)|for any machine"
    ):
        train(config.override([change]), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_run(tmp_path_factory.mktemp("memory"))


VERBS: list[list[Any]] = [
    ["generate", "RUN", "--prompt", "the"],
    ["eval", "RUN"],
    ["export", "RUN", "--out", "OUT"],
    ["diagnose", "RUN", "--out", "OUT"],
    ["quantize", "RUN", "--out", "OUT"],
    ["train", "--resume", "--out", "RUN", "train.steps=8"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_every_verb_refuses_a_model_that_does_not_fit(
    words: list[Any], run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device=None: 1000)
    before = sorted(run.rglob("*"))
    names = {"RUN": run, "OUT": tmp_path / "out"}
    assert residua(monkeypatch, *(names.get(word, word) for word in words)) == 2
    said = capsys.readouterr().err
    assert said.count("residua: ") == said.count("\n") == 1
    assert "parameters" in said and "0.0 MiB free" in said
    assert sorted(run.rglob("*")) == before and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_running_out_of_memory_gives_one_sentence(run: Path, monkeypatch, capsys) -> None:
    errors = [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")]
    for error in errors:

        def full(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("residua.model.decoder.Decoder.hidden", full)
        for verb in (["generate", run, "--prompt", "the"], ["eval", run]):
            assert residua(monkeypatch, *verb) == 2
            said = capsys.readouterr().err
            assert (
                said
                == "residua: this machine ran out of memory: end other programs, or choose a smaller model or batch.\n"
            )


@pytest.mark.slow
def test_running_out_of_memory_keeps_the_last_checkpoint(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    call, done = Step.__call__, 0

    def full(self: Step, *arguments: Any) -> None:
        nonlocal done
        done += 1
        if done == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        call(self, *arguments)

    monkeypatch.setattr(Step, "__call__", full)
    with pytest.raises(TrainingStopped, match=r"this machine ran out of memory after step 3; .* is \S+step-2\. Lower"):
        train(config, tmp_path / "run", console=QUIET)


def test_out_of_memory_while_reporting_is_still_reported(monkeypatch, capfd) -> None:
    def full(mistake: BaseException) -> str:
        raise MemoryError

    monkeypatch.setattr("residua.report.terminal.say", full)
    with pytest.raises(SystemExit) as ended:
        fail(MemoryError())
    assert ended.value.code == 2
    assert capfd.readouterr().err == "residua: this machine ran out of memory: end other programs.\n"
