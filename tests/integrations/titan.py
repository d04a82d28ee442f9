"""torchtitan in tests: one process that has imported it, and the runs that its forked ranks train."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

needs_torchtitan = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: make setup installs it"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="torchtitan 0.3.0 needs torch 2.12"),
]


class Engine:
    """`torchrun -m torchtitan.train --module residua.integrations.torchtitan`, without a new process for each run."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.folder, self.count = server, folder, 0

    def train(
        self,
        name: str,
        ranks: int = 1,
        *flags: str,
        dump: Path | None = None,
        die: Sequence[int] = (),
        fails: bool = False,
    ) -> list[tuple[float, float]]:
        """Train `--config name`; the loss and the gradient norm of each step. `die`: a rank, and its last step."""
        self.count += 1
        self.out = out = self.folder / str(self.count)
        out.mkdir()
        self.dump = dump or out / "dump"
        fixed = ["--module", "residua.integrations.torchtitan", "--config", name, "--dump_folder", str(self.dump)]
        quiet = ["--metrics.log_freq", "1", "--debug.no-enable_structured_logging", "--comm.trace_buf_size", "0"]
        quiet += ["--comm.init_timeout_seconds", "60"]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job: dict[str, Any] = {
            "ranks": ranks, "port": store.port, "out": str(out), "die": list(die), "arguments": fixed + quiet + [*flags]
        }  # fmt: skip
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        if fails:
            assert any(codes)
            return []
        assert not any(codes), self.said()
        lines = [json.loads((out / f"losses-{rank}.json").read_text()) for rank in range(ranks)]
        last = lines[-1]  # of a pipeline, the only ranks that know the loss are the last
        return [(loss, norm) for _, loss, norm in last]

    def said(self, rank: int | None = None) -> str:
        """The output of the ranks of the last run."""
        files = sorted(self.out.glob("said-*")) if rank is None else [self.out / f"said-{rank}"]
        return "\n".join(file.read_text()[-4000:] for file in files)


@contextmanager
def engine() -> Iterator[Engine]:
    """The process and a folder for its runs."""
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="titan-") as folder:
        said = Path(folder, "said")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.titan_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said.open("w"), text=True, env=environment,
        )  # fmt: skip
        try:
            assert server.stdout.readline() == "ready\n", said.read_text()
            yield Engine(server, Path(folder))
        finally:
            server.kill()  # it has no ranks now, and its ordinary end takes seconds
            server.wait()
