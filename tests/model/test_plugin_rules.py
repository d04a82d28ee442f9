"""A plugin that breaks a rule of docs/extend.md is refused before it trains; one that follows them is accepted."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.config import plugins
from residua.config.choices import AnchorChoice, NormChoice, TopologyChoice
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model import builders, decoder
from residua.model.anchor_kinds import ANCHORS as KNOWN_ANCHORS
from residua.model.anchor_kinds import register_anchors
from residua.model.anchors import LayerPlace, Unmixed
from residua.model.builders import check_part, check_plugins, junctions, normed
from residua.model.norm import NORMS as KNOWN_NORMS
from residua.model.norm import Norm, build_norm, register_norm
from residua.model.topology import TOPOLOGIES, State, Topology, build_topology, register_topology
from residua.storage.run import read_metrics
from residua.train.start import check_model
from tests.model.combinations import ANCHORS, NORMS
from tests.model.depth import SMALL
from tests.model.small import small
from tests.trained import residua as run_verb
from tests.trained import train_run


class OwnChoice(TopologyChoice):
    kind: Literal["own"] = "own"
    fault: str = ""


class Own(Topology):
    """h ← h + gain ⊙ y, with a fault or an oddity that `config.fault` names."""

    def __init__(self, config: OwnChoice, sublayers: int, width: int) -> None:
        super().__init__()
        self.fault, self.calls = config.fault, 0
        self.gain = nn.Parameter(torch.empty(width))
        self.gate = nn.Parameter(torch.empty(()))
        self.mixing = nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.empty(2, width), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if self.fault != "init":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)
        if self.fault != "parameter":
            nn.init.ones_(self.gain)
        nn.init.ones_(self.scale if self.fault != "half a buffer" else self.scale[:1])

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> Any:
        self.calls += 1
        h = state[0] + self.gain * self.scale[0] * y
        faults = {
            "future": lambda: h + self.gate * h.flip(1).cumsum(1).flip(1),
            "past": lambda: h + self.gate * h.cumsum(1),
            "rows": lambda: h + self.gate * h.mean(0, keepdim=True),
            "calls": lambda: h * self.calls,
            "shape": lambda: h[:, :-1],
            "dropout": lambda: nn.functional.dropout(h, 0.5),
            "matrix": lambda: self.mixing(h),
            "in place": lambda: y.add_(h),
            "not a number": lambda: h * float("nan"),
            "wide": lambda: h.double(),
        }
        h = faults.get(self.fault, lambda: h)()
        states = {"tensor": h, "list": [h], "nested": ((h,),)}
        if self.fault == "raises":
            raise RuntimeError("only on a GPU")
        return h if self.fault == "no state" else (h, states.get(self.fault, (h,)))


class OwnNormChoice(NormChoice):
    kind: Literal["own_norm"] = "own_norm"
    fault: str = ""


class OwnNorm(Norm):
    def __init__(self, config: OwnNormChoice, width: int) -> None:
        super().__init__()
        self.fault = config.fault
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        if self.fault != "parameter":
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        dims = {"future": (1, 2), "shape": 1}.get(self.fault, 2)
        y = self.weight * x / x.abs().mean(dims, keepdim=True)
        return y.sum(1) if self.fault == "shape" else y


class OwnAnchorChoice(AnchorChoice):
    kind: Literal["own_anchors"] = "own_anchors"
    fault: str = ""


class OwnAnchors(Unmixed):
    """V̂ = V + V_1, with a fault that `config.fault` names."""

    def __init__(self, config: OwnAnchorChoice, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.fault = config.fault

    def mix(self, own: Any, x: Tensor, anchors: Any, context: Any) -> Any:
        if self.fault == "raises":
            raise RuntimeError("only on a GPU")
        faults = {"future": lambda v: v.flip(1).cumsum(1).flip(1), "shape": lambda v: v[:, :-1]}
        value = faults.get(self.fault, lambda v: v)(own["v"])
        value = value + anchors[0] if anchors and self.fault != "shape" else value
        return own | {"v": value}, [value] if self.fault == "list" else (value,)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register_topology(OwnChoice, Own)
    register_norm(OwnNormChoice, OwnNorm)
    register_anchors(OwnAnchorChoice, OwnAnchors)
    yield
    for root, built, choice in (
        (TopologyChoice, TOPOLOGIES, OwnChoice), (NormChoice, KNOWN_NORMS, OwnNormChoice),
        (AnchorChoice, KNOWN_ANCHORS, OwnAnchorChoice),
    ):  # fmt: skip
        del plugins._MEMBERS[root][choice.model_fields["kind"].default], built[choice]
        plugins._ADAPTERS.pop(root, None)


def own(fault: str) -> dict[str, str]:
    return {"kind": "own", "fault": fault}


FAULTS = {
    "tensor": "`step` returns a tensor of shape .* as the state: return a tuple of tensors",
    "list": "`step` returns a list as the state: return a tuple of tensors",
    "nested": "`step` returns a tuple with a tuple as the state: return a flat tuple of tensors",
    "no state": "`step` returns a tensor of shape .*: return the next input and the state",
    "shape": r"`step` returns a tensor of shape \(2, 3, 16\) for a tensor of shape \(2, 4, 16\)",
    "parameter": "gain is not initialized: fill every parameter and buffer",
    "half a buffer": "scale is not initialized: fill every parameter and buffer",
    "init": r"gain, gate, scale is not initialized: .* end `__init__` with self.reset_parameters\(\)",
    "future": "depends on other tokens of the sequence",
    "past": "depends on other tokens of the sequence",
    "rows": "depends on other sequences of the batch",
    "calls": "two calls with the same tensors return different results",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_topology_that_breaks_a_rule_is_refused(fault: str) -> None:
    config = small(topology=own(fault))
    sentence = rf"^the topology 'own' of the plugin {__name__} breaks a rule of docs/extend.md: .*{FAULTS[fault]}.*\.$"
    for refused in (lambda: residua.build(config), lambda: check_model(RunConfig(model=config))):
        with pytest.raises(ConfigError, match=sentence):
            refused()


@pytest.mark.parametrize("fault", ["future", "shape"])
def test_a_norm_that_breaks_a_rule_is_refused(fault: str) -> None:
    reason = FAULTS[fault] if fault == "future" else "`forward`"
    with pytest.raises(ConfigError, match=f"^the norm 'own_norm' of the plugin {__name__} breaks.*{reason}"):
        check_plugins(small(norm={"kind": "own_norm", "fault": fault}))


ANCHOR_FAULTS = {
    "future": FAULTS["future"],
    "list": "`mix` returns a list as the anchors: return a tuple of tensors",
    "shape": r"`mix` returns a tensor of shape \(2, 3, 2, 8\) as 'v': return one of shape \(2, 4, 2, 8\)",
}


@pytest.mark.parametrize("fault", ANCHOR_FAULTS)
def test_anchors_that_break_a_rule_are_refused(fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^the anchors 'own_anchors' of the plugin .*{ANCHOR_FAULTS[fault]}"):
        check_plugins(small(anchors={"kind": "own_anchors", "fault": fault}))
    check_plugins(small(anchors={"kind": "own_anchors"}))


@pytest.mark.parametrize("oddity", ["", "dropout", "matrix", "in place", "not a number", "wide"])
def test_unusual_plugins_that_follow_the_rules_pass(oddity: str) -> None:
    config = OwnChoice(fault=oddity)
    check_part(partial(build_topology, config, 6, 16), junctions, (7, 2, 4, 16))
    residua.build(small(topology=own(oddity), norm={"kind": "own_norm"}))


def test_a_part_may_initialise_its_weights_only_in_init() -> None:
    check_plugins(small(norm={"kind": "own_norm", "fault": "parameter"}))


@pytest.mark.parametrize("width", [16, 34])
@pytest.mark.parametrize("name", SMALL)
def test_built_in_topologies_follow_the_plugin_rules(name: str, width: int) -> None:
    check_part(partial(build_topology, SMALL[name], 6, width), junctions, (7, 2, 4, width))


@pytest.mark.parametrize("name", ANCHORS)
def test_built_in_anchors_follow_the_plugin_rules(name: str) -> None:
    config = small(
        anchors=ANCHORS[name], attention={"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "elementwise"}
    )
    check_part(partial(builders._Anchored, config), builders.mixed_heads, (7, 2, 4, 16))


@pytest.mark.parametrize("name", NORMS)
def test_built_in_norms_follow_the_plugin_rules(name: str) -> None:
    check_part(partial(build_norm, NormChoice.choose(NORMS[name]), 16), normed, (7, 2, 4, 16))


@pytest.mark.parametrize(("part", "kind"), [("topology", "own"), ("anchors", "own_anchors")])
def test_trial_raises_the_error_of_a_plugin(part: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="only on a GPU") as met:
        residua.build(small(**{part: {"kind": kind, "fault": "raises"}}))
    assert f"the trial of the {part} '{kind}'" in met.value.__notes__[0]


def test_trial_with_a_gpu_only_warns_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if 'RuntimeError("only on' in text)
    warning = rf"at {__file__}, line {line}: RuntimeError: only on a GPU; training continues"
    with pytest.warns(UserWarning, match=warning):
        check_plugins(small(topology=own("raises")))


def test_built_in_and_oversized_parts_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(builders, "_try", lambda *arguments: tried.append(arguments))
    check_plugins(small())
    assert not tried
    check_plugins(small(topology=own("")))
    assert len(tried) == 1
    monkeypatch.setattr(builders, "LARGEST", 100)
    check_plugins(small(topology=own("")))
    assert len(tried) == 1


def test_trial_changes_no_random_numbers_or_weights() -> None:
    config = small(topology=own(""), norm={"kind": "own_norm"})
    torch.manual_seed(3)
    unchecked, after = decoder.build(config), torch.rand(3)
    torch.manual_seed(3)
    checked = residua.build(config)
    assert torch.equal(torch.rand(3), after)
    assert all(map(torch.equal, checked.state_dict().values(), unchecked.state_dict().values()))
    with torch.device("meta"):
        assert residua.build(config).embed.weight.is_meta


@pytest.mark.slow
def test_training_is_identical_with_and_without_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for name in ("checked", "unchecked"):
        (tmp_path / name).mkdir()
        run = train_run(tmp_path / name, topology=own("dropout"), norm={"kind": "own_norm"})
        losses.append([row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row])
        monkeypatch.setattr("residua.train.start.check_plugins", lambda config: None)
    assert losses[0] and losses[0] == losses[1]


@pytest.mark.slow
def test_train_and_compare_refuse_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    config = train_run(tmp_path, topology=own("")) / "config.toml"
    leaking = "model.topology.fault=future"
    assert run_verb(monkeypatch, "train", config, leaking, "--out", tmp_path / "out") == 2
    assert "depends on other tokens" in capsys.readouterr().err
    how = ("--base", config, "--match", "none", "--set", leaking, "--out", tmp_path / "out")
    assert run_verb(monkeypatch, "compare", "base", "prenorm", *how) == 2
    assert "residua: variant 'base': the topology 'own' of the plugin" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpu_generators_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    check_plugins(small(topology=own("")))
    assert seeds == []
