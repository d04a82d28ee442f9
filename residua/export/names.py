"""Names of sizes and layers that libraries around transformers expect in a configuration."""

from __future__ import annotations

from typing import Any

from residua.config.model import ModelConfig, head_dim


def standard_names(config: ModelConfig) -> dict[str, Any]:
    """Sizes, heads, and what each layer has to keep of earlier tokens."""
    # a model without softmax attention counts its tokens in keys of width 1, beside the recurrent state
    linear = "linear_attention" if config.softmax_layers else "hybrid"
    softmax = config.softmax
    names = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn.hidden,
        "num_hidden_layers": config.layers,
        "max_position_embeddings": config.context,
        "layer_types": ["full_attention" if n in config.softmax_layers else linear for n in range(config.layers)],
        "tie_word_embeddings": config.head.kind == "tied",
    }
    if softmax is not None:
        names["num_attention_heads"] = softmax.heads
        names["num_key_value_heads"] = softmax.kv_heads or softmax.heads
        names["head_dim"] = head_dim(config)
    return names
