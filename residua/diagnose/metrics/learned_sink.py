"""Learned sinks that take a sink's share of attention: by design, so worth knowing and no defect."""

from __future__ import annotations

from collections.abc import Sequence

from residua.diagnose.metric import Explained, Finding, Metric, Model
from residua.diagnose.sentences import listed, percent, sureness
from residua.diagnose.sinks import SINK, learned_sinks


class LearnedSink(Metric):
    """The layers whose mean attention to the learned sink exceeds 0.3. Its numbers are among those of attention."""

    kinds = ("learned_sink",)
    page_place = 21

    def findings(self, model: Model) -> list[Finding]:
        layers = learned_sinks(model.attention)
        if not layers:
            return []
        strongest = max((a for a in model.attention if a.layer in layers), key=lambda a: a.learned_sink)
        return [
            Finding(
                kind="learned_sink",
                where={"layers": layers},
                words=f"the learned sink takes a sink's share of attention in {listed('layer', layers)}: "
                f"{percent(strongest.learned_sink)} of layer {strongest.layer}'s",
            )
        ]

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        strongest = max(a.learned_sink for a in model.attention)
        return Explained(
            listed("layer", learned_sinks(model.attention)),
            sureness(f"up to {percent(strongest)}, where {percent(SINK)} counts", strongest / SINK, model),
            "Nothing: this is what a learned sink is for. Heads park attention there instead of on a token.",
        )
