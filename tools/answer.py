"""Draw the README's picture, docs/img/answer.svg, from docs/results/main-s.json and mini-39m.json.

The longest baseline of mini-39m reads its text twice, so that of main-mini, which does not, takes its place.

Left, how much lower the loss of each architecture is than the baseline's, with its interval, and its gain per second,
bold where its interval is clear of 1 after Holm's correction. Right, what its step costs
against what its tokens are worth in tokens of the baseline: above the line it pays per second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from residua.study.gains import pays
from residua.study.page import show_saved
from residua.study.results import StudyResult
from residua.study.results_file import SavedStudy
from residua.study.statistics import Interval

sys.path.append(str(Path(__file__).parent))
from study_extras import with_external_ladder

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "answer.svg"
NAMES = {
    "resformer": "value residuals",
    "mgr_resformer": "MGR + value residuals",
    "mgr2_resformer": "MGR (n = 2) + value residuals",
    "block_resformer": "Block AttnRes + value residuals",
    "mgr": "MGR",
    "mgr_independent": "MGR, independent gates",
    "mgr_exo": "MGR + dynamic ExoFormer",
    "block_attnres": "Block AttnRes",
    "full_attnres": "Full AttnRes",
    "mhc_lite": "mHC-lite",
    "gated_attention": "gated attention",
    "naive": "gated attention + value residuals",
    "nuresformer": "NuResFormer",
    "exoformer": "ExoFormer",
    "exoformer_dynamic": "dynamic ExoFormer",
    "gatednorm": "GatedNorm",
    "preaffine": "PreAffine",
    "gatednorm_resformer": "GatedNorm + value residuals",
    "gated_gatednorm": "gated attention + GatedNorm",
    "gated_preaffine": "gated attention + PreAffine",
}
COLOURS = ("#2f6fb0", "#b3470b", "#2c7a4b", "#7a4bb8", "#8a6d00", "#a8325e", "#00707a", "#5c5c5c")
DARK = ("#7db8f0", "#ff9a57", "#6fcf97", "#bd93f9", "#e0c04a", "#f78fb3", "#5fd0da", "#bdbdbd")
WIDTH, HEIGHT = 980, 400
LEFT, RIGHT, TOP, BOTTOM = (280, 520), (650, 950), 84, 320
FOOT = (
    "Matched parameters, two or three seeds, one H200, English: 124 M on 58.6 M tokens, 51 M on 39 M "
    "(docs/results/main-s.md, mini-39m.md).",
    "Losses on 131,072 validation tokens. Gains per second are pooled over the variants; bold: clear of 1 after Holm's "
    "correction.",
)


class Row(NamedTuple):
    """One variant: its loss less the baseline's, the worth of its tokens, the time of its step, its gain per second."""

    name: str
    change: float
    low: float
    high: float
    worth: float
    worth_low: float
    worth_high: float
    time: float
    gain: float
    pays: bool
    size: str = ""

    @property
    def label(self) -> str:
        """Its name, with the size of the model if there are several."""
        return f"{self.name}, {self.size}" if self.size else self.name

    @property
    def shown(self) -> bool:
        """Whether the interval of the loss leaves zero out."""
        return self.low > 0 or self.high < 0


def measured() -> list[Row]:
    """What pays most per second at S and at `mini`, the largest gain in loss first."""
    small, large, longer = (
        SavedStudy.read(ROOT / "docs" / "results" / f"{name}.json") for name in ("mini-39m", "main-s", "main-mini")
    )
    first = rows(show_saved(large), "124 M")
    second = rows(with_external_ladder(small, longer)[0], "51 M", len(COLOURS) - len(first))
    return sorted((*first, *second), key=lambda row: row.change)


def rows(result: StudyResult, size: str = "", most: int = len(COLOURS)) -> list[Row]:
    """The variants with a complete comparison that gain most per second, the largest gain in loss first."""
    found = []
    for row in result.variants:
        change, worth, gain = (_ends(m) for m in (row.difference, row.equivalent_tokens, row.wall_clock_gain))
        if row.throughput_ratio is None or change is None or worth is None or gain is None:
            continue
        time = 1 / row.throughput_ratio.value
        pooled = row.shrunk or row.wall_clock_gain
        found.append(Row(NAMES.get(row.name, row.name), *change, *worth, time, pooled.value, pays(row), size))
    paying = sorted(found, key=lambda row: -row.gain)[:most]
    return sorted(paying, key=lambda row: row.change)


def _ends(measured: Interval | None) -> tuple[float, float, float] | None:
    """The value and both ends of its interval; None without an interval."""
    if measured is None or measured.low is None or measured.high is None:
        return None
    return measured.value, measured.low, measured.high


