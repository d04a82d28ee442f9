"""Sublayers that share compiled code: the same step, and as few compilations as there are kinds of sublayers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from residua.model.decoder import Decoder, build
from residua.study import variants
from residua.train.config import RunConfig
from residua.train.rewrites.layers import structure
from tests.train.test_step import batch, make, weights

LAYERS = "model.layers=4"


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts graphs; compiled code is traced and run as it is."""
    compile_plainly, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_plainly(f, backend=counter, dynamic=False))
    return counter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "graphs"),
    [
        ("prenorm", 2),
        ("full_attnres", 2),
        ("block_attnres", 2),
        ("mgr", 2),
        ("mhc", 2),
        ("exoformer", 2),
        ("gatednorm", 2),
    ],
)
def test_layers_that_share_code_step_as_plain_ones_do(
    config: RunConfig, counter: CompileCounterWithBackend, variant: str, graphs: int
) -> None:
    changes = [LAYERS, "train.precision=bfloat16", *variants.overrides([variant], config.override([LAYERS]).model)]
    plain, compiled = (make(config, *changes, f"train.compile={how}") for how in ("off", "layers"))
    for seed in range(3):
        for step in (plain, compiled):
            step([batch(2, seed), batch(2, 7)])
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-3, atol=1e-4)
    assert counter.frame_count == graphs
    assert compiled.evaluate([batch(2, 3)]) == pytest.approx(plain.evaluate([batch(2, 3)]), rel=1e-3)


@pytest.mark.slow
def test_layers_that_are_recomputed_share_code_too(config: RunConfig, counter: CompileCounterWithBackend) -> None:
    changes = [LAYERS, "train.recompute=sublayers"]
    plain, compiled = (make(config, *changes, f"train.compile={how}") for how in ("off", "layers"))
    for step in (plain, compiled):
        step([batch(2, 0), batch(2, 7)])
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_a_rehearsal_runs_and_leaves_nothing_behind(
    config: RunConfig, counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["train.precision=bfloat16", "train.compile=layers"]
    first, second = (make(config, *changes) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr("residua.train.step.suppress", lambda *_: nullcontext())  # what fails is seen
        second._rehearse(batch(2, 0))
    assert counter.frame_count == 0 and all(p.grad is None for p in second.model.parameters())
    for step in (first, second):
        step([batch(2, 0), batch(2, 7)])
    assert torch.equal(weights(first.model), weights(second.model))


def _structures(config: RunConfig, *words: str) -> list[str]:
    config = config.override([LAYERS])
    model: Decoder = build(config.override(variants.overrides(list(words), config.model)).model)
    return [structure(sublayer) for sublayer in model.sublayers]


def test_sublayers_of_a_kind_have_one_structure(config: RunConfig) -> None:
    assert len(set(_structures(config, "prenorm"))) == 2


def test_a_layer_that_writes_the_anchors_has_a_structure_of_its_own(config: RunConfig) -> None:
    found = _structures(config, "nuresformer")
    assert found[0] not in found[1:] and len(set(found)) == 3


def test_layers_of_different_attention_have_different_structures(config: RunConfig) -> None:
    assert len(set(_structures(config, "hybrid"))) == 3
