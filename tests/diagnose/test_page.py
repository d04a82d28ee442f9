"""Content of the page: findings as cards, the model layer by layer, then every metric with its healthy values."""

import json
import math
import re
from html import unescape
from typing import Any

import pytest
import torch

from residua.diagnose import Diagnosis, ModelDiagnosis
from residua.diagnose.metric import Finding
from residua.diagnose.metrics.chance import Chance, frequency_loss
from residua.diagnose.metrics.depth_weights import DepthWeights, ReaderFacts
from residua.diagnose.metrics.removal import AblationFacts, Removal
from residua.diagnose.metrics.states import Similarity
from residua.diagnose.metrics.sublayers import Sublayers
from residua.diagnose.page import WIDE, add_findings, add_picture, diagnosis_page, title
from residua.diagnose.plots import by_layer, colours
from residua.diagnose.sentences import absent, short, sureness, token
from residua.report import Page, theme
from tests.diagnose import reports
from tests.diagnose.reports import findings_of, report

SECTIONS = (
    "Findings", "Layer by layer", "Depth weights", "Summary", "Cost of removal", "Attention sinks",
    "Attention entropy", "Attention map", "Attention map, layer by layer", "Residual sinks", "Tokens and dimensions",
    "Tokens and dimensions, layer by layer", "Norm weights", "Massive activations", "Largest outputs",
    "Magnitude per sublayer", "Gradient per sublayer", "Token and layer similarity", "Streams", "Write gates",
    "Expert load", "Attention gates", "Norm gates", "Anchor mixing", "How this was made",
)  # fmt: skip
GREEN = "No chance-level loss, attention sink, residual sink, massive activation or dead layer was found."


def html_of(*models: ModelDiagnosis) -> str:
    """The whole page."""
    return unescape(diagnosis_page(Diagnosis(models=list(models))).html())


def top_of(*models: ModelDiagnosis) -> str:
    """The cards and the picture; quick, as it has no plots."""
    page = Page("t", "l")
    add_findings(page.section("Findings"), models)
    add_picture(page.section("Layer by layer"), models)
    return unescape(page.html())


def cards(html: str) -> dict[str, str]:
    """The text of each card by its title."""
    found = re.findall(r'<article class="card is-(\w+)"><h3>.*?</span>([^<>]+)</h3>(.*?)</article>', html, flags=re.S)
    return {title: f"{tone}: {re.sub('<[^>]+>', ' ', text)}" for tone, title, text in found}


def figures(html: str) -> list[dict[str, Any]]:
    """Plotly's description of every plot."""
    return [json.loads(p) for p in re.findall(r'<script type="application/json">(.*?)</script>', html)]


def rows(html: str) -> dict[str, list[tuple[str, str]]]:
    """The strip: by row, the flag and the number of each cell."""
    (body,) = re.findall(r'<div class="strip".*?<tbody>(.*?)</tbody>', html, flags=re.S)
    return {
        name: re.findall(r'<td(?: class="(?:is-)?(\w+)")?[^>]*>.*?<span>(.*?)<', cells)
        for name, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', body)
    }


def test_every_section_describes_healthy_values() -> None:
    html = diagnosis_page(reports.side_by_side(3, layers=4)).html()
    assert tuple(re.findall(r"<h2[^>]*>(.*?)</h2>", html)) == SECTIONS
    for part in html.split("<section ")[1:-1]:
        assert "ealthy" in re.sub(r"<script.*?</script>", "", part, flags=re.S)
    plain = html_of(report(layers=2, removal=False))  # has no empty sections
    titles = set(re.findall(r"<h2[^>]*>(.*?)</h2>", plain))
    assert not {"Depth weights", "Streams", "Attention gates", "Anchor mixing", "Cost of removal"} & titles
    assert plain.index('class="strips') < plain.index("Depth routing: nothing to show") < plain.index('id="summary"')


