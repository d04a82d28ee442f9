"""Telemetry: every figure by brute force, an outlier that grows while a run trains, and no effect when it is off."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import residua
from residua.config.run import RunConfig
from residua.data.loader import Batch
from residua.model import taps
from residua.model.decoder import Decoder
from residua.ops.multi_gate import inversion
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from residua.train.sinks import scalars
from residua.train.step import Step, build_step
from residua.train.telemetry import Gauges, Growth, first_tokens, interval, measured_tokens
from residua.train.telemetry_curves import FAMILIES, RAN_OUT, by_place, measured, over_places, telemetry_of, whole_model
from tests.model.small import small, tokens_and_targets
from tests.train.conftest import Lab, after_each_step

MODELS: dict[str, dict[str, Any]] = {
    "multi-gate": {
        "topology": {"kind": "multi_gate", "streams": 3, "memory": {"kind": "invert", "share": 0.05}},
        "attention": {"kind": "softmax", "heads": 2, "gate": "elementwise"},
        "anchors": {"kind": "exoformer", "mixing": {"kind": "dynamic", "hidden": 4}},
        "norm": {"kind": "preaffine"},
    },
    "attention residuals": {"topology": {"kind": "full_attnres"}, "anchors": {"kind": "resformer"}},
    "dense": {"topology": {"kind": "dense"}},
    "hyper-connections": {"topology": {"kind": "hyper", "streams": 2}},
}


def seen_by(model: Decoder) -> tuple[dict[tuple[str, int], float], dict[str, Tensor]]:
    """The figures of a forward pass, and everything that was tapped in it."""
    tokens, _ = tokens_and_targets()
    gauges = Gauges(model)
    with torch.no_grad(), taps.record() as seen:
        model.hidden(tokens)
    with torch.no_grad(), taps.record(gauges):
        model.hidden(tokens)
    return gauges.figures(), seen


def entropy(rows: Tensor) -> float:
    total = 0.0
    for row in rows.flatten(0, -2).tolist() if rows.dim() > 1 else [rows.tolist()]:
        shares = [abs(w) / sum(map(abs, row)) for w in row]
        total -= sum(p * math.log(p) for p in shares if p)
    return total / max(1, rows[..., 0].numel())


def expected(model: Decoder, seen: dict[str, Tensor]) -> dict[tuple[str, int], float]:
    """Every figure again, element by element, from the tapped tensors and the parameters."""
    found: dict[tuple[str, int], float] = {}
    readers = [seen[f"sublayer.{k}.input"] for k in range(len(model.sublayers))] + [seen["final.input"]]
    norms: list[Any] = [sublayer.norm for sublayer in model.sublayers] + [model.norm]
    for k, (h, norm) in enumerate(zip(readers, norms, strict=True)):
        table = np.abs(h.numpy().reshape(-1, h.shape[-1]))
        sizes = [sum(column) / len(column) for column in table.T.tolist()]
        gain = (norm.weight * getattr(norm, "affine", 1.0)).abs().tolist()
        found["peak", k] = max(map(max, table.tolist()))
        found["sink_ratio", k] = max(sizes) / sorted(sizes)[(len(sizes) - 1) // 2]
        found["gain", k] = sum(gain) / len(gain)
        found["sink_gain", k] = gain[sizes.index(max(sizes))]
    for name, value in seen.items():
        match name.split("."):
            case ["depth", k, "weights"]:
                found["entropy", int(k) + 1] = entropy(value)
            case ["depth", k, "pre"]:
                found["entropy", int(k)] = entropy(value)
            case ["depth", k, "streams"]:
                for i in range(value.shape[-2]):
                    found[f"stream.{i}", int(k) + 1] = max(abs(x) for x in value[..., i, :].flatten().tolist())
            case ["depth", k, "beta"]:
                beta = value.flatten().numpy()
                found["beta_mean", int(k)], found["beta_max", int(k)] = (
                    sum(beta.tolist()) / len(beta),
                    max(beta.tolist()),
                )
                for q, share in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
                    found[f"beta_{q}", int(k)] = np.quantile(beta, share)
                if int(k) < len(model.sublayers) - 1:  # the last junction keeps its streams
                    beyond = sorted(beta.tolist(), reverse=True)[math.ceil(0.05 * len(beta)) :]
                    found["recovery", int(k)] = 1 / (1 - beyond[0])
            case ["attention", layer, "gate"]:
                gates = value.flatten().tolist()
                found["gate_mean", int(layer)] = sum(gates) / len(gates)
                found["gate_closed", int(layer)] = sum(g < 0.2 for g in gates) / len(gates)
    return found | anchors(model, readers)


def anchors(model: Decoder, readers: Sequence[Tensor]) -> dict[tuple[str, int], float]:
    """The mean of λγ over tokens and elements, with γ recomputed from the input of each layer."""
    found = {}
    for layer in range(len(model.sublayers) // 2):
        sublayer: Any = model.sublayers[2 * layer]
        mix, h = sublayer.body.mix, readers[2 * layer]
        if not hasattr(mix, "anchor_scale"):
            continue
        gamma = torch.ones(*h.shape[:2], 2 * len(mix.pathways), dtype=torch.float64)
        if hasattr(mix, "gamma"):
            norm = sublayer.norm
            x = norm.affine * h
            x = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            hidden = torch.nn.functional.gelu(x @ mix.gamma.down.weight.T) @ mix.gamma.up.weight.T
            gamma = 1 / (1 + torch.exp(-(hidden + mix.gamma.bias)))
        for i, pathway in enumerate(mix.pathways):
            for name, scales, j in (("anchor", mix.anchor_scale, 2 * i), ("current", mix.current_scale, 2 * i + 1)):
                products = [a * b for a in scales[pathway].flatten().tolist() for b in gamma[..., j].flatten().tolist()]
                found[f"{name}.{pathway}", layer] = sum(products) / len(products)
    return found


@pytest.mark.parametrize("tables", MODELS.values(), ids=MODELS)
def test_every_figure_matches_brute_force_in_float64(tables: dict[str, Any]) -> None:
    model = residua.build(small(**tables)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        figures, seen = seen_by(model)
        wanted = expected(model, seen)
    assert figures.keys() == wanted.keys()
    assert figures == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    assert {name.partition(".")[0] for name, _ in figures} <= FAMILIES.keys()


def test_a_non_finite_figure_is_recorded_as_null() -> None:
    model = residua.build(small())
    gauges = Gauges(model)
    with torch.no_grad(), taps.record(gauges):
        model.embed.weight[:, 3] = math.inf
        model.hidden(tokens_and_targets()[0])
    assert gauges.table()["peak"][0] is None


def test_measurements_use_few_tokens_from_the_start_of_a_batch(config: RunConfig) -> None:
    for steps, every in (60, 20), (400, 20), (3570, 180), (10**5, 200):
        assert interval(config.override([f"train.steps={steps}", "train.log_every=20"]).train) == every
    assert interval(config.override(["train.steps=1000", "train.telemetry_every=5"]).train) == 5
    assert measured_tokens(config) == 64  # a hundredth of 2 steps of 64 tokens would be one
    large = config.override(["train.micro_batch=4096", "train.telemetry_every=5", "train.log_every=1"])
    assert measured_tokens(large) == 1024  # … of 5 · 131,072: 6,553
    assert measured_tokens(large.override(["train.telemetry_tokens=300"])) == 300
    batch = Batch(torch.arange(80).view(5, 16), torch.arange(80).view(5, 16), torch.zeros(5, 16, dtype=torch.long))
    assert first_tokens(batch, 64).tokens.shape == first_tokens(batch, 64).segments.shape == (4, 16)
    assert first_tokens(batch, 10).tokens.tolist() == [list(range(10))]
    assert first_tokens(batch, 1024).tokens.shape == (5, 16)


def grown(config: RunConfig, peaks: dict[int, float]) -> dict[int, str]:
    """The messages about a peak with these values, by step."""
    growth = Growth(config)
    said = {step: growth.check(step, {"peak": [1.0, peak], "stream.1": [None, 0.5]}) for step, peak in peaks.items()}
    return {step: sentence for step, sentence in said.items() if sentence is not None}


def test_tenfold_growth_within_a_tenth_of_a_run_is_reported_once(config: RunConfig) -> None:
    long = config.override(["train.steps=1000", "train.schedule.warmup=20"])
    said = grown(long, {200: 2.0, 250: 3.0, 290: 21.0, 310: 25.0, 390: 200.0, 400: 205.0})
    assert said.keys() == {290}  # 3 to 25 is not tenfold; 21 at step 290 is the new beginning, 200 not yet ten times it
    assert said[290].startswith(
        "step 290: the largest |h| before layer 0 feed-forward grew 10.5-fold in 90 steps, from 2"
    )
    assert grown(long, {200: 2.0, 290: 19.9}) == {} == grown(long, {200: 2.0, 301: 100.0})
    assert grown(long, {1: 0.1, 50: 2.0, 99: 90.0}) == {}  # an untrained model's peaks are small
    assert grown(long.override(["train.schedule.warmup=300"]), {200: 2.0, 250: 30.0}) == {}


def telemetry(folder: Path) -> list[dict[str, Any]]:
    """The records, without fields that depend on the clock."""
    records = telemetry_of(read_metrics(folder / "metrics.jsonl"))
    return [{key: value for key, value in record.items() if key not in ("took", "seconds")} for record in records]


@pytest.mark.slow
def test_outlier_planted_during_training_is_reported(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def plant(step: Step, done: int) -> None:  # taken back two steps later, so that the run can finish
        step.model.sublayers[1].body.out.weight[5] += {8: 30.0, 10: -30.0}.get(done, 0.0)

    after_each_step(monkeypatch, plant)
    steps = ("train.steps=12", "train.log_every=1", "train.validate_every=12", "train.save_every=12")
    lab.train(*steps, "train.telemetry=on")
    lines = [line for line in lab.printed.splitlines() if "-fold in" in line]
    assert len(lines) == 1 and lines[0].startswith("step 8: the largest |h| before "), lab.printed
    records = telemetry(lab / "run")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["said"] for record in records if "said" in record] == [lines]
    assert records[7]["peak"] > 10 * records[6]["peak"] == 10 * max(records[6]["figures"]["peak"])


@pytest.mark.slow
def test_telemetry_off_has_no_effect_on_training(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.train("train.telemetry=on", "train.telemetry_every=3", out="on")
    monkeypatch.setattr(Step, "observe", None)
    monkeypatch.setattr(taps, "record", None)
    monkeypatch.setattr("residua.train.trainer.inspect_model", lambda *_: {})
    lab.train("train.telemetry=off", out="off")
    assert [record["step"] for record in telemetry(lab / "on")] == [1, 3, 6]
    assert telemetry(lab / "off") == []
    on, off = (checkpoints(lab / name)[-1] for name in ("on", "off"))
    weights, others = (load_file(checkpoint.path / "model.safetensors") for checkpoint in (on, off))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    for key in ("rng", "loader", "totals", "watch"):
        assert on.state[key] == off.state[key]


@pytest.mark.slow
def test_junction_unsafe_to_invert_keeps_its_streams(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a resumed run."""
    bearable = 1.2 * torch.finfo(torch.float32).eps / 2  # Π 1/(1 − β) up to 1.2
    monkeypatch.setattr(inversion, "MAX_AMPLIFIED_ERROR", bearable)
    monkeypatch.setattr(inversion, "ERROR_HEADROOM", 1.0)
    mgr = "model.topology={kind='multi_gate', streams=2, memory={kind='invert'}}"
    lab.config = lab.config.override([mgr, "train.telemetry=on", "train.steps=4"])
    whole, cut = lab / "whole", lab / "cut"
    lab.train(out="whole")
    (line,) = [line for line in lab.printed.splitlines() if "too much for inversion" in line]
    assert line == (
        "step 1: the gates after sublayer 1 overwrite too much for inversion, so the streams there are stored from "
        "now on (0.0 MiB more memory)."
    )
    assert [record["kept"] for record in telemetry(whole)] == [[1]] * 3
    assert checkpoints(whole)[-1].state["kept"] == [1]
    shutil.copytree(whole, cut)
    shutil.rmtree(checkpoints(cut)[-1].path)
    kept: list[tuple[int, ...]] = []
    after_each_step(monkeypatch, lambda step, done: kept.append(step.model.topology.recovery().kept))
    lab.resume(out="cut")
    assert "too much for inversion" not in lab.printed
    assert set(kept) == {(1,)} and telemetry(cut) == telemetry(whole)
    ended = [load_file(checkpoints(folder)[-1].path / "model.safetensors") for folder in (whole, cut)]
    assert all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def test_keeping_streams_recaptures_graphs_and_ends_with_the_run(config: RunConfig) -> None:
    mgr = config.override(["model.topology={kind='multi_gate', streams=2, memory={kind='invert'}}"])
    step = build_step(residua.build(mgr.model), mgr.train, torch.device("cpu"))
    made: list[tuple[int, ...]] = []
    step._build_graphed = lambda: (made.append(step.model.topology.recovery().kept), None)  # type: ignore[method-assign]
    step.keep_streams([1, 2])
    step.keep_streams((1, 2))
    assert made == [(1, 2)]
    step.restart(residua.build(mgr.model), mgr.train)
    assert made == [(1, 2), ()] and step.model.topology.recovery().kept == ()


