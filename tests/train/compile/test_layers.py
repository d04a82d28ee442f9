"""Sublayers that share compiled code: the same step, with one compilation per kind of sublayer."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from residua.config import variants
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model import taps
from residua.model.decoder import Decoder, build
from residua.train import summary
from residua.train.compile.layers import structure
from residua.train.compile.precompile import Helpers
from residua.train.result import inspect_model
from residua.train.step import Step, build_step
from tests.nightly import only_nightly
from tests.train.test_step import CPU, batch, make, weights

pytestmark = pytest.mark.slow

LAYERS = "model.layers=4"
LAYERED = "train.compile=layers"
ROUNDED = "train.precision=bfloat16"


@pytest.fixture(params=["aot_eager"])
def counter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> CompileCounterWithBackend:
    """Count graphs; traced code runs without a compiler."""
    compile_plainly, counter = torch.compile, CompileCounterWithBackend(request.param)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_plainly(f, backend=counter, dynamic=False))
    return counter


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share code between sublayers, but run it without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


def _changes(config: RunConfig, *words: str) -> list[str]:
    return [LAYERS, *variants.overrides(list(words), config.override([LAYERS]).model)]


def _pair(config: RunConfig, *changes: str) -> tuple[Step, Step]:
    """A step without a compiler, and one on shared code."""
    return make(config, *changes, "train.compile=off"), make(config, *changes, LAYERED)


GRAPHS = {
    "prenorm": 2,
    "full_attnres": 2,
    "block_attnres": 2,
    "mgr": 2,
    "mhc": 2,
    "exoformer": 2,
    "gatednorm": 2,
    "nuresformer": 3,
    "hybrid": 3,
    "moe": 2,
}
EXACT = {"hybrid": "train.precision=float32", "moe": "train.precision=float32"}
"""Cases where a compiler's other rounding exceeds the tolerance, for the whole model as well as for sublayers."""


@pytest.mark.parametrize("variant", only_nightly(GRAPHS, but={"full_attnres", "mgr", "nuresformer", "hybrid", "moe"}))
def test_layers_that_share_code_train_bit_identically(config: RunConfig, shared: None, variant: str) -> None:
    plain, layered = _pair(config, ROUNDED, *_changes(config, variant))
    for step in (plain, layered):
        step([batch(2, 0), batch(2, 7)])
        step([batch(2, 1)])
    assert torch.equal(weights(layered.model), weights(plain.model))
    assert layered.evaluate([batch(2, 3)]) == plain.evaluate([batch(2, 3)])


@pytest.mark.parametrize(
    ("counter", "variant"),
    [("eager", "block_attnres"), *(pytest.param("aot_eager", name, marks=pytest.mark.nightly) for name in GRAPHS)],
    indirect=["counter"],
)
def test_layers_that_share_code_step_like_plain_ones(config: RunConfig, counter, variant) -> None:
    plain, compiled = _pair(config, EXACT.get(variant, ROUNDED), *_changes(config, variant))
    for seed in range(2):
        for step in (plain, compiled):
            step([batch(2, seed), batch(2, 7)])
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-3, atol=1e-4)
    assert counter.frame_count == GRAPHS[variant]


@pytest.mark.nightly
@pytest.mark.parametrize("variant", GRAPHS)
def test_layers_that_share_code_evaluate_like_plain_ones(config: RunConfig, counter, variant) -> None:
    """`make test` evaluates one variant, in the turns of two steps."""
    plain, compiled = _pair(config, EXACT.get(variant, ROUNDED), *_changes(config, variant))
    for step in (plain, compiled):
        step([batch(2, 0)])
    assert compiled.evaluate([batch(2, 3)]) == pytest.approx(plain.evaluate([batch(2, 3)]), rel=1e-3)


@pytest.mark.nightly
def test_recomputed_layers_also_share_code(config: RunConfig, counter: CompileCounterWithBackend) -> None:
    plain, compiled = _pair(config, LAYERS, "train.recompute=sublayers")
    for step in (plain, compiled):
        step([batch(2, 0), batch(2, 7)])
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.parametrize("counter", ["eager"], indirect=True)
def test_two_steps_can_train_one_model_in_turn(config: RunConfig, counter: CompileCounterWithBackend) -> None:
    models, losses = [], []
    for first in _pair(config, LAYERS, ROUNDED):
        how = "layers" if first.compiled else "off"
        second = build_step(first.model, config.override([ROUNDED, f"train.compile={how}"]).train, CPU)
        for seed, step in enumerate((second, first, second)):
            step([batch(2, seed)])
        models.append(weights(first.model))
        if first.compiled:
            assert counter.frame_count == 2
        losses.append(first.evaluate([batch(2, 3)]))
    torch.testing.assert_close(models[1], models[0], rtol=1e-3, atol=1e-4)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def _pickled(model: Decoder) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [deepcopy, _pickled])
@pytest.mark.parametrize("recompute", ["none", "sublayers"])
def test_a_copied_model_is_uncompiled_with_its_own_weights(config: RunConfig, shared, copied, recompute) -> None:
    plain, compiled = _pair(config, f"train.recompute={recompute}")
    twin, tokens, targets = copied(compiled.model), batch(2).tokens, batch(2).targets
    with torch.no_grad():
        for parameter in compiled.model.parameters():
            parameter.zero_()
    assert torch.equal(twin.loss(tokens, targets), plain.model.loss(tokens, targets))
    twin.loss(tokens, targets).backward()
    assert all(p.grad is not None for p in twin.sublayers.parameters())
    assert all(p.grad is None for p in compiled.model.parameters())


