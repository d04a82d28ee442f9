"""A process of a run under faults: the `residua` command on one thread, with quick heartbeats."""

import sys

import torch
import torch.utils.tensorboard  # imported once, in the process that ranks are forked from

from residua.cli import main as command
from residua.cli import train  # noqa: F401
from residua.distributed import heartbeat, world  # noqa: F401
from residua.train import trainer  # noqa: F401


def main(*arguments: str) -> None:
    torch.set_num_threads(1)
    heartbeat.BEAT_SECONDS = 0.25
    sys.argv = ["residua", *arguments]
    command.main()
