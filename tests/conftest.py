"""Every test runs on one thread and from one seed; Triton kernels run in its interpreter by default."""

import atexit
import gc
import logging
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

# Triton reads its switch when it is first imported, OpenMP when torch is: both before any other import.
# On a machine with a GPU, TRITON_INTERPRET=0 in the environment runs the real kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# as `residua` sets it for the processes it starts: tests call the command in their own process
os.environ.setdefault("PYTHONSAFEPATH", "1")
# cuBLAS reads this when it is first used, which may be long before the test that asks for equal bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# transformers copies the code of an exported folder into one place for all processes of a person, and imports it there:
# a second run of the tests at the same time would remove what the first imports
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="residua-tests-")

import pytest

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
os.fsync = lambda descriptor: None  # tests kill processes, not machines; `tests/faults.py` counts the calls
gc.disable()  # until all is collected, see below
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start and interrupt must obey it

MARK_OF_FILE = re.compile(r"^pytestmark = (?:\[[^]]*)?pytest\.mark\.(slow|nightly)\b", re.MULTILINE)


def set_up_torch() -> None:
    """One thread, seeds for the devices of this machine, and the faster interpreter."""
    import torch

    from tests.interpreter import patch_once

    torch.set_num_threads(1)
    for device in (torch.cuda, torch.xpu, torch.mtia):  # each seed would be kept for them, with the whole stack
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    if os.environ["TRITON_INTERPRET"] == "1":
        patch_once()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    # `_seed` comes after fixtures that several tests share: without this they would depend on earlier tests
    if fixturedef.scope != "function":
        import torch

        torch.manual_seed(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files none of whose tests would run: importing them would take `make check` seconds."""
    if "not " not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    marked = MARK_OF_FILE.search(collection_path.read_text("utf-8"))
    return True if marked and f"not {marked[1]}" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # torch's loggers of single artifacts are silent by default, and pytest would attach itself to each, six times
    # a test
    for name, logger in logging.root.manager.loggerDict.items():
        if ".__" in name and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()  # a million objects of imports and collection stay: the garbage collector need not look through them
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # torch says so once on processors without bfloat16 instructions, with a page of C++ frames
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul")
    parallel = getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")
    if parallel and getattr(config, "cache", None):
        config.pluginmanager.register(LongestFirst(config))
    if getattr(config.option, "numprocesses", None):  # only starts workers: torch would take it two seconds
        config.pluginmanager.register(StopAtCrash(config))
    else:
        set_up_torch()


class LongestFirst:
    """With several workers, starts the files that took longest last time first, so that the workers end together."""

    KEY = "residua/seconds"

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.seconds = config, dict(config.cache.get(self.KEY, {}))
        self.measured: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files: dict[str, float] = {}
        for item in items:
            limit = item.get_closest_marker("timeout")  # of its own: compiling all kernels takes minutes at first
            guess = limit.args[0] if limit else 1.0 if item.get_closest_marker("slow") else 0.01
            files[_file(item.nodeid)] = files.get(_file(item.nodeid), 0.0) + self.seconds.get(item.nodeid, guess)
        items.sort(key=lambda item: -files[_file(item.nodeid)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[report.nodeid] = round(self.measured.get(report.nodeid, 0.0) + report.duration, 3)

    def pytest_sessionfinish(self) -> None:
        if not hasattr(self.config, "workerinput"):  # the workers have reported to this process
            self.config.cache.set(self.KEY, self.seconds | self.measured)


class StopAtCrash:
    """Ends the run when a worker dies: xdist would wait forever for the tests that it moves to another worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:
            self.config.pluginmanager.get_plugin("dsession").shouldstop = f"a worker died: {error}"


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