def test_a_dead_layer_gets_a_card_and_two_red_cells() -> None:
    made = report(dead=[7])
    html = top_of(made)
    assert title([made]) == "Inside prenorm: a dead layer" and GREEN not in html
    (card,) = cards(html).items()
    assert card[0] == "Dead layer" and card[1].startswith("bad: ")
    for part in ("Layer 7 is dead", "Where", "layer 7", "Certain: removal changes the loss by at most 0.0000 nats"):
        assert part in card[1]
    red = {name: cells for name, cells in rows(html).items() if any(flag == "bad" for flag, _ in cells)}
    assert red == {"layer 7": [("bad", "dead"), ("", "9.0×"), ("", "5.1 %"), ("bad", "0")]}


def test_a_massive_activation_gets_a_card_and_red_reader_cells() -> None:
    html = top_of(report(massive=[2, 3]))
    card = cards(html)["Massive activation"]
    for part in ("dimension 91", "before layer 2 attention", r"token '\n' (id 199)", "massive in 4 of 25 states"):
        assert part in card
    assert "Clear: 5963× the median, where 1,000× counts, on 8,192 tokens in 8 sequences." in card
    red = {name: [text for flag, text in cells if flag == "bad"] for name, cells in rows(html).items()}
    assert {name: cells for name, cells in red.items() if cells} == {"layer 2": ["5963×"], "layer 3": ["5040×"]}


def test_model_without_findings_shows_one_green_line() -> None:
    html = html_of(report("control", 2))
    assert html.count(GREEN) == 1 and '<p class="good is-good">' in html
    assert cards(html) == {} and "<title>Inside control: nothing wrong found</title>" in html
    assert '<header data-tone="good">' in html
    assert not any(flag in ("bad", "note") for cells in rows(html).values() for flag, _ in cells)


def test_several_models_share_one_card_per_kind() -> None:
    models = report("a", dead=[1]), report("b", dead=[2, 3]), report("c"), report("d")
    html = top_of(*models)
    (card,) = cards(html).items()
    assert card[0] == "Dead layer in 2 of 4 models"
    assert re.search(r"a\s+layer 1 .*b\s+layers 2 and 3 ", card[1])
    assert f"c, d: {GREEN}" in html and html.count(GREEN) == 1
    assert title(models) == "Inside a, b, c and d: findings in a and b"
    assert title(reports.side_by_side(16).models) == "Inside 16 models: findings in 8 of them"


def test_rows_run_from_the_last_layer_up_and_gaps_are_hatched() -> None:
    html = top_of(report(layers=3, removal=False))
    assert list(rows(html)) == ["final norm", "layer 2", "layer 1", "layer 0"]
    assert [flag for flag, _ in rows(html)["final norm"]] == ["missing", "", "missing"]  # no removal: no such column
    assert "1.0" not in rows(html)["layer 0"]


def test_depth_routing_is_blue_and_not_called_a_defect() -> None:
    html = top_of(report(routing=True))
    assert GREEN in html
    card = cards(html)["Depth routing × 2"]
    assert card.startswith("note: ") and "layer 4 feed-forward ← embedding; layer 9 attention ← embedding" in card
    blue = {name: cells[3] for name, cells in rows(html).items() if ("note", "0.97") in cells}
    assert blue == {"layer 9": ("note", "0.97"), "layer 4": ("note", "0.97")}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sinks": [3]}, "Attention sink"),
        ({"outlier": True}, "Residual sink"),
        ({"massive": [3]}, "Massive activation"),
        ({"dead": [3]}, "Dead layer"),
        ({"dead": [3], "removal": False}, "Dead layer"),
        ({"extras": True}, "Sink token"),
        ({"routing": True, "layers": 5}, "Depth routing"),
    ],
)
def test_every_card_states_place_confidence_and_advice(options: dict[str, object], kind: str) -> None:
    html = top_of(report(**options))  # type: ignore[arg-type]
    (whole,) = re.findall(rf"<article[^>]*><h3>[^/]*</span><span[^/]*</span>{kind}</h3>(.*?)</article>", html)
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", whole))
    assert set(facts) == {"Where", "How sure", "What to do"} and all(len(text) > 6 for text in facts.values())
    assert re.match(r"<p>.{20,}\.</p>", whole)


