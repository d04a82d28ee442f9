"""Draw what attention reads of other layers: `make map` writes docs/img/anchors-KIND.svg, one per kind of anchors.

Like topologies.py it asks the code what depends on what (anchor_reads.py), and draws each projection that is read as a
lane below the layers.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from residua.config import choices

sys.path.append(str(Path(__file__).parent))
from anchor_reads import LAYERS, PATHWAYS, Layer, Name, trace
from topologies import HEAD, MARGIN, PICTURES, line, write

SETTINGS: dict[str, dict[str, object]] = {
    "kv_source": {"kind": "kv_source", "layer": 1},
    "svformer": {"kind": "kv_source", "shared": "v"},
}
"""Pictures of kinds with other settings than the defaults."""
WORDS = {
    "taken": "taken unchanged",
    "learned": "mixed in with learned weights",
    "gate": "added through a gate per token and head",
    "compared": "compared with the query",
    "attended": "mixed in with the weights that result",
    "none": "no projection of its own",
}
CELL, COLUMN, SOURCE, TOP, BOTTOM, LANE = 22, 104, 76, 42, 64, 20
"""Widths of a cell, a layer with the gap after it, and the embedding's box; where cells begin and layers end; the
distance between lanes."""
LEFT = MARGIN + SOURCE + 18
WIDTH = LEFT + COLUMN * LAYERS + MARGIN


def draw(name: str, layers: list[Layer]) -> str:
    """The picture of these layers as SVG; it is light or dark as the page around it is."""
    reads = [
        (number, _at(pathway, how), source, how)
        for number, layer in enumerate(layers, 1)
        for pathway, sources in layer.reads.items()
        for source, how in sources.items()
    ]
    lanes = sorted({source for *_, source, _ in reads}, key=lambda source: ("tqkvg".index(source[1]), source[0]))
    tables = lanes == [(0, "t")]
    y = {lane: BOTTOM + 28 + LANE * i + 44 * tables for i, lane in enumerate(lanes)}
    parts = [_box(MARGIN, MARGIN, SOURCE, BOTTOM - MARGIN, "embedding", 29)]
    for number, layer in enumerate(layers, 1):
        parts += _layer(number, layer)
    for lane in lanes:
        parts += _lane(lane, max(number for number, _, source, _ in reads if source == lane), y[lane])
    for place in sorted({read[:2] for read in reads}):
        parts += _reader(_x(*place) + 4, [(y[source], how) for *at, source, how in reads if (*at,) == place], tables)
    used = {how for *_, how in reads} | {"none" for layer in layers if len(layer.own) < len(PATHWAYS)}
    legend, bottom = _legend([how for how in WORDS if how in used], max(y.values()) + 34)
    title = f"What attention reads of other layers with {name}"
    head = HEAD.format(width=WIDTH, height=bottom + 14, title=title, words=escape(_words(layers)))
    head = head.replace("<svg ", f'<svg width="{WIDTH}" ', 1).replace("</style>", ".none{stroke-dasharray:3 2}</style>")
    return "\n".join([head, *parts, *legend, "</svg>", ""])


def _at(pathway: str, how: str) -> str:
    """The cell at which a read is drawn: keys that weigh values are drawn where the query meets them."""
    return "q" if how == "compared" else pathway


def _x(number: int, pathway: str) -> int:
    """The middle of a pathway's cell."""
    return LEFT + COLUMN * (number - 1) + CELL * PATHWAYS.index(pathway) + CELL // 2


def _box(x: int, y: int, width: int, height: int, text: str, baseline: int = 18) -> str:
    middle = f'x="{x + width / 2:g}" y="{y + baseline}" text-anchor="middle"'
    return f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/><text {middle}>{text}</text>'


def _layer(number: int, layer: Layer) -> list[str]:
    x = LEFT + COLUMN * (number - 1)
    parts = [
        line(x - 17, MARGIN + 24, x - 8, MARGIN + 24, "read"),
        f'<path class="tip" d="M{x - 1} {MARGIN + 24}l-8 -4v8z"/>',
        _box(x, MARGIN, CELL * len(PATHWAYS), BOTTOM - MARGIN, f"layer {number}"),
    ]
    for pathway in PATHWAYS:
        style, middle = "box" if pathway in layer.own else "add none", _x(number, pathway)
        parts.append(f'<rect class="{style}" x="{middle - 9}" y="{TOP}" width="18" height="19" rx="3"/>')
        words = f'x="{middle}" y="{TOP + 14}" text-anchor="middle"'
        parts.append(f'<text class="small" {words}>{pathway.upper()}</text>')
    return parts


