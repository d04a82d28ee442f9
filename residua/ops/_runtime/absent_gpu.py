"""A GPU that is not there: Triton compiles for it what would be launched, and nothing runs.

Helper processes fill Triton's cache with it while a model is traced, and tests compile every kernel without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from residua.ops._runtime import triton_support

THREADS = 1024
"""Most threads of a program."""


class AbsentGPU:
    """A stand-in for Triton's driver. Operators called on CPU tensors choose and compile kernels as for this GPU.

    `loaded` gets each kernel's name, its binary and its bytes of shared memory; Triton refuses those that need more
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
        """From here on, in this process."""
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
        """Module, function, registers, spills and most threads of a kernel."""
        self.loaded(name, binary, shared)
        return object(), 0, 0, 0, THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            pass

        return launch
