"""Layers that mix the same anchors compute the anchors' gradient together: equal numbers, and the conditions for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua import ops
from residua.config.run import TrainConfig
from residua.model.anchor_sharing import Sharing, find_sharing
from residua.model.context import Context
from residua.model.decoder import Decoder
from residua.ops._runtime import triton_support
from residua.ops.mix_projection import anchor_gradients
from residua.train.compile.layers import compile_sublayers
from residua.train.low_precision import LowPrecision
from residua.train.step import recompute_sublayers
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly
from tests.train.compile.rewriting import rewriting

aten = torch.ops.aten
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]

GATED = {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "elementwise"}
MODELS: dict[str, dict[str, Any]] = {
    "exoformer": {"anchors": {"kind": "exoformer"}, "attention": GATED},
    "exoformer, headwise, raw": {
        "anchors": {"kind": "exoformer", "granularity": "headwise", "norm": "none"},
        "attention": GATED | {"qk_norm": "none"},
    },
    "exoformer, norms on Q and K": {"anchors": {"kind": "exoformer", "norm": "qk"}, "attention": GATED},
    "exoformer, dynamic": {"anchors": {"kind": "exoformer", "mixing": {"kind": "dynamic"}}, "attention": GATED},
    "nuresformer": {"anchors": {"kind": "nuresformer"}, "attention": GATED},
    "resformer": {"anchors": {"kind": "resformer"}},
}


def built(tables: dict[str, Any]) -> Decoder:
    return randomise(residua.build(small(**tables)), 0.1)


def sharing(model: Decoder) -> Sharing | None:
    return find_sharing(model.config, model.anchors, model.sublayers)


def gradients(model: Decoder, run: Any, choice: str) -> dict[str, Tensor]:
    model.zero_grad()
    with ops.backend(choice):
        run(*tokens_and_targets()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal_the_reference(model: Decoder) -> None:
    ours = gradients(model.float(), model.loss, "triton")
    exact = gradients(model.double(), model.loss, "reference")
    for parameter, b in exact.items():
        error = (ours[parameter].double() - b).norm() / b.norm().clamp(min=1e-12)
        assert error <= 2e-5, f"{parameter}: relative error {error:.2e}"


@pytest.mark.parametrize("name", only_nightly(MODELS, but=["exoformer, dynamic", "resformer"]))
def test_every_gradient_equals_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, handed = built(MODELS[name]), []
    share = anchor_gradients.share
    monkeypatch.setattr(
        anchor_gradients, "share", lambda *args, **how: handed.append(share(*args, **how)) or handed[-1]
    )
    assert_gradients_equal_the_reference(model)
    assert [len(handles) for handles in handed] == [3 if name.startswith("exo") else 2]


@pytest.mark.parametrize("name", ["exoformer, dynamic", "nuresformer"])
def test_gradients_of_layers_skipped_by_hand_are_exact(name: str) -> None:
    model = built(MODELS[name])
    model.sublayers[2].forward = lambda h, anchors, context: (torch.zeros_like(h), anchors)
    assert_gradients_equal_the_reference(model)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["exoformer", "exoformer, dynamic"])
def test_compiled_model_is_one_graph_with_equal_gradients(name: str) -> None:
    torch._dynamo.reset()
    model = built(MODELS[name] | {"layers": 2}).float()
    eager = gradients(model, model.loss, "triton")
    compiled = gradients(model, torch.compile(model.loss, fullgraph=True, backend="aot_eager"), "triton")
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


def test_compiled_layers_copy_neither_projections_nor_gradients() -> None:
    torch._dynamo.reset()
    tables = MODELS["exoformer, dynamic"] | {"layers": 2, "ffn": {"kind": "relu2", "hidden": 8}}
    model, graphs = built(tables).float(), []
    gradients(model, torch.compile(model.loss, fullgraph=True, backend=rewriting(seen=graphs)), "triton")
    tokens, columns = tokens_and_targets()[0].numel(), len(model.sublayers[0].body.project.weight)
    copies = {aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten.slice_scatter.default}
    shapes = [n.meta["val"].shape for graph in graphs for n in graph.graph.nodes if n.target in copies]
    assert not [shape for shape in shapes if shape[:-1].numel() == tokens and shape[-1] >= columns]


@pytest.mark.parametrize(
    "reason", ["no gradients", "reference", "one layer", "sharded", "hook", "recomputed", "offloaded"]
)
def test_anchors_are_passed_by_layers_if_sharing_is_impossible(reason: str) -> None:
    tables = dict(MODELS["exoformer"], layers=1 if reason == "one layer" else 2)
    model = built(tables).float()
    if reason == "sharded":

        class Shard(torch.nn.Parameter):
            pass

        mix = model.sublayers[0].body.mix
        mix.anchor_scale["q"] = Shard(mix.anchor_scale["q"].data)
    if reason == "hook":
        model.sublayers[0].body.project.register_forward_hook(lambda *_: None)
    if reason == "recomputed":
        recompute_sublayers(model)
    if reason == "offloaded":
        model.sublayers[0].body.project.to("meta")
    choice = "reference" if reason == "reference" else "triton"
    with torch.set_grad_enabled(reason != "no gradients"), ops.backend(choice):
        anchors = model.anchors.open(torch.randn(1, 2, 16), Context(None, None, sharing=sharing(model)))
    assert len(anchors) == len(model.anchors.pathways)


def test_a_hook_on_a_sublayer_changes_no_gradient() -> None:
    model = built(MODELS["exoformer"] | {"layers": 2}).float()
    plain = gradients(model, model.loss, "triton")
    model.sublayers[0].register_forward_hook(lambda *_: None)
    hooked = gradients(model, model.loss, "triton")
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.parametrize("change", ["wrapped", "replaced", "another class"])
def test_layers_that_might_skip_their_handle_do_not_share(change: str) -> None:
    """Handles are taken in turn: an unused one would go to the next layer."""
    model = built(MODELS["exoformer"] | {"layers": 3}).float()
    assert sharing(model) is not None
    sublayer = model.sublayers[2]
    if change == "wrapped":
        sublayer.body = torch.nn.Sequential(sublayer.body)
    elif change == "replaced":
        sublayer.forward = lambda h, anchors, context: (torch.zeros_like(h), anchors)
    else:
        model.sublayers[2] = torch.nn.Identity()
    assert sharing(model) is None


def fp8_feed_forwards(model: Decoder) -> None:
    config = TrainConfig(precision="fp8_emulated", low_precision={"smallest": 1, "sublayers": "feed-forward"})
    LowPrecision(model, config, torch.device("cpu"))


@pytest.mark.parametrize("replace", [recompute_sublayers, compile_sublayers, fp8_feed_forwards])
def test_whoever_replaces_forward_declares_it(replace: Callable[[Decoder], None]) -> None:
    model = built(MODELS["exoformer"] | {"ffn": {"kind": "relu2", "hidden": 16}})
    replace(model)
    assert any("forward" in vars(part) for sublayer in model.sublayers for part in (sublayer, sublayer.body))
    assert not model.anchors.shares_gradient
