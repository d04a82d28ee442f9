"""Short names for architectures. A name stands for overrides of one aspect of a run, so names can be combined.

`mgr+exoformer` is Multi-Gate Residuals with exogenous anchors. A name changes its own aspect (topology, anchors,
norm or gate) and keeps the rest of the base configuration; `base` changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from residua.config import presets
from residua.config.choices import AnchorChoice, NormChoice, SoftmaxAttention, TopologyChoice
from residua.config.model import ModelConfig, head_dim
from residua.config.plugins import load_plugins
from residua.config.run import RunConfig
from residua.config.settings import ConfigError, suggest
from residua.reading import counted


@dataclass(frozen=True)
class Variant:
    """The meaning of a name: a one-line description, and its overrides, which may depend on the base model."""

    summary: str
    overrides: Callable[[ModelConfig], Sequence[str]]
    replaces: bool = False
    """Whether it replaces a part that overrides of other names depend on, such as the mixers; it then comes first."""


def sublayers_per_block(layers: int) -> int:
    """About eight blocks, as the paper recommends, with at least two sublayers each (one would be Full)."""
    return max(2, -(-2 * layers // 8))


def _topology(summary: str, kind: str, *keys: str) -> Variant:
    changes = (f"model.topology.kind={kind}", *(f"model.topology.{key}" for key in keys))
    return Variant(summary, lambda model: changes)


def _anchors(summary: str, kind: str, *keys: str) -> Variant:
    gated = kind in ("nuresformer", "exoformer")
    changes = (f"model.anchors.kind={kind}", *(f"model.anchors.{key}" for key in keys))

    def with_gate(model: ModelConfig) -> Sequence[str]:
        gate = _on_softmax(model, "gate=elementwise") if gated and model.softmax else ()  # else the model is refused
        return (*changes, *gate)

    return Variant(summary, with_gate)


def _on_softmax(model: ModelConfig, change: str) -> Sequence[str]:
    """An override of the softmax attention, which has its own table in a hybrid."""
    table = model.attention.softmax_path
    if model.softmax is None:
        kind = (model.latent or model.attention).kind
        raise ConfigError(
            f"{change.partition('=')[0]} is a key of softmax attention, but {table}.kind = '{kind}': use softmax "
            "attention."
        )
    return [f"model.{table}.{change}"]


def _softmax(summary: str, key: str) -> Variant:
    return Variant(summary, lambda model: _on_softmax(model, key))


def _norm(summary: str, kind: str) -> Variant:
    """Another kind of norm, with the eps of the base's."""
    kinds, norm = (f"model.norm.kind={kind}",), NormChoice.choose({"kind": kind})
    return Variant(summary, lambda model: (*kinds, *with_eps(model.norm, norm, kinds)))


def with_eps(before: NormChoice, after: NormChoice, changes: Sequence[str]) -> list[str]:
    """An override that gives a new kind of norm the eps of the old one, where both have one and `changes` has none."""
    old, new = (norm.model_dump().get("eps") for norm in (before, after))
    is_set = any(change.startswith(("model.norm.eps", "model.norm={")) for change in changes)
    return [] if is_set or None in (old, new) or old == new else [f"model.norm.eps={old}"]


