"""Draw the README's picture, docs/img/answer.svg, from the table of docs/results/first-study.md.

Left, how much lower the loss of each architecture is than the baseline's, with its interval. Right, what its step costs
against how many tokens it saves: above the line it pays per second.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "results" / "first-study.md", ROOT / "docs" / "img" / "answer.svg"
HEADING = "# A first study"
COLOURS = ("#2f6fb0", "#b3470b", "#2c7a4b", "#7a4bb8", "#8a6d00")
DARK = ("#7db8f0", "#ff9a57", "#6fcf97", "#bd93f9", "#e0c04a")
WIDTH, HEIGHT = 980, 400
LEFT, RIGHT, TOP, BOTTOM = (215, 500), (610, 950), 84, 320
FOOT = "51 M parameters, 9.8 M tokens, three seeds, one H200, before most operators were fused: see docs/results"


class Row(NamedTuple):
    """One variant of the table."""

    name: str
    change: float
    low: float
    high: float
    saved: float
    saved_low: float
    saved_high: float
    time: float

    @property
    def shown(self) -> bool:
        """Whether the interval of the loss leaves zero out."""
        return self.low > 0 or self.high < 0


def rows(page: str) -> list[Row]:
    """The table's variants, the largest gain first."""
    table = page[page.index(HEADING) :]
    found = []
    for line in re.findall(r"^\| (.+) \|$", table, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 8 and "[" in cells[3] and cells[0] != "variant":
            change, saved = _numbers(cells[3]), _numbers(cells[4])
            found.append(Row(cells[0].replace("AttnRes", "Attention Residuals"), *change, *saved, float(cells[5])))
    return sorted(found, key=lambda row: row.change)


def _numbers(cell: str) -> tuple[float, float, float]:
    value, low, high = (float(n) for n in re.findall(r"[+-]?\d+\.\d+", cell.replace("−", "-")))
    return value, low, high


def draw(found: list[Row]) -> str:
    """The picture as SVG; it is light or dark as the page around it is."""
    parts = [_text(24, 34, _answer(found), "title"), *_forest(found), *_break_even(found)]
    parts.append(_text(24, HEIGHT - 14, FOOT, "tick"))
    style = "".join(f".c{i}{{fill:{a};stroke:{a}}}" for i, a in enumerate(COLOURS))
    dark = "".join(f".c{i}{{fill:{a};stroke:{a}}}" for i, a in enumerate(DARK))
    words = "; ".join(
        f"{row.name}: loss {row.change:+.3f} [{row.low:+.3f}, {row.high:+.3f}], tokens saved {row.saved:.2f} times, "
        f"step {row.time:.2f} times as long"
        for row in found
    )
    head = _HEAD.format(
        width=WIDTH, height=HEIGHT, title=escape(_answer(found)), words=escape(words), style=style, dark=dark
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _answer(found: list[Row]) -> str:
    better = [_short(row) for row in found if row.shown and row.change < 0]
    paying = [_short(row) for row in found if row.saved > row.time]
    first = f"Lower loss per step: {' and '.join(better)}." if better else "No lower loss was shown."
    return f"{first} Faster per second: {' and '.join(paying) if paying else 'none in this study'}."


def _short(row: Row) -> str:
    return row.name.split(",")[0]


def _forest(found: list[Row]) -> list[str]:
    scale = _scale(-0.2, 0.15, *LEFT)
    parts = [_text(24, 66, "Validation loss against pre-norm, nats [95 %]", "head")]
    for tick in (-0.2, -0.1, 0.0, 0.1):
        parts.append(_line(scale(tick), TOP - 6, scale(tick), BOTTOM, "zero" if tick == 0 else "grid"))
        parts.append(_text(scale(tick), BOTTOM + 18, f"{tick:+.1f}" if tick else "0", "tick middle"))
    parts.append(_text((LEFT[0] + scale(0)) / 2, BOTTOM + 36, "← better", "tick middle"))
    for i, row in enumerate(found):
        y = _row_y(i, len(found))
        strong = "" if row.shown else " weak"
        parts.append(_text(24, y + 4, _short(row), "name"))
        parts.append(_line(scale(row.low), y, scale(row.high), y, f"bar c{i}{strong}"))
        parts.append(f'<circle class="c{i}{strong}" cx="{scale(row.change):.1f}" cy="{y:.1f}" r="6"/>')
    return parts


def _row_y(i: int, count: int) -> float:
    return TOP + 20 + i * (BOTTOM - TOP - 40) / (count - 1)


def _break_even(found: list[Row]) -> list[str]:
    across, up = _scale(1.0, 2.0, *RIGHT), _scale(0.85, 1.45, BOTTOM, TOP)
    parts = [_text(RIGHT[0] - 60, 66, "Tokens saved against time of a step, both × pre-norm", "head")]
    for tick in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        parts.append(_line(across(tick), TOP - 6, across(tick), BOTTOM, "grid"))
        parts.append(_text(across(tick), BOTTOM + 18, f"{tick:.1f}×", "tick middle"))
    for tick in (0.9, 1.0, 1.1, 1.2, 1.3, 1.4):
        parts.append(_line(RIGHT[0], up(tick), RIGHT[1], up(tick), "zero" if tick == 1 else "grid"))
        parts.append(_text(RIGHT[0] - 8, up(tick) + 4, f"{tick:.1f}×", "tick end"))
    parts.append(_line(across(1.0), up(1.0), across(1.45), up(1.45), "even"))
    parts.append(_text(across(1.03), up(1.38), "pays per second", "tick"))
    parts.append(_text(across(1.5), up(1.36), "does not", "tick"))
    for i, row in enumerate(found):
        x, strong = across(row.time), "" if row.shown else " weak"
        parts.append(_line(x, up(max(row.saved_low, 0.85)), x, up(row.saved_high), f"bar c{i}{strong}"))
        parts.append(f'<circle class="c{i}{strong}" cx="{x:.1f}" cy="{up(row.saved):.1f}" r="6"/>')
    parts.append(_text((RIGHT[0] + RIGHT[1]) / 2, BOTTOM + 36, "time of a step", "tick middle"))
    return parts


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title><desc>{words}</desc>
<style>
.back{{fill:#fff}}text{{fill:#1c2430}}.title{{font-size:18px;font-weight:700}}.head{{font-weight:600}}
.tick{{font-size:12px;fill:#56607a}}.middle{{text-anchor:middle}}.end{{text-anchor:end}}
.grid{{stroke:#e3e7ee}}.zero{{stroke:#56607a;stroke-width:1.3}}.even{{stroke:#56607a;stroke-width:1.6}}
.even{{stroke-dasharray:6 5}}
.bar{{stroke-width:3}}.weak{{opacity:.45}}{style}
@media (prefers-color-scheme:dark){{.back{{fill:#1e2129}}text{{fill:#e6eaf2}}
.tick{{fill:#a9b4c8}}.grid{{stroke:#333b49}}
.zero,.even{{stroke:#a9b4c8}}{dark}}}
</style>
<rect class="back" width="100%" height="100%"/>"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(rows(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
