"""All families by `model_type`; each file has those that are alike."""

from __future__ import annotations

from residua.convert import cohere, deepseek, gemma, glm, gpt, granite, kimi, llama, mixture, nanochat, qwen_next
from residua.convert.family import FAMILIES, find_family

__all__ = [
    "FAMILIES", "cohere", "deepseek", "find_family", "gemma", "glm", "gpt", "granite", "kimi", "llama", "mixture",
    "nanochat", "qwen_next",
]  # fmt: skip
