"""Diagnoses made from formulas: no model is trained or run, and every section of the page has content."""

import math
from collections.abc import Sequence
from typing import Any

from residua.diagnose import Diagnosis, ModelDiagnosis
from residua.diagnose.attention import AttentionFacts, HeadFacts, PositionFacts, TokenSink
from residua.diagnose.metric import Finding, Metric, on_page
from residua.diagnose.metrics.depth_weights import BlockFacts, ReaderFacts
from residua.diagnose.metrics.dimensions import DimensionFacts, DimensionProfile, NormFacts
from residua.diagnose.metrics.experts import ExpertFacts
from residua.diagnose.metrics.gates import BetaFacts, GateCurve, GateFacts, NormGateFacts, Quartiles
from residua.diagnose.metrics.maps import AttentionLayerMap, AttentionMap, LayerMap, TokenMap
from residua.diagnose.metrics.outputs import OutputFacts
from residua.diagnose.metrics.removal import AblationFacts
from residua.diagnose.metrics.states import Activation, StateFacts
from residua.diagnose.metrics.streams import StreamFacts
from residua.diagnose.metrics.sublayers import LayerFacts, SiteFacts
from residua.diagnose.observe import AnchorFacts
from residua.diagnose.schema import TextFacts
from residua.diagnose.sentences import summary

TEXT = TextFacts(source="the validation text of wiki", tokens=8192, sequences=8, length=1024)
WIDTH, HEADS = 512, 8
SINK_DIMENSION, MASSIVE_DIMENSION = 304, 91


def report(
    name: str = "prenorm",
    layers: int = 12,
    *,
    place: int | None = None,
    dead: Sequence[int] = (),
    massive: Sequence[int] = (),
    sinks: Sequence[int] = (),
    outlier: bool = False,
    routing: bool = False,
    extras: bool = False,
    removal: bool = True,
    untrained: bool = False,
) -> ModelDiagnosis:
    """A model with these defects; `massive` and `sinks` are the layers that show them.

    `routing` gives it depth weights, `extras` everything else that a topology or an attention may have.
    """
    sites = _sites(layers, dead)
    read = _states(sites, layers, massive)
    facts: dict[str, Any] = {
        "name": name,
        "place": place,
        "path": f"runs/{name}",
        "description": f"{layers} layers of width {WIDTH}, additive topology, softmax attention, swiglu feed-forward",
        "parameters": 3_000_000 * layers,
        "layers": layers,
        "width": WIDTH,
        "state_name": "sublayer input" if routing else "residual stream",
        "text": TEXT,
        "device": "cpu",
        "seconds": 12.3,
        "loss": 10.4 if untrained else 3.2 + 0.01 * len(name),
        "uniform_loss": math.log(32_000),
        "frequency_loss": 7.1,
        "ablation_tokens": 4096 if removal else 0,
        "sites": sites,
        "layer_sizes": _layers(sites),
        "states": read,
        "similarity": _pairs(len(read), lambda d: math.cos(0.9 * d)),
        "angular_distance": _pairs(len(read), lambda d: 0.45 * d),
        "dimensions": _dimensions(outlier),
        "attention": [_attention(layer, layer in sinks) for layer in range(layers)],
        "ablations": _ablations(layers, dead) if removal else [],
        "skipped": [] if removal else ["Removal of layers, sources and heads: skipped because of --ablations none."],
    }
    if routing:
        facts["depth_weights"] = [_reader(k, sites) for k in range(1, 2 * layers + 1)]
        facts["depth_blocks"] = [_block(n) for n in range(layers)]
        if removal:
            facts["ablations"] += _depth_ablations(sites)
    if extras:
        facts |= _extras(layers, len(read))
    made = ModelDiagnosis(**facts)
    return _with_findings(made, sinks)


def findings_of(metric: type[Metric], made: ModelDiagnosis) -> list[Finding]:
    """The findings of a metric that has looked at no text."""
    bare: Any = metric.__new__(metric)
    bare.layers = {}  # the sums of an attention sink
    return bare.findings(made)