def test_dead_sublayer_differs_from_dead_layer() -> None:
    made = report()
    sites = [*made.sites]
    sites[5] = sites[5].model_copy(update={"relative_rms": 1e-6, "relative_median": 1e-6})
    found = findings_of(Sublayers, made.model_copy(update={"sites": sites}))
    html = top_of(made.model_copy(update={"sites": sites, "findings": found}))
    assert "layer 2 feed-forward" in cards(html)["Dead sublayer"]
    assert [name for name, cells in rows(html).items() if cells[0][0] == "bad"] == ["layer 2"]


def test_confidence_follows_from_margin_and_text() -> None:
    made = report()
    few = made.model_copy(update={"text": reports.TEXT.model_copy(update={"sequences": 1})})
    assert sureness("9×", 3.0, made) == "Clear: 9×, on 8,192 tokens in 8 sequences."
    assert sureness("9×", 1.1, made).startswith("Near the limit: 9×") and "--tokens" in sureness("9×", 1.1, made)
    assert sureness("9×", 3.0, few).endswith("in 1 sequence. Measure again with more text (--tokens).")


def test_a_variant_keeps_the_colour_of_its_study() -> None:
    models = [report(f"m{place}", 2, place=place) for place in (4, 0, 11)]
    assert colours(models) == [theme.colour(place) for place in (4, 0, 11)]
    html = html_of(*models)
    for model, colour in zip(models, colours(models), strict=True):
        assert f'style="--own:{colour}" tabindex="0" role="region" aria-label="{model.name}, layer by layer"' in html
        assert re.search(rf'background:{colour}"></span>{model.name}<', html)  # in the table
    strangers = [report("a", 2), report("b", 2, place=7)]
    assert len(set(colours(strangers))) == 2


def test_model_without_a_quantity_keeps_its_colour() -> None:
    first, second = report("a", 2), report("b", 2)
    figure = by_layer([first, second], lambda m: [(0, 1.0)] if m is second else [], "y")
    assert figure is not None and figure.data[0].line.color == colours([first, second])[1]


def test_axes_and_tooltips_name_layers_as_sentences_do() -> None:
    made = report(layers=36)
    figure = by_layer([made], lambda m: [(s.index, s.rms) for s in m.states], "RMS", x="read by")
    axis = figure.layout.xaxis
    assert len(axis.ticktext) == 12 and list(axis.ticktext[:2]) == ["layer 0", "layer 3"] and axis.tickvals[1] == 6
    assert figure.data[0].customdata[7] == "layer 3 feed-forward" and figure.data[0].customdata[-1] == "the final norm"
    page = Page("t", "l")
    Similarity.draw(page, [report(layers=4)])
    maps = [p["data"][0] for p in figures(page.html()) if p["data"][0]["type"] == "heatmap"]
    assert [m["x"][6] for m in maps if len(m["x"]) == 9] == ["layer 3 attention"] * 2


def test_a_token_is_shown_by_its_text() -> None:
    html = html_of(report(layers=2, extras=True))
    assert r"<td class=\"words\">'\n' (id 199)</td>".replace('\\"', '"') in html and "token id" not in html
    assert token("", 7) == token("#7", 7) == "id 7"


def test_summary_of_several_models_has_no_empty_columns() -> None:
    html = html_of(report("a", 3), report("b", 3, routing=True))
    part = html[html.index('<section id="summary"') : html.index('<section id="cost-of-removal"')]
    heads = re.findall(r'<th scope="col"[^>]*>(?:<button[^>]*>)?([^<]+)', part)
    assert "costs most" in heads and "uniform depth" in heads and "gate" not in heads and "<ul>" not in part
    tables = [re.findall(r'<th scope="col"', table) for table in part.split("<table>")[1:]]
    assert len(tables) == 2 and all(len(table) <= WIDE + 1 for table in tables)  # wider ones are cut at 1,100 pixels


