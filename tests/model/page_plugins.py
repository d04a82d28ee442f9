"""The plugins that docs/extend.md and its reference show, as files and as modules."""

import re
from pathlib import Path
from typing import Any

from residua.config import plugins
from residua.config.choices import AnchorChoice, NormChoice, TopologyChoice
from residua.model.anchor_kinds import ANCHORS
from residua.model.norm import NORMS
from residua.model.topology import TOPOLOGIES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("extend.md", "reference/extending.md"))
BUILT: tuple[tuple[Any, dict[Any, Any]], ...] = (
    (TopologyChoice, TOPOLOGIES), (AnchorChoice, ANCHORS), (NormChoice, NORMS),
)  # fmt: skip


def page_plugins() -> dict[str, str]:
    """The code of each plugin, by the file that the text before it names."""
    blocks = re.split(r"```python\n(.*?)```", PAGES, flags=re.S)
    return {re.findall(r"`(\w+\.py)`", text)[0]: code for text, code in zip(blocks[::2], blocks[1::2], strict=False)}


def register(kind: str) -> None:
    """Make the topology of the page known in this process."""
    if kind not in plugins._MEMBERS[TopologyChoice]:
        exec(compile(page_plugins()[f"{kind}.py"], f"{kind}.py", "exec", dont_inherit=True), {"__name__": kind})


def forget() -> None:
    """Unregister the page's kinds in this process."""
    modules = {Path(name).stem for name in page_plugins()}
    for root, built in BUILT:
        plugins._ADAPTERS.pop(root, None)
        for choice in [choice for choice in built if choice.__module__ in modules]:
            plugins._MEMBERS[root].pop(choice.model_fields["kind"].default)
            del built[choice]