def _with_findings(made: ModelDiagnosis, sinks: Sequence[int]) -> ModelDiagnosis:
    """The findings that the metrics make of the facts; that of an attention sink needs sums, so it is written here."""
    words = f"the first token is an attention sink for {8 * len(sinks)} of {HEADS * made.layers} heads"
    sink = {"kind": "attention_sink", "where": {"position": 0, "layers": list(sinks)}, "words": words}
    defects_first = sorted(on_page(made), key=lambda metric: not metric.defect)
    found = [*([sink] if sinks else []), *(finding for each in defects_first for finding in findings_of(each, made))]
    made = type(made).model_validate(dict(made) | {"findings": found})
    return made.model_copy(update={"summary": summary(made)})


def _sites(layers: int, dead: Sequence[int]) -> list[SiteFacts]:
    return [
        SiteFacts(
            index=k,
            layer=k // 2,
            kind="feed-forward" if k % 2 else "attention",
            name=f"layer {k // 2} {'feed-forward' if k % 2 else 'attention'}",
            output_rms=1e-7 if k // 2 in dead else 0.1 * (1 + k) ** 0.7,
            relative_rms=1e-6 if k // 2 in dead else 0.9 / (1 + k) ** 0.6,
            relative_median=1e-6 if k // 2 in dead else 0.8 / (1 + k) ** 0.6,
            gradient_rms=1e-9 if k // 2 in dead else 1e-3 / (1 + k) ** 0.4,
        )
        for k in range(2 * layers)
    ]


def _layers(sites: Sequence[SiteFacts]) -> list[LayerFacts]:
    """The sum of outputs at right angles; both sublayers have as many parameters."""
    pairs = zip(sites[::2], sites[1::2], strict=True)
    return [
        LayerFacts(
            layer=one.layer,
            output_rms=math.hypot(one.output_rms or 0.0, two.output_rms or 0.0),
            gradient_rms=math.hypot(one.gradient_rms or 0.0, two.gradient_rms or 0.0) / 2**0.5,
        )
        for one, two in pairs
    ]


def _states(sites: Sequence[SiteFacts], layers: int, massive: Sequence[int]) -> list[StateFacts]:
    found = []
    for k in range(2 * layers + 1):
        median = 0.3 * (1 + k) ** 0.5
        value = 4000.0 if k // 2 in massive else 9 * median
        dimension = MASSIVE_DIMENSION if k // 2 in massive else 17
        largest = [
            Activation(value=value / n, dimension=dimension, sequence=n, position=0, token=199, text="\n")
            for n in (1, 2, 3)
        ]
        found.append(
            StateFacts(
                index=k,
                name=sites[k].name if k < 2 * layers else "the final norm",
                rms=1.6 * median,
                median=median,
                largest=largest,
                token_similarity=0.1 + 0.3 * k / (2 * layers),
                input_similarity=1 / (1 + 0.2 * k),
                core_features=WIDTH - 40 - k,
            )
        )
    return found


def _pairs(count: int, of: Any) -> list[list[float]]:
    return [[of(abs(i - j) / count) for j in range(count)] for i in range(count)]


def _dimensions(outlier: bool) -> DimensionProfile:
    largest = [
        DimensionFacts(dimension=7 * n % WIDTH, mean=0.8 * r, ratio=r, share=0.01, gain=1.1 / r)
        for n, r in enumerate(2.4 / (1 + 0.05 * n) for n in range(63))
    ]
    if outlier:
        largest.insert(0, DimensionFacts(dimension=SINK_DIMENSION, mean=33.0, ratio=41.0, share=0.96, gain=0.006))
    return DimensionProfile(median=0.8, median_gain=1.1, largest=largest)


