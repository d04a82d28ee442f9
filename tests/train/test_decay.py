"""Plain decoupled weight decay beside the cautious one."""

from __future__ import annotations

import pytest
import torch

from residua.config.run import AdamW, Muon, RunConfig
from residua.config.settings import ConfigError
from residua.model.decoder import Decoder
from residua.train.optimizer import build_optimizer, hidden_matrices
from tests.train.standin import StandIn


@pytest.mark.slow  # torch's own optimizers import its compiler
def test_plain_decay_makes_adamw_the_one_of_torch_in_float64() -> None:
    ours, theirs = StandIn().double(), StandIn().double()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, AdamW(lr=0.02, weight_decay=0.5, decay="plain"))
    groups = [
        {"params": [theirs.fused.weight, theirs.out.weight], "weight_decay": 0.5},
        {"params": [theirs.gain], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(4):
        for model, its in ((ours, optimizer), (theirs, torchs)):
            model.set_gradients(seed)
            its.step()
    for name, weight in theirs.weights().items():
        torch.testing.assert_close(ours.weights()[name], weight, rtol=1e-10, atol=1e-12)


def test_plain_decay_with_muon_shrinks_every_weight_alike() -> None:
    """Muon's update does not depend on the weight: with decay the step differs by η·wd·x, at every element."""
    moved = {}
    for decay in (0.0, 0.3):
        torch.manual_seed(0)
        model = StandIn().double()
        before = model.weights()
        optimizer = build_optimizer(model, Muon(lr=0.05, weight_decay=decay, decay="plain"))
        model.set_gradients(0)
        optimizer.step()
        moved[decay] = model.weights()
    for name in ("fused.weight", "out.weight"):
        shrunk = moved[0.0][name] - moved[0.3][name]
        torch.testing.assert_close(shrunk, 0.05 * 0.3 * before[name], rtol=1e-9, atol=1e-12)
    assert torch.equal(moved[0.0]["gain"], moved[0.3]["gain"])


def test_mgr_presets_decay_matrices_and_embedding_only() -> None:
    """The paper's table 3 has one weight decay, 0.1; nanoGPT, which its code is based on, decays no vectors."""
    small = ["layers=5", "width=32", "attention.heads=2", "ffn.hidden=32", "vocab_size=64"]
    for preset in ("mgr-s-competitive4", "mgr-m-full", "mgr-l-block8"):
        run = RunConfig.find(preset).override([f"model.{change}" for change in small])
        model = Decoder(run.model)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        optimizer = build_optimizer(model, run.train.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved = {name: not torch.equal(before[name], parameter) for name, parameter in model.named_parameters()}
        matrices = {"embed.weight", *hidden_matrices(model)}
        assert moved == {name: name in matrices for name in moved}
        rate = run.train.optimizer.rest.lr
        torch.testing.assert_close(model.embed.weight, (1 - 0.1 * rate) * before["embed.weight"])


@pytest.mark.parametrize("table", [Muon(), AdamW()], ids=["muon", "adamw"])
def test_a_configuration_that_names_no_rule_decays_cautiously(table: Muon | AdamW) -> None:
    assert table.decay == "cautious"
    assert RunConfig.find("tiny").train.optimizer.decay == "cautious"
    assert RunConfig.find("exoformer-base").train.optimizer.decay == "cautious"


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.decay = 'plane' is not a choice: did you mean 'plain'"):
        RunConfig.find("tiny").override(["train.optimizer.decay=plane"])
