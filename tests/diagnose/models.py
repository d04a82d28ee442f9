"""Tiny random Hugging Face models of several architectures, saved to a folder with a byte tokenizer."""

from pathlib import Path
from typing import Any

import torch

from residua.data import Tokenizer
from tests.diagnose import architectures
from tests.diagnose.architectures import WIDTH as WIDTH

VOCABULARY = 264
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": WINDOWS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma2": WINDOWS,
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": None},
    "deepseek_v4": {"hc_mult": 3, "sliding_window": 8, "index_topk": 4},
}
"""Settings in which a model differs from the tiny one of its architecture."""


def build(name: str) -> Any:
    """A random model of this architecture, the same each time, in single precision and as its library starts it."""
    import transformers

    torch.manual_seed(0)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    changes = {"vocab_size": VOCABULARY} | no_ids | CHANGES.get(name, {})
    config = architectures.configuration(name, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save(model: Any, folder: Path) -> Path:
    """Write the model and a tokenizer."""
    model.save_pretrained(folder)
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return folder
