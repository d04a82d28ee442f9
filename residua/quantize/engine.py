"""Write a quantized model of one of transformers' families in the compressed-tensors layout.

Serving engines load it without Residua. Up to names, a pre-norm model with RMSNorm, softmax attention with QK-norm and
SwiGLU is Qwen3; without QK-norm, it is Llama (`residua.convert`). Fused projections are split by rows and keep their
scales.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig
from residua.convert.families import find_family
from residua.convert.family import Family
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.ops.low_precision.fp8 import GROUP, ROW, Fp8
from residua.ops.low_precision.nvfp4 import GROUP as NVFP4_GROUP
from residua.ops.low_precision.nvfp4 import Nvfp4
from residua.quantize.schemes import Quantized
from residua.quantize.store import FORMATS, TILES, as_json, module_tensors, quantization_config, write_folder
from residua.reading import inside
from residua.storage.card import ENGINE, Metadata, Trained, card_metadata, model_card
from residua.storage.hugging_face import CARD_FILE, CONFIG, companions, end_ids

LAYOUTS = ("qwen3", "llama", "qwen2", "mistral")
"""The families to try, in this order. Families with experts are excluded: engines expect other names for them."""

ACTIVATION_GROUPS = {"fp8-group": GROUP.columns or 1, **dict.fromkeys(FORMATS, NVFP4_GROUP)}
"""Channels of an activation that share a scale; engines do not support a shorter last group."""


def served_dtype(scheme: str) -> torch.dtype:
    """The dtype of the folder's unquantized weights: bf16 with NVFP4, which engines unpack into bf16, else fp32."""
    return torch.bfloat16 if scheme in FORMATS else torch.float32


def find_layout(config: ModelConfig) -> Family:
    """Return the first family that fits a model. If none fits, refuse it and name what the nearest family lacks."""
    families = [find_family(name) for name in LAYOUTS]
    misfits = {family.model_type: family.misfits(config) for family in families}
    nearest = min(families, key=lambda family: len(misfits[family.model_type]))
    if lacking := misfits[nearest.model_type]:
        raise UserError(
            f"--engine writes models of the shape of {', '.join(LAYOUTS)}, but this one has {lacking[0]}, which "
            f"{nearest.model_type} models do not: leave --engine out."
        )
    return nearest


def require_served(model: Decoder, modules: Container[str], scheme: str) -> None:
    """Refuse a model that an engine could not open, or would round differently from the evaluated model."""
    family = find_layout(model.config)
    group, tile = ACTIVATION_GROUPS.get(scheme, 1), TILES.get(scheme, ROW)
    for rule in family.rules(model.config, family.write(model.config)):
        name = rule.ours.removesuffix(".weight")
        if name not in modules:
            continue
        if rule.shape[-1] % group:
            raise UserError(
                f"--engine with {scheme} needs input widths that are multiples of {group}, but {name} has "
                f"{rule.shape[-1]}: use --scheme fp8-row, or leave --engine out."
            )
        if any(first % (tile.rows or 1) for first in accumulate(rule.rows[:-1])):
            raise UserError(
                f"--engine with {scheme} would cut blocks of {tile.rows} rows, because {name} consists of parts with "
                f"{', '.join(map(str, rule.rows))} rows: use --scheme fp8-row, or leave --engine out."
            )


def save_engine(
    out: Path, source: Path, model: Decoder, weights: Mapping[str, Quantized], scheme: str, peaks: Mapping[str, float]
) -> None:
    """Write config.json, model.safetensors, a card and the tokenizer; tensors not in `weights` have `served_dtype`.

    The chat template, generation settings and end tokens of an imported run or Hugging Face folder are included.
    """
    family = find_layout(model.config)
    keys, dtype = family.write(model.config), served_dtype(scheme)
    tensors: dict[str, Tensor] = {}
    low: list[str] = []
    for rule in family.rules(model.config, keys):
        parameter, name = model.get_parameter(rule.ours), rule.ours.removesuffix(".weight")
        if name not in weights:
            tensors |= rule.write(parameter.to(dtype))
            continue
        first = 0
        for theirs, rows in zip(rule.theirs, rule.rows, strict=True):
            part = theirs.removesuffix(".weight")
            low.append(part)
            tensors |= module_tensors(part, rows_of(weights[name], first, rows), peaks[name])
            first += rows
    about = {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization_config(scheme, low)}
    config = end_tokens(source) | keys | about
    copies = companions(source) | {"tokenizer.json": inside(source, "tokenizer.json")}
    words = f"{len(low)} matrices and their inputs are in {scheme}, everything else in {about['dtype']}."
    known = card_metadata(source, Metadata())
    card = model_card(model, out.name, Trained(source), form=ENGINE, metadata=known, about=words)
    write_folder(out, tensors, {CONFIG: as_json(config), CARD_FILE: card}, copies)


def end_tokens(source: Path) -> dict[str, Any]:
    """The ids that begin and end a text, for config.json: from the folder's config.json, or else from the tokenizer."""
    files = companions(source)
    if CONFIG in files:
        return end_ids(files)
    if inside(source, "tokenizer.json").is_file():
        return {"eos_token_id": Tokenizer.load(source).end_of_text}
    return {}


def rows_of(weight: Quantized, first: int, count: int) -> Quantized:
    """Return rows of a quantized matrix with their scales; `require_served` ensures that they do not split a block."""
    rows = slice(first, first + count)
    if isinstance(weight, Nvfp4):
        return Nvfp4(weight.codes[rows], weight.scale[rows], weight.global_scale.clone(), weight.columns)
    assert isinstance(weight, Fp8)
    height = weight.tile.rows or len(weight.codes)
    assert first % height == 0
    return Fp8(weight.codes[rows], weight.scale[first // height : -(-(first + count) // height)], weight.tile)