def _lane(name: Name, last: int, y: int) -> list[str]:
    """The lane of a projection, from its cell to the last layer that reads it, and its name."""
    (number, pathway), end = name, LEFT + COLUMN * last - 12
    if pathway == "t":
        return [line(MARGIN + SOURCE, y, end, y, "lane"), _box(MARGIN, y - 14, SOURCE, 28, "token ids")]
    x = _x(number, pathway) - 4 if number else MARGIN + SOURCE // 2
    top = BOTTOM if number else max(BOTTOM, y - LANE - 8)  # lanes of the embedding share one line
    text = pathway.upper() + "₀₁₂₃₄"[number] * bool(number)
    return [
        line(x, top, x, y, "write"),
        line(x, y, end, y, "lane"),
        f'<circle class="start" cx="{x}" cy="{y}" r="3.5"/>',
        f'<text class="small" x="{end + 3}" y="{y + 4}">{text}</text>',
    ]


def _reader(x: int, touched: list[tuple[int, str]], tables: bool) -> list[str]:
    """The line from the lanes that a cell reads up to the cell; ids of tokens pass through a table."""
    bottom = max(y for y, _ in touched)
    parts = [line(x, bottom, x, BOTTOM, "read"), f'<path class="tip" d="M{x} {BOTTOM + 1}l-4 8h8z"/>']
    if tables:
        start = f'<circle class="start" cx="{x}" cy="{bottom}" r="3.5"/>'
        return [*parts, start, _box(x - 24, bottom - 44, 48, 26, "table"), _mark(touched[0][1], x, BOTTOM + 17)]
    return parts + [_mark(how, x, y) for y, how in touched]


def _mark(how: str, x: int, y: int) -> str:
    if how == "none":
        return f'<rect class="add none" x="{x - 6}" y="{y - 6}" width="12" height="12" rx="3"/>'
    if how == "gate":
        return f'<path class="gate" d="M{x} {y - 7}l7 7l-7 7l-7 -7z"/>'
    style = {"taken": "dot", "learned": "dot learned", "compared": "add", "attended": "mix"}[how]
    return f'<circle class="{style}" cx="{x}" cy="{y}" r="4.5"/>'


def _legend(used: list[str], y: int) -> tuple[list[str], int]:
    """The meaning of the marks, in lines no wider than the picture, and where the last line stands."""
    parts, x = [], MARGIN + 8
    for how in used:
        width = 34 + 6 * len(WORDS[how])
        if x + width > WIDTH:
            x, y = MARGIN + 8, y + LANE
        parts.append(_mark(how, x, y - 4) + f'<text class="small" x="{x + 12}" y="{y}">{WORDS[how]}</text>')
        x += width
    return parts, y


def _words(layers: list[Layer]) -> str:
    """The picture in words."""
    readers: dict[tuple[str, str], list[str]] = {}
    for number, layer in enumerate(layers, 1):
        for pathway, sources in layer.reads.items():
            named = {at: f"layer {at}" if at else "the embedding" for at, _ in sources}
            names = ["token ids" if s == "t" else f"{s.upper()} of {named[at]}" for at, s in sources]
            if names:
                readers.setdefault((pathway.upper(), ", ".join(names)), []).append(str(number))
    found = [f"{s} of layer {', '.join(at)} reads {names}" for (s, names), at in readers.items()]
    return "; ".join(found) + "."


def made() -> dict[Path, str]:
    """The content of every picture, by path."""
    ours = (t for t in choices.AnchorChoice.alternatives() if t.__module__.startswith("residua."))  # no plugin's
    kinds = [t.model_fields["kind"].default for t in ours if t is not choices.NoAnchors]
    settings = {kind: {"kind": kind} for kind in kinds} | SETTINGS
    return {PICTURES / f"anchors-{name}.svg": draw(name, trace(chosen)) for name, chosen in settings.items()}


if __name__ == "__main__":
    write(made())
