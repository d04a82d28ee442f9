"""A rank that dies by a segmentation fault the first `times` times."""

import os
import signal
from pathlib import Path


def main(folder: Path, times: int) -> None:
    if len(list(folder.iterdir())) < times:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
