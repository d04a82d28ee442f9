"""Compile the kernels of a forward pass side by side, before it runs: Triton would compile each at its first launch.

Much of a compilation runs outside of Python, so threads help. (For training, `train/compile/precompile.py` has helper
processes: they need seconds to start, and `torch.compile` takes longer than that.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from residua.ops._runtime.library import Call, dry_run


def compile_ahead(forward: Callable[[], object]) -> None:
    """Call `forward` without its kernels, then launch each operator's kernels in a thread of its own.

    What the kernels compute is thrown away. `forward` should be small: the tensors of all calls are kept until the end.
    """
    with dry_run() as calls:
        forward()
    by_name: dict[str, list[Call]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    if by_name:
        with ThreadPoolExecutor(len(by_name)) as threads:
            list(threads.map(_launch, by_name.values()))


@torch.inference_mode()
def _launch(calls: list[Call]) -> None:
    tensors = [x for call in calls for x in tree_leaves(call.args) if isinstance(x, Tensor)]
    # a thread has no CUDA context before PyTorch runs something in it, and describing a tensor to the GPU needs one
    torch.zeros(1, device=tensors[0].device)
    for call in calls:
        call.run(*call.args, **call.settings)
