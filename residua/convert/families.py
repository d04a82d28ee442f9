"""All families by `model_type`; each file holds similar families."""

from __future__ import annotations

from residua.convert import gemma, gpt, latent, llama, mixture, qwen_next
from residua.convert.family import FAMILIES, find_family

__all__ = ["FAMILIES", "find_family", "gemma", "gpt", "latent", "llama", "mixture", "qwen_next"]
