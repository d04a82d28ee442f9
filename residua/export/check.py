"""Run an export's own code and compare it with the original model, before the folder gets its final name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from residua import ops
from residua.errors import UserError
from residua.machine import free_memory, short_bytes
from residua.model.decoder import Decoder
from residua.reading import read_json
from residua.storage.tensors import read_tensors, weight_files

CHECKED_TOKENS = 16
AGAIN = "export again"
COPIES = 3
"""Float32 copies of the weights in memory during a check: the model's, the exported code's, and those just read."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_PACKAGE = "residua_export_under_check"


def why_unchecked(model: Decoder) -> str | None:
    """Say why an export of this model cannot be checked, if so; the model may be on the meta device."""
    if find_spec("transformers") is None:
        return "install transformers (residua[hf]) to check it"
    needed = 4 * COPIES * sum(parameter.numel() for parameter in model.parameters())
    free = free_memory()
    if free is None or needed <= free:
        return None
    return f"that needs {short_bytes(needed)} of memory, but this machine has {short_bytes(free)} free"


def check_export(folder: Path, model: Decoder, dtype: torch.dtype) -> float | None:
    """Return the largest difference in logits between the folder's code and the model, relative to the largest logit.

    It includes the effect of rounding weights to `dtype`. None if transformers, which the code needs, is not installed.
    """
    if find_spec("transformers") is None:
        return None
    with ops.backend("reference"), _package(folder) as modeling:
        return _difference(_build(folder, modeling), model, dtype)


def check_layout(folder: Path, model: Decoder, dtype: torch.dtype) -> float | None:
    """Return the same for a folder in the layout of a transformers family, run by transformers' code."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        dtype=torch.float32,
        attn_implementation="eager",  # others ignore Gemma 2's caps
    ).eval()
    return _difference(partial(theirs, use_cache=False), model, dtype)  # its cache needs softmax attention


@torch.no_grad()
def _difference(exported: Callable[[Tensor], Any], model: Decoder, dtype: torch.dtype) -> float:
    tokens = torch.randint(model.config.vocab_size, (1, CHECKED_TOKENS), generator=torch.Generator().manual_seed(0))
    was_training = model.training
    expected = model.eval()(tokens.to(next(model.parameters()).device)).float().cpu()
    model.train(was_training)
    if not torch.isfinite(expected).all():
        raise UserError(
            "the model's own logits are not finite, although its weights are, so the export cannot be tested: "
            "some weights are too large; use another checkpoint."
        )
    logits = exported(tokens).logits.float()
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= TOLERANCES[dtype]:
        raise RuntimeError(
            f"the exported code differs from the model by {difference:.1e}: this is a bug in the export."
        )
    return difference


def _build(folder: Path, modeling: ModuleType) -> Any:
    keys = read_json(folder / "config.json", dict[str, Any], AGAIN)
    config = modeling.ResiduaConfig(**keys | {"implementation": "file"})
    exported = modeling.ResiduaForCausalLM(config).eval().float()
    saved = {name: tensor for file in weight_files(folder, AGAIN) for name, tensor in read_tensors(file, AGAIN).items()}
    missing, unexpected = exported.load_state_dict(saved, strict=False)
    if unexpected or missing != (["lm_head.weight"] if config.tie_word_embeddings else []):
        raise RuntimeError(
            f"the exported code has no tensors {unexpected} and expects {missing}: this is a bug in the export."
        )
    return exported


@contextmanager
def _package(folder: Path) -> Iterator[ModuleType]:
    """Import the folder's modeling file in a separate package, which is removed from `sys.modules` afterwards."""
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield import_module(f"{_PACKAGE}.modeling_residua")
    finally:
        sys.dont_write_bytecode = before
        for name in [n for n in sys.modules if n.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
