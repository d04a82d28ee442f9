"""Tiny random Hugging Face models of several architectures, saved to a folder with a byte tokenizer."""

from pathlib import Path
from typing import Any

import torch

from residua.data import Tokenizer

VOCABULARY, WIDTH, LAYERS, HEADS = 264, 32, 2, 4


def _common(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    return sizes | heads | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | more


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _common()),
    "qwen3": ("Qwen3Config", _common()),
    "gpt2": ("GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
        "bos_token_id": None, "eos_token_id": None,
    }),
    "gpt_oss": ("GptOssConfig", _common(
        num_local_experts=4, num_experts_per_tok=2, **WINDOWS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )),
    "mixtral": ("MixtralConfig", _common(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", _common(**EXPERTS)),
    "qwen3_next": ("Qwen3NextConfig", _common(
        **EXPERTS, num_hidden_layers=4, shared_expert_intermediate_size=16, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    )),
    "gemma2": ("Gemma2Config", _common(**WINDOWS)),
    "olmo2": ("Olmo2Config", _common() | {"head_dim": None}),
    "neox": ("GPTNeoXConfig", {k: v for k, v in _common().items() if k not in ("num_key_value_heads", "head_dim")}),
    "deepseek_v4": ("DeepseekV4Config", _common(
        num_key_value_heads=1, q_lora_rank=8, qk_rope_head_dim=4, o_lora_rank=8, o_groups=2, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, hc_mult=3, sliding_window=8, index_n_heads=2,
        index_head_dim=8, index_topk=4,
    )),
    "bloom": ("BloomConfig", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "bos_token_id": None,
        "eos_token_id": None,
    }),
}  # fmt: skip


def build(name: str) -> Any:
    """A random model of this architecture, the same each time, in single precision."""
    import transformers

    kind, settings = CONFIGS[name]
    settings = {key: value for key, value in settings.items() if value is not None or key.endswith("token_id")}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save(model: Any, folder: Path) -> Path:
    """Write the model and a tokenizer."""
    model.save_pretrained(folder)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return folder
