"""Kernels of decoding that run beside a sublayer: a fork of the captured stream, and its join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _side(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """A second stream for each: one that is being captured must take no work of others."""
    return torch.cuda.Stream(main.device)


_forked: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
"""The second streams of those whose fork has not been joined."""


@contextmanager
def beside(x: Tensor) -> Iterator[None]:
    """Kernels launched in the block run beside those behind it, until `join`; only in a capture.

    Outside one, kernels wait for the host, and there is nothing to gain. What they read and write must be kept until
    `join`: memory that is given back is used again in the order of the first stream.
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
    """What comes behind waits for all that runs `beside`."""
    if x.is_cuda and _forked:
        main = torch.cuda.current_stream(x.device)
        if (side := _forked.pop(main, None)) is not None:
            main.wait_stream(side)
