"""Hooks of the documentation site (mkdocs.yml): pages outside docs/, and links that hold on GitHub and on the site."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# SECURITY.md would share its name with docs/security.md where names have no case
BORROWED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Without mike there is no `versions.json`: every page would ask for it and report an error."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        config["extra"].pop("version", None)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own pages."""
    from mkdocs.structure.files import File  # `relink` is tested without mkdocs

    for source, name in BORROWED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    borrowed = {name: source for source, name in BORROWED.items()}
    here = page.file.src_uri
    return relink(markdown, borrowed.get(here, f"docs/{here}"), here)


def on_page_content(html: str, **_: Any) -> str:
    """Show `a|b` of a table's cell as GitHub does, without the backslash; a line may break after the bar."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|<wbr>"), html)


def relink(markdown: str, source: str, page: str) -> str:
    """Links of the file `source` of the repository, as they are from `page` of the site."""

    def replace(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in BORROWED:
            path = BORROWED[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:  # a file that is not on the site: the words remain
            return words[1:-1]
        if path == "decisions":
            path = "decisions/README.md"
        return f"{words}({posixpath.relpath(path, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return LINK.sub(replace, markdown)
