"""Small runs that torchtitan's ranks and one process of Residua must train identically."""

from pathlib import Path
from typing import Any

import torch

from residua.config.run import RunConfig
from residua.data.loader import Loader
from residua.data.source import open_data
from residua.train.start import starting_model
from residua.train.step import build_step
from tests.trained import SMALL

LINEAR = {"key_heads": 2, "value_heads": 2, "head_dim": 8}
BLOCKS = {"kind": "block_attnres", "sublayers_per_block": 2}
ANCHORED = {"anchors": {"kind": "exoformer"}, "attention": {"kind": "softmax", "heads": 2, "gate": "elementwise"}}
EXPERTS = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 8}
MODELS: dict[str, dict[str, Any]] = {
    "additive": {"head": {"kind": "untied"}},
    "full": {"topology": {"kind": "full_attnres"}},
    "block": {"topology": BLOCKS},
    "mgr": {"topology": {"kind": "multi_gate", "streams": 3}},
    "hyper": {"topology": {"kind": "hyper", "streams": 2}},
    "exoformer": ANCHORED,
    "exo-block": {"topology": BLOCKS, **ANCHORED},
    "grouped": {
        "topology": BLOCKS,
        "anchors": {"kind": "exoformer"},
        "attention": {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "elementwise", "sink": "learned"},
    },
    "gatednorm": {"norm": {"kind": "gatednorm"}},
    "hybrid": {"attention": {"kind": "hybrid", "linear": LINEAR, "softmax": {"heads": 2}, "softmax_every": 2}},
    "experts": {"ffn": EXPERTS},
    "hyper-experts": {"topology": {"kind": "hyper", "streams": 2}, "ffn": EXPERTS},
}


def run_config(model: str, data: Path, **train: Any) -> RunConfig:
    """Four layers, and four steps of four micro-batches of different documents."""
    base = SMALL | {"layers": 4, "ffn": {"kind": "swiglu", "hidden": 24}, "init": {"std": 0.2}}
    recipe = {
        "steps": 4, "micro_batch": 2, "accumulate": 4, "save_every": 2, "schedule": {"kind": "cosine", "warmup": 1},
        "z_loss": 1e-3, "clip_norm": 0.1,
    }  # fmt: skip
    documents = {"path": str(data), "masking": "documents"}
    return RunConfig(model=base | MODELS[model], data=documents, train=recipe | train)


def train_alone(run: RunConfig) -> tuple[list[tuple[float, float]], torch.nn.Module]:
    """The loss and the gradient norm of each step on one process of Residua, and the trained model."""
    torch.manual_seed(run.train.seed)
    step = build_step(starting_model(run), run.train, torch.device("cpu"))
    split = open_data(run).split("train")
    loader = Loader(split, run.sequence, run.train.micro_batch, run.data.seed, segments=True, prefetch=0)
    lines = []
    for number in range(run.train.steps):
        step.set_totals([0.0] * 4)
        batches = [next(loader) for _ in range(run.train.accumulate)]
        step(batches, run.train.schedule.factor(number, run.train.steps))
        totals = step.totals()
        lines.append((totals.loss, totals.grad_norm))
    return lines, step.model
