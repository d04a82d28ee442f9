"""Nothing is imported from the folder that a command is started in: not by the command, nor by a process it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from residua import machine
from residua.config import plugins
from residua.data import Dataset, open_corpus, prepare
from residua.machine import python_command, python_environment
from residua.study import StudyConfig
from tests.study.conftest import SMALL
from tests.trained import residua

BIN = Path(sys.executable).parent
OF_TORCHRUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that it takes over."""
BARE = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"} | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Modules that Python, typer, torch and Residua import, and a package called residua; each leaves a mark."""
    folder = tmp_path / "hostile"
    packages = [folder / name for name in ("residua", "residua/cli", "tensorboard", "numpy")]
    modules = [folder / f"{name}.py" for name in ("random", "json", "typing", "torch", "rich", "sitecustomize")]
    for package in packages:
        package.mkdir(parents=True)
    for file in [*(package / "__init__.py" for package in packages), folder / "residua/cli/main.py", *modules]:
        file.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write(__file__ + chr(10)); raise SystemExit(66)\n")
    return folder


def imported(hostile: Path) -> str:
    mark = hostile.with_name("imported")
    return mark.read_text() if mark.exists() else ""


def run(command: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env={**BARE, **changes}, capture_output=True, text=True)


@pytest.fixture
def text(tmp_path: Path) -> Dataset:
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_text("the cat sat on a mat and ran, and sat again. " * 200)
    corpus = open_corpus([tmp_path / "train.txt"], validation=str(tmp_path / "validation.txt"))
    return prepare(corpus, tmp_path / "prepared", "bytes")


@pytest.mark.parametrize("start", [("-m", "random"), ("-c", "import random, json, residua.cli.main")])
def test_child_python_imports_nothing_from_its_working_folder(
    hostile: Path, start: tuple[str, str], monkeypatch
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a notebook, or under `python -c`
    done = subprocess.run(python_command(*start), env=python_environment(), capture_output=True, text=True)
    assert (done.returncode, imported(hostile)) == (0, ""), done.stderr


def test_only_one_module_starts_python() -> None:
    package = Path(machine.__file__).parent
    starting = [path for path in package.rglob("*.py") if "sys.executable" in path.read_text()]
    assert starting == [package / "machine.py"]


def test_the_hostile_folder_breaks_an_unprotected_start(hostile: Path) -> None:
    assert run([sys.executable, "-m", "residua.cli.main", "presets", "tiny"], hostile).returncode == 66
    assert "hostile" in imported(hostile)


def test_grandchildren_import_nothing_from_the_hostile_folder(hostile: Path, tmp_path: Path) -> None:
    """Like multiprocessing and Inductor: start Python again, from a process that Residua started."""
    again = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import random']))"
    done = subprocess.run(python_command("-c", again), env=python_environment(), cwd=hostile)
    assert (done.returncode, imported(hostile)) == (0, "")


@pytest.mark.slow
def test_plugin_workers_import_nothing_from_the_hostile_folder(hostile: Path) -> None:
    """A plugin is trusted, and read from the given path; processes that its libraries spawn are safe, too."""
    (hostile / "spawning.py").write_text(
        "import multiprocessing, os\n"
        "child = multiprocessing.get_context('spawn').Process(target=os.getpid)\n"
        "child.start(); child.join(); assert child.exitcode == 0\n"
    )
    done = run([str(BIN / "residua"), "presets", "tiny"], hostile, RESIDUA_PLUGINS="spawning.py")
    assert (done.returncode, imported(hostile)) == (0, ""), done.stderr


@pytest.mark.slow
def test_compare_trains_in_a_hostile_folder(hostile: Path, text: Dataset, monkeypatch, capfd) -> None:
    """With a plugin named by its file in that folder, as documented: it is the only thing taken from there.

    The command runs in this process, which would import from there only if the command changed its path.
    """
    (hostile / "plugin_of_a_hostile_folder.py").write_text("")
    changes = (*SMALL, "train.steps=1", "train.schedule.warmup=0")
    study = StudyConfig(name="one", variants={"plain": ()}, seeds=1, threads=1, data=str(text.path), set=changes)
    (hostile / "study.toml").write_text(study.to_toml())
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", path := [*filter(os.path.isabs, sys.path)])
    monkeypatch.setattr(plugins, "_loaded", set(plugins._loaded))
    monkeypatch.setenv("RESIDUA_PLUGINS", "plugin_of_a_hostile_folder.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = path.copy()
    code = residua(monkeypatch, "compare", "study.toml")
    shown = capfd.readouterr()
    assert (code, imported(hostile)) == (0, ""), shown
    assert sys.path == before and sys.modules.pop("plugin_of_a_hostile_folder").__file__.startswith(str(hostile))
    assert (hostile / "runs/one/runs/plain-seed0/checkpoints/step-1").is_dir(), shown


@pytest.mark.slow
def test_torchrun_ranks_import_nothing_from_the_hostile_folder(hostile: Path, monkeypatch, capfd) -> None:
    """The line of the README, with a quick verb. The part of torchrun that imports torch is loaded already."""
    from torch.distributed.run import main

    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    heeded = {number: signal.getsignal(number) for number in OF_TORCHRUN}
    try:
        main(["--standalone", "--nproc-per-node", "2", "--no-python", "residua", "presets", "tiny"])
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
    shown = capfd.readouterr()
    assert (shown.out.count("[model]"), imported(hostile)) == (2, ""), shown.err


@pytest.mark.slow
@pytest.mark.parametrize("editable", ["finder", "path"])
def test_editable_install_works_above_its_clone(tmp_path: Path, editable: str) -> None:
    """There the clone, a folder called residua without code at its top, looks like a package to Python."""
    clone = tmp_path / "residua"
    clone.mkdir()
    (clone / "residua").symlink_to(Path(__file__).parents[2] / "residua")
    install = {
        "path": f"import sys; sys.path.insert(0, {str(clone)!r})",
        "finder": "import sys, importlib.machinery as m, importlib.util as u\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        file = {str(clone / 'residua' / '__init__.py')!r}\n"
        "        return u.spec_from_file_location(name, file) if name == 'residua' else None\n"
        "sys.meta_path.insert(sys.meta_path.index(m.PathFinder) + 1, Finder)",
    }
    start = f"""{install[editable]}
import subprocess
from residua.machine import python_command, python_environment
sys.exit(subprocess.call(python_command("-m", "residua.cli.main", "presets", "tiny"), env=python_environment()))
"""
    known = {key: value for key, value in BARE.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", start], cwd=tmp_path, env=known, capture_output=True, text=True)
    assert done.returncode == 0 and "[model]" in done.stdout, done.stderr
