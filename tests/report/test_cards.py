"""Cards and strips: escaped like everything else, and missing values differ from zeros."""

import re

from residua.report import Bar, Card, Owner, Page, Spread, Strip, Track

EVIL = '<script>alert("x")</script>&\'</b>'


def page_of(*cells: Bar | Spread | None, text: str = "x", names: int = 1) -> str:
    page = Page("t", "l")
    tracks = [Track(text, text, text) for _ in cells]
    strips = [Strip(text, "#2f7ed8", {text: cells}) for _ in range(names)]
    page.section("s").strips(tracks, strips, text)
    return page.html()


def test_text_in_cards_and_strips_is_escaped() -> None:
    page = Page("t", "l")
    section = page.section("s")
    section.good(EVIL)
    section.cards([Card(EVIL, EVIL, {EVIL: EVIL}, owners=[Owner(EVIL, EVIL, EVIL, EVIL)], more=[EVIL])])
    cells = (Bar((0.5,), EVIL, flag="bad", words=EVIL), Spread(((0.5,),), 1, EVIL, flag="note", words=EVIL))
    for html in (page.html(), page_of(*cells, text=EVIL, names=2)):
        assert EVIL not in html and "<script>alert" not in html and 'x")' not in html


def test_card_omits_empty_facts_and_folds_the_rest() -> None:
    page = Page("t", "l")
    page.section("s").cards([Card("Dead layer", facts={"where": "layer 3", "to do": ""}, more=["one", "two"])])
    html = page.html()
    assert "<dt>where</dt><dd>layer 3</dd>" in html and "to do" not in html
    assert "<summary>2 more</summary>" in html


def test_a_missing_cell_differs_from_one_near_zero() -> None:
    (row,) = re.findall(r"<tbody><tr>.*?</tr>", page_of(Bar((0.0,), "0"), None, Bar((0.0, None), "0")))
    zero, missing, half = re.findall(r"<td.*?</td>", row)
    assert 'style="width:0%"' in zero and "missing" not in zero
    assert 'class="missing"' in missing and "width" not in missing
    assert half.count('class="missing"') == 1 and half.count("width:0%") == 1


def test_bars_stay_in_their_cell_and_weak_weights_are_hidden() -> None:
    html = page_of(Bar((7.0, -1.0), "much", mark=2.0), Spread(((0.5, 0.001, 3.0), (0.01,)), 3, "weights"))
    assert {"width:100%", "width:0%", "left:100%"} <= set(re.findall(r"(?:width|left):[\d.]+%", html))
    assert re.findall(r'fill-opacity="([\d.]+)"', html) == ["0.71", "1.00"]
    assert re.findall(r'class="paper" y="\d" width="(\d)"', html) == ["3", "1"]  # the second row has one source


def test_a_finding_is_written_out_not_only_coloured() -> None:
    html = page_of(Bar((0.5,), "97 %", flag="bad", words="attention sink"))
    assert re.search(r'<td class="is-bad" title="attention sink">.*97 %<span class="spoken"> \(attention sink\)', html)
    page = Page("t", "l")
    page.section("s").cards([Card("Dead layer")])
    assert '<span class="spoken">Problem: </span>Dead layer' in page.html()
