"""The key-value store in which the ranks of a job meet."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from residua.distributed import mesh

LIMIT = timedelta(seconds=60)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """What `job_store` returns to rank 0 of a job without torchrun; it listens on a port that was free a moment ago."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(mesh, "_served", [])
    for _ in range(20):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        try:
            return mesh.job_store("group", LIMIT)
        except dist.DistNetworkError:  # another process has taken the port since
            continue
    raise AssertionError("no free port in 20 attempts")


def test_without_torchrun_rank_0_serves_the_store(served: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    served.set("address", "of rank 0")
    monkeypatch.setenv("RANK", "1")
    assert mesh.job_store("group", LIMIT).get("address") == b"of rank 0"
    monkeypatch.setenv("RANK", "0")
    mesh.job_store("heartbeat", LIMIT)
    assert len(mesh._served) == 1


@pytest.mark.parametrize(("name", "restart"), [("heartbeat", "0"), ("group", "1")])
def test_names_and_restarts_do_not_see_each_other(
    served: dist.Store, name: str, restart: str, monkeypatch: Any
) -> None:
    served.set("address", "of a process")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    assert not mesh.job_store(name, LIMIT).check(["address"])
