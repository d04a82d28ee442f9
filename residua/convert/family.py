"""The base class of families of transformers models, and the conversion rules that follow from their declarations.

A family says which keys of config.json hold which of Residua's settings (`HELD_BY`); `settings` reads them and `keys`
writes them. It names the tensors that each of Residua's parameters consists of (`TOP`, `ATTENTION`, `FEED_FORWARD`):
parts that Residua has fused are stacked by rows. A family refuses settings that Residua does not implement, and names
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import reduce
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from residua.config import choices
from residua.config.model import ModelConfig, head_dim
from residua.config.positions import PartialRope
from residua.config.settings import flat
from residua.convert.layouts import ROWS, Layout, Rule, by_head, reordered, turned_order
from residua.convert.positions import (
    FULL,
    SLIDING,
    read_layered_positions,
    read_positions,
    write_positions,
    write_windows,
)  # fmt: skip
from residua.errors import UserError
from residua.model.decoder import Decoder, build
from residua.model.projection import declared_matrices
from residua.model.size import shapes_only
from residua.reading import OpenShape, counted

Size = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Factor = Annotated[float, Field(gt=0)]


class Keys(OpenShape):
    """Keys that config.json needs for every family, and keys of some families that we compute with; others are kept."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size
    intermediate_size: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    sliding_window: Count | None = None
    sliding_window_pattern: Count | str | None = None
    max_window_layers: Count | None = None
    full_attention_interval: Size = 4
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size = 4
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size = 1
    first_k_dense_replace: Count = 0
    n_group: Size | None = None
    topk_group: Size | None = None
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    logit_scale: Factor = 1.0
    query_pre_attn_scalar: Factor = 1.0
    per_layer_config: dict[str, dict[str, Any]] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    tie_word_embeddings: bool | None = None
    model_type: str
    hidden_act: str | None = None
    hidden_activation: str | None = None


Names = dict[str, tuple[str, ...]]
"""Our parameter → their tensors that are stacked to form it; `{e}` stands for each expert."""

GATED = {"silu": "swiglu", "swish": "swiglu", "sigmoid": "glu", "gelu_pytorch_tanh": "geglu"}
"""`hidden_act` of a gated feed-forward → its kind."""

TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PLAIN = {"gelu": "gelu", "relu2": "relu2", **dict.fromkeys(TANH, "gelu_tanh")}
"""`hidden_act` of a feed-forward without a gate → its kind."""

FAMILIES: dict[str, type[Family]] = {}
MISSING = {
    "bloom": ("position biases in the scores (ALiBi)", "gpt_neox"),
}
"""The parts of a `model_type` that Residua lacks, and the closest supported family."""


def is_known(model_type: object) -> bool:
    """Whether a `model_type` names a family; a config.json may hold anything there."""
    return isinstance(model_type, str) and model_type in FAMILIES


def find_family(model_type: object) -> Family:
    """The family of a `model_type`."""
    if not is_known(model_type):
        lacks, near = MISSING.get(str(model_type), (None, None))
        text = f"{model_type}_text"  # the text part of a vision-language model
        alike = [text] if text in FAMILIES else get_close_matches(str(model_type), FAMILIES, cutoff=0.5)
        nearest = near or next(iter(alike), "llama")
        why = "" if lacks is None else f", because Residua lacks {lacks}"
        raise UserError(f"model_type = {model_type!r} is not a supported family{why}: the nearest is {nearest!r}.")
    return FAMILIES[str(model_type)]()


def alike(name: str, *projections: str) -> Names:
    """Names for the weight and the bias of a projection that is fused from these `projections`."""
    return {f"{name}.{suffix}": tuple(f"{each}.{suffix}" for each in projections) for suffix in ("weight", "bias")}


