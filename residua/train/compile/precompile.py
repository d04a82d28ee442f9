"""Compiles kernels ahead of time: helper processes fill Triton's disk cache while `torch.compile` traces the model.

Triton compiles each kernel at its first launch, one at a time, and a model's first step launches dozens of new ones.
Long before that, tracing asks each operator for its outputs, with the shapes, strides and dtypes of the launch. A
helper calls the same operator on stand-in CPU tensors, and so compiles the same kernels. If the helper missed a kernel
or is late, the launch compiles as usual.

The first step of Full at L takes 20 s instead of 56 (docs/lab/kernels.md, "Gains of single parts"). To time it, with
empty caches: `residua bench step mgr-l-full train.compile=layers --micro-batch 8 --accumulate 2`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from itertools import cycle
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from residua.machine import available_cores, python_command, python_environment, start_helpers
from residua.ops._runtime import library, triton_support

MOST_HELPERS = 8
THREADS = 1024
"""Maximum threads per program."""


class StandIn(NamedTuple):
    """The properties of a tensor that matter for compilation: shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> StandIn:
        return _same(cls(tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype))

    def make(self) -> Tensor:
        """A tensor whose memory is never touched, so the system never allocates it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@cache
def _same(stand_in: StandIn) -> StandIn:
    """The same object for all equal ones, so that a pickle stores it once."""
    return stand_in


class Request(NamedTuple):
    """A call of the operator `residua::name`, which `module` registers."""

    module: str
    name: str
    args: tuple[Any, ...]
    settings: dict[str, Any]


class Helpers:
    """Processes that compile the kernels of traced operators. They exit when done or when this object is freed."""

    @classmethod
    def start(cls, device: torch.device) -> Helpers | None:
        """Start one helper for each spare pair of cores, up to a limit; None where no kernels run."""
        count = min(MOST_HELPERS, available_cores() // 2 - 1)
        if device.type != "cuda" or not triton_support.INSTALLED or triton_support.INTERPRETED or count < 1:
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(10 * properties.major + properties.minor, properties.multi_processor_count, count)

    def __init__(self, capability: int, multiprocessors: int, count: int) -> None:
        call = f"precompile.serve(precompile.received({os.getpid()}), {capability}, {multiprocessors})"
        command = python_command("-c", f"from residua.train.compile import precompile; {call}")
        processes = list(start_helpers(command, count, env=_environment(), stdout=subprocess.DEVNULL))
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        Thread(target=_distribute, args=(self._requests, processes), daemon=True).start()
        self.close = finalize(self, self._requests.put, None)
        """Tell the helpers that no more requests will come."""
        self._request_keys: set[str] = set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Send operators traced inside the block to the helpers; closes the request queue at the end."""
        library.listeners.append(self.hear)
        try:
            yield
        finally:
            library.listeners.remove(self.hear)
            self.close()

    def hear(self, module: str, name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Send a traced operator to a helper, once; consecutive operators go to different helpers."""
        with suppress(Exception):  # symbolic sizes
            request = Request(module, name, *tree_map_only(Tensor, StandIn.of, (args, settings)))
            if repr(request) not in self._request_keys:
                self._request_keys.add(repr(request))
                self._requests.put(pickle.dumps(request))


def _distribute(requests: SimpleQueue[bytes | None], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send requests to the helpers in turn, on a thread: a pipe may be full until its helper has started."""
    pipes = [process.stdin for process in processes if process.stdin is not None]
    for request, pipe in zip(iter(requests.get, None), cycle(pipes), strict=False):
        with suppress(OSError):  # this helper died
            pipe.write(request)
            pipe.flush()
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()
    for process in processes:
        process.wait()


def _environment() -> dict[str, str]:
    """A helper's environment: no GPU, and the cache that launches read.

    Inductor sets the cache directory of this process when it compiles, unless one is set; so this sets it here, too.
    """
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    return python_environment(CUDA_VISIBLE_DEVICES="")


def serve(requests: Iterator[Request], capability: int, multiprocessors: int) -> list[str]:
    """Call each request's operator, compiling kernels without launching them; returns the kernels' names."""
    compiled: list[str] = []
    AbsentGPU(capability, multiprocessors, loaded=lambda name, *_: compiled.append(name)).install()
    for module, name, args, settings in requests:
        with suppress(Exception):  # the launch itself will report it
            import_module(module)
            given = (args, settings)
            tensors, named = tree_map_only(StandIn, StandIn.make, given, is_leaf=lambda x: isinstance(x, StandIn))
            getattr(torch.ops.residua, name)(*tensors, **named)
    return compiled


def received(parent: int) -> Iterator[Request]:
    """The requests sent to a helper, until its parent process ends."""
    with suppress(EOFError):
        while os.getppid() == parent:
            yield pickle.load(sys.stdin.buffer)


class AbsentGPU:
    """A stand-in for Triton's driver, so that operators on CPU tensors choose and compile kernels as for this GPU.

    `loaded` gets each kernel's name, its binary and its bytes of shared memory; Triton refuses kernels that need more
    than `shared_memory`.
    """

    def __init__(
        self,
        capability: int,
        multiprocessors: int,
        shared_memory: int = triton_support.HOPPER_SHARED_MEMORY,
        loaded: Callable[[str, bytes, int], None] = lambda name, binary, shared: None,
    ) -> None:
        self.capability, self.multiprocessors, self.shared_memory = capability, multiprocessors, shared_memory
        self.loaded = loaded
        self.utils = self

    def install(self) -> None:
        """Make this the driver of this process from here on."""
        from triton.runtime import driver

        driver.set_active(self)
        triton_support.absent = triton_support.Gpu(self.multiprocessors, self.shared_memory)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_memory}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills and maximum threads of a kernel."""
        self.loaded(name, binary, shared)
        return object(), 0, 0, 0, THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            pass

        return launch
