"""Signals remove half-written folders, and warnings of other libraries are hidden."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residua.cli.process import SHOW_WARNINGS
from residua.files import UNFINISHED

# A test verb in place of another: it writes a folder like all of them, and waits inside.
WRITER = """
import signal, sys, time
from pathlib import Path
import typer
from residua.cli import main
from residua.files import atomic_folder

app = typer.Typer()

@app.command()
def write() -> None:
    with atomic_folder(Path("made"), unique=True) as folder:
        (folder / "half").write_text("half")
        print("ready", flush=True)
        time.sleep(600)

sys.modules["writer"] = sys.modules["__main__"]
main.VERBS["export"] = ("writer", "")
sys.argv = ["residua", "export"]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite started with nohup has its children ignore it
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_written_folder(tmp_path: Path, number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path, stdout=subprocess.PIPE, env=environment())
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    assert [path.name.startswith(UNFINISHED) for path in tmp_path.iterdir()] == [True]
    child.send_signal(number)
    assert child.wait() == -number
    assert not list(tmp_path.iterdir())


def test_a_signal_while_preparing_text_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "text.txt")  # reading it waits until someone writes
    command = [sys.executable, "-m", "residua.cli.main", "data", "prepare", "text.txt", "--tokenizer", "bytes"]
    child = subprocess.Popen([*command, "--out", "data"], cwd=tmp_path, stderr=subprocess.PIPE, env=environment())
    while not list(tmp_path.glob(f"{UNFINISHED}*")) and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, printed = child.communicate()
    assert child.returncode == -signal.SIGTERM and b"Traceback" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


WARNER = """
import logging, sys, warnings
from residua.cli.process import quiet_libraries

quiet_libraries()
handler = logging.StreamHandler()
logging.getLogger().addHandler(handler)
logging.getLogger("torch.utils._pytree").warning("their log")
logging.getLogger("residua").warning("our log")
warnings.warn_explicit("their warning", FutureWarning, "x.py", 1, module="torchao.quantization")
warnings.warn_explicit("mkldnn_matmul failed", UserWarning, "x.py", 1, module="residua.model.decoder")
warnings.warn_explicit("our warning", UserWarning, "x.py", 1, module="residua.quantize.store")
warnings.warn_explicit("a plugin's warning", UserWarning, "x.py", 1, module="torchy")
"""


@pytest.mark.parametrize("shown", [False, True])
def test_only_warnings_of_other_libraries_are_hidden(shown: bool) -> None:
    variables = environment() | ({SHOW_WARNINGS: "1"} if shown else {})
    done = subprocess.run([sys.executable, "-c", WARNER], capture_output=True, text=True, env=variables)
    assert all(words in done.stderr for words in ("our log", "our warning", "a plugin's warning")), done.stderr
    for words in ("their log", "their warning", "mkldnn_matmul failed"):
        assert (words in done.stderr) == shown


def environment() -> dict[str, str]:
    """This process's environment, without variables that change how warnings are shown."""
    kept = {key: value for key, value in os.environ.items() if key not in (SHOW_WARNINGS, "PYTHONWARNINGS")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
