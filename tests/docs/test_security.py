"""What docs/security.md says that the code never does, the code does not contain."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import residua

PACKAGE = Path(residua.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def calls(*names: str) -> set[str]:
    """The files that call a function of one of these names, as in `torch.load`."""
    return {
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    }


def imported(name: str) -> set[str]:
    found = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {file for module in modules if module == name or module.startswith(f"{name}.")}
    return found


def test_pickles_are_read_from_our_own_helpers_only() -> None:
    assert imported("pickle") == calls("pickle.load") == {"train/compile/precompile.py"}
    assert calls("torch.load", "numpy.load", "np.load", "pickle.loads") == set()
    assert not any(imported(name) for name in ("marshal", "shelve", "dill", "cloudpickle", "joblib"))


def test_no_code_is_made_of_text() -> None:
    assert calls("exec", "eval", "os.system", "runpy.run_path", "runpy.run_module") == set()


def test_code_of_model_folders_is_never_trusted() -> None:
    trusting = [
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False"
    ]
    assert trusting == []


@pytest.mark.parametrize("name", ["urllib.request", "http", "requests", "httpx", "huggingface_hub"])
def test_the_network_is_left_to_libraries_that_a_person_asks_for(name: str) -> None:
    assert imported(name) == set()
    assert calls("socket.socket", "socket.create_connection", "socket.create_server") == set()


def test_pages_link_only_to_files_that_exist() -> None:
    root = PACKAGE.parent
    for page in (root / "SECURITY.md", root / "docs/security.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), target
