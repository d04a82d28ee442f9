"""A rank that runs the `residua` command; rank 0 is slower than the others."""

import os
import sys
import time

from residua.cli import main as command


def main(*arguments: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(2)
    sys.argv = ["residua", *arguments]
    command.main()
