"""The promises of docs/security.md about the code: no pickles, no foreign code, no network unless requested."""

import re
from functools import cache
from pathlib import Path

import pytest

import residua

PACKAGE = Path(residua.__file__).parent


@cache
def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


def files_with(pattern: str) -> set[str]:
    found = re.compile(pattern, re.M)
    return {name for name, text in sources().items() if found.search(text)}


def calls(*names: str) -> set[str]:
    """The files that call a function of one of these names."""
    return files_with(rf"(?<![\w.])({'|'.join(map(re.escape, names))})\(")


def imported(name: str) -> set[str]:
    return files_with(rf"^\s*(import|from) {re.escape(name)}\b")


@pytest.mark.slow
def test_pickles_are_read_only_from_our_own_helpers() -> None:
    assert calls("pickle.load") == {"train/compile/precompile.py"}
    # takes only the names of a checkpoint's description (tests/integrations)
    assert imported("pickle") == {"train/compile/precompile.py", "integrations/torchtitan/convert.py"}
    assert calls("torch.load", "numpy.load", "np.load", "pickle.loads") == set()
    assert not any(imported(name) for name in ("marshal", "shelve", "dill", "cloudpickle", "joblib"))


def test_no_text_is_executed_as_code() -> None:
    assert calls("exec", "eval", "os.system", "runpy.run_path", "runpy.run_module") == set()


def test_code_of_model_folders_is_never_trusted() -> None:
    trusting = files_with(r"trust_remote_code\s*=\s*(?!False)\w+")
    assert trusting == {"cli/export.py", "storage/card.py"}  # which say how transformers opens the folder


@pytest.mark.parametrize("name", ["urllib.request", "http", "requests", "httpx", "huggingface_hub"])
def test_only_requested_libraries_use_the_network(name: str) -> None:
    # for `export --push`, and on 127.0.0.1 only (tests/watch/test_server.py)
    asked = {"huggingface_hub": {"export/__init__.py"}, "http": {"watch/server.py"}}
    assert imported(name) == asked.get(name, set())


def test_only_the_watch_server_opens_sockets() -> None:
    assert calls("socket.create_connection", "urlopen") == set()
    assert calls("socket.socket", "socket.create_server") == {"watch/server.py"}


def test_pages_link_only_to_files_that_exist() -> None:
    root = PACKAGE.parent
    for page in (root / "SECURITY.md", root / "docs/security.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), target