def _in_blocks(summary: str, kind: str = "block_attnres", count: int | None = None) -> Variant:
    """At most `count` blocks, whatever the depth, or about eight."""

    def changes(model: ModelConfig) -> Sequence[str]:
        sublayers = sublayers_per_block(model.layers) if count is None else -(-model.sublayers // count)
        return (f"model.topology.kind={kind}", f"model.topology.sublayers_per_block={sublayers}")

    return Variant(summary, changes)


def _glu(model: ModelConfig) -> Sequence[str]:
    """The base's feed-forward, or its experts, with a sigmoid in the gate."""
    if model.ffn.mixture:
        return ["model.ffn.activation=glu"]
    return [f"model.ffn={{kind='glu', hidden={model.ffn.hidden}}}"]


def _anchor_rows() -> dict[str, Variant]:
    """The rows of the ExoFormer paper's table 3 that differ from `nuresformer` and `exoformer` in one or two keys."""
    norms_qk, only_vg = ("norm=qk",), ("norm=none", "pathways=['v', 'g']")
    families = {
        "nuresformer": ("NuResFormer", ()),
        "nuresformer_qk": ("NuResFormer, norms on Q and K only", norms_qk),
        "nuresformer_vg": ("NuResFormer, V and G only, without norms", only_vg),
        "exoformer": ("ExoFormer", ()),
    }
    granularities = {"": "", "_headwise": ", λ per head", "_scalar": ", one λ"}
    rows: dict[str, Variant] = {}
    for name, (title, keys) in families.items():
        for grain, how in granularities.items():
            finer = (f"granularity={grain[1:]}",) if grain else ()
            if keys or finer:
                rows[f"{name}{grain}"] = _anchors(f"{title}{how}", name.partition("_")[0], *keys, *finer)
    rows["exoformer_nonorm"] = _anchors("ExoFormer without norms on the anchors", "exoformer", "norm=none")
    rows["exoformer_qk"] = _anchors("ExoFormer, norms on Q and K only", "exoformer", "norm=qk")
    return rows


def _linear_table(model: ModelConfig) -> str:
    """Gated DeltaNet with about as many parameters as the base's softmax attention without a gate."""
    softmax = _base_softmax(model)
    shape = f"key_heads={max(1, softmax.heads // 2)}, value_heads={softmax.heads}, head_dim={head_dim(model)}"
    return f"kind='gated_deltanet', {shape}"


def _linear(model: ModelConfig) -> Sequence[str]:
    return [f"model.attention={{{_linear_table(model)}}}"]


def _hybrid(model: ModelConfig) -> Sequence[str]:
    softmax = _inline(_base_softmax(model).model_dump(exclude_none=True))
    return [f"model.attention={{kind='hybrid', softmax={softmax}, linear={{{_linear_table(model)}}}}}"]


def _kimi(model: ModelConfig) -> Sequence[str]:
    """Heads as in the base; latents of a quarter of its width, as in the published model."""
    softmax, dim = _base_softmax(model), head_dim(model)
    latent = (
        f"kind='mla', heads={softmax.heads}, head_dim={dim}, shared_dim={dim // 2}, rank={max(1, model.width // 4)}"
    )
    linear = f"kind='kimi_delta', heads={softmax.heads}, head_dim={dim}"
    return [f"model.attention={{kind='hybrid', softmax={{{latent}, positions='none'}}, linear={{{linear}}}}}"]


def _inline(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_inline(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_inline, value)) + "]" if isinstance(value, list | tuple) else json.dumps(value)


def _base_softmax(model: ModelConfig) -> SoftmaxAttention:
    softmax = model.attention.everywhere
    if softmax is None:
        raise ConfigError(
            "variants 'linear', 'hybrid' and 'kimi' replace softmax attention in every layer, but attention.kind = "
            f"'{model.attention.kind}': use one of them, and a base with attention.kind = 'softmax'."
        )
    return softmax


def _moe(model: ModelConfig) -> Sequence[str]:
    """Experts of a quarter of the base's width; three and a shared one are active, so tokens see the base's width."""
    if model.ffn.mixture:
        raise ConfigError("variant 'moe' replaces a dense FFN, but the base already has ffn.kind = 'moe': use 'base'.")
    shape = f"hidden={max(1, model.ffn.hidden // 4)}, experts=16, top_k=3, shared=1"
    return [f"model.ffn={{kind='moe', activation='{model.ffn.kind}', {shape}}}"]


def _ends(model: ModelConfig) -> int:
    """Layers before and after a loop over the middle half."""
    return model.layers // 4


def _looped(model: ModelConfig, turns: int) -> str:
    ends = _ends(model)
    return f"model.order={{kind='loop', prelude={ends}, coda={ends}, turns={turns}}}"


def _parcae(model: ModelConfig) -> Sequence[str]:
    ends = _ends(model)
    keys = f"prelude={ends}, loop={model.layers - 2 * ends}, turns=2"
    return [_looped(model, 2), f"model.topology={{kind='injection', {keys}}}"]


def _middle_source(model: ModelConfig) -> Sequence[str]:
    middle = max(0, len(model.softmax_layers) // 2 - 1)
    return ["model.anchors.kind=kv_source", f"model.anchors.layer={middle}"]


NUMBERED: dict[str, Callable[[int], Variant]] = {
    "blockN": lambda n: _in_blocks(f"Block Attention Residuals, {counted(n, 'block')}", count=n),
    "mgrN": lambda n: _topology(f"Multi-Gate Residuals, competitive, {n} streams", "multi_gate", f"streams={n}"),
    "mgrN_independent": lambda n: _topology(
        f"Multi-Gate Residuals, independent gates, {n} streams", "multi_gate", f"streams={n}", "gate=independent"
    ),
    "clipN": lambda n: _topology(f"x + f(x), clipped at ±{n}", "clipped", f"limit={n}.0"),
}
"""Names with any number N from 1 upwards, such as `block6`."""

KNOWN: dict[str, Variant] = {
    "base": Variant("the base configuration, unchanged", lambda model: ()),
    "prenorm": _topology("x + f(x)", "additive"),
    "layer_scale": _topology("LayerScale: learned gains on outputs, from 0.1, per channel", "scaled"),
    "rezero": _topology("ReZero: a learned factor on outputs, from 0", "scaled", "gain=scalar", "start=0"),
    "laurel": _topology("LAuReL: learned weights, and a low-rank map of the stream", "laurel"),
    "lns": _topology("LayerNorm scaling: inputs of layer l divided by √l", "lns"),
    "keel": _topology("KEEL: norms inside and outside the residual sum", "keel"),
    "deepnorm": _topology("DeepNorm: post-norm with a scaled stream", "deepnorm"),
    "resi_dual": _topology("ResiDual: a post-norm stream, and a sum for the head", "resi_dual"),
    "x0": _topology("residual scalars, x0 injection and backout, per layer", "x0"),
    "x0_sublayer": _topology("residual scalars, x0 injection and backout, per sublayer", "x0", "scalars=sublayer"),
    "full_attnres": _topology("Full Attention Residuals", "full_attnres"),
    "block_attnres": _in_blocks("Block Attention Residuals, about 8 blocks"),
    **{f"block{count}": NUMBERED["blockN"](count) for count in (2, 4, 8, 16)},
    "boundary_attnres": _in_blocks("attention over depth between about 8 blocks, x + f(x) within", "boundary_attnres"),
    "delta_attnres": _topology("Delta Attention Residuals: added to the residual sum", "delta_attnres"),
    "delta_block_attnres": _in_blocks("Delta Attention Residuals, about 8 blocks", "delta_attnres"),
    "mgr": _topology("Multi-Gate Residuals, competitive, 4 streams", "multi_gate"),
    "mgr8": NUMBERED["mgrN"](8),
    "mgr_independent": _topology("Multi-Gate Residuals, independent gates", "multi_gate", "gate=independent"),
    "mgr8_independent": NUMBERED["mgrN_independent"](8),
    **{f"clip{limit}": NUMBERED["clipN"](limit) for limit in (10, 100, 1000)},
    "highway": _topology("one gated stream", "highway"),
    "gated_residual": _topology("Gated Residual of Qwen4-Exp, 4 streams", "gated_residual"),
    "hc": _topology("hyper-connections, dynamic, 4 streams", "hyper"),
    "hc_identity": _topology("hyper-connections, dynamic, streams not mixed", "hyper", "mix=identity"),
    "hc_cyclic": _topology("hyper-connections, dynamic, streams mixed by shifts", "hyper", "mix=cyclic"),
    "hc_single_pass": _topology("hyper-connections that read with earlier weights", "hyper_single_pass"),
    "frac": _topology("Frac-connections, dynamic, 4 slices of the stream", "frac"),
    "mhc": _topology("manifold-constrained hyper-connections, 4 streams", "mhc"),
    "mhc_lite": _topology("mHC-lite, 4 streams", "mhc_lite"),
    "denseformer": _topology("DenseFormer", "dense"),
    "mudd": _topology("MUDD: Q, K, V and the stream read mixtures of earlier layers", "mudd"),
    "loop": Variant("the middle half of the layers runs twice", lambda model: [_looped(model, 2)], replaces=True),
    "parcae": Variant("the middle half runs twice, each turn with decay and injection", _parcae, replaces=True),
    "dca": _topology("DeepCrossAttention: Q, K and V weight earlier layers per channel", "dca"),
    "resformer": _anchors("value residual from the first layer", "resformer"),
    "gated_value": _anchors("value residual from the first layer, gated per token and head", "gated_value"),
    "value_embeddings": _anchors("value embeddings of the token in every second layer", "value_embeddings"),
    "lime": _anchors("LIMe: keys and values mix those of all layers so far", "lime"),
    "depth_attention": _anchors(
        "Depth-Attention: queries attend to the values of all layers so far", "depth_attention"
    ),
    "cla": _anchors("cross-layer attention: two layers share keys and values", "cla"),
    "kv_source": Variant("the upper half of the layers uses keys and values of the middle layer", _middle_source),
    "svformer": _anchors("SVFormer: all layers use the values of the first", "kv_source", "shared=v"),
    "nuresformer": _anchors("projections of the first layer as normalised anchors, including the gate", "nuresformer"),
    "exoformer": _anchors("projections of the embedding as anchors, including the gate", "exoformer"),
    "exoformer_dynamic": _anchors("ExoFormer with dynamic mixing, with the gate", "exoformer", "mixing.kind=dynamic"),
    **_anchor_rows(),
    "gated_attention": _softmax("sigmoid gate on the attention output", "gate=elementwise"),
    "xsa": _softmax("attention outputs minus the direction of the token's own value", "own_value=removed"),
    "sink": _softmax("learned attention sink", "sink=learned"),
    "linear": Variant("linear attention (Gated DeltaNet)", _linear, replaces=True),
    "hybrid": Variant("linear attention, with softmax in every fourth layer", _hybrid, replaces=True),
    "kimi": Variant(
        "Kimi Linear's mixers: delta attention, with latent attention in every fourth layer", _kimi, replaces=True
    ),
    "moe": Variant(
        "16 experts, 3 and a shared one active per token, with the active width of the base's FFN", _moe, replaces=True
    ),
    "glu": Variant("sigmoid GLU as the feed-forward, with the base's width", _glu),
    "gatednorm": _norm("RMSNorm with a low-rank gate", "gatednorm"),
    "preaffine": _norm("gain before the norm", "preaffine"),
    "dyt": _norm("dynamic tanh instead of a norm", "dyt"),
    "derf": _norm("dynamic error function instead of a norm", "derf"),
    "gated_dyt": _norm("dynamic tanh with a low-rank gate", "gated_dyt"),
}


def overrides(entries: Sequence[str], model: ModelConfig) -> list[str]:
    """The overrides of a variant. `train.steps=5` is one already; other entries are known names, joined with `+`.

    The order of names does not matter, except where an override stands between them.
    """
    changes: list[str] = []
    parts: list[str] = []
    for are_changes, group in groupby(entries, lambda entry: "=" in entry or "." in entry):
        if are_changes:
            changes.extend(group)
            continue
        names = [name.strip() for entry in group for name in entry.split("+")]
        for name in sorted(names, key=lambda name: not _known(name).replaces):
            try:
                named = _known(name).overrides(model)
            except ConfigError as error:
                if not parts:
                    raise
                raise _no_combination(name, "+".join(parts), error) from None
            changes.extend(named)
            try:
                model = model.override([change.removeprefix("model.") for change in named])
            except ConfigError:  # a later name may fix this; if not, the whole list is refused at the end
                continue
            parts.append(name)
            _refuse_undoing(parts, model)
    return changes


def _no_combination(name: str, other: str, reason: ConfigError) -> ConfigError:
    return ConfigError(f"{name!r} cannot be combined with {other!r}: {reason}")


def changed(base: RunConfig, entries: Sequence[str]) -> RunConfig:
    """A configuration with overrides and names of variants, as in `mgr2+exoformer train.steps=500`."""
    return base.override(overrides(entries, base.model))


def holds(config: RunConfig | ModelConfig, change: str) -> bool:
    """Whether a configuration already has the value set by an override."""
    try:
        return config.override([change]) == config
    except ConfigError:
        return False


def _refuse_undoing(names: Sequence[str], model: ModelConfig) -> None:
    """Refuse a last name that overrides an earlier one: applying the names again must change nothing."""
    *earlier, last = names
    for name in earlier:
        variant = _known(name)
        try:
            named = variant.overrides(model)
        except ConfigError as error:
            if variant.replaces:  # it cannot be applied twice, because it replaced what it needs
                continue
            raise _no_combination(name, last, error) from None
        undone = next((change for change in named if not holds(model, change.removeprefix("model."))), None)
        if undone is not None:
            key = undone.partition("=")[0]
            raise ConfigError(f"{name!r} and {last!r} both set {key}: combine only one of them.")


def is_known(entry: str) -> bool:
    """Whether an entry is a known name, or several joined with `+`."""
    try:
        return all(_known(name.strip()) for name in entry.split("+"))
    except ConfigError:
        return False


def _known(name: str) -> Variant:
    if name in KNOWN:
        return KNOWN[name]
    if match := re.fullmatch(r"([a-z]+)([1-9][0-9]{0,6})(\w*)", name):
        numbered = NUMBERED.get(f"{match[1]}N{match[3]}")
        if numbered is not None:
            return numbered(int(match[2]))
    if name in presets.names():
        raise ConfigError(f"{name!r} is a preset, not a variant: `residua compare --base {name}` varies it.")
    load_plugins()
    for part, family in (("topology", TopologyChoice), ("anchors", AnchorChoice), ("norm", NormChoice)):
        if name in (table.model_fields["kind"].default for table in family.alternatives()):
            entry = f'put {name} = ["model.{part}.kind={name}"] under [variants] of a study file.'
            raise ConfigError(f"{name!r} is a kind of {part}, not a variant: {entry}")
    raise ConfigError(f"{name!r} is not a known variant: {suggest(name, KNOWN, 'residua compare --list')}")
