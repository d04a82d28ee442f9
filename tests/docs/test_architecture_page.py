"""The architecture page shows the tree and the imports as they are."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def _drawing():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tools" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _listed() -> set[str]:
    """The paths that the page's indented list names."""
    (block,) = re.findall(r"```text\nresidua/\n(.*?)```", PAGE, re.S)
    found, parents = set(), {}
    for line in block.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth] = name
        found.add("".join(parents[d] for d in sorted(parents) if d < depth) + name)
        parents = {d: n for d, n in parents.items() if d <= depth}
    return found


def test_the_layout_on_the_page_is_the_one_in_the_tree():
    here = ROOT / "residua"
    operators = {p.parent for p in here.glob("ops/[a-z]*/__init__.py")}
    folders = {p.parent for p in here.glob("**/__init__.py")} - operators - {here}
    modules = {p for p in here.glob("*.py") if not p.stem.startswith("__")}
    tree = {f"{p.relative_to(here)}/" for p in folders} | {p.name for p in modules}
    assert _listed() == tree


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_code_as_it_is():
    drawing = _drawing()
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(), "run `make map` and look at the picture"


def test_every_path_of_the_package_that_a_page_names_exists():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = {
        page.name: re.findall(r"\b((?:residua|tests)/[a-z_/.]*[a-z])(?![\w/])", page.read_text("utf-8"))
        for page in pages
    }
    assert sum(map(len, found.values())) > 20
    assert not [(page, path) for page, paths in found.items() for path in paths if not (ROOT / path).exists()]
