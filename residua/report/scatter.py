"""Named points with intervals and reference lines: as a Plotly figure for pages, as SVG for documents."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

from residua.report import theme
from residua.report.figures import Figure, framed, of_series, span

WIDTH, HEIGHT = 860, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 44, 56
_LETTER, _LINE = 6.7, 13.0  # approximate size of a character at 12 px
# Label positions, best first: Plotly's name for the side, and the offset of the anchor from the point.
_SIDES = {
    "middle right": (9.0, 4.0), "top right": (6.0, -7.0), "bottom right": (6.0, 15.0), "top center": (0.0, -9.0),
    "bottom center": (0.0, 18.0), "middle left": (-9.0, 4.0), "top left": (-6.0, -7.0), "bottom left": (-6.0, 15.0),
}  # fmt: skip
_ANCHORS = {"right": "start", "center": "middle", "left": "end"}
_DASHES = {"dot": "2 4", "dash": "6 4"}

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Point:
    """A named value and the ends of its intervals, None without an interval. An open end is infinite.

    If its label is not drawn, an interactive figure names it in the legend.
    """

    name: str
    x: float
    y: float
    colour: str
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    labelled: bool = True
    symbol: str = "circle"


@dataclass(frozen=True)
class Line:
    """A reference line with straight segments between its points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = theme.SERIES[0]
    dash: str = "solid"


