"""`residua.build` and `residua.build_topology`, and the checks of plugin parts against the rules of docs/extend.md.

The checks run a plugin's topology, anchors or norm on a few tokens before training: a part that violates a rule would
otherwise train and give wrong numbers. Tests check Residua's own parts. The caller's random state is preserved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from residua.config import choices
from residua.config.model import ModelConfig
from residua.config.plugins import plugin_place
from residua.config.settings import ConfigError, explain
from residua.model.anchor_kinds import build_mix
from residua.model.context import Context, Reads, flat_reads
from residua.model.decoder import Decoder, build_anchor_source, place_of
from residua.model.decoder import build as build_decoder
from residua.model.norm import build_norm
from residua.model.topology import State, Topology
from residua.model.topology import build_topology as build_chosen
from residua.reading import brief

ROWS, TOKENS = 2, 4
CHANGED = (0, 1)
"""The row and the token that a check changes, to see which outputs depend on them."""
LARGEST = 20_000_000
"""Check only parts with at most this many parameters: larger ones would take over a second."""

Outputs = Callable[[Any, Tensor], Iterator[tuple[str, Any]]]
"""Takes a part and random tensors [n, B, T, C]; yields each call's name and its result, expected [B, T, C]."""


class _Breach(Exception):
    """A violated rule, and how to follow it."""


def build(config: ModelConfig) -> Decoder:
    """Build and initialise the model that a configuration describes, after checking the parts from plugins."""
    if isinstance(config, ModelConfig):
        check_plugins(config)
    return build_decoder(config)


def build_topology(config: choices.TopologyChoice | Mapping[str, Any], sublayers: int, width: int) -> Topology:
    """Build the topology that a configuration describes, for a model with `sublayers` sublayers.

    A table is accepted too: {"kind": "multi_gate", "streams": 4} is choices.MultiGate(streams=4).
    """
    choice = config if isinstance(config, choices.TopologyChoice) else _chosen(dict(config))
    choice.check_width(width)
    return build_chosen(choice, sublayers, width)


def _chosen(table: dict[str, Any]) -> choices.TopologyChoice:
    try:
        return choices.TopologyChoice.choose(table)
    except ValidationError as error:
        raise ConfigError(explain(error, choices.TopologyChoice)) from None


def check_plugins(config: ModelConfig) -> None:
    """Refuse a plugin part that breaks a rule of docs/extend.md; its own errors propagate."""
    sublayers, width = config.sublayers, config.width
    topology = partial(build_chosen, config.topology, sublayers, width)
    norm = partial(build_norm, config.norm, width)
    for what, choice, make, outputs in (
        ("topology", config.topology, topology, junctions),
        ("anchors", config.anchors, partial(_Anchored, config), mixed_heads),
        ("norm", config.norm, norm, normed),
    ):
        plugin = type(choice).__module__
        if plugin.startswith("residua."):
            continue
        try:
            check_part(make, outputs, (sublayers + 1, ROWS, TOKENS, width))
        except _Breach as breach:
            whose = f"the {what} {choice.kind!r} of the plugin {plugin}"
            raise ConfigError(f"{whose} breaks a rule of docs/extend.md: {breach}.") from None
        except Exception as error:
            trial = f"the trial of the {what} {choice.kind!r} of the plugin {plugin}"
            if not torch.cuda.is_available():
                error.add_note(f"This was {trial}, on the CPU before training (docs/extend.md).")
                raise
            _warn(error, trial, plugin)


def _warn(error: Exception, trial: str, plugin: str) -> None:
    """Warn about an error in a part that may only need a GPU; training will show whether it works."""
    place = plugin_place(error, plugin)
    where = "" if place is None else f" at {place}"
    words = brief(f"{type(error).__name__}: {error}")
    warnings.warn(f"{trial} on the CPU raised an error{where}: {words}; training continues.", stacklevel=4)


def check_part(make: Callable[[], nn.Module], outputs: Outputs, shape: tuple[int, ...]) -> None:
    """Build a part and run it on random tensors [n, B, T, C]; its own errors propagate."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in make().parameters())
        if parameters <= LARGEST:
            _try(_filled(make), outputs, shape)


class _Poisoned(TorchFunctionMode):
    """Fill new memory with NaN until it is initialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if "empty" in getattr(func, "__name__", "") and returned.is_floating_point():
            with torch.no_grad():
                returned.fill_(math.nan)
        return returned


def _filled(make: Callable[[], nn.Module]) -> nn.Module:
    """The part, after checking that `__init__` or `reset_parameters` initialises all of it."""
    with _Poisoned():
        part = make()
    tensors = chain(part.named_parameters(), part.named_buffers())
    if names := ", ".join(name for name, tensor in tensors if tensor.isnan().any()):
        raise _Breach(
            f"{names} is not initialized: fill every parameter and buffer in `reset_parameters` of its module, "
            "and end `__init__` with self.reset_parameters()"
        )
    return part


