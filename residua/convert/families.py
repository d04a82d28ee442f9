"""All families by `model_type`; each file has those that are alike."""

from __future__ import annotations

from residua.convert import gemma, granite, kimi, llama, mixture, qwen_next
from residua.convert.family import FAMILIES, find_family

__all__ = ["FAMILIES", "find_family", "gemma", "granite", "kimi", "llama", "mixture", "qwen_next"]
