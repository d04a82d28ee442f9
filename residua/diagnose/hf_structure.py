"""The structure of a Hugging Face decoder, found by running it once: layers, sublayers, norms and their gains.

Our attention function replaces the model's own and sums its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from residua.diagnose.attention import AttentionSums, Scores, attend_and_sum
from residua.diagnose.observe import Site, first, on_each
from residua.errors import UserError
from residua.model.taps import hooked
from residua.ops._runtime.numeric import rms, wide

INTERFACE, DENSE_MASKS = "residua_diagnose", "residua_diagnose_dense_masks"
"""Two names for one function. Under the second, models without SDPA build the masks of eager attention."""
_USED = {"s_aux", "sliding_window", "softcap", "is_causal", "position_bias", "indices"}
_NOT_SCORES = {"position_ids", "position_embeddings", "cache_position", "attention_mask"}
"""Tensors that models pass to every attention function and that affect no score."""


@dataclass
class Watch:
    """Record of the attention function's calls in order, the heads of each module, and unknown arguments."""

    calls: list[tuple[int, AttentionSums | None]] = field(default_factory=list)
    heads: dict[int, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


_watch: Watch | None = None
_silent: tuple[int, int] | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key and value [B, H_kv, K, D]; returns [B, T, H, D].

    Sums are recorded if each key is a token (K = T); compressed or cached keys are attended to but not counted.
    """
    sink = options.get("s_aux")
    causal = options.get("is_causal")
    how = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window") if attention_mask is None else None,
        mask=_chosen(attention_mask, options.get("indices"), key.shape[2]),
        softcap=options.get("softcap"),
        sink=getattr(module, "sinks", None) if sink is None else sink,
        bias=options.get("position_bias"),
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )
    y, sums = attend_and_sum(query, key, value, how)
    if _watch is not None:
        _watch.calls.append((id(module), sums if key.shape[2] == query.shape[2] else None))
        _watch.heads[id(module)] = query.shape[1]
        _watch.unknown |= {
            name for name, option in options.items() if isinstance(option, Tensor) and name not in _USED | _NOT_SCORES
        }
    if _silent is not None and _silent[0] == id(module):
        y = y.clone()
        y[:, _silent[1]] = 0
    return y.transpose(1, 2).contiguous(), None


def _chosen(mask: Tensor | None, indices: Tensor | None, keys: int) -> Tensor | None:
    """Hide the keys that sparse attention did not choose from the mask; `indices` [B, T, top] are the chosen ones."""
    if indices is None:
        return mask
    visible = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    visible = visible.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return visible.tril()
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


@contextmanager
def watching() -> Iterator[Watch]:
    """Record the calls of the attention function inside the block."""
    global _watch
    _watch = Watch()
    try:
        yield _watch
    finally:
        _watch = None


@contextmanager
def without_head(module: nn.Module, head: int) -> Iterator[None]:
    """Inside the block, set the output of one head of the module to zero."""
    global _silent
    _silent = (id(module), head)
    try:
        yield
    finally:
        _silent = None


_NORM_COSINE, _NORM_SIZE = 0.9999, (0.5, 1.05)
"""A part without parameters is a norm if its output's cosine with its input, centred or not, exceeds the first number
and the output's RMS is in the range."""
MOST_STREAMS = 16


@dataclass
class Layer:
    """One decoder layer: its module, the bodies of its sublayers in execution order, its norms, and its runs per pass.

    prepared: by a body's id, the parts that prepare its input, such as a gated norm, and belong to its sublayer.
    """

    module: nn.Module
    bodies: list[nn.Module]
    norms: list[nn.Module]
    runs: int = 1
    prepared: dict[int, list[nn.Module]] = field(default_factory=dict)

    @property
    def inner(self) -> list[nn.Module]:
        """Parts that only prepare the input of a body."""
        return [part for parts in self.prepared.values() for part in parts]

    def join(self, part: nn.Module) -> None:
        """Merge a body into the next one, whose input it prepares."""
        following = self.bodies[self.bodies.index(part) + 1]
        self.prepared.setdefault(id(following), []).extend([*self.prepared.pop(id(part), []), part])
        self.bodies.remove(part)


def main_input(args: tuple[Any, ...], named: dict[str, Any], width: int | None = None) -> Any:
    """Find the main input of a module: the first tensor of this width, its first argument, or `hidden_states`."""
    if width is not None:
        everything = [*args, *([named["hidden_states"]] if "hidden_states" in named else []), *named.values()]
        for x in everything:
            if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-1] == width and x.is_floating_point():
                return x
    return args[0] if args else named.get("hidden_states", next(iter(named.values()), None))


