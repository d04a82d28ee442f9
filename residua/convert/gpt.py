"""Families with LayerNorm or without gains: GPT-2, GPT-NeoX and their successors. transformers is the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config.model import ModelConfig, head_dim
from residua.convert.family import PLAIN, Family, alike
from residua.convert.layouts import NO_TENSOR, ONES, TRANSPOSED, Layout, Rule, reordered
from residua.convert.positions import FULL
from residua.errors import UserError
from residua.ops._runtime.numeric import rms


class LayerNormed(Family):
    """LayerNorm in place of RMSNorm."""

    HELD_BY = Family.HELD_BY | {"norm.eps": ("layer_norm_eps",)}
    SETTINGS = Family.SETTINGS | {"norm.kind": "layernorm", "norm.parameters": "gain_and_bias"}
    DEFAULTS = Family.DEFAULTS | {"layer_norm_eps": 1e-5}
    TOP = Family.TOP | alike("norm", "model.norm")
    ATTENTION = Family.ATTENTION | alike("norm", "input_layernorm")


class PlainFeedForwards(LayerNormed):
    """Feed-forwards without a gate, and biases everywhere."""

    ACTS = PLAIN
    SETTINGS = LayerNormed.SETTINGS | {"attention.bias": "all", "ffn.bias": True}
    LEFT_OUT = r"\w+\.(h|layers)\.\d+\.(attn|attention)\.(masked_)?bias"  # masks in folders of old versions


class Olmo(LayerNormed, model_type="olmo"):
    """OLMo 1: LayerNorm without parameters; models that clip queries, keys and values are refused."""

    SETTINGS = LayerNormed.SETTINGS | {"norm.parameters": "none"}
    BIAS = ("attention_bias", "all")
    ABSENT = ("layer_norm_eps",)
    UNKNOWN = Family.UNKNOWN | {"clip_qkv": ()}


class Starcoder2(PlainFeedForwards, model_type="starcoder2"):
    """StarCoder 2: LayerNorm, plain feed-forwards, biases unless switched off, a window in every layer or none."""

    HELD_BY = PlainFeedForwards.HELD_BY | {"norm.eps": ("norm_epsilon",), "ffn.bias": ("use_bias",)}
    BIAS = ("use_bias", "all")
    WINDOWS = ("sliding_window",)
    DEFAULTS = Family.DEFAULTS | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_bias": True,
    }
    FEED_FORWARD = (
        alike("norm", "post_attention_layernorm") | alike("body.up", "mlp.c_fc") | alike("body.out", "mlp.c_proj")
    )


class GPT2(PlainFeedForwards, model_type="gpt2"):
    """GPT-2: LayerNorm, learned positions and no others, plain feed-forwards, biases everywhere."""

    architecture = "GPT2LMHeadModel"
    BODY = "transformer."
    LAYERS = "h"
    DEFAULTS = LayerNormed.DEFAULTS | {"hidden_act": "gelu_new", "tie_word_embeddings": True}
    UNKNOWN = Family.UNKNOWN | {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    SPELLINGS = Family.SPELLINGS | {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    ABSENT = ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    HELD_BY = PlainFeedForwards.HELD_BY | {
        "context": ("n_ctx", "max_position_embeddings"),
        "learned_positions": ("max_position_embeddings",),
    }
    TOP = alike("norm", "transformer.ln_f") | {
        "embed.weight": ("transformer.wte.weight",),
        "places.weight": ("transformer.wpe.weight",),
        "unembed.weight": ("lm_head.weight",),
    }
    ATTENTION = alike("norm", "ln_1") | alike("body.project", "attn.c_attn") | alike("body.out", "attn.c_proj")
    FEED_FORWARD = alike("norm", "ln_2") | alike("body.up", "mlp.c_fc") | alike("body.out", "mlp.c_proj")
    LAYOUTS = dict.fromkeys(("project.weight", "up.weight", "out.weight"), TRANSPOSED)

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        usual = super().spelled(keys)
        return usual | {"intermediate_size": usual.get("intermediate_size") or 4 * usual.get("hidden_size", 0)}

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"unturned_layers": list(range(keys["num_hidden_layers"]))}


class GPTNeoX(PlainFeedForwards, model_type="gpt_neox"):
    """GPT-NeoX and Pythia: LayerNorm, parallel sublayers unless switched off, heads that turn in part, biases."""

    BODY = "gpt_neox."
    BIAS = ("attention_bias", "all")
    partial = True
    DEFAULTS = LayerNormed.DEFAULTS | {
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
    }
    SPELLINGS = Family.SPELLINGS | {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    ABSENT = ("num_key_value_heads", "head_dim")
    TOP = alike("norm", "gpt_neox.final_layer_norm") | {
        "embed.weight": ("gpt_neox.embed_in.weight",),
        "unembed.weight": ("embed_out.weight",),
    }
    ATTENTION = (
        alike("norm", "input_layernorm")
        | alike("body.project", "attention.query_key_value")
        | alike("body.out", "attention.dense")
    )
    FEED_FORWARD = (
        alike("norm", "post_attention_layernorm")
        | alike("body.up", "mlp.dense_h_to_4h")
        | alike("body.out", "mlp.dense_4h_to_h")
    )

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().settings(keys) | ({"topology.kind": "parallel"} if keys["use_parallel_residual"] else {})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"use_parallel_residual": config.topology.kind == "parallel"}

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        """Their projection stores, head by head, its query, key and value; ours all queries, then keys, then values."""
        if ".body.project." not in name or config.softmax is None:
            return super().layout(name, config, keys)
        width = head_dim(config)
        rows = torch.arange(3 * config.softmax.heads * width).view(-1, 3, width).transpose(0, 1)
        return reordered(torch.cat([rows[:2, :, self.head_order(width, config)].flatten(), rows[2].flatten()]))


class HeadWithBias(Rule):
    """W' for a head (W, b) after a LayerNorm with gain g and bias β, where our norm has gains and biases of 1.

    A LayerNorm without parameters gives x with Σ x = 0. So W' = W diag(g) + c 1ᵀ gives W'(x + 1) = W(g ⊙ x + β) + b
    for c = (W β + b − W g) / C: the bias is folded into the head and needs no parameter.
    """

    @property
    def exact(self) -> bool:
        return False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from zip(self.theirs, (self.shape, self.shape[:1]), strict=True)

    def read(self, parts: list[Tensor]) -> Tensor:
        weight, bias, *norm = (part.double() for part in parts)
        gain, shift = norm or (weight.new_ones(weight.shape[1]),) * 2
        constant = (weight @ (shift - gain) + bias) / weight.shape[1]
        return (weight * gain + constant[:, None]).float()

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.theirs, (parameter, parameter.new_zeros(len(parameter))), strict=True))


class Phi(PlainFeedForwards, model_type="phi"):
    """Phi 1 to 2: parallel sublayers with one LayerNorm, heads that turn in part, biases, also on logits."""

    partial = True
    SETTINGS = PlainFeedForwards.SETTINGS | {"topology.kind": "parallel"}
    DEFAULTS = LayerNormed.DEFAULTS | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}
    UNKNOWN = Family.UNKNOWN | {"qk_layernorm": (False,), "tie_word_embeddings": (False,)}
    TOP = Family.TOP | alike("norm", "model.final_layernorm")
    ATTENTION = LayerNormed.ATTENTION | alike("body.out", "self_attn.dense")
    FEED_FORWARD = alike("norm", "input_layernorm") | alike("body.up", "mlp.fc1") | alike("body.out", "mlp.fc2")

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        return ONES if name in ("norm.weight", "norm.bias") else super().layout(name, config, keys)

    def rules(self, config: ModelConfig, keys: Mapping[str, Any]) -> Iterator[Rule]:
        norm = self.TOP["norm.weight"] + self.TOP["norm.bias"]
        for rule in super().rules(config, keys):
            if rule.ours != "unembed.weight":
                yield rule
                continue
            yield HeadWithBias(rule.ours, rule.shape, ("lm_head.weight", "lm_head.bias"), (), also=norm)


class Cohere(LayerNormed, model_type="cohere"):
    """Command R: parallel sublayers with one LayerNorm without a bias, a factor on logits; QK-norm is refused."""

    interleaved = True
    BIAS = ("attention_bias", "all")
    SETTINGS = LayerNormed.SETTINGS | {"norm.parameters": "gain", "topology.kind": "parallel"}
    DEFAULTS = LayerNormed.DEFAULTS | {"rope_theta": 500_000.0, "tie_word_embeddings": True, "logit_scale": 0.0625}
    UNKNOWN = Family.UNKNOWN | {"use_qk_norm": (False,)}
    FREE: ClassVar[dict[str, Any]] = {"logit_scale": 1.0}
    FEED_FORWARD = LayerNormed.FEED_FORWARD | {"norm.weight": ("input_layernorm.weight",)}

    def change(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> tuple[float, float]:
        return 0.0, keys["logit_scale"] if name == "norm.weight" else 1.0


class Cohere2(Cohere, model_type="cohere2"):
    """Command R7B and A: Command R with windows in three of four layers, and no positions in the others."""

    WINDOWS = ("sliding_window", "layer_types")
    ABSENT = ("head_dim",)
    DEFAULTS = Cohere.DEFAULTS | {"rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}

    def unturned(self, keys: dict[str, Any]) -> list[int]:
        has_window = keys["sliding_window"] is not None
        return [layer for layer, kind in enumerate(self.types(keys)) if kind == FULL or not has_window]


def normed_rows(eps: float) -> Layout:
    """Their rows, normalized: their model normalizes its embeddings, ours does not."""

    def write(ours: Tensor) -> Tensor:
        """The x with x / sqrt(mean(x²) + eps) = p: x = p · sqrt(eps / (1 − mean(p²)))."""
        square = ours.double().square().mean(-1, keepdim=True)
        if (square > 1 + 1e-5).any():
            raise UserError("the nanochat layout norms embedded tokens, and training has made some longer than that.")
        return (ours * (eps / (1 - square).clamp(min=1e-8)).sqrt()).float()

    return Layout(lambda theirs: rms(theirs.float(), eps), write, exact=False)


class NanoChat(Family, model_type="nanochat"):
    """nanochat: norms without gains, also on embedded tokens, squared ReLU, capped logits."""

    ACTS = PLAIN
    BIAS = ("attention_bias", "all")
    QK_NORM = "rms"
    HELD_BY = Family.HELD_BY | {"logit_softcap": ("final_logit_softcapping",)}
    SETTINGS = Family.SETTINGS | {"norm.kind": "unit_rmsnorm", "logit_softcap": None}
    DEFAULTS = Family.DEFAULTS | {"hidden_act": "relu2", "final_logit_softcapping": 15.0}
    UNKNOWN = Family.UNKNOWN | {"tie_word_embeddings": (False,)}
    ATTENTION = Family.ATTENTION | {"body.qk_norm.query": (), "body.qk_norm.key": ()}
    FEED_FORWARD = alike("body.up", "mlp.fc1") | alike("body.out", "mlp.fc2")
    LAYOUTS = dict.fromkeys(("qk_norm.query", "qk_norm.key"), NO_TENSOR)

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        positions = super().positions(keys)
        if "attention_factor" in positions.get("rope_scaling", {}):  # norms after the rotation cancel it
            positions["rope_scaling"]["attention_factor"] = 1.0
        return positions

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        return normed_rows(keys["rms_norm_eps"]) if name == "embed.weight" else super().layout(name, config, keys)

    def head_order(self, width: int, config: ModelConfig) -> Tensor:
        """Theirs rotates pairs in the other direction, which equals swapping the halves."""
        return torch.arange(width).roll(width // 2)
