"""Points with intervals as a static picture and as a Plotly figure."""

import math
from itertools import combinations
from xml.etree import ElementTree

from residua.report.scatter import Line, Point, Scatter, _label_box, _overlap, _ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*points: Point) -> Scatter:
    return Scatter(points, [Line("even", [0.0, 3.0], [0.0, 3.0], dash="dash")], "cost <s>", "worth & more")


A = Point("a", 1.0, 1.0, "#2f7ed8", (0.9, 1.1), (0.8, 1.3))
B = Point("b<i>", 2.0, 1.5, "#e0752d", None, (1.2, math.inf))


def test_the_picture_is_well_formed_and_text_is_escaped() -> None:
    root = ElementTree.fromstring(drawn(A, B).svg("1 < 2"))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"1 < 2", "cost <s>", "worth & more", "a", "b<i>", "even"} <= set(words)
    assert len(list(root.iter(f"{SVG}circle"))) == 2


def test_points_lie_at_their_axis_positions() -> None:
    picture = drawn(A, B)
    root = ElementTree.fromstring(picture.svg("t"))
    (left, right), (low, high) = picture.ranges
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    across = (circles[1][0] - circles[0][0]) / (860 - 64 - 24)
    up = (circles[0][1] - circles[1][1]) / (520 - 44 - 56)
    assert math.isclose(across, 1.0 / (right - left), abs_tol=1e-3)
    assert math.isclose(up, 0.5 / (high - low), abs_tol=1e-3)


def test_an_open_interval_does_not_stretch_the_axis() -> None:
    (_, _), (low, high) = drawn(A, B).ranges
    assert low < 0.8 and high < 2.2


def test_labels_do_not_overlap() -> None:
    points = [Point(f"variant_{i}", 1.0 + 0.03 * (i % 3), 1.0 + 0.05 * i, "#2f7ed8") for i in range(8)]
    picture = drawn(*points)
    sides = picture._sides()
    boxes = [_label_box(p.name, picture._pixel(p.x, p.y), side) for p, side in zip(points, sides, strict=True)]
    assert all(_overlap(a, b) == 0.0 for a, b in combinations(boxes, 2))


def test_ticks_are_round_and_inside() -> None:
    assert _ticks(0.93, 1.61) == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert _ticks(-0.2, 51.0) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


def test_the_figure_draws_whiskers_for_intervals() -> None:
    lines, a, b = drawn(A, B).figure().data
    assert lines.name == "even"
    assert (a.error_y.array[0], a.error_y.arrayminus[0]) == (1.3 - 1.0, 1.0 - 0.8)
    assert b.error_x.array is None and b.error_y.array[0] > 100
    assert b.text == ("b&lt;i&gt;",)