def as_state(x: Any, tokens: Tensor, width: int) -> Tensor | None:
    """View a state or output, [B, T, C] or [B·T, C], as [B, T, C]; None if x has neither shape."""
    if not isinstance(x, Tensor) or x.shape[-1:] != (width,):
        return None
    if x.dim() == 2 and x.shape[0] == tokens.numel():
        return x.view(*tokens.shape, width)
    return x if x.shape[:-1] == tokens.shape else None


def as_streams(y: Any, tokens: Tensor, width: int) -> Tensor | None:
    """View the streams of a multi-stream layer, [B, T, n, C], [n, B, T, C] or [B, T, n·C], as [B, T, n, C]."""
    if not isinstance(y, Tensor) or y.dim() not in (3, 4):
        return None
    x: Tensor = y
    if x.dim() == 3 and x.shape[-1] in range(2 * width, MOST_STREAMS * width + 1, width):
        x = x.view(*x.shape[:2], -1, width)
    if x.dim() != 4 or x.shape[-1] != width:
        return None
    if x.shape[:2] == tokens.shape:
        return x
    return x.permute(1, 2, 0, 3) if x.shape[1:3] == tokens.shape else None


class _Probe:
    """Facts about every module from one short run: whether it keeps the width or is a norm, and how often it runs."""

    def __init__(self, model: nn.Module, tokens: Tensor, width: int) -> None:
        self.tokens, self.width = tokens, width
        self.order: list[int] = []
        self.keeps: set[int] = set()
        self.carries: set[int] = set()
        self.paired: set[int] = set()
        self.runs: Counter[int] = Counter()
        self.plain_norms: set[int] = set()
        self.ends: dict[int, tuple[Any, Any]] = {}
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        self.lists = lists
        self.members = {id(member) for modules in lists for member in modules}

    def note(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        y = first(output)
        if not isinstance(y, Tensor):
            return
        self.order.append(id(module))
        self.runs[id(module)] += 1
        if isinstance(output, tuple) and sum(as_state(x, self.tokens, self.width) is not None for x in output) > 1:
            self.paired.add(id(module))
        x = main_input(args, named, y.shape[-1])
        if id(module) in self.members and any(
            f(y, self.tokens, self.width) is not None for f in (as_state, as_streams)
        ):
            self.carries.add(id(module))
            self.ends[id(module)] = (x.clone() if isinstance(x, Tensor) else None, y.clone())
        if as_state(y, self.tokens, self.width) is None:
            return
        self.keeps.add(id(module))
        if isinstance(x, Tensor) and not any(True for _ in module.parameters()) and _norms(x, y):
            self.plain_norms.add(id(module))

    def chained(self, layers: nn.ModuleList) -> bool:
        """Return whether some layer's input is the output of the layer before it."""
        ends = [self.ends[id(layer)] for layer in layers]
        pairs = [(before[1], after[0]) for before, after in pairwise(ends)]
        return len(ends) == 1 or any(isinstance(x, Tensor) and torch.equal(y, x) for y, x in pairs)


def find_layers(model: nn.Module, probe: Tensor, width: int) -> tuple[list[Layer], set[int], Watch]:
    """Find the decoder layers, the norms without parameters, and the calls of the attention function."""
    run = _Probe(model, probe, width)
    with torch.no_grad(), hooked(on_each(list(model.modules()), run.note, with_kwargs=True)), watching() as watch:
        model(input_ids=probe, use_cache=False)
    lists = [m for m in run.lists if all(id(x) in run.carries for x in m) and run.chained(m)]
    longest = max(lists, key=len, default=None)
    layers = [] if longest is None else list(longest)
    if any(id(layer) in run.paired for layer in layers):
        raise UserError(
            f"{type(model).__name__} passes two states from layer to layer, as reversible layers do, so it has "
            "no single residual stream and cannot be diagnosed."
        )
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no list of layers that pass states of hidden width {width} from one "
            "to the next, so it cannot be diagnosed."
        )
    return [_layer(module, run) for module in layers], run.plain_norms, watch


