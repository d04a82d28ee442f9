"""Exports for tests: small models with the byte tokenizer, also opened by transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import residua
from residua.config.model import ModelConfig
from residua.data.tokenizer import Tokenizer
from residua.export.folder import write_folder
from residua.model.decoder import Decoder
from tests.model.combinations import config_of

VOCABULARY = 257
FACTORS = ("topology", "anchors", "norm", "attention", "ffn", "head")


def made_of(*choices: str) -> ModelConfig:
    """The configuration with these choices, one for each of the FACTORS."""
    return config_of(dict(zip(FACTORS, choices, strict=True)))


def trained_like(config: ModelConfig) -> Decoder:
    """A model with parameters away from their initial values, where many have no effect: closed gates, zero queries."""
    model = residua.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()


def bytes_config(config: ModelConfig) -> ModelConfig:
    return ModelConfig(**config.model_dump() | {"vocab_size": VOCABULARY, "context": 64})


def write(model: Decoder, folder: Path) -> Path:
    write_folder(model, Tokenizer.bytes(), folder, check=False)
    return folder


@torch.no_grad()
def greedy(model: Decoder, tokens: Tensor, count: int, ids: int | None = None) -> Tensor:
    """Tokens and the `count` most likely next ones, of the first `ids`; computed without a cache."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:, :ids].argmax(-1)], 1)
    return tokens


def in_transformers(folder: Path, **settings: Any) -> nn.Module:
    """The folder as transformers opens it, by the folder's own code by default."""
    from transformers import AutoModelForCausalLM

    given = {"trust_remote_code": True, "implementation": "file"} | settings
    return AutoModelForCausalLM.from_pretrained(folder, **given).eval()