@dataclass(frozen=True)
class Scatter:
    """Points and lines over two axes; the legend names the lines."""

    points: Sequence[Point]
    lines: Sequence[Line]
    x_title: str
    y_title: str
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Axis ranges that fit all points, and their intervals up to twice the extent of the points."""
        across = span([p.x for p in self.points], [p.x_ends for p in self.points])
        return across, span([p.y for p in self.points], [p.y_ends for p in self.points])

    def figure(self, height: int = 460, narrowest: int = 380, legend: bool = True) -> Figure:
        """The interactive figure of a page.

        A point is labelled if its label overlaps nothing, even in a figure as narrow as `narrowest` pixels; the others
        are named on hover, in the legend, or in the neighbouring figure.
        """
        sides = replace(self, width=narrowest, height=height)._sides(free=True)
        traces: list[dict[str, Any]] = [
            {
                "type": "scatter", "x": list(line.x), "y": list(line.y), "mode": "lines", "name": escape(line.name),
                "hoverinfo": "skip", "line": {"color": line.colour, "width": 1.5, "dash": line.dash},
                "meta": of_series(line.name),
            }
            for line in self.lines
        ]  # fmt: skip
        traces += [
            {
                "type": "scatter", "x": [point.x], "y": [point.y],
                "mode": "markers+text" if point.labelled and side else "markers", "name": escape(point.name),
                "text": [escape(point.name)], "textposition": side or "middle right", "meta": of_series(point.name),
                "showlegend": legend and not point.labelled, "cliponaxis": False,
                "marker": {"color": point.colour, "size": 10, "symbol": point.symbol},
                "hovertemplate": "%{text}: %{y:.4g} at %{x:.4g}<extra></extra>",
                "error_x": _whiskers(point.x, point.x_ends, point.colour),
                "error_y": _whiskers(point.y, point.y_ends, point.colour),
            }
            for point, side in zip(self.points, sides, strict=True)
        ]  # fmt: skip
        across, up = self.ranges
        x, y = {"range": list(across)}, {"range": list(up)}
        return framed(traces, self.x_title, self.y_title, height, x=x, y=y)

    def svg(self, title: str) -> str:
        """The same plot as a static picture on white."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" font-family="{escape(theme.FONT)}" font-size="12" fill="#3a414b">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
            *self._axes(),
            f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{WIDTH - _LEFT - _RIGHT}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"/></clipPath>',
            '<g clip-path="url(#plot)">',
            *map(self._drawn_line, self.lines),
            *map(self._drawn_whiskers, self.points),
            "</g>",
            *self._line_names(),
            *self._drawn_points(),
            "</svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def _pixel(self, x: float, y: float) -> tuple[float, float]:
        (left, right), (low, high) = self.ranges
        across, up = (x - left) / (right - left), (y - low) / (high - low)
        return (
            _LEFT + across * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM),
        )

    def _sides(self, free: bool = False) -> list[str]:
        """For each point, the side of its label that overlaps least with markers, intervals and earlier labels.

        With `free`, empty if every side overlaps another label or marker, or leaves the frame.
        """
        centres = [self._pixel(point.x, point.y) for point in self.points]
        labels = [
            {side: _label_box(point.name, centre, side) for side in _SIDES}
            for point, centre in zip(self.points, centres, strict=True)
        ]
        occupied: list[Box] = [*self._frame(), *((x - 6, y - 6, x + 6, y + 6) for x, y in centres)]
        whiskers = [ends for point in self.points for ends in self._whiskers(point)]
        light = [
            (min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1) for (x1, y1), (x2, y2) in whiskers
        ]
        light += [box for line in self.lines for box in self._line_boxes(line)]
        light = _near(light, [box for boxes in labels for box in boxes.values()])
        sides = []
        for boxes in labels:
            near = _near(light, boxes.values())
            best = min(boxes, key=lambda side: sum(_overlap(boxes[side], box) for box in (*occupied, *near)))
            if free and any(_overlap(boxes[best], box) for box in occupied):
                sides.append("")
                continue
            occupied.append(boxes[best])
            sides.append(best)
        return sides

    def _frame(self) -> list[Box]:
        """The boxes around the plot, where labels are not allowed."""
        return [
            (-1e4, -1e4, _LEFT, 1e4), (self.width - _RIGHT, -1e4, 1e4, 1e4),
            (-1e4, -1e4, 1e4, _TOP), (-1e4, self.height - _BOTTOM, 1e4, 1e4),
        ]  # fmt: skip

    def _line_boxes(self, line: Line) -> list[Box]:
        """Small boxes along a line, which labels also avoid."""
        places = [self._pixel(x, y) for x, y in zip(line.x, line.y, strict=True)]
        boxes = []
        for (x1, y1), (x2, y2) in pairwise(places):
            count = max(1, int(math.hypot(x2 - x1, y2 - y1) / 8))
            for i in range(count + 1):
                x, y = x1 + (x2 - x1) * i / count, y1 + (y2 - y1) * i / count
                boxes.append((x - 2, y - 2, x + 2, y + 2))
        return boxes

    def _whiskers(self, point: Point) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """The ends of its intervals in pixels, clipped at the frame."""
        (left, right), (low, high) = self.ranges
        if point.x_ends is not None:
            first, last = (min(max(end, left), right) for end in point.x_ends)
            yield self._pixel(first, point.y), self._pixel(last, point.y)
        if point.y_ends is not None:
            first, last = (min(max(end, low), high) for end in point.y_ends)
            yield self._pixel(point.x, first), self._pixel(point.x, last)

    def _drawn_whiskers(self, point: Point) -> str:
        return "".join(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{point.colour}" stroke-width="1.5" '
            'stroke-opacity="0.55"/>'
            for (x1, y1), (x2, y2) in self._whiskers(point)
        )

    def _drawn_line(self, line: Line) -> str:
        places = " ".join("{:.1f},{:.1f}".format(*self._pixel(x, y)) for x, y in zip(line.x, line.y, strict=True))
        dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash in _DASHES else ""
        return f'<polyline points="{places}" fill="none" stroke="{line.colour}" stroke-width="1.5"{dash}/>'

    def _line_names(self) -> list[str]:
        """A legend at the upper right, level with the title."""
        parts, x = [], float(WIDTH - _RIGHT)
        for line in reversed([line for line in self.lines if line.name]):
            dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash in _DASHES else ""
            start = x - _LETTER * len(line.name) - 30
            parts.append(
                f'<line x1="{start:.1f}" y1="33" x2="{start + 22:.1f}" y2="33" stroke="{line.colour}" '
                f'stroke-width="1.5"{dash}/><text x="{start + 27:.1f}" y="37">{escape(line.name)}</text>'
            )
            x = start - 16
        return parts

    def _drawn_points(self) -> Iterator[str]:
        """The markers and their labels."""
        for point, side in zip(self.points, self._sides(), strict=True):
            (x, y), (dx, dy) = self._pixel(point.x, point.y), _SIDES[side]
            anchor = _ANCHORS[side.split()[1]]
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{point.colour}"/>'
                f'<text x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}" fill="{point.colour}">'
                f"{escape(point.name)}</text>"
            )

    def _levels(self, low: float, high: float) -> list[float]:
        """The values along the vertical axis."""
        return _ticks(low, high)

    def _axes(self) -> list[str]:
        (left, right), (low, high) = self.ranges
        bottom, parts = HEIGHT - _BOTTOM, []
        for value in _ticks(left, right):
            x, _ = self._pixel(value, low)
            parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e6e9ee"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
        for value in self._levels(low, high):
            _, y = self._pixel(left, value)
            parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e6e9ee"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle = (_TOP + bottom) / 2
        return [
            *parts,
            f'<path d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}" fill="none" stroke="#c3c9d1"/>',
            f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle" font-size="13">'
            f"{escape(self.x_title)}</text>",
            f'<text x="16" y="{middle}" text-anchor="middle" font-size="13" transform="rotate(-90 16 {middle})">'
            f"{escape(self.y_title)}</text>",
        ]


def _label_box(name: str, centre: tuple[float, float], side: str) -> Box:
    (x, y), (dx, dy), width = centre, _SIDES[side], _LETTER * len(name)
    left = x + dx - {"start": 0.0, "middle": width / 2, "end": width}[_ANCHORS[side.split()[1]]]
    return left, y + dy - 10, left + width, y + dy - 10 + _LINE


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _near(boxes: Iterable[Box], labels: Collection[Box]) -> list[Box]:
    """The boxes that can overlap one of these labels; a steep line has thousands outside the picture."""
    if not labels:
        return []
    left, top, right, bottom = zip(*labels, strict=True)
    around = min(left), min(top), max(right), max(bottom)
    return [box for box in boxes if _overlap(around, box)]


def _ticks(low: float, high: float) -> list[float]:
    """About seven round values."""
    raw = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step) + 1)]


def _whiskers(value: float, ends: tuple[float, float] | None, colour: str) -> dict[str, object] | None:
    if ends is None:
        return None
    far = 1e3 * abs(value)  # an open end extends beyond the frame
    low, high = (min(abs(end - value), far) for end in ends)
    return {
        "type": "data", "symmetric": False, "array": [high], "arrayminus": [low],
        "color": theme.faded(colour, 0.55), "thickness": 1.5, "width": 0,
    }  # fmt: skip
