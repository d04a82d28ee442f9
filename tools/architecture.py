"""Draw the package's rooms and the imports between them: `make map` writes docs/img/architecture.svg.

Rooms are the folders of `residua/`, their order is the import contract's in pyproject.toml, their sentence is the first
of their docstring. "Uses" lists the imports in the code, less those that follow from others; the ones between
neighbouring levels are drawn as arrows.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "architecture.svg"
WIDTH, MARGIN, GAP, ROW = 1180, 24, 18, 30
LINE, PADDING = 15, 12


def layers() -> list[list[str]]:
    """The rooms by level, top first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    found = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("residua.") for name in _split(layer)] for layer in found]


def _split(layer: str) -> list[str]:
    return layer.replace(":", "|").split("|")


def rooms() -> dict[str, str]:
    """Every folder and module directly under `residua/`, with the first sentence of its docstring."""
    here = ROOT / "residua"
    files = {p.parent.name: p for p in here.glob("*/__init__.py")} | {p.stem: p for p in here.glob("[a-z]*.py")}
    return {name: _sentence(path) for name, path in sorted(files.items())}


def _sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).split(". ")[0].rstrip(".")


def subrooms(room: str) -> list[str]:
    """The folders inside a room, operators left out: there are many and they are alike."""
    inside = sorted(p.parent.name for p in (ROOT / "residua" / room).glob("*/__init__.py"))
    return [name for name in inside if room != "ops" or name.startswith("_")]


def arrows() -> set[tuple[str, str]]:
    """Which room imports which, lazily or not."""
    known, found = rooms(), set()
    for path in (ROOT / "residua").glob("*/**/*.py"):
        room = path.relative_to(ROOT / "residua").parts[0]
        for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _imported(node):
                target = module.split(".")[1] if module.startswith("residua.") else ""
                if target in known and target != room:
                    found.add((room, target))
    return found


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement, also inside functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, ())


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def reduced(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Edges that no path of other edges stands for."""
    reach = {room: {b for a, b in edges if a == room} for room, _ in edges}

    def below(room: str) -> set[str]:
        return set().union(*({b} | below(b) for b in reach.get(room, ())))

    deep = {room: below(room) for room in {b for _, b in edges} | set(reach)}
    return {(a, b) for a, b in edges if not any(b in deep[c] for c in reach[a] if c != b)}


def draw() -> str:
    """The picture as SVG."""
    words, edges, places, parts = rooms(), reduced(arrows()), {}, []
    y = MARGIN
    for number, level in enumerate(layers()):
        width = (WIDTH - 2 * MARGIN - GAP * (len(level) - 1)) / len(level)
        columns = int((width - 2 * PADDING) / 6.4)
        wrapped = {room: textwrap.wrap(words[room], columns) for room in level}
        used = {room: ", ".join(b for a, b in sorted(edges) if a == room) for room in level}
        details = {room: [" · ".join(subrooms(room)), used[room] and f"uses {used[room]}"] for room in level}
        inside = {room: [line for part in details[room] for line in textwrap.wrap(part, columns)] for room in level}
        height = 2 * PADDING + LINE * (1 + max(len(wrapped[room]) + len(inside[room]) for room in level))
        for i, room in enumerate(level):
            x = MARGIN + i * (width + GAP)
            places[room] = (number, x, y, width, height)
            parts.append(_box(room, x, y, width, height, wrapped[room], inside[room]))
        y += height + ROW
    near = [(a, b) for a, b in sorted(edges) if a in places and places[b][0] - places[a][0] == 1]
    lines = [_line(places[a][1:], places[b][1:]) for a, b in near]
    return "\n".join([_HEAD.format(width=WIDTH, height=int(y - ROW + MARGIN)), *lines, *parts, "</svg>", ""])


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 L8 4 L0 8 z" fill="#8a94a6"/></marker></defs>
<rect width="100%" height="100%" fill="#ffffff"/>"""


def _box(room: str, x: float, y: float, width: float, height: float, words: list[str], inside: list[str]) -> str:
    rows = [f'<tspan x="{x + PADDING:.0f}" dy="{LINE}">{escape(line)}</tspan>' for line in words]
    rows += [f'<tspan x="{x + PADDING:.0f}" dy="{LINE}" fill="#3366aa">{escape(line)}</tspan>' for line in inside]
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="6" fill="#f4f6fa" stroke="#b8c0cc"/>'
        f'<text x="{x + PADDING:.0f}" y="{y + PADDING + 10}" fill="#222"><tspan font-weight="700" font-size="14">'
        f"{escape(room)}</tspan>{''.join(rows)}</text>"
    )


def _line(upper: tuple[float, ...], lower: tuple[float, ...]) -> str:
    x1, y1 = upper[0] + upper[2] / 2, upper[1] + upper[3]
    x2, y2 = lower[0] + lower[2] / 2, lower[1]
    middle = (y1 + y2) / 2
    return (
        f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2 - 2:.0f}" '
        'fill="none" stroke="#8a94a6" stroke-width="1.3" marker-end="url(#tip)"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
