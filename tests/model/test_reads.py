"""Queries, keys and values that read separate inputs: attention, the models around it, and refusals."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.config.settings import ConfigError
from residua.model.attention import SoftmaxAttention
from residua.model.body import Sublayer
from residua.model.context import Context, Reads, flat_reads, map_reads
from residua.model.rope import rotary_table
from residua.train.step import recompute_sublayers
from tests.golden.compare import agree, close, leaves_of, random, randomise
from tests.model.combinations import ATTENTIONS, ONE_READ
from tests.model.depth import SMALL
from tests.model.small import small, tokens_and_targets


def model_of(name: str, **tables: Any) -> residua.Decoder:
    return randomise(residua.build(small(topology=SMALL[name].model_dump(exclude_none=True), **tables)), 0.1)


def sections(sublayer: Sublayer, h: Tensor, context: Context) -> dict[str, Tensor]:
    """The sections of the fused projection of one input, by name."""
    body: Any = sublayer.body
    parts = body.project(sublayer.norm(h)).split(body.rows, -1)
    return dict(zip("qkvg", parts, strict=False))


@pytest.mark.parametrize("keys", [{}, {"gate": "elementwise"}, {"kv_heads": 1, "gate": "headwise", "bias": "all"}])
@pytest.mark.parametrize("watched", [False, True])
def test_each_projection_reads_its_own_input(keys: dict[str, Any], watched: bool) -> None:
    """As if each input were projected whole, and the section of its way selected."""
    model = randomise(residua.build(small(attention={"kind": "softmax", "heads": 2, **keys})))
    sublayer: Any = model.sublayers[0]
    body: SoftmaxAttention = sublayer.body
    reads = Reads(*(random(2, 5, 16, seed=i) for i in range(4)))
    context = Context(rotary_table(torch.arange(5), 8, 1e4), None)
    projected = {way: sections(sublayer, h, context) for way, h in zip("qkv", reads[:3], strict=True)}
    whole = torch.cat([projected["q" if s == "g" else s][s] for s in [*"qkvg"][: len(body.rows)]], -1)
    given = deepcopy(body)
    given.project = Given(whole)  # type: ignore[assignment]
    expected, _ = given(sublayer.norm(reads.q), (), context)
    if watched:
        body.project.register_forward_hook(lambda *_: None)
    y, _ = sublayer(reads, (), context)
    leaves = leaves_of(sublayer, **dict(zip("qkv", reads[:3], strict=True)))
    shared = {name: leaf for name, leaf in leaves.items() if not name.startswith(("body.qk_norm", "body.out"))}
    agree([y], [expected], shared)


class Given(nn.Module):
    """A projection with known outputs."""

    def __init__(self, projected: Tensor) -> None:
        super().__init__()
        self.projected = projected

    def forward(self, x: Tensor) -> Tensor:
        return self.projected


def test_equal_reads_are_computed_once() -> None:
    model = randomise(residua.build(small()))
    h, context = random(2, 5, 16), Context(rotary_table(torch.arange(5), 8, 1e4), None)
    calls: list[Tensor] = []
    assert map_reads(lambda x: calls.append(x) or x, Reads(h, h, h, h)) == Reads(h, h, h, h)  # type: ignore[func-returns-value]
    assert len(calls) == 1 and flat_reads(Reads(h, h, h, h)) == (h,)
    for sublayer in list(model.sublayers)[:2]:
        close("output", sublayer(Reads(h, h, h, h), (), context)[0], sublayer(h, (), context)[0], 1e-14)


@pytest.mark.parametrize("name", ["mudd", "mudd few", "dca", "dca recent"])
def test_new_model_with_several_reads_equals_a_prenorm_model(name: str) -> None:
    plain = residua.build(small()).double()
    model = residua.build(small(topology=SMALL[name].model_dump(exclude_none=True))).double()
    model.load_state_dict(plain.state_dict() | {f"topology.{k}": v for k, v in model.topology.state_dict().items()})
    tokens, _ = tokens_and_targets()
    close("logits", model(tokens), plain(tokens), 1e-13)


@pytest.mark.parametrize("name", ["mudd", "dca recent"])
def test_recomputed_sublayers_keep_gradients_of_several_reads(name: str) -> None:
    model, (tokens, targets) = model_of(name, anchors={"kind": "exoformer", "pathways": ["v"]}), tokens_and_targets()
    again = deepcopy(model)
    recompute_sublayers(again)
    for each in (model, again):
        each.loss(tokens, targets).backward()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        close("gradient", other.grad, one.grad)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mudd", "dca recent"])
def test_several_reads_compile_into_one_graph(name: str) -> None:
    model, (tokens, _) = model_of(name), tokens_and_targets()
    compiled = torch.compile(model.hidden, backend="eager", fullgraph=True)
    close("compiled", compiled(tokens), model.hidden(tokens))


@pytest.mark.parametrize("attention", sorted(ONE_READ))
def test_attention_limited_to_one_read_is_refused_by_name(attention: str) -> None:
    with pytest.raises(
        ConfigError, match=r"topology.kind = 'mudd' gives .* attention.kind = '\w+' takes a single one: use softmax"
    ):
        small(layers=4, attention=ATTENTIONS[attention], topology={"kind": "mudd"})
    small(layers=4, attention=ATTENTIONS[attention], topology={"kind": "mudd", "ways": ["r"]})