def test_trackers_and_pages_plot_every_figure_over_tokens() -> None:
    pytest.importorskip("plotly")
    tables = [{"peak": [1.0, 2.0 * i], "stream.0": [None, 3.0], "stream.1": [None, 4.0]} for i in range(1, 4)]
    records = [{"kind": "telemetry", "step": i, "tokens": 100 * i, "peak": 2.0 * i, "figures": table, "took": 0.1}
               for i, table in enumerate(tables, 1)]  # fmt: skip
    assert scalars(records[1]) == {
        "telemetry/tokens": 200, "telemetry/peak": 4.0, "telemetry/took": 0.1, "telemetry.peak/00": 1.0,
        "telemetry.peak/01": 4.0, "telemetry.stream.0/01": 3.0, "telemetry.stream.1/01": 4.0,
    }  # fmt: skip
    assert measured([records]) == ["peak", "stream"] and over_places(records[0], "stream") == 4.0
    assert whole_model(records, "peak") == [(100.0, 2.0), (200.0, 4.0), (300.0, 6.0)]
    drawn = by_place(records)
    assert list(drawn) == ["peak |h|", "peak |s| of a stream: 0", "peak |s| of a stream: 1"]
    last = drawn["peak |h|"].to_dict()["data"][1]
    assert last["name"] == "read by the final norm"
    assert list(last["x"]) == [100, 200, 300] and list(last["y"]) == [2, 4, 6]


def test_map_shows_which_input_exceeded_its_range_and_when() -> None:
    pytest.importorskip("plotly")
    tables = [{"reach.out": [0.5, 0.25 * i]} for i in range(1, 9)] + [
        {"reach.out": [0.5, 0.5], "reach.up": [None, 1.0], "reach.head": [None, None, 0.5]}
    ]
    records = [{"kind": "telemetry", "step": 10 * i, "tokens": i, "figures": table} for i, table in enumerate(tables)]
    drawn = by_place(records)[RAN_OUT].to_dict()["data"][0]
    assert list(drawn["y"]) == [
        "layer 0 attention, out", "layer 0 feed-forward, out", "layer 0 feed-forward, up", "head"
    ]  # fmt: skip
    assert [column for column, value in zip(drawn["x"], drawn["z"][1], strict=True) if value > 1] == [
        "40", "50", "60", "70"
    ]  # fmt: skip
    assert list(drawn["z"][2]) == [None] * 8 + [1.0]
    own_scales = [{**record, "figures": {"reach.out": [1.0]}} for record in records]
    assert RAN_OUT not in by_place(own_scales)
