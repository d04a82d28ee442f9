"""Models compile into one graph and compute the same. Code generation takes about 20 seconds a model."""

import pytest
import torch

import residua
from residua import ops
from residua.ops.short_convolution import launch as convolution
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

TOPOLOGIES = {
    "additive": {"kind": "additive"},
    "full_attnres": {"kind": "full_attnres"},
    "block_attnres": {"kind": "block_attnres", "sublayers_per_block": 3},
    "multi_gate": {"kind": "multi_gate", "streams": 3},
    "frac": {"kind": "frac", "fractions": 2},
    "dca": {"kind": "dca"},
    "gated_residual": {"kind": "gated_residual", "streams": 2, "rank": 3},
}


def loss_and_gradients(model: torch.nn.Module, run) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens, targets = tokens_and_targets()
    model.zero_grad()
    logits = run(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def check_compiled(model: torch.nn.Module, **how: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One graph with the same loss and gradients; returns those of the eager model."""
    loss, gradients = loss_and_gradients(model, model)
    again, compiled = loss_and_gradients(model, torch.compile(model, fullgraph=True, **how))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled, gradients, rtol=1e-4, atol=1e-6)
    return loss, gradients


@pytest.mark.parametrize("backend", only_nightly({"aot_eager": 0, "inductor": 1}, ["aot_eager"]))
@pytest.mark.parametrize("topology", only_nightly(TOPOLOGIES, ["full_attnres"]))
def test_compiled_model_is_one_graph_with_equal_gradients(topology: str, backend: str) -> None:
    """Inductor's C++ takes a compiler a minute where it is not cached."""
    torch._dynamo.reset()
    config = small(layers=2, width=32, ffn={"kind": "relu2", "hidden": 32}, topology=TOPOLOGIES[topology])
    check_compiled(randomise(residua.build(config), 0.05).float(), backend=backend)


MIXERS = {
    "kimi_delta": {"kind": "kimi_delta", "heads": 2, "head_dim": 8},
    "mla": {"kind": "mla", "heads": 2, "head_dim": 8, "shared_dim": 4, "rank": 12},
}


@pytest.mark.nightly
@pytest.mark.parametrize("mixer", MIXERS)
def test_kimi_linear_mixers_compile_into_one_graph(mixer: str) -> None:
    torch._dynamo.reset()
    model = randomise(residua.build(small(layers=1, attention=MIXERS[mixer])), 0.05).float()
    check_compiled(model, backend="aot_eager")


@pytest.mark.nightly
def test_a_fused_hybrid_mixture_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; PyTorch's grouped product also runs on a CPU. `make test` compiles either part alone."""
    monkeypatch.setattr(ops.grouped_linear, "_serves", lambda *_, **__: True)
    torch._dynamo.reset()
    config = small(
        layers=2, width=32, ffn={"kind": "moe", "hidden": 16, "experts": 4, "top_k": 2},
        attention={"kind": "hybrid", "softmax_every": 2, "softmax": {"heads": 2},
                   "linear": {"key_heads": 1, "value_heads": 2, "head_dim": 16}},
    )  # fmt: skip
    model = randomise(residua.build(config), 0.05).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = loss_and_gradients(model, model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        again, compiled_gradients = loss_and_gradients(model, compiled)
    torch.testing.assert_close(again, loss, rtol=1e-3, atol=0)
    for found, expected in zip(compiled_gradients, gradients, strict=True):
        assert float((found - expected).norm()) <= 0.05 * float(expected.norm())


def test_linear_attention_kernels_compile_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, in float32, and with tiles of a few tokens, for it takes them one by one."""
    monkeypatch.setattr(ops.delta_mixer, "_serves", lambda *_, **__: True)
    monkeypatch.setattr(convolution, "BACKWARD", convolution.TilePlan(4, 1, 2, 1))
    torch._dynamo.reset()
    attention = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 16}
    model = randomise(residua.build(small(layers=1, width=32, attention=attention)), 0.05).float()
    loss, gradients = check_compiled(model, backend="aot_eager")
    with ops.backend("reference"):
        reference, plain = loss_and_gradients(model, model)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients, plain, rtol=1e-3, atol=1e-6)
