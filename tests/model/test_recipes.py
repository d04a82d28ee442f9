"""Settings that recipes need: how gates and λ start, DyT as QK-norm, and the article's variant of Block."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import residua
from residua.config import choices
from residua.config.topologies import gate_bias
from residua.model import taps
from residua.model.attention import TanhQKNorm, head_shape
from residua.model.retrofit import retrofit
from tests.golden import attnres, parts
from tests.golden.compare import agree, each_token, leaves_of, random, randomise
from tests.model.depth import drive, embedding_and_outputs, named, random_topology
from tests.model.small import small, tokens_and_targets


@pytest.mark.parametrize("gate", ["competitive", "independent"])
def test_multi_gates_start_from_the_configured_base(gate: str) -> None:
    """b = ln( sqrt(L/L_base)(e^−b_base + 1) − n ), of which β = sqrt(L_base/L)·sigmoid(b_base) follows."""
    lerping, n = 33, 4
    bias = gate_bias(choices.MultiGate(streams=n, gate=gate, base_depth=9, base_bias=-2.5), lerping)
    scores = [math.exp(b) for b in bias]
    beta = scores[1] / sum(scores) if gate == "competitive" else 1 / (1 + 1 / scores[0])
    assert beta == pytest.approx(math.sqrt(9 / lerping) / (1 + math.exp(2.5)))
    assert len(bias) == (n + 1 if gate == "competitive" else n)


def test_the_base_of_the_paper_is_the_default() -> None:
    ours = gate_bias(choices.MultiGate(streams=4), 21)
    assert ours[0] == pytest.approx(math.log(math.exp(3) + 1 - 4)) and ours[1:] == (0.0,) * 4


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_lambdas_start_at_their_configured_values(mixing: str) -> None:
    """λ·γ is the start; dynamic mixing has γ = ½."""
    anchors = {"kind": "exoformer", "start": [0.25, 0.75], "mixing": {"kind": mixing}}
    model = residua.build(small(attention={"kind": "softmax", "heads": 2, "gate": "elementwise"}, anchors=anchors))
    whole = {"static": 1.0, "dynamic": 2.0}[mixing]
    for sublayer in model.sublayers[::2]:
        for anchor, current in sublayer.body.mix.scales().values():
            assert (anchor == 0.25 * whole).all() and (current == 0.75 * whole).all()


def test_retrofit_copies_anchors_whatever_their_initial_lambda() -> None:
    tables = {"attention": {"kind": "softmax", "heads": 2, "gate": "elementwise"}, "layers": 1}
    old, new = (
        residua.build(small(anchors={"kind": "exoformer", "start": start}, **tables))
        for start in ([0.5, 0.5], [0.1, 1.0])
    )
    retrofit(new, old)
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), old.parameters(), strict=True))


def test_resformer_lambdas_start_at_their_configured_values() -> None:
    model = residua.build(small(anchors={"kind": "resformer", "start": [0.0, 1.0]}))
    anchor, current = model.sublayers[2].body.mix.scales()["v"]
    assert anchor == 0 and current == 1


def test_unset_settings_keep_their_earlier_defaults() -> None:
    config = small(anchors={"kind": "nuresformer", "pathways": ["v"]}, topology={"kind": "multi_gate", "streams": 2})
    assert config.anchors.start == (0.5, 0.5)
    assert (config.topology.base_depth, config.topology.base_bias) == (21, -3.0)
    assert (config.softmax.qk_norm, config.softmax.qk_alpha) == ("rms", 0.5)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (x_i, x_{i + D/2}) of [B, T, H, D], each turned by its angle."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_dyt_as_qk_norm_matches_its_equation_and_gradients() -> None:
    config = choices.SoftmaxAttention(heads=2, head_dim=4, qk_norm="dyt", qk_alpha=0.8)
    norm = TanhQKNorm(head_shape(config, 8), config)
    assert norm.query.alpha.item() == norm.key.alpha.item() == pytest.approx(0.8)
    randomise(norm)
    q, k, angles = random(1, 3, 2, 4), random(1, 3, 2, 4, seed=1), random(3, 2, seed=2, grad=False)
    table = angles.cos(), angles.sin()
    ours = norm.turn_queries(q, table), norm.turn_keys(k, table)
    golden = [
        rotated(parts.dyt(x, part.alpha, part.weight, part.bias), *table)
        for x, part in ((q, norm.query), (k, norm.key))
    ]
    agree(ours, golden, leaves_of(norm, q=q, k=k))


def test_a_dyt_model_has_no_other_norm() -> None:
    config = small(attention={"kind": "softmax", "heads": 2, "qk_norm": "dyt"}, norm={"kind": "dyt"})
    model = residua.build(config)
    assert not model.sublayers[0].body.direct_to_cache, "decoding kernels would norm queries and keys otherwise"
    kinds = {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}
    assert kinds == {"TanhQKNorm"}
    tokens, targets = tokens_and_targets()
    model.loss(tokens, targets).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "qk_norm" in name]
    assert len(gradients) == 6 * 3 and all(g is not None and g.isfinite().all() for g in gradients)


def boundary(x: Tensor, y: list[Tensor], readers: list[attnres.Reader], per_block: int) -> list[Tensor]:
    """The article: blocks of x + f(x); B_n = h at the end of one, and the next starts from a read of [x, B_1 … B_n]."""
    sources, inputs = [x], []
    h = x
    blocks = [y[i : i + per_block] for i in range(0, len(y), per_block)]
    for n, outputs in enumerate(blocks):
        if n:
            sources.append(h)
            h = readers[n - 1](sources)
        for output in outputs:
            inputs.append(h)
            h = h + output
    return [*inputs, h]


@pytest.mark.parametrize(("sublayers", "per_block"), [(6, 3), (6, 2), (8, 3), (6, 6), (4, 1)])
def test_boundary_attnres_matches_the_article(sublayers: int, per_block: int) -> None:
    """Whole and unfinished last blocks, one block (pre-norm), blocks of one."""
    topology = random_topology(choices.BoundaryAttnRes(sublayers_per_block=per_block), sublayers, 7)
    readers = [attnres.Reader(r.query, r.gain) for r in topology.reads]
    assert len(readers) == -(-sublayers // per_block) - 1
    x, y = embedding_and_outputs(sublayers, 7)
    golden = each_token(partial(boundary, readers=readers, per_block=per_block), x, y)
    agree(drive(topology, x, y), golden, leaves_of(topology, **named(x, y)))


def test_boundary_weights_are_tapped_and_can_be_uniform() -> None:
    model = residua.build(small(topology={"kind": "boundary_attnres", "sublayers_per_block": 2}))
    for read in model.topology.reads:
        torch.nn.init.normal_(read.query)
    tokens = tokens_and_targets()[0]
    with taps.record() as seen:
        model(tokens)
    assert {name for name in seen if name.startswith("depth.")} == {"depth.1.weights", "depth.3.weights"}
    assert seen["depth.3.weights"].shape[-1] == 3
    assert list(model.topology.ablations().weighing_readers) == [2, 4]
    with model.topology.ablations().with_equal_weights([4]), taps.record() as seen:
        model(tokens)
    torch.testing.assert_close(seen["depth.3.weights"], torch.full_like(seen["depth.3.weights"], 1 / 3))
    assert (seen["depth.1.weights"] - 0.5).abs().max() > 0.01
    assert [model.topology.source_names([]).source(4, i) for i in range(3)] == ["embedding", "block 1", "block 2"]
