"""Every operator on this machine, by the path that runs here, against its reference in float64: a self-test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from residua import ops
from residua.config.model import ModelConfig
from residua.doctor.findings import Finding, fix_of, in_words, quiet
from residua.doctor.helpers import run_beside
from residua.machine import available_cores, free_memory, python_command
from residua.model.decoder import build
from residua.ops import decode
from residua.ops._runtime.backend import Operator, backend
from residua.ops.hyper_connection import manifold_weights
from residua.report.terminal import Progress

N = 4
"""Streams, and heads."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative error of an output or a gradient."""
LONGEST = (
    "delta_mixer", "gated_delta", "a small model", "depth_attention", "expert_ffn", "gated_norm", "multi_gate",
    "hyper_step", "route", "squared_relu_ffn", "kimi_delta", "convolve_heads",
)  # fmt: skip
"""Checks whose kernels take longest to compile, 11 to 2 s each: helpers begin with them."""
_HOPPER = "; its kernel needs Hopper"


@dataclass(frozen=True)
class Call:
    """An operator with inputs; all but the `fixed` ones get gradients.

    `first`: compare only its first output, as the others differ between paths.
    """

    operator: Operator[..., Any]
    args: Sequence[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    first: bool = False
    fixed: Sequence[Tensor] = ()
    note: str = ""


class Draw:
    """Random inputs: activations in the dtype that is tested, weights in float32, the same on every machine.

    `sizes`: tokens, width, width of a head.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int = 192, width: int = 256) -> None:
        self.device, self.dtype = device, dtype
        self.sizes = tokens, width, width // N
        self._source = torch.Generator().manual_seed(0)

    def x(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Activations."""
        return self.w(*shape, scale=scale).to(self.dtype)

    def w(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Weights."""
        return (scale * torch.randn(shape, generator=self._source)).to(self.device)

    def below(self, bound: int, *shape: int) -> Tensor:
        """Whole numbers."""
        return torch.randint(bound, shape, generator=self._source).to(self.device)

    def ends(self, *ends: int) -> Tensor:
        """Where groups end."""
        return torch.tensor(ends, device=self.device)

    def angles(self, tokens: int, half: int) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, half] of rotary positions."""
        positions = torch.arange(tokens, device=self.device)[:, None]
        turned = positions / 10 ** torch.linspace(0, 4, half, device=self.device)
        return turned.cos(), turned.sin()


def _depth(d: Draw) -> dict[str, Call]:
    """Reads and writes along depth."""
    T, C, _ = d.sizes
    gates = (d.w(C), d.w(N + 1), d.w(C))
    weights = (d.w(T, N).softmax(-1), d.w(T, N, N).softmax(-1), d.w(N))
    phi = {"scale": d.w(), "phi": d.w(N * (N + 2), N * C, scale=(N * C) ** -0.5), "norm": "all"}
    return {
        "depth_attention": Call(ops.depth_attention, ([d.x(T, C) for _ in range(6)], d.w(C)), {"norm_weight": d.w(C)}),
        "multi_gate": Call(ops.multi_gate, (d.x(T, N, C), d.x(T, C), *gates)),
        "multi_gate_chain": Call(ops.multi_gate_chain, ([d.x(T, N, C)], d.x(T, C), *gates), first=True),
        "multi_gate_inverted": Call(
            ops.multi_gate_inverted, ([d.x(T, N, C)], d.x(T, C), *gates), {"last": True}, first=True
        ),
        "pool_streams": Call(ops.pool_streams, ([d.x(T, C) for _ in range(N)], d.w(C)), first=True),
        "hyper_step": Call(ops.hyper_step, (d.x(T, N, C), d.x(T, C), *weights), phi),
        "manifold_weights": Call(manifold_weights, (d.w(T, N * (N + 2)), d.w(3), d.w(N * (N + 2)), N, 20)),
        "sinkhorn": Call(ops.sinkhorn, (d.w(T, N, N), 20)),
    }


def _sublayers(d: Draw) -> dict[str, Call]:
    """Norms, heads, feed-forwards and the loss."""
    T, C, H = d.sizes
    table = d.angles(T, H // 2)
    sections = dict.fromkeys("qkvg", (N, H))
    anchors = {s: d.x(1, T, N, H) for s in sections}
    scales = [{s: d.w(N, H) for s in sections} for _ in range(2)]
    square = C**-0.5
    keys = torch.nn.functional.normalize(d.w(1, T, N, H), dim=-1).to(d.dtype)
    decay, share = -d.w(1, T, N).exp() / 8, d.w(1, T, N).sigmoid()
    return {
        "rms_norm": Call(ops.rms_norm, (d.x(T, C), d.w(C))),
        "rms_norm, scaled": Call(ops.rms_norm, (d.x(T, C), d.w(C)), {"affine": d.w(C)}),
        "add_norm": Call(ops.add_norm, (d.x(T, C), d.x(T, C), d.w(C))),
        "gated_norm": Call(ops.gated_norm, (d.x(T, C), d.w(C), d.w(16, C, scale=square), d.w(C, 16))),
        "norm_rotate": Call(ops.norm_rotate, (d.x(1, T, N, H), d.w(H), *table), fixed=table),
        "mix_projection": Call(ops.mix_projection, (d.x(1, T, N, H), d.x(1, T, N, H), d.w(N, H), d.w(N, H))),
        "mix_heads": Call(
            ops.mix_heads,
            (d.x(1, T, 4 * C), sections, anchors, *scales, table),
            {"gains": (d.w(H), d.w(H))},
            fixed=table,
        ),
        "gated_delta": Call(ops.gated_delta, (keys, keys.flip(1), d.x(1, T, N, H), decay, share), first=True),
        "convolve_heads": Call(ops.convolve_heads, (d.x(1, T, 6 * H), d.w(4, 4 * H), 1, 2)),
        "gated_output": Call(ops.gated_output, (d.x(1, T, N, H), d.x(1, T, N, H), d.w(H))),
        "delta_mixer": Call(
            ops.delta_mixer, (d.x(1, T, 6 * H), decay[..., :2], share[..., :2], d.w(4, 4 * H), d.w(H), 1), first=True
        ),
        "kimi_delta": Call(
            ops.kimi_delta, (keys, keys.flip(1), d.x(1, T, N, H), -d.w(1, T, N, H).exp() / 8, share), first=True
        ),
        "route": Call(ops.route, (d.x(T, C), d.w(16, C, scale=square), 3)),
        "expert_ffn": Call(
            ops.expert_ffn,
            (
                d.x(T, C),
                d.x(3, 2 * C, C, scale=square),
                d.x(3, C, C, scale=square),
                d.ends(T // 3, T // 3, T),
                "swiglu",
            ),
        ),
        "grouped_linear": Call(ops.grouped_linear, (d.x(T, C), d.x(3, C, C, scale=square), d.ends(T // 3, T // 3, T))),
        "squared_relu_ffn": Call(
            ops.squared_relu_ffn, (d.x(2048, C), d.x(512, C, scale=square), d.x(C, 512, scale=square)), note=_HOPPER
        ),
        "linear_cross_entropy": Call(
            ops.linear_cross_entropy, (d.x(T, C), d.w(1000, C, scale=square), d.below(1000, T)), {"z_loss": 1e-4}
        ),
        "training_cross_entropy": Call(  # only loss + z has a right gradient: without z, the loss
            ops.training_cross_entropy, (d.x(T, C), d.w(1000, C, scale=square), d.below(1000, T)), first=True
        ),
        "symmetric_product": Call(
            ops.symmetric_product, (d.x(2, 512, C, scale=square),), gradients=False, note=f"{_HOPPER} or Blackwell"
        ),
    }


def _decoding(d: Draw) -> dict[str, Call]:
    """One token per row, without gradients."""
    _, C, H = d.sizes
    rows, slots = 5, 40
    streams, gates = [d.x(rows, C) for _ in range(N)], (d.w(C), d.w(N + 1), d.w(C))
    cache = d.x(rows, slots, N, H), d.x(rows, slots, N, H)
    calls = {
        "decode.add_norm": Call(decode.add_norm, (d.x(rows, C), d.x(rows, C), d.w(C))),
        "decode.gate_norm": Call(decode.gate_norm, (streams, d.x(rows, C), *gates, d.w(C))),
        "decode.read_sources": Call(decode.read_sources, (streams, d.x(rows, C), None, d.w(3, C, scale=0.1), d.w(C))),
        "decode.attention": Call(decode.decode_attention, (d.x(rows, 8, H), *cache, d.below(slots, rows))),
        "decode.activate": Call(decode.activate, (d.x(rows, C), "swiglu")),
    }
    return {name: Call(call.operator, call.args, gradients=False) for name, call in calls.items()}


def checks(device: torch.device) -> dict[str, Callable[[], Finding]]:
    """The self-test by names, in order: every operator on random inputs, outputs and gradients, then a small model."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = Draw(device, dtype)
    calls = {**_depth(draw), **_sublayers(draw), **_decoding(draw)}
    operators = {name: partial(check, name, call, TOLERANCE[dtype]) for name, call in calls.items()}
    return {**operators, "a small model": partial(_attempt, "a small model", partial(_model, device))}


def self_test(device: torch.device, helpers: int | None = None, progress: Progress | None = None) -> Iterator[Finding]:
    """The findings of all checks: seconds; the first time on a GPU, kernels are compiled by this and other processes.

    `helpers`: how many others; unless given, as many as cores and the GPU's memory allow, and none without a GPU.
    """
    code = "import sys, torch; from residua.doctor import helpers, kernels\n"
    code += "helpers.serve(kernels.checks(torch.device(sys.argv[1])))"
    count = helper_count(device) if helpers is None else helpers
    return run_beside(checks(device), python_command("-c", code, device.type), count, first=LONGEST, progress=progress)


def helper_count(device: torch.device) -> int:
    """One for each further core, 7 at most, and a GiB of the GPU for each; none without a GPU or with two cores."""
    cores = available_cores()
    if device.type != "cuda" or cores <= 2:
        return 0
    return min(7, cores - 1, (free_memory(device) or 0) // 2**30)


def check(name: str, call: Call, tolerance: float) -> Finding:
    """Compare the path that runs here with the reference in float64."""

    def compare() -> tuple[float, float, str]:
        with torch.no_grad() if not call.gradients else torch.enable_grad():
            fused = call.operator.fuses(*call.args, **call.settings)
            ours = _run(call.operator, call, exact=False)
        path = f"fused{call.note}" if fused else "PyTorch reference"
        with backend("reference"):  # also for the operators that a reference is made of
            exact = _run(call.operator.reference, call, exact=True)
        return _error(ours, exact), tolerance, path

    return _attempt(name, compare)


def _attempt(name: str, compare: Callable[[], tuple[float, float, str]]) -> Finding:
    start = time.perf_counter()
    try:
        with quiet():
            error, tolerance, path = compare()
    except Exception as problem:
        return Finding("self-test", name, "failed", in_words(problem), fix_of(problem))
    words = f"{path}, relative error {error:.1e}, {time.perf_counter() - start:.1f} s"
    if error <= tolerance:
        return Finding("self-test", name, "ok", words)
    return Finding("self-test", name, "failed", f"{words}: more than {tolerance:g}", _REPORT)


_REPORT = "set residua.ops.backend('reference') to do without kernels, and report this with `residua doctor --json`"


def _run(function: Callable[..., Any], call: Call, exact: bool) -> list[Tensor]:
    """Outputs, and gradients of all inputs, of a function on the inputs of a call; `exact`: in float64."""

    def leaf(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        wanted = call.gradients and not any(t is fixed for fixed in call.fixed)
        return (t.detach().double() if exact else t.detach().clone()).requires_grad_(wanted)

    args, settings = tree_map_only(Tensor, leaf, (tuple(call.args), call.settings))
    made = function(*args, **settings)
    outputs = [t for t in tree_flatten(made[0] if call.first else made)[0] if isinstance(t, Tensor)]
    if not call.gradients:
        return outputs
    outputs = [t for t in outputs if t.requires_grad]
    leaves = [t for t in tree_flatten((args, settings))[0] if isinstance(t, Tensor) and t.requires_grad]
    source = torch.Generator().manual_seed(1)
    probes = [torch.randn(t.shape, generator=source).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, leaves, probes, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


def _error(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error; infinite if something is not finite or not there."""
    if len(ours) != len(exact):
        return float("inf")
    errors = [float((a.double() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(ours, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _model(device: torch.device) -> tuple[float, float, str]:
    """A small model's loss and gradients, by the path that runs here and by the references alone, in float32."""
    torch.manual_seed(0)
    config = ModelConfig.preset("tiny").override(["topology=full_attnres", "layers=2", "context=64"])
    model = build(config).to(device)
    tokens = torch.randint(config.vocab_size, (2, 65), device=device)
    found = []
    for choice in ("auto", "reference"):
        with backend(choice):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        found.append([loss.double(), *(g.double() for g in torch.autograd.grad(loss, [*model.parameters()]))])
    return _error(*found), 1e-3, f"loss {float(found[0][0]):.3f} and its gradients on {device.type}"
