"""The whole model: its equation, its masking, and its losses."""

from functools import partial

import pytest
import torch
from torch import Tensor

import residua
from residua.model.decoder import Decoder
from tests.golden import attention as golden_attention
from tests.golden import attnres, multigate, parts
from tests.golden.arithmetic import cap
from tests.golden.compare import agree, close, leaves_of, randomise
from tests.model.depth import SMALL
from tests.model.small import VOCABULARY, small, tokens_and_targets


def golden_states(model: Decoder, tokens: list[int], depth, mixer, feed_forward, norm) -> Tensor:
    """The final normed states of one sequence; `depth(k, x, y)` is the input of sublayer k of one token."""
    x = [model.embed.weight[i] for i in tokens]
    y: list[list[Tensor]] = [[] for _ in tokens]
    for k, sublayer in enumerate(model.sublayers):
        normed = torch.stack([norm(sublayer.norm, depth(k, x[t], y[t])) for t in range(len(tokens))])
        body = sublayer.body
        outputs = [feed_forward(body, v) for v in normed] if k % 2 else mixer(k // 2, body, normed)
        for t, output in enumerate(outputs):
            y[t].append(output)
    last = len(model.sublayers)
    return torch.stack([norm(model.norm, depth(last, x[t], y[t])) for t in range(len(tokens))])


def heads_of(x: Tensor, weight: Tensor, heads: dict[str, int], head_dim: int) -> dict[str, Tensor]:
    matrices = weight.split([n * head_dim for n in heads.values()])
    return {s: golden_attention.project(x, W, n) for (s, n), W in zip(heads.items(), matrices, strict=True)}


def test_full_attnres_with_value_residuals_matches_equation(exact_rotary: None) -> None:
    config = small(
        layers=2,
        topology={"kind": "full_attnres"},
        anchors={"kind": "resformer", "granularity": "headwise"},
        norm={"kind": "preaffine"},
        ffn={"kind": "relu2", "hidden": 9},
    )
    model = randomise(residua.build(config), 0.3)
    readers = [attnres.Reader(r.query, r.gain) for r in model.topology.reads]
    tokens, targets = tokens_and_targets(length=3)
    expected = []
    for row in tokens.tolist():
        first: dict[str, Tensor] = {}

        def mixer(layer: int, body, x: Tensor, first=first) -> Tensor:
            S = heads_of(x, body.project.weight, {"q": 2, "k": 2, "v": 2}, 8)
            if layer == 0:
                first["v"] = S["v"]
            else:
                S = golden_attention.mixed(x, S, first, body.mix.anchor_scale, body.mix.current_scale, None)
            norm = body.qk_norm
            return golden_attention.attention(S, body.out.weight, theta=1e4, q_gain=norm.query, k_gain=norm.key)

        depth = lambda k, x, y: attnres.full(x, y[:k], readers)[-1]  # noqa: E731
        ffn = lambda f, v: parts.relu2(v, f.up.weight, f.out.weight)  # noqa: E731
        norm = lambda n, v: parts.preaffine(v, n.affine, n.weight)  # noqa: E731
        expected.append(golden_states(model, row, depth, mixer, ffn, norm))
    check_logits_and_losses(model, tokens, targets, torch.stack(expected), model.embed.weight)


def test_multi_gate_exoformer_matches_its_equation(exact_rotary: None) -> None:
    config = small(
        layers=2,
        topology={"kind": "multi_gate", "streams": 2},
        anchors={"kind": "exoformer", "mixing": {"kind": "dynamic", "hidden": 3}},
        norm={"kind": "gatednorm", "rank": 3},
        attention={"kind": "softmax", "heads": 2, "kv_heads": 1, "gate": "elementwise", "sink": "learned"},
        head={"kind": "untied"},
        logit_softcap=1.5,
    )
    model = randomise(residua.build(config), 0.3)
    heads = {"q": 2, "k": 1, "v": 1, "g": 2}
    equation = partial(
        multigate.multi_gate_residuals,
        n=2,
        gate_queries=[g.query for g in model.topology.gates],
        biases=[g.bias for g in model.topology.gates],
        pool_queries=[p.query for p in model.topology.pools],
        competitive=True,
    )
    tokens, targets = tokens_and_targets(length=3)
    expected = []
    for row in tokens.tolist():
        embedded = torch.stack([model.embed.weight[i] for i in row])
        raw = heads_of(embedded, model.anchors.project.weight, heads, 8)
        anchors = {s: golden_attention.normed(a, model.anchors.norm.gains[s]) for s, a in raw.items()}

        def mixer(layer: int, body, x: Tensor, anchors=anchors) -> Tensor:
            gamma = body.mix.gamma
            own, scales = heads_of(x, body.project.weight, heads, 8), (body.mix.anchor_scale, body.mix.current_scale)
            weights = gamma.down.weight, gamma.up.weight, gamma.bias
            S = golden_attention.mixed(x, own, anchors, *scales, weights)
            gains = {"q_gain": body.qk_norm.query, "k_gain": body.qk_norm.key}
            return golden_attention.attention(S, body.out.weight, theta=1e4, sink=body.sink, **gains)

        depth = lambda k, x, y: equation(x, y[:k])[-1]  # noqa: E731
        ffn = lambda f, v: parts.swiglu(v, *f.gate_up.weight.chunk(2), f.out.weight)  # noqa: E731
        norm = lambda n, v: parts.gatednorm(v, n.weight, n.gate.down, n.gate.up)  # noqa: E731
        expected.append(golden_states(model, row, depth, mixer, ffn, norm))
    check_logits_and_losses(model, tokens, targets, torch.stack(expected), model.unembed.weight)


def check_logits_and_losses(model: Decoder, tokens: Tensor, targets: Tensor, states: Tensor, head: Tensor) -> None:
    targets, softcap = targets.clone(), model.config.logit_softcap
    targets[0, 0] = -100
    loss, z = parts.cross_entropy(states.flatten(0, 1), head, targets.flatten(), z_loss=0.1, softcap=softcap)
    logits = states @ head.T if softcap is None else cap(states @ head.T, softcap)
    ours = [model(tokens), *model.losses(tokens, targets, z_loss=0.1)]
    agree(ours, [logits, loss, z], leaves_of(model), tolerance=1e-9)


def test_cross_entropy_and_z_term_are_returned_separately() -> None:
    model = residua.build(small()).double()
    tokens, targets = tokens_and_targets()
    targets = targets.clone()
    targets[0, :3] = -100
    logits = model(tokens)
    pure, none = model.losses(tokens, targets)
    reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close("cross-entropy", pure, reference, 1e-13)
    assert none == 0
    same, z = model.losses(tokens, targets, z_loss=0.5)
    lse2 = logits.logsumexp(-1).square()[targets != -100].mean()
    close("z", z, 0.5 * lse2, 1e-13)
    close("loss", model.loss(tokens, targets, z_loss=0.5), same + z, 1e-13)
    assert torch.equal(model.loss(tokens, targets), pure)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_head_shares_the_embedding_only_when_tied(head: str) -> None:
    model = residua.build(small(head={"kind": head}))
    assert (model.head_weight is model.embed.weight) == (head == "tied")
    assert model.head_weight.shape == (VOCABULARY, 16)


MIXERS = {
    "plain": {"heads": 2},
    "grouped and gated": {"heads": 4, "head_dim": 4, "kv_heads": 2, "gate": "headwise"},
    "sink": {"heads": 2, "sink": "learned", "gate": "elementwise"},
}
ANCHORS = {
    "none": {"kind": "none"},
    "nuresformer": {"kind": "nuresformer", "pathways": ["q", "k", "v"]},
    "exoformer": {"kind": "exoformer", "pathways": ["q", "k", "v"], "mixing": {"kind": "dynamic"}},
}


def random_model(mixer: str, anchors: str, topology: str = "multi_gate") -> Decoder:
    tables = {"kind": "softmax", **MIXERS[mixer]}
    config = small(attention=tables, anchors=ANCHORS[anchors], topology=SMALL[topology].model_dump())
    model = randomise(residua.build(config), 0.3)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_no_token_depends_on_a_later_one(mixer: str, anchors: str) -> None:
    model = random_model(mixer, anchors)
    tokens, _ = tokens_and_targets()
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    close("earlier tokens", after[:, :3], before[:, :3], 1e-13)
    assert all((after[:, t] - before[:, t]).abs().max() > 1e-6 for t in range(3, 6))


@pytest.mark.slow
@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_equal_separate_documents(mixer: str, anchors: str, exact_rotary: None) -> None:
    model = random_model(mixer, anchors)
    tokens, _ = tokens_and_targets(length=8)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [3, 1, 1, 1, 1, 1, 2, 2]])
    together = model(tokens, segments)
    for b in range(2):
        for document in segments[b].unique():
            inside = segments[b] == document
            close(f"sequence {b}", together[b, inside], model(tokens[b : b + 1, inside])[0], 1e-11)
    assert (together - model(tokens)).abs().max() > 1e-3


def test_one_segment_equals_no_segments() -> None:
    model = random_model("grouped and gated", "exoformer")
    tokens, _ = tokens_and_targets()
    close("logits", model(tokens, torch.zeros_like(tokens)), model(tokens), 1e-12)


def test_gradients_stay_inside_the_document() -> None:
    model = random_model("sink", "nuresformer")
    tokens = torch.arange(8)[None]
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    model.hidden(tokens, segments)[:, 4:].sum().backward()
    gradient = model.embed.weight.grad[:8]
    assert gradient[:4].abs().max() == 0
    assert gradient[4:].abs().amax(-1).min() > 0


def test_autocast_runs_in_half_and_returns_a_float32_loss() -> None:
    model = residua.build(small(topology={"kind": "block_attnres", "sublayers_per_block": 2}))
    tokens, targets = tokens_and_targets()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.hidden(tokens).dtype == torch.bfloat16
        loss = model.loss(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model.loss(tokens, targets), rtol=2e-2, atol=0)


def test_build_refuses_a_preset_name() -> None:
    with pytest.raises(TypeError, match=r"build takes a ModelConfig, not str: ModelConfig\.preset\(NAME\) makes one"):
        residua.build("tiny")  # type: ignore[arg-type]