def _attention(layer: int, sink: bool) -> AttentionFacts:
    first = 0.9 if sink else 0.03 + 0.002 * layer
    heads = [HeadFacts(first_token=min(1.0, first * (0.8 + 0.05 * h)), entropy=3 + 0.1 * h) for h in range(HEADS)]
    return AttentionFacts(
        layer=layer,
        first_token=sum(head.first_token for head in heads) / HEADS,
        uniform_first_token=0.0073,
        sink_rate=1.0 if sink else 0.0,
        entropy=2.0 + 0.1 * (layer % 5),
        uniform_entropy=5.9,
        learned_sink=0.0,
        heads=heads,
        positions=[PositionFacts(position=0, attention=first, uniform=0.0073, sink_rate=float(sink))],
    )


def _ablations(layers: int, dead: Sequence[int]) -> list[AblationFacts]:
    costs = [0.0 if n in dead else -0.004 if n == layers - 2 else 2.5 / (1 + 2 * n) for n in range(layers)]
    made = [
        AblationFacts(kind="layer", index=n, label=f"layer {n}", loss=3.2 + cost, change=cost)
        for n, cost in enumerate(costs)
    ]
    for count in range(2, layers // 2 + 1):
        first = (layers - count) // 2
        made.append(AblationFacts(
            kind="layers", index=first, label=f"layers {first} to {first + count - 1}", loss=3.2 + count / 4,
            change=count / 4, count=count,
        ))  # fmt: skip
    for n in dead:
        made += [
            AblationFacts(kind="sublayer", index=k, label=f"layer {n}", loss=3.2, change=0.0)
            for k in (2 * n, 2 * n + 1)
        ]
    return made


def _sources(reader: int, sites: Sequence[SiteFacts]) -> list[str]:
    return ["embedding", *(site.name for site in sites[:reader])]


def _reader(reader: int, sites: Sequence[SiteFacts]) -> ReaderFacts:
    """Half to the last source, a fifth to the embedding, the rest even; every ninth reader takes only the embedding."""
    count = reader + 1
    if reader % 9 == 0:
        mean = [0.97, *[0.03 / reader] * reader]
    else:
        mean = [0.2, *[0.3 / max(1, count - 2)] * (count - 2), 0.5] if count > 2 else [0.4, 0.6]
    name = sites[reader].name if reader < len(sites) else "the final norm"
    return ReaderFacts(reader=reader, name=name, sources=_sources(reader, sites), mean=mean)


def _block(layer: int) -> BlockFacts:
    """Half to the embedding, the rest even over the layers so far."""
    sources = ["embedding", *(f"layer {n}" for n in range(layer + 1))]
    mean = [0.5, *[0.5 / (layer + 1)] * (layer + 1)]
    return BlockFacts(name=f"layer {layer}", readers=[2 * layer, 2 * layer + 1], sources=sources, mean=mean)


def _depth_ablations(sites: Sequence[SiteFacts]) -> list[AblationFacts]:
    everywhere = AblationFacts(kind="uniform", index=-1, label="uniform weights at every reader", loss=3.5, change=0.3)
    each = [
        AblationFacts(kind="uniform", index=k, label=f"uniform weights at reader {k}", loss=3.2, change=0.01 * (k % 7))
        for k in range(1, len(sites) + 1)
    ]
    sources = [
        AblationFacts(kind="source", index=i, label=name, loss=3.2, change=0.4 / (1 + i))
        for i, name in enumerate(_sources(len(sites), sites))
    ]
    return [everywhere, *each, *sources]


def _extras(layers: int, readers: int) -> dict[str, Any]:
    bins = [0.05] * 20
    spread = Quartiles(low=0.01, lower=0.02, median=0.03, upper=0.05, high=0.09, largest=0.8)
    tokens = [f"t{n}" for n in range(8)]
    rows = [[5.0 / (1 + j) + 0.1 * n for j in range(8)] for n in range(8)]
    largest = [Activation(value=9.0 / n, dimension=17, sequence=0, position=3, token=199, text="\n") for n in (1, 2, 3)]
    return {
        "token_sinks": [TokenSink(layer=1, token=199, text="\n", attention=0.41, uniform=0.03)],
        "gates": [GateFacts(layer=n, mean=0.3 + 0.01 * n, closed=0.4) for n in range(layers)],
        "experts": [ExpertFacts(layer=n, load=[0.1, 0.2, 0.3, 0.4]) for n in range(layers)],
        "anchors": [
            AnchorFacts(
                layer=n, pathway=p, anchor=[0.1 * n] * 2, current=[1.0] * 2, near_zero=0.0, gamma=[0.5, 0.5],
                ratio=0.1 * n, anchor_channels=[0.05 * n] * 8, current_channels=[0.5] * 8,
            )
            for n in range(layers)
            for p in "qkv"
        ],
        "betas": [
            BetaFacts(site=k, mean=[0.4, 0.6], histogram=bins, quartiles=spread, by_stream=[spread, spread])
            for k in range(2 * layers)
        ],
        "streams": [
            StreamFacts(
                reader=k, angular_distance=[0.1, 0.2 + 0.01 * k], similarity=0.5, largest=[3.0, 4.0 + k],
                earlier=[[0.02 * (k - j) for j in range(1, k)], [0.01 * (k - j) for j in range(1, k)]],
            )
            for k in range(1, readers)
        ],
        "outputs": [OutputFacts(site=k, largest=largest) for k in range(2 * layers)],
        "norms": [
            NormFacts(
                state=k, name="n", factor=factor, lowest=0.1, median=1.0, highest=2.0, dimensions=[7, 9],
                values=[2.0, 0.1],
            )
            for factor in ("λ", "λ1")
            for k in range(readers)
        ],
        "token_map": TokenMap(tokens=tokens, dimensions=list(range(8)), values=rows),
        "attention_map": AttentionMap(tokens=tokens, values=rows),
        "attention_layer_maps": [AttentionLayerMap(layer=k, heads=[rows, rows]) for k in range(2)],
        "layer_maps": [LayerMap(state=k, name=f"s{k}", values=rows) for k in range(2)],
        "norm_gates": [NormGateFacts(state=k, name="n", mean=0.5, correlation=-0.1) for k in range(readers)],
        "gate_by_size": GateCurve(edges=[0.5, 1.0], share=[0.2, 0.3, 0.5], gate=[0.6, 0.5, 0.4]),
    }  # fmt: skip


def healthy(count: int = 1, layers: int = 12) -> Diagnosis:
    """Models with nothing wrong."""
    return Diagnosis(models=[report(f"control{n}", layers) for n in range(count)])


def sick(layers: int = 12) -> Diagnosis:
    """A dead layer, a massive activation, an attention sink and a residual sink in one model."""
    return Diagnosis(
        models=[report("prenorm", layers, dead=[7], massive=[2, 3], sinks=[4, 5, 6], outlier=True, extras=True)]
    )


NAMES = (
    "prenorm", "gated_attention", "mgr+exoformer_dynamic+gatednorm", "full_attnres", "block_attnres", "hyper", "dense",
    "mgr", "exoformer", "resformer", "gatednorm", "preaffine", "dyt", "nuresformer", "mgr+gatednorm", "hybrid",
)  # fmt: skip


def side_by_side(count: int, layers: int = 12) -> Diagnosis:
    """Variants of a study: some sick, some well, some with depth routing, one without removal."""
    return Diagnosis(
        models=[
            report(
                name,
                layers,
                place=place,
                dead=[5] if place == 1 else [],
                massive=[3] if place % 5 == 2 else [],
                sinks=[2, 3] if place % 4 == 0 else [],
                outlier=place % 7 == 2,
                routing="attnres" in name or place == 2,
                extras=place == 1,
                removal=place != 4,
            )
            for place, name in enumerate(NAMES[:count])
        ]
    )
