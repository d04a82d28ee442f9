"""Fused anchor mixing against the reference in float64, in the Triton interpreter and on a GPU."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad

from residua import ops
from tests.nightly import only_nightly
from tests.ops.harness import (
    assert_close,
    assert_equal,
    assert_one_graph,
    choose,
    gradients,
    interpreter,
    named_results,
    on_gpu,
    relative,
)

pytestmark = pytest.mark.slow


HEADS = {"q": (2, 6), "k": (1, 6), "v": (1, 6), "g": (2, 6)}
CASES = {
    "elementwise, all": {},
    "headwise": {"granularity": "headwise"},
    "scalar": {"granularity": "scalar"},
    "values only, gate per head": {"pathways": "v", "sections": HEADS | {"g": (2, 1)}},
    "queries and keys only": {"pathways": "qk"},
    "keys and gate": {"pathways": "kg"},
    "no gate, no qk-norm": {"pathways": "qkv", "sections": {s: HEADS[s] for s in "qkv"}, "normed": False},
    "dynamic": {"dynamic": True},
    "dynamic, subset, scalar": {"dynamic": True, "pathways": "vk", "granularity": "scalar"},
    "a table for each row": {"per_row": True},
    "wide heads, more than a tile of tokens": {"sections": {s: (1, 130) for s in "qkvg"}, "size": (2, 11)},
}


NIGHTLY = ("scalar", "queries and keys only", "dynamic")
"""Each is part of a case that stays: a subset, scalars and the dynamic network in one."""


class Layers:
    """Two layers that share their anchors, so that the anchors' gradient is a sum; leaves by name."""

    def __init__(
        self, sections=HEADS, pathways="qkvg", granularity="elementwise", normed=True, dynamic=False, per_row=False,
        size=(2, 5), device="cpu", dtype=torch.float32,
    ):  # fmt: skip
        self.sections, self.normed, self.pathways = sections, normed, pathways
        shape = {"elementwise": lambda h, d: (h, d), "headwise": lambda h, d: (h,), "scalar": lambda h, d: ()}
        width, head = sum(h * d for h, d in sections.values()), sections["q"][1]
        draw = torch.Generator(device).manual_seed(0)

        def random(*size, dtype=torch.float32):
            return torch.randn(size, device=device, generator=draw).to(dtype)

        self.leaves = {f"anchor {s}": random(*size, *sections[s], dtype=dtype) for s in pathways}
        for layer in "12":
            # columns of something wider: the rows are not dense
            self.leaves[f"projected {layer}"] = random(*size, width + 3, dtype=dtype)
            for s in pathways:
                for scale in ("own", "other"):
                    self.leaves[f"{scale} {s} {layer}"] = random(*shape[granularity](*sections[s]))
            if normed:
                self.leaves |= {f"gain {s} {layer}": random(head) for s in "qk"}
            if dynamic:
                self.leaves[f"gamma {layer}"] = random(*size, 2 * len(pathways), dtype=dtype)
        angles = random(*(size if per_row else size[1:]), head // 2)
        self.table = angles.cos(), angles.sin()

    def __call__(self, leaves: dict[str, Tensor], table: tuple[Tensor, Tensor]) -> list[Tensor]:
        anchors, made = [leaves[f"anchor {s}"] for s in self.pathways], []
        for layer in "12":
            own, anchors = ops.mix_heads(
                leaves[f"projected {layer}"][..., 3:],
                self.sections,
                dict(zip(self.pathways, anchors, strict=True)),
                {s: leaves[f"other {s} {layer}"] for s in self.pathways},
                {s: leaves[f"own {s} {layer}"] for s in self.pathways},
                table,
                gains=tuple(leaves[f"gain {s} {layer}"] for s in "qk") if self.normed else None,
                gamma=leaves.get(f"gamma {layer}"),
            )
            made += own.values()
        return made

    def results(self, choice: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in self.leaves.items()}
        with ops.backend(choice):
            made = self(leaves, tuple(t.to(dtype or t.dtype) for t in self.table))
        # gradients as attention returns them: heads before tokens
        draw = torch.Generator(made[0].device).manual_seed(1)
        probes = [
            torch.randn(y.transpose(1, 2).shape, generator=draw, device=y.device).to(y).transpose(1, 2) for y in made
        ]
        grads = torch.autograd.grad(made, list(leaves.values()), probes, materialize_grads=True)
        return dict(enumerate(made)) | dict(zip(leaves, grads, strict=True))


class SharedLayers(Layers):
    """The same with λ2 inside the projections, where one pass of the fused path has the anchors' whole gradient."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.leaves = {name: t for name, t in self.leaves.items() if not name.startswith("own")}
        self.hidden = 3 if "gamma 1" in self.leaves else 0
        for layer in "12":
            projected = self.leaves.pop(f"projected {layer}")[..., 3:]
            self.leaves[f"x {layer}"] = projected[..., :3]
            self.leaves[f"o {layer}"] = projected.flip(1)[..., : math.prod(self.sections["q"])].unflatten(
                -1, self.sections["q"]
            )
            columns = projected.flatten(0, 1)[:3].mT
            self.leaves[f"weight {layer}"] = torch.cat([columns, columns[: self.hidden].flip(0)])  # W', then W1
            if self.hidden:
                gamma = self.leaves.pop(f"gamma {layer}")
                self.leaves[f"up {layer}"] = gamma[0, : self.hidden].mT.float()
                self.leaves[f"bias {layer}"] = gamma[0, 3].float()

    def __call__(self, leaves: dict[str, Tensor], table: tuple[Tensor, Tensor]) -> list[Tensor]:
        scales = [{s: leaves[f"other {s} {layer}"] for s in self.pathways} for layer in "12"]
        if ops.chosen_backend() == "reference":
            one = torch.ones((), dtype=table[0].dtype, device=table[0].device)
            extra = {f"own {s} {n}": one for s in self.pathways for n in "12"}
            for layer in "12":
                both = linear(leaves[f"x {layer}"], leaves[f"weight {layer}"])
                projected, hidden = both.split([both.shape[-1] - self.hidden, self.hidden], -1)
                extra[f"projected {layer}"] = pad(projected, (3, 0))
                if self.hidden:
                    network = (leaves[f"{part} {layer}"].to(hidden.dtype) for part in ("up", "bias"))
                    extra[f"gamma {layer}"] = torch.sigmoid(linear(gelu(hidden), *network))
            made = super().__call__(leaves | extra, table)
            for last, layer in ((len(made) // 2 - 1, "1"), (len(made) - 1, "2")):
                if "g" in self.sections:
                    made[last] = leaves[f"o {layer}"] * torch.sigmoid(made[last])
            return made
        from residua.ops.mix_projection import anchor_gradients

        anchors, made = {s: leaves[f"anchor {s}"] for s in self.pathways}, []
        handles = anchor_gradients.share(anchors, scales, self.sections, hidden=self.hidden, **self.origin(leaves))
        for layer, own, handle in zip("12", scales, handles, strict=True):
            gains = tuple(leaves[f"gain {s} {layer}"] for s in "qk") if self.normed else None
            network = (leaves[f"up {layer}"], leaves[f"bias {layer}"]) if self.hidden else None
            heads, gate = anchor_gradients.mix_heads(
                leaves[f"x {layer}"], leaves[f"weight {layer}"], handle, self.sections, anchors, own, table,
                gains=gains, network=network,
            )  # fmt: skip
            o = leaves[f"o {layer}"]
            if gate is not None:
                self.gate, heads["g"] = gate, gate.apply(o)
            elif "g" in heads:
                heads["g"] = o * torch.sigmoid(heads["g"])
            made += heads.values()
        return made

    def origin(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        return {}


class SourcedLayers(SharedLayers):
    """The same where the anchors are norms of columns of one projection; the last is a column itself."""

    def __init__(self, **settings):
        super().__init__(**settings)
        raw = {s: self.leaves.pop(f"anchor {s}") for s in self.pathways}
        self.leaves["source"] = torch.cat([a.flatten(-2) for a in raw.values()], -1)
        self.leaves |= {f"norm {s}": 1 + 0.5 * raw[s][0, 0, 0].float() for s in self.pathways[:-1]}

    def __call__(self, leaves: dict[str, Tensor], table: tuple[Tensor, Tensor]) -> list[Tensor]:
        heads = [self.sections[s] for s in self.pathways]
        parts = leaves["source"].split([h * d for h, d in heads], -1)
        raw = {s: part.unflatten(-1, shape) for s, part, shape in zip(self.pathways, parts, heads, strict=True)}
        normed = {s: ops.rms(a, weight=leaves[f"norm {s}"]) if f"norm {s}" in leaves else a for s, a in raw.items()}
        return super().__call__(leaves | {f"anchor {s}": a for s, a in normed.items()}, table)

    def origin(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        return {"source": leaves["source"], "gains": {s: leaves[f"norm {s}"] for s in self.pathways[:-1]}}


def assert_exact(layers, tolerance=2e-6):
    assert_close(layers.results("triton"), layers.results("reference", torch.float64), tolerance)


SHARED = ["elementwise, all", "values only, gate per head", "dynamic, subset, scalar"]
KINDS = [(kind, case) for kind in (Layers, SharedLayers) for case in CASES]
REGULAR = [(kind, case) for kind, case in KINDS if (case in SHARED if kind is SharedLayers else case not in NIGHTLY)]


@interpreter
@pytest.mark.parametrize("case", only_nightly(KINDS, but=REGULAR), ids=lambda case: f"{case[0].__name__}, {case[1]}")
def test_two_layers_equal_the_reference_in_every_gradient(case):
    kind, name = case
    # the gradient of a λ for a whole head or layer is one sum of terms that cancel
    assert_exact(kind(**CASES[name]), 1e-4 if "granularity" in CASES[name] else 2e-6)


@interpreter
@pytest.mark.parametrize("most", [1, 2])
def test_anchor_source_gets_gradient_through_anchor_norms(most, monkeypatch):
    """With one launch for both layers, and with one for each."""
    from residua.ops.mix_projection import launch

    monkeypatch.setattr(launch, "MOST_READERS", most)
    monkeypatch.setattr(launch, "GATHER", launch.Tiling(16, 1))
    monkeypatch.setattr(launch, "FOLDED_BACKWARD", launch.Tiling(16, 1))
    assert_exact(SourcedLayers(pathways="kqv", dynamic=most == 1))


@interpreter
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gate_reports_the_values_it_applies(dynamic):
    layers = SharedLayers(dynamic=dynamic)
    made = layers.results("triton")
    torch.testing.assert_close(layers.leaves["o 2"] * layers.gate.values(), made[7])


@interpreter
def test_several_token_tiles_per_program_are_correct(monkeypatch):
    from residua.ops.mix_projection import launch

    monkeypatch.setattr(launch, "FORWARD", launch.Tiling(16, 1))
    monkeypatch.setattr(launch, "BACKWARD", launch.Tiling(16, 1))
    assert_exact(Layers(dynamic=True))


@interpreter
def test_empty_input_gives_empty_output_and_zero_gradients():
    results = Layers(size=(0, 5), dynamic=True).results("triton")
    assert results[0].shape == (0, 5, 2, 6)
    assert not any(results[f"{name} q 1"].any() for name in ("own", "other", "gain"))


def heads(layers):
    """The fused layers as a function of their leaves."""
    return choose("triton", lambda *leaves: layers(dict(zip(layers.leaves, leaves, strict=True)), layers.table))


@interpreter
@pytest.mark.parametrize("kind", only_nightly([Layers, SharedLayers], but=[SharedLayers]))
def test_compiles_into_one_graph(kind):
    layers = kind(pathways="kg", size=(1, 3))
    assert_one_graph(heads(layers), list(layers.leaves.values()), exact=False)


@interpreter
@pytest.mark.parametrize("kind", [Layers, SharedLayers])
def test_works_inside_activation_checkpointing(kind):
    layers = kind(pathways="qv", size=(1, 3))
    run = heads(layers)
    with ops.backend("triton"):
        kept = partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False)
        assert_equal(*(gradients(each, list(layers.leaves.values())) for each in (run, kept)))


SCALES = {"elementwise": (3, 7), "headwise": (3,), "scalar": (), "one axis": (3, 1)}


def mixed(choice: str, inputs: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return named_results(choose(choice, ops.mix_projection, eps=1e-3), inputs, ("y",), dtype)


@interpreter
@pytest.mark.parametrize("normed", [False, True], ids=["raw", "normed"])
@pytest.mark.parametrize("scale", SCALES)
def test_one_projection_equals_the_reference_in_every_gradient(scale, normed):
    inputs = {
        "current": torch.randn(2, 3, 3, 9)[..., 1:8],
        "anchor": torch.randn(2, 3, 3, 7),
        "current_scale": torch.randn(SCALES[scale]),
        "anchor_scale": torch.randn(SCALES[scale]),
    } | ({"norm_weight": torch.randn(7)} if normed else {})
    assert_close(mixed("triton", inputs), mixed("reference", inputs, torch.float64), 2e-6)


@interpreter
def test_per_token_scales_fall_back_to_the_reference():
    x, scale = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 1)
    with ops.backend("triton"), pytest.raises(ValueError, match="has no fused kernel of mix_projection"):
        ops.mix_projection(x, x, scale, scale)


@on_gpu
@pytest.mark.parametrize(
    ("kind", "head"), [*product((Layers, SharedLayers, SourcedLayers), (64, 96, 128)), (Layers, 256)]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)], ids=str)
def test_gpu_gradients_are_correct(dtype, tolerance, dynamic, kind, head):
    sections = {"q": (6, head), "k": (2, head), "v": (2, head), "g": (6, head)}
    layers = kind(sections=sections, dynamic=dynamic, size=(3, 700), device="cuda", dtype=dtype)
    ours, again = layers.results("triton"), layers.results("triton")
    assert_equal(list(ours.values()), list(again.values()))
    exact = layers.results("reference", torch.float64)
    network = [name for name in exact if str(name).startswith(("up", "bias"))] if dtype == torch.bfloat16 else []
    if network:  # sums over tokens that nearly cancel: unfused in bfloat16 they are up to 2e-2 off
        plain = layers.results("reference")
        for name in network:
            assert relative(ours.pop(name), exact[name]) <= max(tolerance, 1.5 * relative(plain[name], exact[name]))
            del exact[name]
    assert_close(ours, exact, tolerance)


@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("shape", [(6, 128), (1, 1000), (10, 128), (1, 1280), (3, 333)], ids=str)
def test_gpu_projection_of_any_width_is_correct(shape, dtype, tolerance):
    inputs = {
        "current": torch.randn(900, *shape, device="cuda").to(dtype),
        "anchor": torch.randn(900, *shape, device="cuda").to(dtype),
        "current_scale": torch.randn(shape, device="cuda"),
        "anchor_scale": torch.randn(shape, device="cuda"),
        "norm_weight": torch.randn(shape[-1], device="cuda"),
    }
    assert_close(mixed("triton", inputs), mixed("reference", inputs, torch.float64), tolerance)
