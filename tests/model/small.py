"""Small models for tests."""

from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.model.decoder import Decoder

VOCABULARY = 23


def small(**tables: Any) -> ModelConfig:
    """Three layers of width 16 over 23 tokens, unless `tables` say otherwise."""
    base = {
        "vocab_size": VOCABULARY,
        "context": 8,
        "layers": 3,
        "width": 16,
        "attention": {"kind": "softmax", "heads": 2},
        "ffn": {"kind": "swiglu", "hidden": 24},
        "init": {"std": 0.2},
    }
    tables = base | tables
    topology = tables.get("topology", {})
    if topology.get("kind") == "injection":  # it needs a loop
        coda = tables["layers"] - topology["prelude"] - topology["loop"]
        order = {"kind": "loop", "prelude": topology["prelude"], "coda": max(0, coda), "turns": topology["turns"]}
        tables = {"order": order} | tables
    return ModelConfig(**tables)


def tokens_and_targets(batch: int = 2, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def in_parts(model: Decoder, tokens: Tensor, sizes: list[int]) -> Tensor:
    """The logits of tokens [B, T] that a cache gets in parts of these sizes."""
    cache = model.new_cache(*tokens.shape)
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, 1)], 1)