def draw(found: list[Row]) -> str:
    """The picture as SVG; it is light or dark as the page around it is."""
    parts = [_text(24, 34, _answer(found), "title"), *_forest(found), *_break_even(found)]
    parts += [_text(24, HEIGHT - 24 + 16 * i, line, "tick") for i, line in enumerate(FOOT)]
    style = "".join(f".c{i}{{fill:{a};stroke:{a}}}" for i, a in enumerate(COLOURS))
    dark = "".join(f".c{i}{{fill:{a};stroke:{a}}}" for i, a in enumerate(DARK))
    words = "; ".join(
        f"{row.label}: loss {row.change:+.3f} [{row.low:+.3f}, {row.high:+.3f}], tokens worth {row.worth:.2f} times, "
        f"step {row.time:.2f} times as long, {row.gain:.2f} times per second"
        for row in found
    )
    head = _HEAD.format(
        width=WIDTH, height=HEIGHT, title=escape(_answer(found)), words=escape(words), style=style, dark=dark
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _answer(found: list[Row]) -> str:
    paying = sorted((row for row in found if row.pays), key=lambda row: -row.gain)
    if paying:
        first = {row.name: row for row in reversed(paying)}  # of a name with two sizes, the larger gain
        named = ", ".join(f"{row.name} {row.gain:.2f}×" for row in sorted(first.values(), key=lambda r: -r.gain)[:2])
        return f"Faster per second: {named}{f', and {len(first) - 2} more' if len(first) > 2 else ''}."
    better = [row.name for row in found if row.shown and row.change < 0]
    first = f"Lower loss per step: {' and '.join(better)}." if better else "No lower loss was shown."
    return f"{first} Faster per second: none in this study."


def _forest(found: list[Row]) -> list[str]:
    low, high, ticks = _axis([0.0, *(end for row in found for end in (row.low, row.high))])
    scale = _scale(low, high, *LEFT)
    parts = [_text(24, 66, "Validation loss against pre-norm, nats [95 %]", "head")]
    parts.append(_text(LEFT[1] + 48, 66, "per second", "head end"))
    for tick in ticks:
        parts.append(_line(scale(tick), TOP - 6, scale(tick), BOTTOM, "zero" if tick == 0 else "grid"))
        parts.append(_text(scale(tick), BOTTOM + 18, f"{tick:+.2f}" if tick else "0", "tick middle"))
    parts.append(_text((LEFT[0] + scale(0)) / 2, BOTTOM + 36, "← better", "tick middle"))
    for i, row in enumerate(found):
        y = _row_y(i, len(found))
        strong = "" if row.shown else " weak"
        parts.append(_text(24, y + 4, row.label, "name"))
        parts.append(_text(LEFT[1] + 48, y + 4, f"{row.gain:.2f}×", "sure end" if row.pays else "tick end"))
        parts.append(_line(scale(row.low), y, scale(row.high), y, f"bar c{i}{strong}"))
        parts.append(f'<circle class="c{i}{strong}" cx="{scale(row.change):.1f}" cy="{y:.1f}" r="6"/>')
    return parts


def _row_y(i: int, count: int) -> float:
    return TOP + 20 + i * (BOTTOM - TOP - 40) / max(count - 1, 1)


def _break_even(found: list[Row]) -> list[str]:
    left, right, times = _axis([1.0, *(row.time for row in found)])
    low, high, worths = _axis([1.0, *(end for row in found for end in (row.worth_low, row.worth_high))])
    across, up = _scale(left, right, *RIGHT), _scale(low, high, BOTTOM, TOP)
    parts = [_text(RIGHT[0] - 60, 66, "Worth of its tokens, time of its step (× pre-norm)", "head")]
    for tick in times:
        parts.append(_line(across(tick), TOP - 6, across(tick), BOTTOM, "grid"))
        parts.append(_text(across(tick), BOTTOM + 18, f"{tick:.2f}×", "tick middle"))
    for tick in worths:
        parts.append(_line(RIGHT[0], up(tick), RIGHT[1], up(tick), "zero" if tick == 1 else "grid"))
        parts.append(_text(RIGHT[0] - 8, up(tick) + 4, f"{tick:.2f}×", "tick end"))
    start, end = max(left, low), min(right, high)
    parts.append(_line(across(start), up(start), across(end), up(end), "even"))
    parts.append(_text(RIGHT[0] + 10, TOP + 12, "pays per second", "tick"))
    parts.append(_text(RIGHT[1] - 8, BOTTOM - 26, "does not", "tick end"))
    for i, row in enumerate(found):
        x, strong = across(row.time), "" if row.shown else " weak"
        parts.append(_line(x, up(row.worth_low), x, up(row.worth_high), f"bar c{i}{strong}"))
        parts.append(f'<circle class="c{i}{strong}" cx="{x:.1f}" cy="{up(row.worth):.1f}" r="6"/>')
    parts.append(_text((RIGHT[0] + RIGHT[1]) / 2, BOTTOM + 36, "time of a step", "tick middle"))
    return parts


def _axis(values: Iterable[float]) -> tuple[float, float, list[float]]:
    """Both ends of an axis over these values, and three to six round ticks between them."""
    values = list(values)
    span = max(values) - min(values) or 1.0
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, span) if span / s <= 5)
    first, last = math.floor(min(values) / step + 1e-9), math.ceil(max(values) / step - 1e-9)
    return first * step - step / 4, last * step + step / 4, [round(i * step, 6) for i in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title><desc>{words}</desc>
<style>
.back{{fill:#fff}}text{{fill:#1c2430}}.title{{font-size:16px;font-weight:700}}.head{{font-weight:600}}
.tick{{font-size:12px;fill:#56607a}}.middle{{text-anchor:middle}}.end{{text-anchor:end}}
.grid{{stroke:#e3e7ee}}.zero{{stroke:#56607a;stroke-width:1.3}}.even{{stroke:#56607a;stroke-width:1.6}}
.even{{stroke-dasharray:6 5}}.sure{{font-size:12px;font-weight:700}}
.bar{{stroke-width:3}}.weak{{opacity:.45}}{style}
@media (prefers-color-scheme:dark){{.back{{fill:#1e2129}}text{{fill:#e6eaf2}}
.tick{{fill:#a9b4c8}}.grid{{stroke:#333b49}}
.zero,.even{{stroke:#a9b4c8}}{dark}}}
</style>
<rect class="back" width="100%" height="100%"/>"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(measured()), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
