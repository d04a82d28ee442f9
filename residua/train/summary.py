"""The summary printed before a run starts, and checks that the run fits in memory and its checkpoints on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.tokenizer import padded_vocabulary
from residua.machine import require_memory, short_bytes
from residua.model.size import shapes
from residua.reading import counted
from residua.storage.checkpoint import checkpoints, model_tensors
from residua.train.optimizer import build_optimizer
from residua.train.sinks import short
from residua.train.step import Step

if TYPE_CHECKING:
    from residua.model.size import Size

RULES = {"muon": "Muon", "adamw": "AdamW"}

DEEP = 48
"""With this many sublayers or more, compiling them as one graph takes at least a minute."""


def summarise(
    console: Console, config: RunConfig, step: Step, dataset: Dataset, size: Size, done: int, ranks: str | None = None
) -> None:
    """Print parameters by group, compute, data, batch, device and, if several processes train, `ranks`."""
    for title, line in _lines(config, step, dataset, size):
        console.print(f"{title:<8} {line}", soft_wrap=True)
    if ranks is not None:
        console.print(f"{'ranks':<8} {ranks}", soft_wrap=True)
    if done:
        console.print(f"resuming after step {done} of {config.train.steps}")


def _lines(config: RunConfig, step: Step, dataset: Dataset, size: Size) -> Iterator[tuple[str, str]]:
    model, recipe = config.model, config.train
    tokens = recipe.steps * config.tokens_per_step
    turns = f", run as {len(model.executed)}" * model.repeats
    shape = f"{counted(model.layers, 'layer')} of width {model.width}{turns}, {model.topology.kind}"
    shape += f", {model.anchors.kind} anchors" * (model.anchors.kind != "none")
    active = f", {short(size.parameters - size.idle)} active per token" if size.idle else ""
    yield "model", f"{shape}, {short(size.parameters)} parameters{active}"
    for group in build_optimizer(shapes(model), recipe.optimizer).param_groups:  # a rank may have only a part of them
        yield "", _group_line(group)
    yield "compute", f"{short(size.flops_per_token)}FLOP a token, {short(size.flops_per_token * tokens)}FLOP in all"
    available = dataset.split("train").tokens
    yield "data", f"{dataset.path}: {short(available)} tokens, {tokens / available:.2g} times over"
    yield "vocab", _vocabulary_line(model.vocab_size, dataset.vocab_size)
    if (notice := dataset.tiny_validation()) is not None:
        yield "note", notice
    step_words = (
        f"{recipe.accumulate} x {recipe.micro_batch} x {config.sequence} = {config.tokens_per_step} tokens a step"
    )
    run_words = f"{short(tokens)} tokens ({tokens / size.parameters:.3g} per parameter)"
    yield "batch", f"{step_words}, {counted(recipe.steps, 'step')}, {run_words}"
    if step.low_precision is not None:
        yield "products", step.low_precision.describe()
    yield "device", f"{_device_name(step.device)}, {str(step.precision).removeprefix('torch.')}, {_mode(step, config)}"


def _vocabulary_line(model: int, text: int) -> str:
    """How the model's vocabulary relates to that of the text's tokenizer."""
    padded = padded_vocabulary(text)
    if text > model:
        return f"{model:,} token ids; the tokenizer has {text - model:,} more, which do not occur in the text"
    if model == padded > text:
        return f"{model:,} token ids: {text:,} in the text, padded to a multiple of 128"
    if model > padded:
        return f"{model:,} token ids, {text:,} of them in the text: model.vocab_size={padded} is enough"
    return f"{model:,} token ids, {text:,} of them in the text"


def _group_line(group: dict[str, Any]) -> str:
    elements = sum(parameter.numel() for parameter in group["params"])
    decay = f", {group['decay']} decay {group['weight_decay']:g}" if group["weight_decay"] else ""
    return (
        f"{group['title']}: {RULES[group['rule']]}, {short(elements)} in {counted(len(group['params']), 'tensor')}, "
        f"rate {group['peak_lr']:g}{decay}"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {counted(torch.get_num_threads(), 'thread')}"


def _mode(step: Step, config: RunConfig) -> str:
    recomputed = ", sublayers recomputed in the backward pass" if config.train.recompute == "sublayers" else ""
    return (_compiled(config) if step.compiled else "not compiled") + recomputed


def _compiled(config: RunConfig) -> str:
    if config.train.compile == "layers":
        return "compiled by layers"
    slow = config.model.sublayers >= DEEP and config.parallel.ranks == 1
    return "compiled" + ", which takes a minute or more (train.compile=layers starts sooner)" * slow


TOKEN_BYTES = 16
"""Bytes of a token and its target."""


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Refuse a run whose weights, gradients and optimizer state, all in float32, exceed the free memory.

    Several processes share these states. Each builds its share on its device, with one part of the model at a time in
    host memory. A run that starts from another model is built whole in host memory, and so is one for a single GPU.
    Activations come on top but depend on recomputation, so only a micro-batch's tokens and one hidden state count.
    """
    model = shapes(config.model)
    weights = 4 * sum(tensor.numel() for tensor in model_tensors(model).values())
    needed = 2 * weights + 4 * build_optimizer(model, config.train.optimizer).state_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    what = f"the model has {short(parameters)} parameters, and training needs at least"
    advice = "choose a smaller model, or divide it over more devices with parallel.shard"
    ranks = config.parallel.ranks
    require_memory(what, needed // ranks, advice, device)
    whole = config.train.start is not None or (ranks == 1 and device.type == "cuda")
    layers = zip(model.sublayers[::2], model.sublayers[1::2], strict=True)
    built = [model.embed.parameters(), *(chain(a.parameters(), b.parameters()) for a, b in layers)]  # one at a time
    largest = 4 * max(sum(parameter.numel() for parameter in part) for part in built)
    require_memory(what, weights if whole else largest, advice)
    batch, length = config.train.micro_batch, config.model.context
    tokens = f"a micro-batch of {batch:,} × {length:,} tokens needs at least"
    smaller = "lower train.micro_batch, and raise train.accumulate for the same tokens per step"
    require_memory(tokens, batch * length * (TOKEN_BYTES + 2 * config.model.width), smaller, device)


def check_disk(step: Step, folder: Path, keep: int) -> None:
    """Refuse a run whose checkpoints will not fit: the last `keep`, the best, and the one being written."""
    tensors = [*model_tensors(step.model).values(), *step.optimizer.tensors().values()]
    one = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    needed = one * max(1, keep + 2 - len(checkpoints(folder)))
    free = shutil.disk_usage(folder).free
    if needed > free:
        fewer = f", choose another --out, or lower train.keep = {keep}" if keep > 1 else " or choose another --out"
        raise ConfigError(
            f"the checkpoints of this run need {short_bytes(needed)} ({short_bytes(one)} each) and {folder} has "
            f"{short_bytes(free)} free: free some space{fewer}."
        )
