"""Small models, a known defect to plant in each, and the text they read."""

from typing import Any

import torch
from torch import Tensor

import residua
from residua.diagnose import ModelDiagnosis, diagnose_model
from residua.diagnose.native import NativeSubject
from residua.diagnose.schema import TextFacts
from residua.diagnose.text import Sample
from residua.model.decoder import Decoder

VOCABULARY, WIDTH, HEAD, LENGTH, SEQUENCES = 61, 32, 8, 32, 8
FIRST = 0
"""The token that every sequence begins with; it occurs nowhere else."""
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "additive": {"kind": "additive"},
    "full_attnres": {"kind": "full_attnres"},
    "block_attnres": {"kind": "block_attnres", "sublayers_per_block": 2},
    "multi_gate": {"kind": "multi_gate", "streams": 3},
    "hyper": {"kind": "hyper", "streams": 2},
    "mhc": {"kind": "mhc", "streams": 2, "iterations": 3},
    "dense": {"kind": "dense"},
}


def config(**tables: Any) -> residua.ModelConfig:
    attention = {"kind": "softmax", "heads": WIDTH // HEAD, "qk_norm": "none", "rope_theta": 1e6}
    base: dict[str, Any] = {"vocab_size": VOCABULARY, "context": LENGTH, "layers": 4, "width": WIDTH}
    base |= {"attention": attention, "ffn": {"kind": "swiglu", "hidden": 48}, "init": {"std": 0.1}}
    return residua.ModelConfig(**(base | tables))


@torch.no_grad()
def control(**tables: Any) -> Decoder:
    """A model with nothing planted: unit embeddings, a dimension that only `FIRST` has, and one that all have."""
    torch.manual_seed(1)
    model = residua.build(config(**tables))
    weight = model.embed.weight
    weight.normal_()
    weight[:, 0], weight[FIRST, 0] = 0.0, 4.0
    weight[:, 1] = 1.0
    return model


@torch.no_grad()
def stirred(model: Decoder) -> Decoder:
    """The model with its topology away from its start."""
    for parameter in model.topology.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def sample(dtype: torch.dtype = torch.int64) -> Sample:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator).to(dtype)
    rows[:, 0] = FIRST
    return sample_of(rows)


def sample_of(rows: Tensor) -> Sample:
    """Sequences of a text, one token longer than the input of a model."""
    sequences, length = rows[:, 1:].shape
    facts = TextFacts(source="random tokens", tokens=sequences * length, sequences=sequences, length=length)
    return Sample(rows[:, :-1], rows[:, 1:], facts)


def diagnosed(model: Decoder, text: Sample | None = None, **options: Any) -> ModelDiagnosis:
    return diagnose_model(NativeSubject(model, "model"), text or sample(), **options)


def named(made: ModelDiagnosis) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
    """The findings of a diagnosis as a set that can be compared, without the loss: no model here is trained."""
    return {
        (f.kind, tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in f.where.items())))
        for f in made.findings
        if f.kind != "chance_level_loss"
    }


@torch.no_grad()
def plant_sink(model: Decoder, layer: int, dimension: int) -> None:
    """Let every query of the layer attend to tokens with a large `dimension`, by the slowest rotation of each head."""
    project = model.sublayers[2 * layer].body.project.weight.view(3, WIDTH // HEAD, HEAD, WIDTH)
    slowest = HEAD // 2 - 1
    project[:2] = 0.0
    project[0, :, slowest, 1] = 5.0
    project[1, :, slowest, dimension] = 5.0


@torch.no_grad()
def plant_outlier(model: Decoder, dimension: int, size: float, gain: float) -> None:
    """Make one dimension large in every token and small after every norm; other gains undo its effect on the RMS."""
    model.embed.weight[:, dimension] = size
    for norm in (*(s.norm for s in model.sublayers), model.norm):
        norm.weight[:] = (1 + size**2 / WIDTH) ** 0.5
        norm.weight[dimension] = gain


@torch.no_grad()
def silence(model: Decoder, *sublayers: int) -> None:
    for k in sublayers:
        model.sublayers[k].body.out.weight.zero_()


@torch.no_grad()
def plant_routing(model: Decoder, reader: int, strength: float = 30.0) -> None:
    """Let the reader choose by dimension 1, which the embedding has in every token and no sublayer writes."""
    for sublayer in model.sublayers:
        sublayer.body.out.weight[1] = 0.0
    model.topology.reads[reader - 1].query[1] = strength


def losses(model: Decoder, text: Sample) -> Tensor:
    return model.losses(text.tokens, text.targets)[0]