def test_names_are_escaped_everywhere() -> None:
    evil = "<b>bold</b>"
    page = diagnosis_page(Diagnosis(models=[report(evil, 2, dead=[1]), report("b", 2)])).html()
    assert evil not in page


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.0031, "0.0031"), (0.314, "0.31"), (1.84, "1.8"), (41.2, "41"), (5963.2, "5963"), (12345, "12k"),
     (3e7, "3e7")],
)  # fmt: skip
def test_numbers_fit_into_narrow_cells(value: float, words: str) -> None:
    assert short(value) == words and len(words) <= 6


def test_metric_without_wording_gets_a_card_from_its_numbers() -> None:
    from residua.diagnose.metric import Metric

    found = [Finding(kind="odd", where={"state": 3, "layers": [1, 2]}, words="odd")]
    assert Metric.explain(report(layers=2), found).where == "state 3, layers 1, 2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([0.5, 0.1], "Removing layer 0 costs most (+0.5000 nats), removing layer 1 least (+0.1000)."),
        ([-0.2, -0.0231], "Removing no layer raises the loss: it changes by -0.2000 nats without layer 0, by -0.0231 "),
        ([0.0, 0.0], "Removing no layer raises the loss: "),
        ([-0.0231], "Without layer 0 the loss changes by -0.0231 nats."),
    ],
)
def test_a_removal_cost_is_reported_only_if_the_loss_rises(changes: list[float], words: str) -> None:
    (sentence,) = Removal.sentences(removed(*changes))
    assert sentence.text.startswith(words)


def test_the_page_states_how_much_text_each_model_read() -> None:
    longer = report("c").model_copy(update={"text": reports.TEXT.model_copy(update={"sequences": 4, "length": 2048})})
    alike, apart = html_of(report("a"), report("b")), html_of(report("a"), report("b"), longer)
    assert "measured on 8,192 tokens (8 sequences of 1024) of the validation text of wiki." in alike
    lead = "8,192 tokens (8 sequences of 1024) for a and b; 8,192 tokens (4 sequences of 2048) for c."
    assert f"measured on the validation text of wiki, {lead}" in apart
    assert "8,192 tokens (4 sequences of 2048) of the validation text of wiki" in apart


def test_a_loss_at_chance_level_is_the_first_finding() -> None:
    made = report("random", untrained=True, dead=[3], routing=True)
    assert made.findings[0].kind == "chance_level_loss" and made.summary[1].startswith("The loss of 10.4000 nats")
    html = top_of(made)
    first, words = next(iter(cards(html).items()))
    assert first == "Chance level loss" and GREEN not in html
    for guess in ("same probability (10.3735)", "token frequencies (7.1000)", "Train the model, or check"):
        assert guess in words
    assert title([made]).startswith("Inside random: a chance level loss")


@pytest.mark.parametrize(("loss", "guesses"), [(10.4, ["alike", "frequencies"]), (7.1, ["frequencies"]), (7.09, [])])
def test_a_loss_is_compared_with_uniform_and_frequency_guesses(loss: float, guesses: list[str]) -> None:
    made = report().model_copy(update={"loss": loss})
    words = " ".join(finding.words for finding in findings_of(Chance, made)).replace("the same probability", "alike")
    assert [guess for guess in ("alike", "frequencies") if guess in words] == guesses


def test_an_older_file_makes_no_claim_about_chance_level() -> None:
    made = report().model_copy(update={"uniform_loss": None, "frequency_loss": None})
    assert findings_of(Chance, made) == [] and absent(made).startswith("No attention sink, ")


