"""Side streams for decoding: kernels that run concurrently with a sublayer, by a fork and a join of a captured stream.

Not part of `launch.py`: it knows streams and captures, not kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _side(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """Each stream has a side stream of its own: one that is being captured must not take work from others."""
    return torch.cuda.Stream(main.device)


_forked: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
"""Streams with a fork that has not been joined, and their side streams."""


@contextmanager
def beside(x: Tensor) -> Iterator[None]:
    """Kernels launched in the block run on a side stream, concurrent with later kernels, until `join`.

    Only in a capture: outside one, kernels wait for the host and there is nothing to gain. What they read and write
    must be kept until `join`, for freed memory is reused in the order of the main stream.
    """
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        yield
        return
    main = torch.cuda.current_stream(x.device)
    side = _forked[main] = _side(main)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            yield
    except BaseException:
        del _forked[main]
        raise


def join(x: Tensor) -> None:
    """Later kernels wait for all that runs `beside`."""
    if x.is_cuda and _forked:
        main = torch.cuda.current_stream(x.device)
        if (side := _forked.pop(main, None)) is not None:
            main.wait_stream(side)
