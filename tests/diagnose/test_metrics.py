"""Every streamed metric equals its direct definition, in float64, over batches of unequal size."""

import math
import weakref
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from residua import ops
from residua.diagnose import ModelDiagnosis, api, attention, taps
from residua.diagnose.metrics import find_metrics
from residua.diagnose.metrics.anchors import Anchors
from residua.diagnose.metrics.dimensions import FAR
from residua.diagnose.metrics.states import CoreFeatures
from residua.diagnose.native import NativeSubject
from residua.diagnose.observe import Observation
from residua.diagnose.text import Sample
from residua.model.decoder import Decoder
from residua.ops._runtime.library import dry_run
from residua.ops.depth_attention.reference import depth_attention
from tests.diagnose import planted

Case = tuple[Decoder, ModelDiagnosis, dict[str, Tensor]]


def looked_into(model: Decoder, maps: bool = False) -> Case:
    """A model, its diagnosis in batches of three and two sequences, and its taps from one batch of all."""
    text = planted.sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "TOKENS_AT_ONCE", 3 * planted.LENGTH)
        made = planted.diagnosed(model, text, ablations="none", maps=maps)
    with taps(model) as seen, torch.no_grad():
        model(text.tokens)
    return model, made, seen


def case(**tables: object) -> Case:
    """A model in float64 with another start of its topology."""
    model = planted.control(**tables).double()
    with torch.no_grad():
        for p in model.topology.parameters():
            p.add_(torch.randn_like(p) * 0.5)
    return looked_into(model)


@pytest.fixture(scope="module")
def additive() -> Case:
    torch.manual_seed(0)
    return case()


def state(seen: dict[str, Tensor], made: ModelDiagnosis, k: int) -> Tensor:
    return seen["final.input" if k == len(made.sites) else f"sublayer.{k}.input"]


def test_an_observation_is_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them at once cost 0.8 GiB on a 12×768 model with four streams."""
    made: list[weakref.ref[Observation]] = []
    observe = NativeSubject.observe

    def counted(self: NativeSubject, *batch: Tensor) -> Observation:
        assert not any(earlier() for earlier in made)
        seen = observe(self, *batch)
        made.append(weakref.ref(seen))
        return seen

    monkeypatch.setattr(NativeSubject, "observe", counted)
    monkeypatch.setattr(api, "TOKENS_AT_ONCE", planted.LENGTH)
    planted.diagnosed(planted.control(), planted.sample(), ablations="none")
    assert len(made) > 1


@pytest.mark.slow
def test_kernels_run_only_in_passes_without_gradients() -> None:
    """Backward kernels would run once and take longer to compile, those of Multi-Gate 45 s on one core."""
    model = planted.control(topology={"kind": "multi_gate", "streams": 3})
    subject, text = NativeSubject(model, "model"), planted.sample()
    with ops.backend("triton"), dry_run() as calls:
        with torch.enable_grad():
            subject.loss(text.tokens, text.targets).backward()
        assert not calls
        subject.observe(text.tokens, text.targets)
    assert {"multi_gate_pool", "multi_gate_forward", "rms_norm"} <= {call.name for call in calls}


class Waits(TorchDispatchMode):
    """Operations inside for which the host would wait for a GPU; `cpu` and `tolist` are not among the dispatched."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [name for name in self.NAMES if func.name() == name]
        return func(*args, **(kwargs or {}))


