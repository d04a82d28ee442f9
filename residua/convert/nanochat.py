"""nanochat: norms without gains, also on embedded tokens, squared ReLU, capped logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config.model import ModelConfig, head_dim
from residua.convert.family import PLAIN, Family, Names, alike, plain_kind, register
from residua.convert.layouts import Layout, Ones, Reordered, by_head
from residua.convert.llama import head_qk_norm
from residua.errors import UserError
from residua.ops._runtime.numeric import rms


class NormedRows(Layout):
    """Their rows, normed: the model norms what it embeds, which ours does not."""

    exact = False

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def read(self, stacked: Tensor) -> Tensor:
        return rms(stacked.float(), self.eps)

    def write(self, parameter: Tensor) -> Tensor:
        """x with x / sqrt(mean(x²) + eps) = p, which is p · sqrt(eps / (1 − mean(p²)))."""
        square = parameter.double().square().mean(-1, keepdim=True)
        if (square > 1 + 1e-5).any():
            raise UserError("the nanochat layout norms embedded tokens, and training has made some longer than that.")
        return (parameter * (self.eps / (1 - square).clamp(min=1e-8)).sqrt()).float()


@register
class NanoChat(Family):
    """nanochat: norms without gains, also on embedded tokens, squared ReLU, capped logits."""

    ACTS: ClassVar[Mapping[str, str]] = PLAIN
    model_type = "nanochat"
    architecture = "NanoChatForCausalLM"
    BIAS = ("attention_bias", "all")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tie_word_embeddings": (False,)}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "body.qk_norm.query": (), "body.qk_norm.key": ()}
    FEED_FORWARD: ClassVar[Names] = {**alike("body.up", "mlp.fc1"), **alike("body.out", "mlp.fc2")}
    LAYOUTS: ClassVar[Mapping[str, Layout]] = {"qk_norm.query": Ones(), "qk_norm.key": Ones()}

    def norm(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "unit_rmsnorm", "eps": keys["rms_norm_eps"]}

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"kind": plain_kind(keys["hidden_act"]), "hidden": keys["intermediate_size"]}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys) | {"logit_softcap": keys["final_logit_softcapping"]}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"final_logit_softcapping": config.logit_softcap}

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if name == "embed.weight":
            return NormedRows({**self.DEFAULTS, **keys}["rms_norm_eps"])
        if ".body.project." not in name or config.softmax is None:
            return super().layout(name, config, keys)
        # pairs turn the other way there, which is the same for halves in the other order
        width, kv = head_dim(config), config.softmax.kv_heads or config.softmax.heads
        swapped = torch.arange(width).roll(width // 2)
        return Reordered(by_head((config.softmax.heads, kv, kv), (swapped, swapped, torch.arange(width))))