@pytest.mark.parametrize("changes", [["model.attention.gate=elementwise"], ["moe"]], ids=["gate", "moe"])
def test_inspection_covers_each_layer_separately(config: RunConfig, shared: None, changes: list[str]) -> None:
    changes = _changes(config, *changes) if changes == ["moe"] else changes
    plain, compiled = (inspect_model(step.model, batch(2)) for step in _pair(config, *changes))
    assert compiled == plain and ("gates" in plain or "experts" in plain)


def test_recording_taps_does_not_change_a_step(config: RunConfig, shared: None) -> None:
    alone, seen = make(config, ROUNDED, LAYERED), make(config, ROUNDED, LAYERED)
    alone([batch(2)])
    with taps.record() as found:
        seen([batch(2)])
    assert torch.equal(weights(seen.model), weights(alone.model))
    assert f"sublayer.{len(seen.model.sublayers) - 1}.output" in found


def _counted(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_a_hook_on_a_sublayer_runs_only_for_it(config: RunConfig, shared: None) -> None:
    """Hooks on modules inside a sublayer do not run, whenever they were added."""
    model = build(config.model)
    before, inside = _counted(model.sublayers[0]), _counted(model.sublayers[0].body)
    step = build_step(model, config.override([LAYERED]).train, CPU)
    after, silent = _counted(model.sublayers[2]), _counted(model.sublayers[2].body)
    step.evaluate([batch(2)])
    assert (len(before), len(after)) == (1, 1)
    assert (len(inside), len(silent)) == (0, 0)


@pytest.mark.parametrize(("variant", "heard"), [("prenorm", True), ("moe", False)])
def test_a_rehearsal_has_no_side_effects(config: RunConfig, shared: None, caplog, variant: str, heard: bool) -> None:
    """Experts in a loop need data, so the rehearsal fails: it is only logged at debug level."""
    changes = [ROUNDED, LAYERED, *_changes(config, variant)]
    first, second = (make(config, *changes) for _ in range(2))
    with caplog.at_level(logging.DEBUG, "residua"):
        second._rehearse(batch(2, 0))
    assert ("warm-up of the first step failed" not in caplog.text) == heard
    assert all(p.grad is None for p in second.model.parameters())
    for step in (first, second):
        step([batch(2, 0), batch(2, 7)])
    assert torch.equal(weights(first.model), weights(second.model))


def test_a_rehearsal_compiles_nothing(config: RunConfig, counter: CompileCounterWithBackend) -> None:
    make(config, ROUNDED, LAYERED)._rehearse(batch(2, 0))
    assert counter.frame_count == 0


class _Heard:
    """Helpers that compile nothing."""

    def __init__(self) -> None:
        self.steps = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.steps += 1
        yield


@pytest.mark.parametrize(("compiled", "forward_passes"), [("on", 1), (LAYERED.partition("=")[2], 2), ("off", 1)])
def test_helpers_receive_the_kernels_of_the_first_step(config, shared, monkeypatch, compiled, forward_passes) -> None:
    """A whole graph tells them what it calls while it is traced, so only layers have a forward pass without data."""
    helpers = _Heard()
    monkeypatch.setattr(Helpers, "start", lambda device: helpers)
    step, passes = make(config, f"train.compile={compiled}"), []
    forward = step._forward
    monkeypatch.setattr(step, "_forward", lambda *batch: (passes.append(1), forward(*batch))[1])
    step([batch(2, 0)])
    assert (helpers.steps, len(passes)) == (0 if compiled == "off" else 1, forward_passes)
    step([batch(2, 7)])
    assert helpers.steps <= 1


def test_several_processes_are_refused(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile = 'layers' supports one process, but parallel asks for 2"):
        config.override([LAYERED, "parallel.data=2"])


def test_the_summary_states_how_the_step_is_compiled(config: RunConfig, shared: None) -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        step = make(config, LAYERED)
        assert torch._dynamo.config.recompile_limit == 8 + len(step.model.sublayers)
    assert summary._mode(step, config.override([LAYERED])) == "compiled by layers"
    assert summary._compiled(config) == "compiled"
    deep = config.override([f"model.layers={summary.DEEP // 2}"])
    assert summary._compiled(deep).endswith("a minute or more (train.compile=layers starts sooner)")
    assert summary._compiled(deep.override(["parallel.data=2"])) == "compiled"


def _structures(config: RunConfig, *words: str) -> list[str]:
    model = build(config.override(_changes(config, *words)).model)
    return [structure(sublayer) for sublayer in model.sublayers]


def test_sublayers_of_a_kind_have_one_structure(config: RunConfig) -> None:
    kinds = {variant: len(set(_structures(config, variant))) for variant in ("prenorm", "nuresformer", "hybrid")}
    assert kinds == {"prenorm": 2, "nuresformer": 3, "hybrid": 3}
    first, *others = _structures(config, "nuresformer")
    assert first not in others, "it writes the anchors"


def test_a_sublayer_with_another_setting_has_another_structure(config: RunConfig) -> None:
    """Same classes and shapes, but another computation."""
    sublayer = build(config.model).sublayers[0]
    before = structure(sublayer)
    sublayer.norm.eps *= 2
    assert structure(sublayer) != before
