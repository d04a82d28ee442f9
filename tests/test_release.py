"""The release: the wheel works in an empty environment, offline, and without Triton."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from residua.doctor.environment import PURPOSES
from residua.version import __version__

pytestmark = pytest.mark.slow  # builds the package, and starts Python

ROOT = Path(__file__).parents[1]
ALONE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def python(code: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, capture_output=True, text=True,
        env={**ALONE, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources() -> list[Path]:
    """The files of a release."""
    package = [p for p in (ROOT / "residua").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return [*(ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")), *package]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the sdist, as an installer does that has only the sdist."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("release")
    for source in sources():
        copy = folder / "tree" / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    python("from setuptools import build_meta; build_meta.build_sdist('..')", folder / "tree")
    with tarfile.open(folder / f"residua-{__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    python("from setuptools import build_meta; build_meta.build_wheel('..')", folder / f"residua-{__version__}")
    return folder / f"residua-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """An environment with nothing but the wheel; a path file lends it the packages that Residua depends on."""
    folder = wheel.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, env=ALONE)
    install = ("install", "-q", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(wheel))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *install]
    subprocess.run(pip, check=True, env=ALONE, cwd=folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def run(environment: Path, folder: Path, *command: str) -> str:
    program = str(environment / "bin" / command[0])
    done = subprocess.run([program, *command[1:]], cwd=folder, capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith(f"residua-{__version__}.dist-info/")}
    assert held == {str(path.relative_to(ROOT)) for path in sources()[4:]}


def test_wheel_metadata_names_versions_extras_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = f"residua-{__version__}.dist-info"
        about = Parser().parsestr(archive.read(f"{inside}/METADATA").decode())
        assert "residua = residua.cli.main:main" in archive.read(f"{inside}/entry_points.txt").decode()
    assert (about["Version"], about["Requires-Python"]) == (__version__, ">=3.11")
    assert about["Description-Content-Type"] == "text/markdown" and "# Residua" in about.get_payload()
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        about.get_all("Classifier")
    )
    extras = set(about.get_all("Provides-Extra"))
    assert extras >= {*PURPOSES, "dev"}
    for need in map(Requirement, about.get_all("Requires-Dist")):
        if need.name == "residua":
            assert need.extras <= extras
            continue
        try:
            installed = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            continue
        assert need.specifier.contains(installed, prereleases=True), f"{need} does not allow the tested {installed}"


def test_the_command_works_in_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    assert run(environment, tmp_path, "residua", "--version") == f"residua {__version__}\n"
    assert run(environment, tmp_path, "python", "-P", "-m", "residua", "--version") == f"residua {__version__}\n"
    where = run(environment, tmp_path, "python", "-c", "import residua; print(residua.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    assert "tiny-mgr" in run(environment, tmp_path, "residua", "presets", "--matching", "tiny")
    assert '"passed": true' in run(environment, tmp_path, "residua", "doctor", "--quick", "--json")


@pytest.mark.nightly
def test_the_wheel_trains_and_plots_in_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the depth of a model, part {number}\n" * 30)
    run(environment, tmp_path, "residua", "data", "prepare", "texts", "--out", "data", "--tokenizer", "bytes",
        "--holdout", "0.3")  # fmt: skip
    run(environment, tmp_path, "residua", "compare", "prenorm", "mgr", "--data", "data", "--out", "study", "--seeds",
        "1", "--set", "train.steps=4", "--set", "train.schedule.warmup=1", "--set", "data.sequence=32")  # fmt: skip
    assert (tmp_path / "study" / "report.html").stat().st_size > 10_000


# As on macOS: neither Triton nor packages that need it are found, even in processes that Residua starts.
WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        gone = name.partition(".")[0] in ("triton", "fla")
        return None if gone else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **settings):
        found = PathFinder.find_distributions(*args, **settings)
        return [d for d in found if d.metadata["Name"] not in ("triton", "flash-linear-attention")]


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


@pytest.fixture(scope="module")
def without_triton(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("path")
    (folder / "sitecustomize.py").write_text(WITHOUT_TRITON)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TRITON_INTERPRET": "0"}


def test_training_and_listing_presets_work_without_triton(without_triton: dict[str, str], tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        import torch
        from tests.trained import train_run
        torch.set_num_threads(1)
        train_run(Path({str(tmp_path)!r}), topology={{"kind": "full_attnres"}})
        from residua.cli.main import main
        for arguments in (["presets", "--matching", "tiny"], ["doctor", "--quick"]):
            sys.argv = ["residua", *arguments]
            try:
                main()
            except SystemExit as end:
                assert end.code == 0, arguments
        assert "triton" not in sys.modules
        print("done")
        """
    shown = python(code, tmp_path, **without_triton)
    assert shown.endswith("done\n")
    assert "tiny-full" in shown and "– triton" in shown
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.nightly
def test_only_kernels_cannot_be_imported_without_triton(without_triton: dict[str, str], tmp_path: Path) -> None:
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in sorted((ROOT / "residua").rglob("*.py"))]
    ours = [parts for parts in paths if "torchtitan" not in parts]  # a separate extra, which needs Triton itself
    names = [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in ours]
    refused = python(
        f"""
        from importlib import import_module
        for name in {names}:
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                assert error.name.partition(".")[0] == "triton", name
                print(name)
        """,
        tmp_path,
        **without_triton,
    ).split()
    assert refused and not [name for name in refused if not re.fullmatch(r"residua\.ops\.\w+\.\w+", name)]
    assert not [name for name in refused if name.endswith((".reference", ".__init__"))]


@pytest.mark.nightly
def test_study_and_self_test_run_without_triton(without_triton: dict[str, str], tmp_path: Path) -> None:
    python(f"""
        from pathlib import Path
        from tests.trained import train_run
        train_run(Path({str(tmp_path)!r}))
        """, tmp_path, **without_triton)  # fmt: skip
    for line in (
        "doctor",
        "compare prenorm mgr --data data --out study --seeds 1 --set train.steps=4 --set train.schedule.warmup=1",
    ):
        code = f"import sys; sys.argv = ['residua', *{line.split()}]\nfrom residua.cli.main import main; main()"
        python(code, tmp_path, **without_triton)
