"""The long description that PyPI shows: README.md with links that also work there. All else is in pyproject.toml.

PyPI knows no files of the repository, so links need its address. A build on GitHub finds it in its environment; any
other build leaves the links as they are.
"""

import os
import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md")


def absolute(text: str, address: str, revision: str) -> str:
    """Markdown with every relative link made absolute: images to the file itself, others to its page."""

    def replace(link: "re.Match[str]") -> str:
        mark, words, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/{revision}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replace, text)


def repository() -> "tuple[str, str] | None":
    """The repository's address and the revision that is built, if this is a build on GitHub."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_SHA")
    server, name, revision = (os.environ.get(key) for key in names)
    return (f"{server}/{name}", revision) if server and name and revision else None


if __name__ == "__main__":
    text, place = README.read_text(encoding="utf-8"), repository()
    setup(
        long_description=text if place is None else absolute(text, *place),
        long_description_content_type="text/markdown",
        project_urls={} if place is None else {"Source": place[0]},
    )
