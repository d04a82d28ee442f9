"""An order of execution over layers: loops, listed layers, and counts of executions and parameters."""

import re
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model import taps
from residua.model.size import measure, measure_work
from residua.train.optimizer import build_optimizer
from tests.golden.compare import close, randomise
from tests.model.depth import SMALL
from tests.model.page_plugins import PAGES
from tests.model.small import small, tokens_and_targets
from tests.model.test_decoding import LOOP
from tests.model.test_refusals import INJECTED
from tests.trained import residua as command
from tests.trained import train_run

TOPOLOGIES = {name: t.model_dump(exclude_none=True) for name, t in SMALL.items() if not t.norms_inputs}


def pair(**tables: Any) -> tuple[residua.Decoder, residua.Decoder]:
    """A loop over the middle of three layers, and the same model written out: four layers, two with equal weights."""
    looped = randomise(residua.build(small(order=LOOP, **tables)), 0.1)
    config = looped.config.model_dump(exclude={"order"}) | {"layers": 4}
    if looped.config.topology.turned_layers:  # it needs an order; the one that lists the layers once will do
        config["topology"] = {"kind": "additive"}
    flat = residua.build(ModelConfig(**config)).double()
    flat.topology = looped.topology
    weights = looped.state_dict()
    flat.load_state_dict({name: weights[_source(name)] for name in flat.state_dict()})
    return looped, flat


def _source(name: str) -> str:
    """The looped model's name for a weight of the flat one: sublayers 4 and 5 are 2 and 3 again."""
    first, _, rest = name.partition(".")
    if first != "sublayers":
        return name
    k, _, rest = rest.partition(".")
    return f"sublayers.{[0, 1, 2, 3, 2, 3, 4, 5][int(k)]}.{rest}"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_loop_equals_the_unrolled_model(topology: str) -> None:
    """Logits, and of each weight the gradients of all its copies together."""
    looped, flat = pair(topology=TOPOLOGIES[topology])
    tokens, targets = tokens_and_targets()
    close("logits", looped(tokens), flat(tokens), 1e-12)
    for model in (looped, flat):
        model.zero_grad()
        model.loss(tokens, targets).backward()
    total: dict[str, Tensor] = {}
    for name, parameter in flat.named_parameters():
        if not name.startswith("topology."):
            total[_source(name)] = total.get(_source(name), 0) + parameter.grad
    for name, parameter in looped.named_parameters():
        if name in total:
            close(name, parameter.grad, total[name], 1e-9)


def test_one_turn_and_a_plain_list_equal_the_sequential_model() -> None:
    tokens, _ = tokens_and_targets()
    found = []
    for order in ({"kind": "sequential"}, LOOP | {"turns": 1}, {"kind": "listed", "layers": [0, 1, 2]}):
        torch.manual_seed(0)
        found.append(residua.build(small(order=order))(tokens))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_documented_order_is_read_as_described() -> None:
    (table,) = re.findall(r"```toml\n(\[model\.order\].*?)```", PAGES, re.S)
    config = small(layers=6, order=tomllib.loads(table)["model"]["order"])
    assert config.executed == (0, 1, 2, 3, 4, 1, 2, 3, 4, 5) and config.sublayers == 20


def test_orders_expand_to_executed_layers() -> None:
    assert small(layers=5, order=LOOP | {"turns": 3}).executed == (0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4)
    assert small(order={"kind": "listed", "layers": [0, 2, 1, 2]}).sublayers == 8
    config = small(order=LOOP)
    assert ModelConfig.from_dict(config.model_dump()) == config and not small().repeats
    assert len(residua.build(config).new_cache(1, 4).sublayers) == 8


def test_shards_of_single_layers_are_refused_for_loops() -> None:
    with pytest.raises(ConfigError, match=r"gathers each layer once: set parallel.unit=model"):
        RunConfig(model=small(order=LOOP).model_dump(), train={"accumulate": 2}, parallel={"shard": 2})


def test_flops_and_work_count_executions_sizes_count_layers() -> None:
    looped, flat = small(order=LOOP), small(layers=4)
    size, written_out = measure(looped), measure(flat)
    assert size.flops_per_token == written_out.flops_per_token
    assert measure_work(looped) == measure_work(flat)
    plain = measure(small())
    assert size.parameters == plain.parameters < written_out.parameters
    assert measure(small(order=LOOP, topology=INJECTED)).depth == 3 * 16


def test_the_optimizer_gets_each_looped_parameter_once() -> None:
    model = residua.build(small(order=LOOP))
    optimizer = build_optimizer(model, RunConfig(model=model.config.model_dump()).train.optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({*map(id, held)}) == len(list(model.parameters()))
    assert model.state_dict().keys() == residua.build(small()).state_dict().keys()


def test_taps_number_executions_not_layers() -> None:
    model = residua.build(small(order=LOOP, attention={"kind": "softmax", "heads": 2, "gate": "elementwise"}))
    with taps.record() as seen:
        model(tokens_and_targets()[0])
    for pattern, count in (("sublayer.{}.input", 8), ("attention.{}.gate", 4)):
        assert {pattern.format(k) for k in range(count)} <= seen.keys() and pattern.format(count) not in seen


@pytest.mark.slow
def test_every_verb_accepts_a_looped_model(tmp_path: Any, monkeypatch: Any) -> None:
    run = train_run(tmp_path, layers=3, order=LOOP)
    few = ("--tokens", 64, "--length", 16, "--ablation-tokens", 32, "--ablations", "all")
    assert command(monkeypatch, "export", run, "--out", tmp_path / "exported") == 0
    assert command(monkeypatch, "diagnose", run, *few, "--out", tmp_path / "diagnosis") == 0
    assert command(monkeypatch, "generate", run, "--prompt", "depth is", "--tokens", 4) == 0
    assert command(monkeypatch, "bench", "plan", run / "config.toml", "train.accumulate=4", "--gpus", 2) == 0
    smooth = ("--smooth", 0.5, "--inside", "--calibration", 2, "--tokens", 64, "--probes", 0)
    assert command(monkeypatch, "quantize", run, "--out", tmp_path / "fp8", *smooth) == 0
