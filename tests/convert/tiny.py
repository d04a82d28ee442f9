"""Tiny random models of transformers' families, saved as their folders are."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LENGTH = 40
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ONE = EXPERTS | {"num_experts_per_tok": 1}
GEMMA = {"head_dim": 16, "sliding_window": 6}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "hidden_size_per_layer_input": 0}
KIMI = EXPERTS | {
    "initializer_range": 0.06,  # with 0.2, rounding makes transformers differ by 3e-5 from the same model in float64
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.7,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}
HYBRID = {
    "initializer_range": 0.06,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
SHARED = EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3,
}
LATENT = SIGMOID | {key: KIMI[key] for key in KIMI if key.endswith(("_rank", "_head_dim", "value_heads", "range"))}
LATENT = {key: value for key, value in LATENT.items() if not key.startswith("linear")} | {"q_lora_rank": 12}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
DEEP_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GROWTH = DEEP_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
SMALL_PAIRS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama, biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 5, "layer_types": MIXED}),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": GROWTH}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "phi3": ("Phi3", PARTIAL),
    "phi3, whole heads": ("Phi3", {"sliding_window": 5}),
    "granite": ("Granite", FACTORS | {"tie_word_embeddings": True}),
    "granite, biases": ("Granite", FACTORS | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("GraniteMoe", FACTORS | {"num_local_experts": 4}),
    "olmo3": ("Olmo3", {"sliding_window": 5, "layer_types": MIXED}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "layer_types": MIXED}),
    "exaone4, no window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}),
    "qwen3_next": ("Qwen3Next", SHARED | HYBRID),
    "qwen3_5_text": ("Qwen3_5", HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5Moe", SHARED | HYBRID | {"attention_bias": True}),
    "glm": ("Glm", PARTIAL | {"head_dim": 16}),
    "glm4": ("Glm4", PARTIAL | {"head_dim": 16, "attention_bias": False}),
    "glm4_moe": ("Glm4Moe", PARTIAL | SIGMOID | {"head_dim": 16, "use_qk_norm": True}),
    "glm4_moe, biases": ("Glm4Moe", PARTIAL | SIGMOID | {"head_dim": 16, "attention_bias": True}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"rope_parameters": DEEP_YARN}),
    "deepseek_v3, full queries": ("DeepseekV3", LATENT | {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3, groups": ("DeepseekV3", LATENT | GROUPS),
    "deepseek_v2": ("DeepseekV2", LATENT | GROUPS | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}),
    "deepseek_v2, greedy": ("DeepseekV2", LATENT | {"q_lora_rank": None, "rope_parameters": DEEP_YARN}),
    "flex_olmo": ("FlexOlmo", EXPERTS),
    "olmo": ("Olmo", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "starcoder2, no biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", {"n_inner": 48}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": PARTIAL["rope_parameters"] | {"rope_theta": 100.0}}),
    "gpt_neox, in turn": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("Phi", PARTIAL),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "layer_types": MIXED, "logit_scale": 0.3, "attention_bias": True}),
    "nanochat": ("NanoChat", {"rms_norm_eps": 1e-5}),
    "nanochat, yarn": ("NanoChat", {"rope_parameters": DEEP_YARN}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        # before 5.21 transformers' default attention ignores the cap
        GEMMA | CAPS | {"query_pre_attn_scalar": 12, "attn_implementation": "eager"},
    ),
    "gemma2, no caps": ("Gemma2", GEMMA | dict.fromkeys(CAPS) | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3",
        GEMMA | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2, "final_logit_softcapping": 2.0},
    ),
    "gemma4": ("Gemma4", GEMMA4 | {"final_logit_softcapping": 2.0}),
    "gemma4, keys as values": (
        "Gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": MIXED},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral, one expert": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, raw weights": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 24}),
    "qwen3_moe, one expert": ("Qwen3Moe", ONE | {"moe_intermediate_size": 24, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", EXPERTS),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear, low-rank queries, raw weights": ("KimiLinear", KIMI | {"q_lora_rank": 12, "norm_topk_prob": False}),
    "kimi_linear, one expert": ("KimiLinear", KIMI | ONE),
}
ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic, short": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, long": {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 20},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 4.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope, long": {"rope_type": "longrope", "original_max_position_embeddings": 16, **SMALL_PAIRS, "factor": 4.0},
    "longrope, short": {"rope_type": "longrope", "original_max_position_embeddings": 48, **SMALL_PAIRS, "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


CONFIGURATIONS = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")}


def build(architecture: str, **keys: Any) -> Any:
    """A random model; gains and biases are away from where they start."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    configuration = CONFIGURATIONS.get(architecture, f"{architecture}Config")
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**SIZES | keys)
    head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{architecture}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


def saved(folder: Path, architecture: str, **keys: Any) -> Any:
    """A random model, and its folder written."""
    model = build(architecture, **keys)
    model.save_pretrained(folder)
    return model


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, given: Tensor) -> Tensor:
    """Of a model of transformers or of Residua."""
    found = model(given)
    return found if isinstance(found, Tensor) else found.logits
