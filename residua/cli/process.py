"""The process of a command: how signals end it, and which library warnings are shown."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import NoReturn

SHOW_WARNINGS = "RESIDUA_WARNINGS"
"""The environment variable that shows what `quiet_libraries` hides."""
_LIBRARIES = (
    "datasets", "huggingface_hub", "lm_eval", "safetensors", "tensorboard", "tokenizers", "torch", "torchao",
    "transformers", "triton", "wandb",
)  # fmt: skip
_CATEGORIES = (DeprecationWarning, FutureWarning, PendingDeprecationWarning, RuntimeWarning, UserWarning)
# Warnings raised by torch in C++ carry the name of the calling module, which may be ours.
_MESSAGES = ("mkldnn_matmul",)
# Loggers that print advice to authors of libraries, on choices that are ours, or on kernels for other devices.
_LOGGERS = (
    "torch.utils._pytree", "torch._inductor.utils", "torch.distributed.elastic.multiprocessing.redirects", "torchao",
)  # fmt: skip


def quiet_libraries() -> None:
    """Hide warnings of other libraries that users of `residua` cannot act on.

    They are shown if the user asks for them with RESIDUA_WARNINGS=1, -W or PYTHONWARNINGS.
    """
    if os.environ.get(SHOW_WARNINGS) or sys.warnoptions:
        return
    for category in _CATEGORIES:
        warnings.filterwarnings("ignore", category=category, module=rf"({'|'.join(_LIBRARIES)})(\.|$)")
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message, UserWarning)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def end_tidily() -> None:
    """Let SIGTERM and SIGHUP unwind the program, so that it removes partial files; a second signal kills it.

    Ranks of torchrun keep the default, since a rank waiting in a collective could not end.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, _end)


class Terminated(SystemExit):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def die(self) -> NoReturn:
        """Die of the signal, as its sender expects."""
        os.kill(os.getpid(), self.number)
        raise self


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)
