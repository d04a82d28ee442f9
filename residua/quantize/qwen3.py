"""Write a quantized model as Qwen3 in the compressed-tensors layout, which serving engines load without Residua.

A pre-norm model with RMSNorm, softmax attention with QK-norm and SwiGLU is Qwen3 under other names. Fused projections
are split by rows and keep their scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from residua.config.model import ModelConfig, head_dim
from residua.model.decoder import Decoder
from residua.quantize.fp8 import Fp8, quantize_fp8
from residua.quantize.layout import module_tensors, quantization_config
from residua.quantize.nvfp4 import Nvfp4
from residua.quantize.schemes import Quantized
from residua.quantize.store import write_folder
from residua.reading import inside

EPS = 1e-6
PARTS = {
    "body.project": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "body.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
NAMES = ({"body.out": "self_attn.o_proj"}, {"body.out": "mlp.down_proj"})
NORMS = ("input_layernorm", "post_attention_layernorm")


def why_not(config: ModelConfig) -> str | None:
    """The part that differs from Qwen3, or None if the model is one."""
    attention = config.attention
    wanted: list[tuple[bool, str]] = [
        (attention.kind == "softmax", f"attention.kind = {attention.kind!r}"),
        (getattr(attention, "gate", "none") == "none", "attention.gate"),
        (getattr(attention, "sink", "none") == "none", "attention.sink"),
        (getattr(attention, "qk_norm", "rms") == "rms", "attention.qk_norm = 'none'"),
        (config.norm.kind == "rmsnorm", f"norm.kind = {config.norm.kind!r}"),
        (getattr(config.norm, "eps", EPS) == EPS, f"norm.eps other than {EPS:g}"),
        (config.topology.kind == "additive", f"topology.kind = {config.topology.kind!r}"),
        (config.anchors.kind == "none", f"anchors.kind = {config.anchors.kind!r}"),
        (config.ffn.kind == "swiglu", f"ffn.kind = {config.ffn.kind!r}"),
    ]
    return next((what for fits, what in wanted if not fits), None)


def check_qwen3(config: ModelConfig) -> None:
    """Refuse a model that has another shape."""
    problem = why_not(config)
    if problem is not None:
        raise ValueError(f"--engine writes models of Qwen3's shape, and this one has {problem}: leave --engine out.")


def save_qwen3(
    out: Path, source: Path, model: Decoder, weights: Mapping[str, Quantized], scheme: str, peaks: Mapping[str, float]
) -> None:
    """Write config.json, model.safetensors and the tokenizer; what is not in `weights` stays in high precision."""
    check_qwen3(model.config)
    tensors = dict(_plain(model))
    low: list[str] = []
    for name, parameter, parts in _projections(model):
        first = 0
        for part, rows in parts:
            if name in weights:
                low.append(part)
                tensors |= module_tensors(part, rows_of(weights[name], parameter, first, rows), peaks[name])
            else:
                tensors[f"{part}.weight"] = parameter[first : first + rows]
            first += rows
    # engines unpack FP4 into bf16
    dtype = "bfloat16" if scheme == "nvfp4" else "float32"
    config = qwen3_config(model.config) | {"dtype": dtype, "quantization_config": quantization_config(scheme, low)}
    write_folder(out, tensors, {"config.json": config}, copies=[inside(source, "tokenizer.json")])


def rows_of(weight: Quantized, exact: Tensor, first: int, count: int) -> Quantized:
    """Rows of a quantized matrix with their scales; quantized again where a block would be cut in two."""
    rows = slice(first, first + count)
    if isinstance(weight, Nvfp4):
        return Nvfp4(weight.codes[rows], weight.scale[rows], weight.global_scale.clone(), weight.columns)
    assert isinstance(weight, Fp8)
    height = weight.tile.rows or len(weight.codes)
    if first % height or ((first + count) % height and first + count < len(weight.codes)):
        return quantize_fp8(exact[rows].detach(), weight.tile)
    return Fp8(weight.codes[rows], weight.scale[first // height : -(-(first + count) // height)], weight.tile)


def qwen3_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of the same model."""
    attention = config.attention.everywhere
    assert attention is not None
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.width,
        "intermediate_size": config.ffn.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads or attention.heads,
        "head_dim": head_dim(config),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": EPS,
        "rope_theta": attention.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": config.head.kind == "tied",
    }


def _projections(model: Decoder) -> Iterator[tuple[str, Tensor, list[tuple[str, int]]]]:
    """Name and weight of each projection, and the names and row counts of its parts in Qwen3."""
    for k, sublayer in enumerate(model.sublayers):
        names = {own: (theirs,) for own, theirs in NAMES[k % 2].items()} | PARTS
        for own, theirs in names.items():
            if not _has(sublayer, own):
                continue
            module: Any = sublayer.get_submodule(own)
            rows = module.hidden_matrices["weight"]
            parts = [f"model.layers.{k // 2}.{part}" for part in theirs]
            yield f"sublayers.{k}.{own}", module.weight, list(zip(parts, rows, strict=True))


def _plain(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """What is never quantized: embedding, norms and head."""
    yield "model.embed_tokens.weight", model.embed.weight
    if model.unembed is not None:
        yield "lm_head.weight", model.unembed.weight
    final: Any = model.norm
    yield "model.norm.weight", final.weight
    for k, sublayer in enumerate(model.sublayers):
        layer = f"model.layers.{k // 2}"
        norm: Any = sublayer.norm
        yield f"{layer}.{NORMS[k % 2]}.weight", norm.weight
        if k % 2 == 0:
            qk: Any = sublayer.get_submodule("body.qk_norm")
            yield f"{layer}.self_attn.q_norm.weight", qk.query
            yield f"{layer}.self_attn.k_norm.weight", qk.key


def _has(sublayer: Any, name: str) -> bool:
    return hasattr(sublayer.body, name.removeprefix("body."))
