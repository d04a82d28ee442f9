"""The content of diagnosis.json. `Diagnosis.model_json_schema()` is its JSON schema; docs/diagnose.md explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from residua.config.settings import Frozen
from residua.diagnose.observe import AblationKind, SiteKind

VERSION: Literal[1] = 1
FindingKind = Literal[
    "attention_sink",
    "sink_token",
    "residual_sink",
    "massive_activation",
    "dead_layer",
    "dead_sublayer",
    "depth_routing",
]


class TextFacts(Frozen):
    """What the model was shown. `prefix` are token ids put before every sequence because its tokenizer does so."""

    source: str
    tokens: int
    sequences: int
    length: int
    prefix: list[int] = Field(default_factory=list)


class SiteFacts(Frozen):
    """One sublayer. Output RMS; the same relative to the RMS of what it read; median |output| relative to the median
    |input|, which no outlier dimension decides; RMS of its parameters' gradients."""

    index: int
    layer: int
    kind: SiteKind
    name: str
    output_rms: float | None = None
    relative_rms: float | None = None
    relative_median: float | None = None
    gradient_rms: float | None = None


class HeadFacts(Frozen):
    """One head: mean attention to the first token, mean entropy in nats."""

    first_token: float
    entropy: float


class PositionFacts(Frozen):
    """One key position: mean over heads, sequences and the queries that see it; share of heads above 0.3."""

    position: int
    attention: float
    uniform: float
    sink_rate: float


class AttentionFacts(Frozen):
    """One softmax layer, each number beside what uniform attention would give."""

    layer: int
    first_token: float
    uniform_first_token: float
    sink_rate: float
    entropy: float
    uniform_entropy: float
    learned_sink: float
    heads: list[HeadFacts]
    positions: list[PositionFacts]


class TokenSink(Frozen):
    """A token id that draws attention wherever it stands (first position not counted): share of a layer's attention."""

    layer: int
    token: int
    text: str
    attention: float
    uniform: float


class Activation(Frozen):
    """One of the largest |h|, and where it stood."""

    value: float
    dimension: int
    sequence: int
    position: int
    token: int


class StateFacts(Frozen):
    """What one sublayer reads (the last entry: the final norm)."""

    index: int
    name: str
    rms: float
    median: float
    largest: list[Activation]
    token_similarity: float
    input_similarity: float
    core_features: int | None = None


class DimensionFacts(Frozen):
    """One dimension of the states: mean |h|, that over the median dimension's, share of tokens in which it stands far
    above the token's median, and the mean of |gain| that the norms give it."""

    dimension: int
    mean: float
    ratio: float
    share: float
    gain: float | None = None


class DimensionProfile(Frozen):
    """The largest dimensions by mean |h| over tokens and states, and the median to compare with."""

    median: float
    median_gain: float | None
    largest: list[DimensionFacts]


class ReaderFacts(Frozen):
    """Mean depth weights of one reader over its sources; `initial` is the one an untrained model reads alone."""

    reader: int
    name: str
    sources: list[str]
    initial: int | None = None
    mean: list[float]


class BetaFacts(Frozen):
    """Gates of the write after one sublayer: the mean of each stream's, and shares of twenty equal bins of [0, 1]."""

    site: int
    mean: list[float]
    histogram: list[float]


class StreamFacts(Frozen):
    """Streams as reader `reader` finds them: angular distance of each to itself one sublayer earlier (null: it is new),
    and mean cosine between different streams."""

    reader: int
    angular_distance: list[float | None]
    similarity: float


class GateFacts(Frozen):
    """The attention gate of one layer: its mean, and the share of it below 0.2."""

    layer: int
    mean: float
    closed: float


class ExpertFacts(Frozen):
    """The mixture of experts of one layer: the share of the tokens' choices that each expert got."""

    layer: int
    load: list[float]


class AnchorFacts(Frozen):
    """λ of projection mixing: means by head of λ1 (anchor) and λ2 (current), and the share of |λ1| below 1e-3."""

    layer: int
    pathway: str
    anchor: list[float]
    current: list[float]
    near_zero: float


class AblationFacts(Frozen):
    """The loss with one thing switched off, and its change on the same tokens. `head` within layer `index`."""

    kind: AblationKind
    index: int
    head: int | None = None
    label: str
    loss: float
    change: float


class Finding(Frozen):
    """Something a person should know. `where` are the numbers that name it: dimension, layer, token, reader."""

    kind: FindingKind
    where: dict[str, int | list[int]]
    words: str


class ModelDiagnosis(Frozen):
    """Everything about one model. Sections it does not have are empty; `skipped` says why where that may surprise."""

    name: str
    path: str
    description: str
    parameters: int
    layers: int
    width: int
    state_name: str
    text: TextFacts
    device: str
    seconds: float
    loss: float
    ablation_tokens: int
    sites: list[SiteFacts]
    states: list[StateFacts]
    similarity: list[list[float]]
    angular_distance: list[list[float]]
    dimensions: DimensionProfile
    attention: list[AttentionFacts] = Field(default_factory=list)
    token_sinks: list[TokenSink] = Field(default_factory=list)
    depth_weights: list[ReaderFacts] = Field(default_factory=list)
    betas: list[BetaFacts] = Field(default_factory=list)
    streams: list[StreamFacts] = Field(default_factory=list)
    gates: list[GateFacts] = Field(default_factory=list)
    experts: list[ExpertFacts] = Field(default_factory=list)
    anchors: list[AnchorFacts] = Field(default_factory=list)
    ablations: list[AblationFacts] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)
    summary: list[str] = Field(default_factory=list)
    skipped: list[str] = Field(default_factory=list)


class Diagnosis(Frozen):
    """The file: one or several models, diagnosed alike."""

    version: Literal[1] = VERSION
    models: list[ModelDiagnosis] = Field(min_length=1)

    @classmethod
    def read(cls, path: str | Path) -> Diagnosis:
        """Read a diagnosis.json."""
        try:
            return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except ValidationError as error:
            raise ValueError(f"{path} is no diagnosis of version {VERSION}: {error.errors()[0]['msg']}.") from None