def expert_names(block: str = "mlp", maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Names:
    """Names of a router, and of experts with separate tensors for gate, up and out."""
    gate, up, out = (f"{block}.experts.{{e}}.{name}.weight" for name in maps)
    router = f"{block}.gate.weight"
    return {"body.router.weight": (router,), "body.experts.up": (gate, up), "body.experts.out": (out,)}


def shared_names(block: str) -> Names:
    """Names of a shared expert."""
    up = alike("body.shared.gate_up", f"{block}.gate_proj", f"{block}.up_proj")
    return up | alike("body.shared.out", f"{block}.down_proj")


class Family:
    """A family with Llama's layout: subclass it and override what differs.

    A subclass with a `model_type` is registered under it, and has the name of transformers' class.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    mixture: ClassVar[bool] = False
    """Whether its feed-forwards have experts."""
    partial: ClassVar[bool] = False
    """Whether rotary positions may turn only a part of each head."""
    interleaved: ClassVar[bool] = False
    """Whether neighbouring elements of a head turn together."""
    layered: ClassVar[bool] = False
    """Whether rotary positions differ between layers with and without a window."""
    less_one: ClassVar[bool] = False
    """Whether norm gains are stored minus one."""
    KEYS: ClassVar[type[OpenShape]] = Keys
    """Keys that its config.json must hold."""
    SPELLINGS: ClassVar[dict[str, str]] = {}
    """The family's key names → the usual ones."""
    ABSENT: ClassVar[tuple[str, ...]] = ()
    """Usual keys that transformers does not read from its config.json."""

    HELD_BY: ClassVar[Names] = {
        "vocab_size": ("vocab_size",),
        "context": ("max_position_embeddings",),
        "layers": ("num_hidden_layers",),
        "width": ("hidden_size",),
        "attention.heads": ("num_attention_heads",),
        "ffn.hidden": ("intermediate_size",),
        "norm.eps": ("rms_norm_eps",),
        "init.std": ("initializer_range",),
        "act": ("hidden_act",),
        "tied": ("tie_word_embeddings",),
    }
    """Our setting → the keys that hold it, of which the first one given counts; null means the value in `SETTINGS`.

    `attention` is softmax attention and `linear` linear attention, also in a hybrid; `act` and `tied` are converted.
    """
    SETTINGS: ClassVar[dict[str, Any]] = {"attention.kind": "softmax", "norm.kind": "rmsnorm"}
    """Our settings in all models of the family, unless a key says otherwise."""
    MIXERS: ClassVar[tuple[type, ...]] = (choices.SoftmaxAttention,)
    BIAS: ClassVar[tuple[str, str] | None] = None
    """The key that turns on attention biases, and which biases these are."""
    QK_NORM: ClassVar[str] = "none"
    WINDOWS: ClassVar[tuple[str, ...]] = ()
    """The keys of `write_windows` that the family uses."""
    OTHER: ClassVar[str] = SLIDING
    """The name in `layer_types` of layers that are not "full_attention"."""
    EVERY: ClassVar[str] = "sliding_window_pattern"
    """The key with n, where every n-th layer is full and `layer_types` are not given."""
    ACTS: ClassVar[dict[str, str]] = GATED
    """`hidden_act` → kind, for the feed-forwards that the family has."""
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    """transformers' defaults for keys that a config.json leaves out."""
    UNKNOWN: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Keys without a counterpart in Residua, and the values (besides null) with which they have no effect."""
    FREE: ClassVar[dict[str, Any]] = {}
    """Keys that are folded into the weights, so that any value can be written, and the values without effect."""
    BODY: ClassVar[str] = "model."
    """The prefix of all tensor names except the head's."""
    LAYERS: ClassVar[str] = "layers"
    TOP: ClassVar[Names] = {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "unembed.weight": ("lm_head.weight",),
    }
    ATTENTION: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        **alike("body.project", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        **alike("body.out", "self_attn.o_proj"),
        "body.qk_norm.query": ("self_attn.q_norm.weight",),
        "body.qk_norm.key": ("self_attn.k_norm.weight",),
    }
    OTHER_ATTENTION: ClassVar[Names] = {}
    """The names in layers of linear attention."""
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        **alike("body.gate_up", "mlp.gate_proj", "mlp.up_proj"),
        **alike("body.out", "mlp.down_proj"),
    }
    LEFT_OUT: ClassVar[str] = ""
    """A pattern of tensor names to ignore; `{layers}` stands for the number of layers."""
    LAYOUTS: ClassVar[dict[str, Layout]] = {}
    """Name suffix → layout, for parameters whose tensors in the folder are not simply their rows."""

    def __init_subclass__(cls, model_type: str | None = None) -> None:
        if model_type is not None:
            FAMILIES[model_type] = cls
            cls.model_type, cls.architecture = model_type, vars(cls).get("architecture", f"{cls.__name__}ForCausalLM")

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        """A config.json with its keys renamed to the usual ones."""
        usual = {self.SPELLINGS.get(key, key): value for key, value in keys.items()}
        return {key: value for key, value in usual.items() if key not in self.ABSENT}

    def named(self, tensor: str) -> str:
        """The usual name of a tensor that has several names in folders."""
        return tensor

    def is_left_out(self, tensor: str, config: ModelConfig) -> bool:
        """Whether to ignore a tensor of a folder, as transformers does."""
        return re.fullmatch(self.LEFT_OUT.replace("{layers}", str(config.layers)), tensor) is not None

    def read(self, keys: Mapping[str, Any]) -> ModelConfig:
        """The configuration that a config.json describes; raises a ValueError that names what is not supported."""
        known = self.DEFAULTS | self.spelled(dict(keys))
        if known.get("rope_parameters") is None:  # in transformers, null means the default
            known["rope_parameters"] = self.DEFAULTS.get("rope_parameters")
        if known.get("quantization_config"):
            raise UserError("its weights are quantized: import the original model.")
        for key, neutral in {"is_causal": (True,), **self.UNKNOWN}.items():
            if known.get(key) is not None and known[key] not in neutral:
                raise UserError(f"{key} = {known[key]!r} is not supported.")
        for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            types = known.get(key)
            if types is not None and len(types) != known["num_hidden_layers"]:
                layers = counted(known["num_hidden_layers"], "layer")
                raise UserError(f"{key} has {counted(len(types), 'entry', 'entries')} for {layers}.")
        try:
            return ModelConfig(**self.tables(known))
        except KeyError as error:
            raise UserError(f"config.json lacks {error.args[0]!r}.") from None

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Residua's tables from the keys of a config.json, with `DEFAULTS` filled in."""
        tables: dict[str, Any] = {}
        for setting, value in self.settings(keys).items():
            *path, name = setting.split(".")
            reduce(lambda table, key: table.setdefault(key, {}), path, tables)[name] = value
        if (linear := tables.pop("linear", None)) is not None:
            full = [layer for layer, kind in enumerate(self.types(keys)) if kind == FULL]
            mixed = {"kind": "hybrid", "softmax_layers": full, "softmax": tables["attention"], "linear": linear}
            if len(full) < keys["num_hidden_layers"]:
                tables["attention"] = mixed if full else linear
        return tables

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Our settings by path, such as `ffn.hidden`."""
        held = {}
        for ours, theirs in self.HELD_BY.items():
            key = next((key for key in theirs if keys.get(key) is not None), theirs[0])
            if keys.get(key) is not None or ours not in self.SETTINGS:
                held[ours] = keys[key]
        return {
            "ffn.activation" if self.mixture else "ffn.kind": self.act(held.pop("act")),
            "head.kind": "tied" if held.pop("tied") else "untied",
            **self.SETTINGS,
            **held,
            **{f"attention.{key}": value for key, value in self.attention(keys).items()},
        }

    def attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The settings of the attention that depend on several keys."""
        heads = keys["num_attention_heads"]
        table = {
            "kv_heads": keys.get("num_key_value_heads") or heads,
            "head_dim": keys.get("head_dim") or keys["hidden_size"] // heads,
            "qk_norm": self.QK_NORM,
            **({} if self.QK_NORM == "none" else {"qk_eps": keys["rms_norm_eps"]}),
            **({} if self.BIAS is None else {"bias": self.BIAS[1] if keys.get(self.BIAS[0]) else "none"}),
            **self.positions(keys),
            **self.window(keys),
        }
        if "window" not in table:
            table.pop("local_rope_theta", None)
        return table

    def act(self, name: str) -> str:
        """The kind of feed-forward with this activation."""
        if name not in self.ACTS:
            form = "plain" if self.ACTS is PLAIN else "gated"
            raise UserError(
                f"hidden_act = {name!r}: a {form} feed-forward with it is not supported ({', '.join(self.ACTS)})."
            )
        return self.ACTS[name]

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of rotary positions."""
        read = read_layered_positions if self.layered else read_positions
        positions, still = read(keys, partial=self.partial), self.unturned(keys)
        return positions | ({"unturned_layers": still} if still else {})

    def unturned(self, keys: dict[str, Any]) -> list[int]:
        """The layers without positions."""
        return []

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys for windowed attention, if layers have a window."""
        if not self.WINDOWS or ("use_sliding_window" in self.WINDOWS and not keys.get("use_sliding_window")):
            return {}
        types = self.types(keys)
        sliding = [layer for layer, kind in enumerate(types) if kind == SLIDING]
        if not sliding or keys.get("sliding_window") is None:
            return {}
        return {"window": keys["sliding_window"], **({} if len(sliding) == len(types) else {"window_layers": sliding})}

    def types(self, keys: dict[str, Any]) -> list[str]:
        """transformers' `layer_types`, given or derived."""
        given = keys.get("layer_types") if not self.WINDOWS or "layer_types" in self.WINDOWS else None
        layers = range(keys["num_hidden_layers"])
        types = given or [self.OTHER if self.slides(layer, keys) else FULL for layer in layers]
        if unknown := set(types) - {FULL, self.OTHER}:
            raise UserError(f"layer_types contains {sorted(unknown)[0]!r}, a kind of layer that is not supported.")
        return list(types)

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        """Whether a layer is not full when `layer_types` is not given: all layers, or all but every n-th."""
        every = keys.get(self.EVERY) if self.EVERY in self.DEFAULTS else None
        return not every or (layer + 1) % every != 0

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of a config.json, by their usual names; `misfits` checks that they describe the whole model."""
        tables, acts = _settled(config), {kind: act for act, kind in reversed(self.ACTS.items())}
        mixer = tables.pop("attention")
        if config.attention.parts:
            tables |= {"attention": mixer["softmax"], "linear": mixer["linear"]}
        else:
            tables["attention" if config.mixers[0].attends else "linear"] = mixer
        ours = {"norm.eps": self.DEFAULTS["rms_norm_eps"], "init.std": config.init.std} | flat(tables)
        ours |= {"act": acts.get(config.ffn.kind, "silu"), "tied": config.head.kind == "tied"}
        keys: dict[str, Any] = {key: values[0] if values else None for key, values in self.UNKNOWN.items()}
        keys |= {"architectures": [self.architecture], "model_type": self.model_type, **self.FREE}
        keys["intermediate_size"] = config.ffn.at(0).hidden
        for setting, theirs in self.HELD_BY.items():
            if setting.split(".")[0] not in {"attention", "linear"} - tables.keys():
                keys |= {key: ours.get(setting, keys.get(key)) for key in theirs}
        softmax, rotary = config.softmax, config.softmax or config.latent
        if softmax is not None:
            keys |= {"num_key_value_heads": softmax.kv_heads or softmax.heads, "head_dim": head_dim(config)}
            keys |= {} if self.BIAS is None else {self.BIAS[0]: softmax.bias == self.BIAS[1]}
        if rotary is not None and rotary.turned(config.width):
            positions = write_positions(rotary.rope_theta, rotary.rope_scaling)
            if self.partial:
                positions.setdefault("partial_rotary_factor", 1.0)
            if self.layered:
                theta = rotary.local_rope_theta or self.DEFAULTS.get("rope_local_base_freq", rotary.rope_theta)
                positions = {FULL: positions, SLIDING: {"rope_type": "default", "rope_theta": theta}}
            keys["rope_parameters"] = positions
        windows = write_windows(config, self.OTHER)
        return keys | {key: windows[key] for key in self.WINDOWS}

    def own_keys(self, config: ModelConfig) -> dict[str, Any]:
        """`keys` under the family's own names."""
        spelled = {usual: spelling for spelling, usual in self.SPELLINGS.items()}
        return {spelled.get(key, key): value for key, value in self.keys(config).items() if key not in self.ABSENT}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a model; raises a ValueError that names the first key that the layout cannot express."""
        if misfits := self.misfits(config):
            raise UserError(f"{misfits[0]} has no counterpart in the {self.model_type} layout.")
        return self.own_keys(config)

    def misfits(self, config: ModelConfig) -> list[str]:
        """Our keys that the layout cannot express, each `kind` first; writes a config, reads it back and compares."""
        if not self.has_attention(config):
            return [f"attention.kind = '{config.attention.kind}'"]
        if config.ffn.mixture != self.mixture:
            return [f"ffn.kind = '{config.ffn.kind}'"]
        wanted, described = (flat(_settled(each)) for each in (config, self.read(self.own_keys(config))))
        different = [key for key in {**wanted, **described} if wanted.get(key) != described.get(key)]
        return [f"{key} = {wanted.get(key)!r}" for key in sorted(different, key=lambda key: not key.endswith(".kind"))]

    def has_attention(self, config: ModelConfig) -> bool:
        """Whether all layers of a model have mixers that the family supports."""
        return all(isinstance(mixer, self.MIXERS) for mixer in config.mixers)

    def change(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> tuple[float, float]:
        """Shift and scale of a parameter's values: ours = (theirs + shift) · scale."""
        gain = name.endswith(("norm.weight", "after.weight", "qk_norm.query", "qk_norm.key"))
        shift = float(self.less_one and gain and not name.endswith("body.norm.weight"))
        query = name.endswith("qk_norm.query")
        return shift, self.score_factor(mixer_of(name, config).turned(config.width), keys) if query else 1.0

    def score_factor(self, width: int, keys: Mapping[str, Any]) -> float:
        """How many times larger their scores are than ours; queries, or the gain of their norm, absorb it."""
        return 1.0

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        """How their tensors are laid out in a parameter; most are its rows."""
        if (known := next((self.LAYOUTS[end] for end in self.LAYOUTS if name.endswith(end)), None)) is not None:
            return known
        softmax = mixer_of(name, config) if ".body.project." in name or ".qk_norm." in name else None
        if not isinstance(softmax, choices.SoftmaxAttention):
            return ROWS
        width, kv = softmax.turned(config.width), softmax.kv_heads or softmax.heads
        order, factor = self.head_order(width, config), 1.0
        if ".qk_norm." in name:
            return reordered(order)
        if self.QK_NORM == "none":
            factor = self.score_factor(width, keys)
        factors = torch.tensor([factor] * softmax.heads + [1.0] * 2 * kv).repeat_interleave(width)
        return reordered(by_head((softmax.heads, kv, kv), (order, order, torch.arange(width))), factor=factors)

    def head_order(self, width: int, config: ModelConfig) -> Tensor:
        """The order of their elements in a head of queries or keys."""
        scaling = softmax_of(config).rope_scaling
        share = scaling.share if isinstance(scaling, PartialRope) else 1.0
        return turned_order(width, 2 * int(share * (width // 2)), interleaved=self.interleaved)

    def rules(self, config: ModelConfig, keys: Mapping[str, Any]) -> Iterator[Rule]:
        """The rule for every parameter of a model, in the model's order; `keys` are those of config.json."""
        known = self.DEFAULTS | dict(keys)
        with torch.device("meta"), shapes_only():
            model = build(config)
        saved = model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        for name, parameter in [*model.named_parameters(), *buffers]:
            theirs = self._theirs(name, config) or ()
            layout = self.layout(name, config, known)
            parts = layout.rows(tuple(parameter.shape), _parts(model, name, parameter), len(theirs))
            if len(theirs) != len(parts):
                raise UserError(f"parameter {name} has no counterpart in the {self.model_type} layout.")
            shift, scale = self.change(name, config, known)
            yield Rule(name, tuple(parameter.shape), theirs, parts, shift, scale, layout)

    def _theirs(self, name: str, config: ModelConfig) -> tuple[str, ...] | None:
        if not name.startswith("sublayers."):
            return self.TOP.get(name)
        _, number, part = name.split(".", 2)
        layer, second = divmod(int(number), 2)
        names = (self.FEED_FORWARD if second else self.of_mixer(layer, config)).get(part)
        if names is None:
            return None
        experts = range(config.ffn.experts if any("{e}" in each for each in names) else 1)
        path = f"{self.BODY}{self.LAYERS}.{layer}"
        return tuple(f"{path}.{each}".replace("{e}", str(e)) for e in experts for each in names)

    def of_mixer(self, layer: int, config: ModelConfig) -> Names:
        """The tensor names in a layer's attention."""
        return self.ATTENTION if config.mixers[layer].attends else self.OTHER_ATTENTION


def softmax_of(config: ModelConfig) -> choices.SoftmaxAttention:
    """The softmax attention of a model that has it."""
    assert config.softmax is not None
    return config.softmax


def mixer_of(name: str, config: ModelConfig) -> choices.Mixer:
    """The mixer that has a parameter."""
    return config.mixers[int(name.split(".")[1]) // 2]


def _settled(config: ModelConfig) -> dict[str, Any]:
    """The settings that determine a model's outputs, with derived defaults filled in; excludes initialization."""
    tables = config.model_dump(exclude={"init": True, "head": {"init"}}, exclude_none=True)
    softmax = config.softmax
    if softmax is not None:
        table = tables["attention"].get("softmax", tables["attention"])
        table |= {"head_dim": head_dim(config), "kv_heads": softmax.kv_heads or softmax.heads}
        if softmax.qk_norm == "none":
            table.pop("qk_eps")
        if softmax.qk_norm != "dyt":
            table.pop("qk_alpha")
    if "softmax_every" in tables["attention"]:
        tables["attention"].pop("softmax_every")
        tables["attention"]["softmax_layers"] = config.softmax_layers
    if config.latent is not None:
        latent = tables["attention"].get("softmax", tables["attention"])
        latent["value_dim"] = config.latent.value_width
        if not config.latent.turned(config.width):
            latent.pop("rope_theta")
    first = config.ffn.at(0)
    if config.ffn.mixture and not first.mixture:
        tables["ffn"]["dense_hidden"] = first.hidden
    return tables


def _parts(model: Decoder, name: str, parameter: Tensor) -> tuple[int, ...]:
    """The row counts of the independent maps that are fused in a parameter."""
    parent, _, leaf = name.rpartition(".")
    module: nn.Module = model.get_submodule(parent)
    return declared_matrices(module).get("weight" if leaf == "bias" else leaf, (parameter.shape[0],))