def test_summing_a_batch_never_synchronizes_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis on a GPU once waited 700 times in each batch. Records of the first batch may be copied."""
    model = planted.control(
        topology={"kind": "multi_gate", "streams": 3},
        attention={"kind": "softmax", "heads": 4, "gate": "elementwise"},
        anchors={"kind": "exoformer", "mixing": {"kind": "dynamic"}},
    )
    subject, text = NativeSubject(model, "model"), planted.sample()
    seen = subject.observe(text.tokens, text.targets)
    metrics = [metric(subject, text) for metric in find_metrics()]
    for metric in metrics:
        metric.add(seen)
    with Waits() as waits:
        monkeypatch.setattr(Tensor, "cpu", lambda x, plain=Tensor.cpu: waits.names.append("cpu") or plain(x))
        monkeypatch.setattr(Tensor, "tolist", lambda x, plain=Tensor.tolist: waits.names.append("tolist") or plain(x))
        for metric in metrics:
            metric.add(seen)
    assert waits.names == []


def test_magnitudes_medians_and_maxima_match_definition(additive: Case) -> None:
    _, made, seen = additive
    for facts in made.states:
        h = state(seen, made, facts.index).abs()
        assert facts.rms == pytest.approx(float(h.square().mean().sqrt()), rel=1e-12)
        assert facts.median == pytest.approx(float(h.median(-1).values.mean()), rel=1e-12)
        top = h.flatten().sort(descending=True).values[:3]
        assert [a.value for a in facts.largest] == pytest.approx(top.tolist(), rel=1e-12)
        a = facts.largest[0]
        assert float(h[a.sequence, a.position, a.dimension]) == a.value
        assert planted.sample().tokens[a.sequence, a.position] == a.token


def test_similarities_match_definition(additive: Case) -> None:
    _, made, seen = additive
    first = state(seen, made, 0)
    for facts in made.states:
        h = state(seen, made, facts.index)
        i, j = torch.tensor(list(combinations(range(h.shape[1]), 2))).T
        pairs = torch.cosine_similarity(h[:, i], h[:, j], -1)
        assert facts.token_similarity == pytest.approx(float(pairs.mean()), rel=1e-9)
        cosines = [float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) for a, b in zip(h, first, strict=True)]
        assert facts.input_similarity == pytest.approx(sum(cosines) / len(cosines), rel=1e-9)


def test_layer_similarity_and_angular_distance_match_definition(additive: Case) -> None:
    _, made, seen = additive
    for one, other in ((0, 1), (2, 7), (3, 8), (4, 4)):
        cosine = torch.cosine_similarity(state(seen, made, one), state(seen, made, other), -1).clamp(-1, 1)
        assert made.similarity[one][other] == pytest.approx(float(cosine.mean()), rel=1e-9)
        angle = 0.0 if one == other else float((cosine.arccos() / math.pi).mean())
        assert made.angular_distance[one][other] == pytest.approx(angle, rel=1e-9, abs=1e-12)


def test_core_features_hold_99_percent_of_the_variance(additive: Case) -> None:
    _, made, seen = additive
    for facts in made.states:
        h = state(seen, made, facts.index).flatten(0, 1)
        spectrum = torch.linalg.svdvals(h - h.mean(0)).square()
        expected = next(k for k in range(1, len(spectrum) + 1) if spectrum[:k].sum() >= 0.99 * spectrum.sum())
        assert facts.core_features == expected


def test_core_features_survive_a_large_constant_dimension() -> None:
    x = torch.randn(4, 100, 6) * torch.tensor([1, 1, 1, 1e-3, 1e-3, 0])
    x[..., 5] += 1e4
    assert core_features(x) == 3


def core_features(batches: Tensor) -> int:
    core = CoreFeatures()
    for batch in batches:
        core.add(batch[None])
    return core.result()


def test_core_features_include_variance_between_batches() -> None:
    x = torch.randn(4, 100, 6) * torch.tensor([1, 1, 0.01, 0.01, 0.01, 0.01])
    x[..., 5] += torch.arange(4.0)[:, None] * 10
    assert core_features(x) == 2  # the drift of dimension 5, and one of the two that vary within batches
    spectrum = torch.linalg.svdvals(x.flatten(0, 1) - x.flatten(0, 1).mean(0)).square()
    assert spectrum[:2].sum() >= 0.99 * spectrum.sum() > spectrum[:1].sum()


def test_dimension_means_and_shares_match_definition(additive: Case) -> None:
    _, made, seen = additive
    stacked = torch.stack([state(seen, made, k) for k in range(len(made.sites) + 1)]).abs()
    mean = stacked.mean((0, 1, 2))
    far = (stacked > FAR * stacked.median(-1, keepdim=True).values).double().mean((0, 1, 2))
    assert [d.dimension for d in made.dimensions.largest] == mean.argsort(descending=True).tolist()
    for d in made.dimensions.largest:
        assert d.mean == pytest.approx(float(mean[d.dimension]), rel=1e-12)
        assert d.ratio == pytest.approx(float(mean[d.dimension] / mean.median()), rel=1e-12)
        assert d.share == pytest.approx(float(far[d.dimension]), abs=1e-12)


def assert_gradients(made: ModelDiagnosis, model: Decoder, text: Sample) -> None:
    model.zero_grad()
    planted.losses(model, text).backward()
    for site in made.sites:
        flat = torch.cat([p.grad.flatten() for p in model.sublayers[site.index].parameters() if p.grad is not None])
        assert site.gradient_rms == pytest.approx(float(flat.square().mean().sqrt()), rel=1e-9)
    model.zero_grad()


def test_output_and_gradient_rms_match_definition(additive: Case) -> None:
    model, made, seen = additive
    assert made.loss == pytest.approx(float(planted.losses(model, planted.sample()).detach()), rel=1e-12)
    for site in made.sites:
        y = seen[f"sublayer.{site.index}.output"]
        assert site.output_rms == pytest.approx(float(y.square().mean().sqrt()), rel=1e-12)
    assert_gradients(made, model, planted.sample())


def test_gradients_use_the_first_512_tokens() -> None:
    model = planted.control().double()
    few = planted.sample()
    rows, targets = few.tokens.repeat(3, 1).roll(1, 1), few.targets.repeat(3, 1)
    text = replace(few, tokens=rows, targets=targets)
    made = planted.diagnosed(model, text, ablations="none")
    assert_gradients(made, model, replace(text, tokens=rows[:16], targets=targets[:16]))  # of 32 tokens each


@pytest.mark.parametrize(("length", "sequences"), [(32, 16), (300, 1), (512, 1), (600, 1)])
def test_first_tokens_of_a_sample_come_in_whole_sequences(length: int, sequences: int) -> None:
    rows = torch.arange(20 * length).view(20, length)
    few = Sample(rows, rows + 1, planted.sample().facts).first(512)
    assert torch.equal(few.tokens, rows[:sequences]) and torch.equal(few.targets, rows[:sequences] + 1)


def attention_map(seen: dict[str, Tensor], layer: int) -> Tensor:
    q, k = (seen[f"attention.{layer}.{name}"].transpose(1, 2) for name in ("query", "key"))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def test_attention_sinks_and_entropy_match_definition(additive: Case) -> None:
    model, made, seen = additive
    length = planted.LENGTH
    for facts in made.attention:
        weights = attention_map(seen, facts.layer)
        assert facts.first_token == pytest.approx(float(weights[..., 0].mean()), rel=1e-10)
        assert facts.uniform_first_token == pytest.approx(sum(1 / i for i in range(1, length + 1)) / length, rel=1e-12)
        assert facts.entropy == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), rel=1e-10)
        uniform = sum(math.log(i) for i in range(1, length + 1)) / length
        assert facts.uniform_entropy == pytest.approx(uniform, rel=1e-12)
        alpha = weights.sum(2) / torch.arange(length, 0, -1)
        assert facts.sink_rate == pytest.approx(float((alpha[..., 0] > 0.3).double().mean()), abs=1e-12)
        for head, one in enumerate(facts.heads):
            assert one.first_token == pytest.approx(float(weights[:, head, :, 0].mean()), rel=1e-10)
        for place in facts.positions:
            assert place.attention == pytest.approx(float(alpha[..., place.position].mean()), rel=1e-10)
        value = seen[f"attention.{facts.layer}.value"].transpose(1, 2)
        y = model.sublayers[2 * facts.layer].body.out((weights @ value).transpose(1, 2).flatten(-2))
        torch.testing.assert_close(
            y, seen[f"sublayer.{2 * facts.layer}.output"]
        )  # the taps hold the values that attention used


def test_depth_weights_of_attention_residuals_match_definition() -> None:
    model, made, seen = case(topology={"kind": "full_attnres"})
    sources = [seen["sublayer.0.input"]]
    for k, read in enumerate(model.topology.reads):
        sources.append(seen[f"sublayer.{k}.output"])
        _, weights = depth_attention(sources, read.query, norm_weight=read.gain, return_weights=True)
        facts = next(r for r in made.depth_weights if r.reader == k + 1)
        assert facts.mean == pytest.approx(weights.mean((0, 1)).tolist(), rel=1e-9)
        assert facts.sources == ["embedding", *(s.name for s in made.sites[: k + 1])]


def test_multi_gate_streams_and_write_gates_match_definition() -> None:
    _, made, seen = case(topology={"kind": "multi_gate", "streams": 3})
    for facts in made.betas:
        beta = seen[f"depth.{facts.site}.beta"]
        assert facts.mean == pytest.approx(beta.mean((0, 1)).tolist(), rel=1e-9)
        counts = [(((beta >= i / 20) & (beta < (i + 1) / 20)).double().mean()) for i in range(20)]
        assert facts.histogram == pytest.approx([float(c) for c in counts], abs=2e-3)
    facts = next(s for s in made.streams if s.reader == 6)
    after = seen["depth.5.streams"]
    pairs = ((after[..., i, :], after[..., j, :]) for i, j in ((0, 1), (0, 2), (1, 2)))
    between = [torch.cosine_similarity(*pair, -1).mean() for pair in pairs]
    assert facts.similarity == pytest.approx(float(sum(between) / 3), rel=1e-9)
    assert made.state_name == "sublayer input"


def test_hyper_connection_weights_and_streams_match_definition() -> None:
    _, made, seen = case(topology={"kind": "hyper", "streams": 3})
    assert [r.reader for r in made.depth_weights] == list(range(8))
    for facts in made.depth_weights:
        assert facts.mean == pytest.approx(seen[f"depth.{facts.reader}.pre"].mean((0, 1)).tolist(), rel=1e-9)
    facts = next(s for s in made.streams if s.reader == 4)
    cosine = torch.cosine_similarity(seen["depth.2.streams"], seen["depth.3.streams"], -1).clamp(-1, 1)
    assert facts.angular_distance == pytest.approx((cosine.arccos() / math.pi).mean((0, 1)).tolist(), rel=1e-6)


@pytest.mark.slow
def test_attention_to_a_token_id_counts_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SINK", 0.0)
    monkeypatch.setattr(attention, "FLOORS", 0.0)
    _, made, seen = case()
    tokens = planted.sample().tokens
    queries = tokens.numel()
    for sink in made.token_sinks:
        here = tokens == sink.token
        here[:, 0] = False
        received = attention_map(seen, sink.layer).mean(1).sum(1)
        assert sink.attention == pytest.approx(float(received[here].sum()) / queries, rel=1e-9)
        uniform = torch.tensor([sum(1 / i for i in range(k + 1, planted.LENGTH + 1)) for k in range(planted.LENGTH)])
        assert sink.uniform == pytest.approx(float(uniform.expand_as(here)[here].sum()) / queries, rel=1e-6)
    assert len(made.token_sinks) == 4 * len(set(tokens[:, 1:].flatten().tolist()))


def test_gates_and_anchor_scales_match_definition() -> None:
    attention = {"kind": "softmax", "heads": 4, "gate": "elementwise"}
    _, made, seen = case(attention=attention, anchors={"kind": "exoformer"})
    for facts in made.gates:
        gate = seen[f"attention.{facts.layer}.gate"]
        assert facts.mean == pytest.approx(float(gate.mean()), rel=1e-10)
        assert facts.closed == pytest.approx(float((gate < 0.2).double().mean()), abs=1e-12)
    assert {(a.layer, a.pathway) for a in made.anchors} == {(n, s) for n in range(4) for s in "qkvg"}
    assert all(len(a.anchor) == 4 and a.anchor == pytest.approx([0.5] * 4) and a.near_zero == 0 for a in made.anchors)


def test_value_gates_report_means_by_head_and_closed_shares() -> None:
    _, made, seen = case(attention={"kind": "softmax", "heads": 4, "kv_heads": 2}, anchors={"kind": "gated_value"})
    assert [(a.layer, a.pathway) for a in made.anchors] == [(1, "v"), (2, "v"), (3, "v")]
    for facts in made.anchors:
        gate = seen[f"attention.{facts.layer}.value_gate"]
        assert facts.anchor == pytest.approx(gate.mean((0, 1)).tolist(), rel=1e-10) and facts.current == [1.0, 1.0]
        assert facts.near_zero == pytest.approx(float((gate < 1e-3).double().mean()), abs=1e-12)
    (sentence,) = Anchors.sentences(made)
    assert "median over heads" in sentence.text


def test_anchor_scales_report_means_by_head_and_near_zero_share() -> None:
    attention = {"kind": "softmax", "heads": 4, "gate": "elementwise"}
    model = planted.control(anchors={"kind": "exoformer"}, attention=attention)
    mix = model.sublayers[2].body.mix
    with torch.no_grad():
        scale = mix.anchor_scale["k"]
        scale.copy_(torch.linspace(-1, 1, scale.numel()).view_as(scale))
        scale[1] = 5e-4
    made = planted.diagnosed(model, ablations="none")
    (facts,) = [a for a in made.anchors if (a.layer, a.pathway) == (1, "k")]
    assert facts.anchor == pytest.approx(scale.reshape(4, -1).mean(1).tolist(), abs=1e-6)
    assert facts.near_zero == pytest.approx(0.25)
    (sentence,) = Anchors.sentences(made)
    assert "median over channels" in sentence.text
