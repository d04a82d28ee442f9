"""A tiny random model of every causal language model in transformers: two layers, width 32, 64 tokens."""

from typing import Any

import torch
from torch import Tensor

VOCABULARY, WIDTH, LENGTH, SEQUENCES = 64, 32, 32, 4
FIRST = 3
"""The token that every sequence begins with; it occurs nowhere else. Lower numbers may be padding or an end of text."""

_NAMES: dict[int, str] = {
    64: "vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab "
    "pronunciation_vocab_size shape_vocab_size "
    "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
    "context_length model_max_length position_bias_max_distance image_size",
    20: "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size index_topk "
    "local_attention",
    32: "hidden_size d_model n_embd emb_dim lru_width word_embed_proj_dim input_embedding_size embedding_dim "
    "attention_hidden_size hidden_size_global output_embedding_size embedding_size ple_embed_dim",
    1: "encoder_layers num_encoder_layers n_group topk_group n_shared_experts num_shared_experts num_expert_group "
    "moe_num_shared_experts first_k_dense_replace num_nextn_predict_layers o_groups index_local_blocks num_codebooks "
    "mamba_n_groups n_groups mamba_ngroups num_dense_layers num_kv_shared_layers zero_expert_num patch_size_ "
    "n_mamba_heads num_mem_blocks moe_layer_start_index num_hashes max_window_layers",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_num_active_experts "
    "top_k_experts moe_top_k linear_num_key_heads index_n_heads swa_num_key_value_heads num_layers_per_stack "
    "index_topk_blocks type_vocab_size heads_per_ngram num_query_groups hc_lowrank prompt_types segment_types",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts linear_num_value_heads linear_num_heads swa_num_attention_heads gated_norm_rank "
    "qk_rope_head_dim mamba_dt_rank laurel_rank rotary_dim adapter_rank time_step_rank index_block_size "
    "split_ngram_parts dim_model_base",
    8: "head_dim attention_head_dim attention_head_size dim_head d_head swa_head_dim "
    "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels index_head_dim "
    "mamba_d_state state_size ssm_state_size mamba_head_dim mamba_d_head hidden_size_per_layer_input "
    "chunk_size mamba_chunk_size q_lora_rank kv_lora_rank "
    "o_lora_rank d_rel rel_extent router_hidden_size num_buckets block_size position_bias_num_buckets prompt_length "
    "mamba_headdim",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size",
    48: "intermediate_size n_inner ffn_dim dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size",
}
SIZES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}


def types() -> list[str]:
    """Every causal language model of the installed transformers, by its name in config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configuration(kind: str, **changes: Any) -> Any:
    """A tiny configuration: the known sizes, for the keys of the class, and the required keys of this architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[kind], NEEDED.get(kind, {}) | changes)


def _shrunk(made: Any, needed: dict[str, Any]) -> Any:
    keys: dict[str, Any] = {}
    known = set(getattr(made, "__dataclass_fields__", ())) or set(made().to_dict())
    for key in known:
        if key in SIZES:
            keys[key] = SIZES[key]
    if "kv_lora_rank" in keys:  # latent attention: as many keys as queries, and a small part of them is rotated
        keys |= {"num_key_value_heads": 4, "head_dim": 4} if "head_dim" in keys else {"num_key_value_heads": 4}
    if "mlp_layer_types" in known:
        keys["mlp_layer_types"] = ["dense", "sparse"]
    if names := [name for name in getattr(made, "sub_configs", None) or {} if name not in needed]:
        parts = {name: type(part) for name in names if (part := getattr(made(), name, None)) is not None}
        keys |= {name: _shrunk(p, NEEDED.get(p.model_type, {})).to_dict() for name, p in parts.items()}
    keys |= {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in known}
    return made(**keys | needed)


@torch.no_grad()
def build(kind: str, seed: int = 0) -> Any:
    """A random model in which every part has an effect: norm-keeping matrices, random gains and biases."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = configuration(kind)
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_decoder", None) is False:
            part.is_decoder = True
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    embeddings = model.get_input_embeddings()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            fan_in = parameter.shape[-1] if parameter.dim() == 2 else parameter[0].numel() / parameter.shape[1]
            parameter.normal_(std=0.7 * max(fan_in, 1) ** -0.5)
        elif parameter.is_floating_point():
            parameter.add_(0.1 * torch.randn_like(parameter))
    embeddings.weight.normal_()
    return model


def rows(seed: int = 1) -> Tensor:
    """Sequences that begin with `FIRST`, one token longer than the input of a model."""
    drawn = torch.randint(FIRST + 1, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    drawn[:, 0] = FIRST
    return drawn


LINEAR = ["linear_attention", "full_attention"]
WINDOWS = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_ssm": 64}
NEEDED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": LINEAR},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "beam": {"layer_types": WINDOWS},
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "cpmant": {"prompt_length": 32, "prompt_types": 32, "segment_types": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe", "moe"],
        "num_key_value_heads": 1,
        "head_dim": 8,
        "o_groups": 2,
    },
    "falcon_h1": MAMBA,
    "flint": {"mlp_only_layers": [0], "layer_types": WINDOWS},
    "gemma4_text": {"layer_types": WINDOWS, "global_head_dim": 16, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"layer_types": WINDOWS, "global_head_dim": 16, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": LINEAR, "residual_multiplier": 0.5},
    "granite": {"residual_multiplier": 0.5},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_hidden_layers": 4, "head_dim": 4},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "olmo_hybrid": {"layer_types": LINEAR},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "qwen4_exp_text": {
        "layer_types": LINEAR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16,
        "is_decoder": True,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that an architecture needs besides the sizes, or that make its parts differ: layer kinds, small windows."""
LEFT_OUT = {
    "gemma3n": "needs timm, which is not installed",
    "gemma4_assistant": "drafts for a larger model, whose states it is given",
    "gemma4_unified_assistant": "drafts for a larger model, whose states it is given",
    "moshi": "reads audio codes in addition to text",
    "musicgen": "reads several codebooks of audio, no text",
    "musicgen_melody": "reads several codebooks of audio, no text",
}
"""Architectures that need more than text to run, or that cannot be built here."""