def test_frequency_loss_of_a_long_text_is_its_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    text = torch.multinomial(shares, 20_000, replacement=True, generator=generator)
    counts = torch.bincount(text).double() / 20_000
    assert frequency_loss(text, 4) == pytest.approx(float(torch.special.entr(counts).sum()), abs=1e-3)


def test_frequency_loss_of_a_short_text_is_smoothed() -> None:
    """The frequencies of three tokens in three would give each away: a trained model is not compared with that."""
    assert frequency_loss(torch.tensor([5, 6, 7]), 100) == pytest.approx(math.log(100))
    assert frequency_loss(torch.tensor([5]), 100) == pytest.approx(math.log(100))
    assert frequency_loss(torch.tensor([5, 5, 5]), 100) == 0


def removed(*changes: float) -> ModelDiagnosis:
    named = [{"index": n, "label": f"layer {n}", "loss": 3 + c, "change": c} for n, c in enumerate(changes)]
    facts = [AblationFacts(kind="layer", **each) for each in named]
    return report(layers=len(changes)).model_copy(update={"ablations": facts})


def test_a_helpful_removal_is_drawn_left_of_zero() -> None:
    (track,) = Removal.tracks([removed(0.5, -0.5, 0.0)])
    bars = track.cells[0]
    assert bars[0].lengths[0] == -bars[1].lengths[0] > 0 and bars[2].lengths == (0.0,)
    assert {bar.zero for bar in bars.values()} == {0.5} and "to the left that it falls" in track.meaning
    assert [bars[n].text for n in range(3)] == ["+0.5", "−0.5", "0"]
    (track,) = Removal.tracks([removed(0.5, 0.2)])
    assert {bar.zero for bar in track.cells[0].values()} == {None} and "falls" not in track.meaning


def test_perplexities_cover_every_layer() -> None:
    page = Page("t", "l")
    Removal.draw(page, [removed(0.5, -0.5, 0.2)])
    loss, perplexity = figures(page.html())
    assert [value > 0 for value in perplexity["data"][0]["y"]] == [True, False, True]
    for figure in (loss, perplexity):
        assert figure["layout"]["shapes"][0]["y0"] == 0 and figure["layout"]["yaxis"].get("type") != "log"


def reading(*means: list[float]) -> ModelDiagnosis:
    readers = [
        ReaderFacts(reader=k, name=f"reader {k}", sources=[f"s{i}" for i in range(len(m))], mean=m)
        for k, m in enumerate(means, 1)
    ]
    return report(layers=2).model_copy(update={"depth_weights": readers})


def test_weights_that_do_not_sum_to_one_are_not_called_shares() -> None:
    made = reading([0.9, 0.9, 0.9], [1.4, -0.2, 0.1])
    (found,) = findings_of(DepthWeights, made)
    assert found.words == "reader 2 multiplies s0 by 1.40; the factors of its other sources have a total size of 0.30"
    (track,) = DepthWeights.tracks([made])
    assert [spread.text for spread in track.cells[0].values()] == ["×0.90", "×1.40"]
    assert track.cells[0][1].rows[0][0] == 1.0 and "factors on the sources, not shares" in track.meaning
    page = Page("t", "l")
    DepthWeights.draw(page, [made])
    html = page.html()
    assert "add up to between 1.30 and 2.70. Weights that do not add up to 1 are factors" in html
    (drawn,) = (figure["data"][0] for figure in figures(html))
    assert (drawn["zmin"], drawn["zmax"]) == (-1.4, 1.4) and drawn["colorbar"]["title"]["text"] == "mean factor"


def test_weights_that_sum_to_one_are_called_shares() -> None:
    made = reading([0.9, 0.1], [0.2, 0.3, 0.5])
    (found,) = findings_of(DepthWeights, made)
    assert found.words == "reader 1 reads mostly s0: weight 0.90 of 2 sources (uniform 0.50)"
    page = Page("t", "l")
    DepthWeights.draw(page, [made])
    assert "factor" not in page.html() and "mean weight" in page.html()
