"""Check and build a release: `make release`. The first step that fails ends it; nothing is uploaded or tagged.

python tools/release.py            # all steps; dist/ has the files
python tools/release.py --check    # only what takes a second: tree, version, changelog
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 1_500  # of a release in CHANGELOG.md


def version(root: Path = ROOT) -> str:
    """The version that the package states."""
    stated = re.search(r'^__version__ = "(.+)"$', (root / "residua" / "version.py").read_text(encoding="utf-8"), re.M)
    assert stated
    return stated[1]


def first_section(changelog: str) -> tuple[str, str, str]:
    """Version, date (or "unreleased") and text of the newest release in a changelog."""
    heading = re.search(r"^## (\S+)(?: \((.+)\))?$", changelog, re.M)
    if heading is None:
        sys.exit("CHANGELOG.md has no section `## VERSION (DATE)`.")
    return heading[1], heading[2] or "", re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.M)[0]


def faults(root: Path = ROOT) -> list[str]:
    """What keeps this tree from being released, in sentences."""
    named, date, text = first_section((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    found = []
    if named != version(root):
        found.append(f"CHANGELOG.md begins with {named}, but residua/version.py says {version(root)}.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md gives {named} no date: write `## {named} (YYYY-MM-DD)`.")
    if (words := len(text.split())) > MOST_WORDS:
        found.append(f"The changelog of {named} has {words:,} words; {MOST_WORDS:,} are enough.")
    if changes := subprocess.run(["git", "status", "--short"], cwd=root, capture_output=True, text=True).stdout:
        found.append(f"{len(changes.splitlines())} files are not committed.")
    return found


def site_command(version: str) -> str:
    """Publishes the site next to those of other versions, on the branch gh-pages; its root leads to the latest one."""
    minor = ".".join(version.split(".")[:2])
    return f"mike deploy --push --update-aliases {minor} latest && mike set-default --push latest"


def main() -> None:
    """All steps in order."""
    if found := faults():
        sys.exit("\n".join(found))
    print(f"Residua {version()}: version, changelog and tree agree.")
    if "--check" in sys.argv:
        return
    backend = "from setuptools import build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"
    for step in (["make", "nightly"], [sys.executable, "-c", backend], ["make", "docs"]):
        print("$", *step, flush=True)
        if code := subprocess.run(step, cwd=ROOT).returncode:
            sys.exit(code)
    print(f"dist/ has the files and build/site the site. Next:\n  git tag v{version()} && git push origin v{version()}")
    print(f"  twine upload dist/residua-{version()}*")
    print(f"  {site_command(version())}")


if __name__ == "__main__":
    main()