def junctions(topology: Any, x: Tensor) -> Iterator[tuple[str, Any]]:
    """The inputs of a topology's readers, for the embedding x[0] and sublayer outputs x[1], x[2], …"""
    ids = ((x[0].sum(-1) * 8).long() % 8,) if topology.reads_tokens else ()
    h, state = _pair("open", topology.open(x[0].clone(), *ids))  # it may overwrite its inputs
    yield from (("open", read) for read in _reads(h))
    for k, y in enumerate(x[1:]):
        h, state = _pair("step", topology.step(k, y.clone(), state, *ids))
        yield from (("step", read) for read in _reads(h))


def _pair(call: str, returned: Any, names: tuple[str, str] = ("next input", "state")) -> tuple[Any, State]:
    """Check that a call returned a pair, by default the next input and the state; `names` are its elements."""
    first, second = names
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise _Breach(f"`{call}` returns {_described(returned)}: return the {first} and the {second}, as in h, (h,)")
    h, state = returned
    if not isinstance(state, tuple):
        raise _Breach(f"`{call}` returns {_described(state)} as the {second}: return a tuple of tensors, such as (h,)")
    for inner in state:
        if not isinstance(inner, Tensor):
            described = _described(inner)
            raise _Breach(f"`{call}` returns a tuple with {described} as the {second}: return a flat tuple of tensors")
    return h, state


def _reads(h: Any) -> tuple[Any, ...]:
    return flat_reads(h) if isinstance(h, Reads) else (h,)


class _Anchored(nn.Module):
    """The modules of a kind of anchors: one that reads the embedding, and one for each softmax layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.source = build_anchor_source(config)
        softmax, layers = config.softmax, config.softmax_layers
        places = [] if softmax is None else [place_of(config, softmax, layer) for layer in layers]
        self.layers = nn.ModuleList(build_mix(config.anchors, place) for place in places)


def mixed_heads(anchored: Any, x: Tensor) -> Iterator[tuple[str, Any]]:
    """The heads that layers mix from x[1], x[2], … and the anchors, reshaped to pieces [B, T, C]."""
    context = Context(None, None, tokens=(x[0].sum(-1) * 8).long() % 8)
    anchors = anchored.source.open(x[0].clone(), context)
    for mix, y in zip(anchored.layers, x[1:], strict=False):
        rows = sum(heads * width for heads, width in mix.sections.values())
        projected = y.repeat(1, 1, -(-rows // y.shape[-1]))[..., :rows]
        projections = mix.split(projected)
        mixed, anchors = _pair("mix", mix.mix(dict(projections), y.clone(), anchors, context), ("heads", "anchors"))
        for pathway, head in projections.items():
            if not isinstance(mixed.get(pathway), Tensor) or mixed[pathway].shape != head.shape:
                description = _described(mixed.get(pathway))
                raise _Breach(f"`mix` returns {description} as {pathway!r}: return one of shape {tuple(head.shape)}")
        heads = torch.cat(
            [mixed[pathway].flatten(2) for pathway in projections] + [anchor.flatten(2) for anchor in anchors], 2
        )
        padded = nn.functional.pad(heads, (0, -heads.shape[-1] % y.shape[-1]))
        yield from (("mix", piece) for piece in padded.split(y.shape[-1], 2))


def normed(norm: Any, x: Tensor) -> Iterator[tuple[str, Any]]:
    """The output of a norm for x[0]."""
    yield "forward", norm(x[0].clone())


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _try(part: nn.Module, outputs: Outputs, shape: tuple[int, ...]) -> None:
    """Run the part three times: twice on equal inputs, then with one token changed, which may affect no other."""
    x, other = torch.randn(shape), torch.randn(shape)
    with torch.no_grad():
        for parameter in part.parameters():  # a gate at zero would hide everything it multiplies
            parameter.add_(torch.rand_like(parameter) / 10)
    changed = x.clone()
    changed[:, *CHANGED] = other[:, *CHANGED]
    first, again, with_change = (_run(part, outputs, tensors) for tensors in (x, x, changed))
    if _differs(first, again).any():
        raise _Breach(
            "two calls with the same tensors return different results: compute from the tensors alone, and draw "
            "random numbers with torch"
        )
    moved = _differs(first, with_change)
    row, token = CHANGED
    moved[row, token] = False
    if moved[row].any():
        raise _Breach(
            "its output at a token depends on other tokens of the sequence, so a model could see the tokens "
            "that it predicts: compute each token from that token alone"
        )
    if moved.any():
        raise _Breach(
            "its output for a sequence depends on other sequences of the batch: compute each token from that "
            "token alone"
        )


def _run(part: nn.Module, outputs: Outputs, x: Tensor) -> Tensor:
    """All outputs [n, B, T, C]."""
    torch.default_generator.manual_seed(0)  # for dropout; torch.manual_seed would also seed GPUs
    results = []
    for call, h in outputs(part, x):
        if not isinstance(h, Tensor) or h.shape != x.shape[1:]:
            raise _Breach(
                f"`{call}` returns {_described(h)} for a tensor of shape {tuple(x.shape[1:])}: return one of that shape"
            )
        results.append(h.detach().clone())
    return torch.stack(results)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """[B, T]: where any of the outputs differ."""
    return ((one != other) & ~(one.isnan() & other.isnan())).any(-1).any(0)