def _layer(module: nn.Module, run: _Probe) -> Layer:
    ranked = {key: index for index, key in enumerate(run.order)}
    parts = [part for part in _parts(module, run) if id(part) in run.keeps]
    norms = [part for part in parts if is_norm(part, run.width) or id(part) in run.plain_norms]
    bodies = [part for part in parts if part not in norms and any(w.dim() >= 2 for w in part.parameters())]
    return Layer(module, sorted(bodies, key=lambda body: ranked[id(body)]), norms, run.runs[id(module)])


def _parts(module: nn.Module, run: _Probe) -> list[nn.Module]:
    """Return a module's children; a container that is never called, such as a list, is replaced by its own children."""
    return [
        part
        for child in module.children()
        for part in ([child] if run.runs[id(child)] or not list(child.children()) else _parts(child, run))
    ]


def is_norm(module: nn.Module, width: int) -> bool:
    """Return whether a module has one gain per dimension. It may hold more, such as the matrices of a small gate."""
    gain = getattr(module, "weight", None)
    return isinstance(gain, Tensor) and tuple(gain.shape) == (width,) and not isinstance(module, nn.Linear)


def _norms(x: Tensor, y: Tensor) -> bool:
    """Return whether y is x, centred or not, scaled to size 1 per token; zeros, as from padding, stay zeros."""
    if x.shape != y.shape or x is y or not x.is_floating_point():
        return False
    x, y = wide(x).double().flatten(0, -2), wide(y).double().flatten(0, -2)
    size = y.square().mean(-1).sqrt()
    written = size > 0
    x, y, size = x[written], y[written], size[written]
    if torch.equal(x, y) or not bool(((size > _NORM_SIZE[0]) & (size < _NORM_SIZE[1])).all()):
        return False
    return any(
        bool((torch.cosine_similarity(base, y, -1) > _NORM_COSINE).all()) for base in (x, x - x.mean(-1, keepdim=True))
    )


def looks_like_attention(body: nn.Module) -> bool:
    """Return whether a body has projections with names usual in attention."""
    names = {name.rpartition(".")[2] for name, _ in body.named_modules()}
    fused = {"query_key_value", "qkv_proj", "c_attn", "Wqkv", "attn_qkv"}
    return bool(names & fused) or (bool(names & {"q_proj", "query"}) and bool(names & {"k_proj", "key"}))


def has_experts(body: nn.Module) -> bool:
    """Return whether a body has a list of modules of one type, or parameters with an expert axis."""
    lists = (m for m in body.modules() if isinstance(m, nn.ModuleList))
    repeated = any(len(m) > 1 and len({type(x) for x in m}) == 1 for m in lists)
    return repeated or any(p.dim() == 3 and p.shape[0] > 1 for p in body.parameters())


def acting_gains(
    model: nn.Module,
    norms: Sequence[nn.Module],
    final: nn.Module | None,
    bodies: Sequence[nn.Module],
    sites: Sequence[Site],
    probe: Tensor,
) -> dict[int, Tensor]:
    """Measure, by site, the factor that its norm applies to each dimension; the final norm's is at `len(sites)`.

    We regress the norm's output on x/RMS(x), so gains that are stored as 1 + w, or scaled, are reported as applied.
    """
    gains: dict[int, Tensor] = {}
    normed: dict[int, tuple[Tensor, Tensor]] = {}

    def note_norm(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not args or args[0].shape != output.shape:
            return
        gain = _acting_gain(module, args[0], output)
        normed[id(output)] = (output, gain)
        if module is final:
            gains[len(sites)] = gain

    def note_body(site: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        x = main_input(args, named)
        if isinstance(x, Tensor) and id(x) in normed:
            gains[site] = normed[id(x)][1]

    handles = on_each([*norms, *([final] if final is not None else [])], note_norm)()
    handles += [
        body.register_forward_hook(partial(note_body, s.index), with_kwargs=True)
        for s, body in zip(sites, bodies, strict=True)
    ]
    with torch.no_grad(), hooked(lambda: handles):
        model(input_ids=probe, use_cache=False)
    return gains


def _acting_gain(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x, y = wide(x).double(), wide(y).double()
    if isinstance(module, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
        y = y if module.bias is None else y - module.bias.double()
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", 1e-6))
    base = rms(x, eps if isinstance(eps, float) else 1e-6).flatten(0, -2)
    return (base * y.flatten(0, -2)).sum(0) / base.square().sum(0).clamp(min=1e-12)
