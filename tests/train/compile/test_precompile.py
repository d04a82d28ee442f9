"""Helpers that compile kernels ahead: they receive traced calls, and compile the kernels of launches."""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from residua.ops._runtime import library, triton_support
from residua.ops.depth_attention import launch
from residua.train.compile import precompile

pytestmark = pytest.mark.skipif(not triton_support.INSTALLED, reason="Triton is not installed")

DEPTH = "residua.ops.depth_attention.launch"
ROOT = Path(__file__).parents[3]


def test_listeners_get_shapes_and_numbers_of_traced_calls() -> None:
    heard: list[tuple[Any, ...]] = []
    library.listeners.append(lambda *call: heard.append(call))
    try:
        with FakeTensorMode():
            launch.depth_scores(torch.empty(2, 3, 8), torch.empty(5, 8), 1, 4, 1e-6)
    finally:
        library.listeners.pop()
    (module, name, args, settings) = heard[0]
    assert (module, name, args[2:], settings) == (DEPTH, "depth_scores", (1, 4, 1e-6), {})
    assert precompile.StandIn.of(args[0]) == ((2, 3, 8), (24, 8, 1), torch.float32)


def test_equal_stand_ins_are_interned() -> None:
    first, second = (precompile.StandIn.of(torch.empty(3, 4)) for _ in range(2))
    assert first is second and first.make().shape == (3, 4)


def test_a_device_without_kernels_starts_no_helpers() -> None:
    assert precompile.Helpers.start(torch.device("cpu")) is None


def test_helpers_use_no_more_cores_than_the_process_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "INTERPRETED", False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert precompile.Helpers.start(torch.device("cuda")) is None


def test_helpers_fill_the_cache_that_launches_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When inductor compiles, it changes the cache directory of a process that has none set; so it is set before."""
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", "to be put back")
    del os.environ["TRITON_CACHE_DIR"]
    before = knobs.cache.dir
    assert precompile._environment()["TRITON_CACHE_DIR"] == os.environ["TRITON_CACHE_DIR"] == before


@pytest.mark.parametrize("able", [0, 1])
def test_training_runs_without_helpers_that_cannot_start(monkeypatch: pytest.MonkeyPatch, able: int) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "none")
    started: list[Any] = []

    def start(*_: Any, **__: Any) -> Any:
        if len(started) == able:
            raise OSError("no memory")
        started.append(SimpleNamespace(stdin=io.BytesIO(), wait=lambda: 0))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with precompile.Helpers(90, 132, 3).listening(), FakeTensorMode():
        launch.depth_scores(torch.empty(2, 3, 8), torch.empty(5, 8), 1, 4, 1e-6)
    assert len(started) == able and not library.listeners


def _sent(monkeypatch: pytest.MonkeyPatch, *requests: int) -> None:
    buffer = io.BytesIO(b"".join(map(pickle.dumps, requests)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer))


def test_a_helper_ends_at_the_end_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    _sent(monkeypatch, 1, 2)
    assert list(precompile.received(os.getppid())) == [1, 2]


def test_a_helper_ends_when_its_parent_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with requests left in the pipe."""
    _sent(monkeypatch, 1, 2, 3)
    parents = iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert list(precompile.received(7)) == [1, 2]


LAUNCH = """
import torch
from residua.ops.depth_attention import launch
from tests.ops.offline import compiled

v, u = torch.randn(64, 256, dtype=torch.bfloat16), torch.randn(4, 256)
assert not compiled([("scores", lambda: torch.ops.residua.depth_scores(v, u, 0, 4, 1e-6))], usage=False)
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A working directory with a module that helpers would fail on, an empty cache, kernels that are compiled."""
    (tmp_path / "queue.py").write_text("raise SystemExit('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "helped"))
    yield tmp_path


def _entries(cache: Path) -> set[Path]:
    return {path.relative_to(cache) for path in cache.glob("*/*.cubin")}


@pytest.mark.nightly
def test_a_helper_compiles_the_kernel_of_a_launch_and_ends(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, and after a call that it cannot make; in the cache the kernel has the same key."""
    started, start = [], subprocess.Popen

    def begin(*args: Any, **settings: Any) -> Any:
        started.append(start(*args, **settings))
        return started[-1]

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", begin)
        helpers = precompile.Helpers(90, 132, 1)
    with helpers.listening(), FakeTensorMode():
        v, u = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(4, 256)
        helpers.hear(DEPTH, "depth_scores", (v,), {})
        for _ in range(2):
            launch.depth_scores(v, u, 0, 4, 1e-6)
    assert not library.listeners and len(helpers._request_keys) == 2

    own = {**os.environ, "TRITON_CACHE_DIR": str(environment / "launched"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-c", LAUNCH], env=own, check=True, capture_output=True)
    assert [process.wait(60) for process in started] == [0]
    assert _entries(environment / "helped") == _entries(environment / "launched") != set()
