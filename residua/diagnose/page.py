"""The report of a diagnosis: the summary first, then each thing with one sentence on what healthy looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from residua.diagnose import plots, plots_depth
from residua.diagnose.findings import percent
from residua.diagnose.plots import Models
from residua.diagnose.schema import Diagnosis, ModelDiagnosis
from residua.report import Column, Page, Section

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NONE = "—"


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """One page for one model or for several side by side."""
    models = diagnosis.models
    names = " and ".join([", ".join(m.name for m in models[:-1])] * (len(models) > 1) + [models[-1].name])
    page = Page(f"Inside {names}", _lead(models))
    for part in (_summary, _removal, _attention, _outliers, _magnitude, _geometry, _depth, _streams, _gates, _made):
        part(page, models)
    return page


def _lead(models: Models) -> str:
    text = models[0].text
    return (
        f"What depth does in {'these models' if len(models) > 1 else 'this model'}: measured on {text.tokens:,} tokens "
        f"({text.sequences} sequences of {text.length}) of {text.source}."
    )


def _summary(page: Page, models: Models) -> None:
    section = page.section("Summary", "A healthy model has no sinks, no massive activations and no dead layers.")
    if len(models) > 1:
        section.table(_COMPARED, [_compared(model) for model in models])
    for model in models:
        if len(models) > 1:
            section.subheading(model.name)
        section.points(model.summary)
        more = [f.words for f in model.findings]
        if len(more) > 6:
            section.text(f"All {len(more)} findings are listed under “How this was made”.")


_COMPARED = [
    Column("model", numeric=False),
    Column("parameters"),
    Column("loss", "nats per token on the text of this page; comparable between models of one tokenizer only"),
    Column("first token", "mean attention to the first token, beside what uniform attention would give"),
    Column("sink heads", "share of heads whose mean attention to the first token exceeds 0.3"),
    Column("largest dimension", "mean |h| of the largest dimension over the median dimension's"),
    Column("largest |h|", "over all tokens and sublayers"),
    Column("findings", "how many things stand out"),
]


def _compared(m: ModelDiagnosis) -> list[str]:
    count = len(m.attention)
    first = sum(a.first_token for a in m.attention) / count if count else 0.0
    floor = sum(a.uniform_first_token for a in m.attention) / count if count else 0.0
    rate = sum(a.sink_rate for a in m.attention) / count if count else 0.0
    return [
        m.name,
        f"{m.parameters:,}",
        f"{m.loss:.4f}",
        f"{percent(first)} (uniform {percent(floor)})" if count else NONE,
        percent(rate) if count else NONE,
        f"{m.dimensions.largest[0].ratio:.3g}×",
        f"{max(s.largest[0].value for s in m.states):.4g}",
        str(len(m.findings)),
    ]


def _removal(page: Page, models: Models) -> None:
    layers, sublayers, heads = plots.layer_costs(models), plots.sublayer_costs(models), plots.head_costs(models)
    if layers is None and not heads:
        return
    section = page.section(
        "What removal costs",
        "Loss change on the same tokens when a part is silenced. Healthy: every layer costs something, the first ones "
        "most; a bar at zero is a layer the model does not use, one below zero a layer it would be better without.",
    )
    if layers is not None:
        section.figure(layers, f"Measured on {max(m.ablation_tokens for m in models):,} tokens.")
    if sublayers is not None:
        section.subheading("Sublayer by sublayer")
        section.figure(sublayers, "Healthy: attention and feed-forward both matter at every depth.")
    if heads:
        section.subheading("Head by head")
        section.tabs(heads, "Healthy: many small costs. One head that costs far more than all others is a bottleneck.")


def _attention(page: Page, models: Models) -> None:
    first = plots.first_token(models)
    if first is None:
        return
    section = page.section(
        "Attention sinks",
        "How much attention goes to the first token. Healthy: near the dotted line, which uniform attention would "
        "give; far above it, heads park attention there because they have nothing to look at.",
    )
    views = {
        "first token": first,
        "share of sink heads": plots.sink_rate(models),
        "learned sink": plots.learned_sink(models),
    }
    _tabs(section, views, "A sink head gives the first token more than 0.3 of its attention on average.")
    section.subheading("Every head")
    section.tabs(plots.heads(models), "Mean attention to the first token. Healthy: near zero everywhere.")
    sinks = [sink for model in models for sink in model.token_sinks]
    if sinks:
        section.subheading("Tokens that are sinks wherever they stand")
        section.table(
            [Column("token", numeric=False), Column("id"), Column("layer"), Column("attention"), Column("uniform")],
            [[repr(s.text), str(s.token), str(s.layer), percent(s.attention), percent(s.uniform)] for s in sinks],
        )
    spread = page.section(
        "Attention entropy",
        "How widely a query looks. Healthy: between zero (one token only) and the dotted line (all alike), and "
        "different from layer to layer.",
    )
    _figure(spread, plots.entropy(models))


def _outliers(page: Page, models: Models) -> None:
    section = page.section(
        "Residual sinks",
        "Dimensions that are large in nearly every token. Healthy: a flat line near 1. A few dimensions far above the "
        "rest, with a small norm gain to undo it, rescale all the others and make the model hard to quantize.",
    )
    section.figure(plots.dimensions(models), "Mean |h| over tokens and sublayers, the largest dimensions first.")
    _figure(
        section, plots.gains(models), "Healthy: a cloud. Points to the lower right are sinks whose norm shuts them out."
    )
    section.table(
        [
            Column("model", numeric=False),
            Column("dimension"),
            Column("× median", "mean |h| over that of the median dimension"),
            Column("far above in", "share of tokens in which it exceeds 8 times the token's median |h|"),
            Column("norm gain", "mean |gain| over all norms, and the median dimension's"),
        ],
        [
            [m.name, str(d.dimension), f"{d.ratio:.3g}", percent(d.share), _gain(d.gain, m.dimensions.median_gain)]
            for m in models
            for d in m.dimensions.largest[: 5 if len(models) == 1 else 3]
        ],
    )
    massive = page.section(
        "Massive activations",
        "The largest single |h| before each sublayer, and the median for comparison. Healthy: within two orders of "
        "magnitude; a thousand times the median, at one or two tokens, is a massive activation.",
    )
    _figure(massive, plots.largest(models))
    tops = [(m, max(m.states, key=lambda s: s.largest[0].value)) for m in models]
    massive.table(
        [Column("model", numeric=False), Column("read by", numeric=False)]
        + [Column(title) for title in ("|h|", "dimension", "sequence", "position", "token id")],
        [
            [m.name, s.name, f"{a.value:.4g}", str(a.dimension), str(a.sequence), str(a.position), str(a.token)]
            for m, s in tops
            for a in s.largest
        ],
    )


def _gain(gain: float | None, median: float | None) -> str:
    return NONE if gain is None or median is None else f"{gain:.3g} ({median:.3g})"


def _magnitude(page: Page, models: Models) -> None:
    section = page.section(
        "Magnitude per sublayer",
        "Healthy: outputs of the same order from first to last. A steep climb means late layers must shout over a "
        "growing stream; an output far below what it is added to changes nothing.",
    )
    _tabs(section, {"output": plots.output_rms(models), "relative to input": plots.relative_rms(models)})
    gradient = plots.gradient_rms(models)
    if gradient is not None:
        page.section(
            "Gradient per sublayer",
            "RMS of the loss gradient over each sublayer's parameters. Healthy: a flat line; a first layer far above "
            "the rest means depth is trained unevenly.",
        ).figure(gradient)


def _geometry(page: Page, models: Models) -> None:
    section = page.section(
        "Token and layer similarity",
        "Healthy: tokens stay different (similarity well below 1), the embedding is slowly left behind, and many "
        "dimensions are used.",
    )
    views = {
        "token similarity": plots.state_curve(models, "token_similarity", "mean cosine of two tokens"),
        "similarity to the input": plots.state_curve(models, "input_similarity", "cosine with the first state"),
        "core features": plots.state_curve(models, "core_features", "components for 99 % of the variance"),
    }
    _tabs(section, views)
    section.subheading("State by state")
    section.tabs(
        plots.pairs(models, "similarity", "cosine", 1.0),
        "Cosine between what two sublayers read, token by token. Healthy: fades away from the diagonal; a solid block "
        "is a run of layers that hardly change anything.",
    )
    section.tabs(
        plots.pairs(models, "angular_distance", "angle / π", 0.5),
        "Angular distance arccos(cos)/π. Healthy: grows steadily away from the diagonal.",
    )
    mixed = [m.name for m in models if m.state_name != "residual stream"]
    if mixed:
        section.note(
            f"{', '.join(mixed)}: there is no single residual stream; a state is what a sublayer reads, mixed anew "
            "each time."
        )


def _depth(page: Page, models: Models) -> None:
    weights = plots_depth.depth_weights(models)
    if not weights:
        return
    section = page.section(
        "Depth weights",
        "Who reads what. Healthy: structure, such as a strong diagonal and a few far sources; a uniform map has not "
        "learned to choose.",
    )
    section.tabs(weights, "Mean over tokens. Each row is one reader.")
    costs = plots_depth.depth_costs(models)
    if costs:
        section.subheading("What the weights are worth")
        section.tabs(
            costs,
            "Routing mass is not importance: this is the loss change when a source is taken away from every reader, or "
            "when a reader's weights are made uniform. Healthy: sources with large weights cost something.",
        )


def _streams(page: Page, models: Models) -> None:
    turned, betas = plots_depth.streams(models), plots_depth.betas(models)
    if not turned and not betas:
        return
    section = page.section(
        "Streams",
        "Each stream apart. Healthy: streams turn at different speeds and stay different from each other.",
    )
    if turned:
        section.tabs(
            turned, "Angular distance of each stream to itself one sublayer earlier; zero is a stream nobody writes."
        )
        _figure(
            section,
            plots_depth.stream_similarity(models),
            "Healthy: well below 1; equal streams are one stream kept n times.",
        )
    if betas:
        section.subheading("Write gates β")
        section.tabs(
            betas,
            "Distribution of β over tokens and streams. Healthy: spread out; all near 0 writes nothing, all near 1 "
            "forgets everything.",
        )


def _gates(page: Page, models: Models) -> None:
    gates, anchors, experts = plots_depth.gates(models), plots_depth.anchors(models), plots_depth.experts(models)
    if experts:
        page.section(
            "Expert load",
            "How often each expert is chosen, 1 being its fair share. Healthy: all near 1 over enough text. An expert "
            "near 0 is not used; one far above 1 does the work of several.",
        ).tabs(experts)
    if gates:
        page.section(
            "Attention gates",
            "Healthy: sparse but open somewhere. A gate mostly below 0.2 has switched its layer's attention off.",
        ).tabs(gates)
    if anchors:
        page.section(
            "Anchor mixing",
            "λ1 weighs the anchor, λ2 the layer's own projection. Healthy: λ1 differs between pathways and layers; λ1 "
            "near zero everywhere is an anchor the model does not use.",
        ).tabs(anchors)


def _made(page: Page, models: Models) -> None:
    section = page.section("How this was made", "The numbers behind this page are in diagnosis.json beside it.")
    for m in models:
        section.subheading(m.name)
        section.facts(
            {
                "model": m.description,
                "folder": m.path or NONE,
                "text": f"{m.text.tokens:,} tokens of {m.text.source}",
                "device": m.device,
                "time": f"{m.seconds:.1f} s",
            }
        )
        if m.findings:
            section.points(f.words for f in m.findings)
        for reason in m.skipped:
            section.note(f"Not measured: {reason}")


def _tabs(section: Section, views: Mapping[str, Figure | None], caption: str = "") -> None:
    known = {title: figure for title, figure in views.items() if figure is not None}
    if known:
        section.tabs(known, caption)


def _figure(section: Section, figure: Figure | None, caption: str = "") -> None:
    if figure is not None:
        section.figure(figure, caption)
