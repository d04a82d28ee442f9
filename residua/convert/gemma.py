"""The Gemmas: scaled embeddings, gains stored minus one; from Gemma 2 on, norms on both sides and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, alike, softmax_of
from residua.convert.layouts import Layout
from residua.convert.llama import Olmo2
from residua.convert.positions import FULL
from residua.errors import UserError


class AnyGemma(Family):
    """The base of all Gemmas: embeddings times √width, gains stored minus one, GeGLU."""

    less_one = True
    BIAS = ("attention_bias", "all")
    DEFAULTS = Family.DEFAULTS | {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    UNKNOWN: ClassVar[dict[str, tuple[Any, ...]]] = {"use_bidirectional_attention": (False,)}

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().settings(keys) | {"embed_scale": keys["hidden_size"] ** 0.5}


class Gemma(AnyGemma, model_type="gemma"):
    """Gemma: embeddings times √width, gains stored less one, GeGLU."""

    ACTS = AnyGemma.ACTS | {"gelu": "geglu"}  # in the first releases, "gelu" means the tanh approximation


class SandwichGemma(AnyGemma):
    """The base of Gemma 2 to 4: norms on both sides of a sublayer, and windows in several layers."""

    WINDOWS = ("sliding_window", "layer_types")
    HELD_BY = AnyGemma.HELD_BY | {
        "act": ("hidden_activation", "hidden_act"),
        "logit_softcap": ("final_logit_softcapping",),
    }
    SETTINGS = AnyGemma.SETTINGS | {"placement": "both", "logit_softcap": None}
    ATTENTION = Olmo2.ATTENTION
    FEED_FORWARD = Olmo2.FEED_FORWARD | {"norm.weight": ("pre_feedforward_layernorm.weight",)}
    DEFAULTS = AnyGemma.DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}
    FREE: ClassVar[dict[str, Any]] = {"query_pre_attn_scalar": 256}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        return keys | {"query_pre_attn_scalar": keys["head_dim"]}

    def score_factor(self, width: int, keys: Mapping[str, Any]) -> float:
        """transformers divides scores by √query_pre_attn_scalar, Residua by √head_dim."""
        return float((width / keys["query_pre_attn_scalar"]) ** 0.5)


class Gemma2(SandwichGemma, model_type="gemma2"):
    """Gemma 2: norms on both sides of a sublayer, windows in every other layer, capped scores and logits."""

    HELD_BY = SandwichGemma.HELD_BY | {"attention.softcap": ("attn_logit_softcapping",)}
    SETTINGS = SandwichGemma.SETTINGS | {"attention.softcap": None}
    DEFAULTS = SandwichGemma.DEFAULTS | {
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


class Gemma3(SandwichGemma, model_type="gemma3_text"):
    """Gemma 3, text only: QK-norm, and another rotary base in the layers with a window."""

    QK_NORM = "rms"
    layered = True
    DEFAULTS = SandwichGemma.DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    # transformers' eager attention caps scores, but its default attention ignores the key
    UNKNOWN = AnyGemma.UNKNOWN | {"attn_logit_softcapping": ()}


class Gemma4(SandwichGemma, model_type="gemma4_text"):
    """Gemma 4, text only: wider heads in layers without a window, normed values, a factor on the sum after each layer.

    Sizes with per-layer inputs (E2B, E4B) or with experts (26B-A4B) are refused.
    """

    less_one = False
    layered = True
    QK_NORM = "rms_qkv"
    SETTINGS = SandwichGemma.SETTINGS | {"topology.kind": "layer_factor"}
    KEYS_AS_VALUES: ClassVar[Names] = alike("body.project", "self_attn.q_proj", "self_attn.k_proj")
    FREE: ClassVar[dict[str, Any]] = {}
    ABSENT = ("query_pre_attn_scalar", "rope_local_base_freq", "rope_scaling")
    DEFAULTS = SandwichGemma.DEFAULTS | {
        "num_key_value_heads": 4,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
        },
    }
    UNKNOWN: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_bidirectional_attention": (None, "vision"),  # text is causal
        "num_kv_shared_layers": (0,),
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
    }

    def types(self, keys: dict[str, Any]) -> list[str]:
        return [*super().types(keys)[:-1], FULL]  # as transformers does

    def attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        attention = super().attention(keys)
        full = {key: value for key, value in self._full(keys).items() if value != attention.get(key)}
        return attention | (full if "window" not in attention else {"full": full} if full else {})

    def _full(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of layers without a window; as in transformers, keys for single layers take precedence."""
        values, kv_heads = {}, keys["num_key_value_heads"]
        if keys["attention_k_eq_v"]:
            values, kv_heads = {"values": "keys"}, keys["num_global_key_value_heads"] or kv_heads
        table = {"head_dim": keys["global_head_dim"], "num_key_value_heads": kv_heads}
        if (stored := keys.get("per_layer_config")) is not None:
            full = [str(layer) for layer, kind in enumerate(self.types(keys)) if kind == FULL]
            plain = {key: keys[key] for key in table}
            table = plain | stored.get(full[0], {})
            same = all(plain | stored.get(layer, {}) == table for layer in full)
            if not same or table.keys() != plain.keys() or stored.keys() - set(full):
                raise UserError(
                    "per_layer_config changes more than the heads of full_attention, which is not supported."
                )
        return {"head_dim": table["head_dim"], "kv_heads": table["num_key_value_heads"], **values}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, full = super().keys(config), softmax_of(config).in_full
        return keys | {
            "global_head_dim": full.head_dim or keys["head_dim"],
            "num_global_key_value_heads": full.kv_heads or full.heads,
            "attention_k_eq_v": full.values == "keys",
        }

    def of_mixer(self, layer: int, config: ModelConfig) -> Names:
        mixer = config.mixers[layer]
        values = isinstance(mixer, choices.SoftmaxAttention) and mixer.values == "projected"
        return self.ATTENTION if values else {**self.ATTENTION, **self.KEYS_AS_VALUES}

    def score_factor(self, width: int, keys: Mapping[str, Any]) -> float:
        """transformers does not divide scores."""
        return float(width**0.5)

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if name == "topology.factor":
            return Layout(sizes=(1,) * config.layers)
        return super().layout(name, config, keys)

    def _theirs(self, name: str, config: ModelConfig) -> tuple[str, ...] | None:
        if name == "topology.factor":
            return tuple(f"{self.BODY}{self.LAYERS}.{layer}.layer_scalar" for layer in range(config.layers))
        return super()._theirs(name, config)
