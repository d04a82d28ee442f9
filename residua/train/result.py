"""The files of a finished run: validation.json, result.json and inspection.json.

During training, a run is validated on a fixed part of the text (`data.validation_tokens`). Its final loss is on all of
the validation text, or on the first two million tokens of it, with the loss of each document. This text does not depend
on the length of a run, so all budgets and trials of a study are measured on the same text. Two models that read the
same documents can be compared in pairs, which gives the sampling error of the text.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.config.variants import holds, overrides
from residua.data.loader import IGNORED, Batch, validated_tokens, validation_batches
from residua.model import gauges, taps
from residua.reading import counted, refuse
from residua.storage.run import METRICS, read_metrics
from residua.train.timing import mfu

if TYPE_CHECKING:
    from residua.data import Dataset
    from residua.model.decoder import Decoder
    from residua.model.size import Size


@dataclass(frozen=True)
class Result:
    """The content of `result.json`. Losses are in nats per token of validation text, speeds medians over log lines.

    `validation_loss` is on the final `validation_tokens`; `best_validation_loss` is the lowest during training, on the
    part of the text that is used then. `unigram_entropy` is the loss of a model that knows only how often tokens occur.
    """

    folder: str
    steps: int
    tokens: int
    parameters: int
    flops_per_token: float
    validation_loss: float
    validation_tokens: int
    bits_per_byte: float
    best_validation_loss: float
    unigram_entropy: float
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_gib: float


def collect_result(
    folder: Path,
    config: RunConfig,
    size: Size,
    device: torch.device,
    unigram_entropy: float,
    final: FinalValidation,
    ranks: int = 1,
) -> Result:
    """The result of a run that reached its last step on `ranks` devices."""
    records = read_metrics(folder / METRICS)
    validations = [record for record in records if record["kind"] == "validation"]
    lines = [record for record in records if record["kind"] == "train"]
    if not validations or not lines:
        refuse(
            f"{folder / METRICS} has no training or no validation record, so the run has no result",
            f"restore the file, or train longer with train.steps={2 * config.train.steps}",
        )
    # The first line covers only the first step, which includes compilation and warm-up.
    speed = median(line["tokens_per_second"] for line in lines[1:] or lines)
    return Result(
        folder=str(folder),
        steps=config.train.steps,
        tokens=config.train.steps * config.tokens_per_step,
        parameters=size.parameters,
        flops_per_token=size.flops_per_token,
        validation_loss=round(final.loss, 6),
        validation_tokens=final.tokens,
        bits_per_byte=round(final.bits_per_byte, 6),
        best_validation_loss=min(record["loss"] for record in validations),
        unigram_entropy=unigram_entropy,
        seconds=lines[-1]["seconds"],
        tokens_per_second=speed,
        mfu=mfu(speed / ranks, size.flops_per_token, device),
        memory_gib=max(line["memory_gib"] for line in lines),
    )


def closing_words(result: Result, config: RunConfig, command: str) -> str:
    """The text to print when a run has finished: its result and the next commands; `command` starts a run."""
    frequencies = f"token frequencies alone, {result.unigram_entropy:.4f}"
    folder = shlex.quote(result.folder)
    is_prenorm = all(holds(config, change) for change in overrides(["prenorm"], config.model))
    other = "mgr" if is_prenorm else "base"
    early = f"It is not below the loss of {frequencies}: the model has learned nothing yet.\n"
    return (
        f"Finished: validation loss {result.validation_loss:.4f} ({result.bits_per_byte:.4f} bits/byte, on "
        f"{counted(result.validation_tokens, 'token')}) after {counted(result.steps, 'step')}; "
        f"weights, curves and config are in {result.folder}.\n"
        f"{early * (result.validation_loss >= result.unigram_entropy)}"
        "Next: try it, look inside it, or compare it with another architecture:\n"
        f"  residua generate {folder} --prompt TEXT\n"
        f"  residua diagnose {folder}\n"
        f"  residua compare prenorm {other} --base {folder}/config.toml\n"
        "or train it longer (the longer schedule raises the learning rate again):\n"
        f"  {command} --resume --out {folder} train.steps={2 * result.steps}"
    )


FINAL = "validation.json"
FINAL_LIMIT = 2_097_152
"""Maximum tokens of the final validation."""
TOY_FACTOR = 128
"""It also reads at most this multiple of `data.validation_tokens`: toys stay fast, presets reach FINAL_LIMIT."""
UNNAMED = "other"
"""The source of documents without a named source, in a text where others have one."""
GROUPS = 256
"""Maximum groups of consecutive documents; each group has about the same number of tokens."""


class SourceLoss(Frozen):
    """The part of a validation that is text of one source."""

    tokens: int
    bits_per_byte: float


class FinalValidation(Frozen):
    """The content of validation.json: `loss` in nats per token over `tokens` targets.

    `document_tokens` and `document_losses` are, for each document or group of documents, its targets and the sum of
    their losses; empty where no process had the whole model. `sources` has the part of each source that the text names.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    document_tokens: tuple[int, ...] = ()
    document_losses: tuple[float, ...] = ()
    sources: dict[str, SourceLoss] = Field(default_factory=dict)


def final_tokens(config: RunConfig, tokens: int) -> int:
    """How many of a validation text's `tokens` the final validation of a run reads."""
    part = config.data.validation_tokens
    limit = max(part, min(FINAL_LIMIT, TOY_FACTOR * part))
    return validated_tokens(tokens, config.sequence, limit)


def final_batches(config: RunConfig, dataset: Dataset) -> Iterator[Batch]:
    """The batches of the final validation, as large as those of training, so that they need no more memory."""
    split, segments = dataset.split("validation"), config.data.masking == "documents"
    limit = final_tokens(config, split.tokens)
    return validation_batches(split, config.sequence, config.train.micro_batch, limit, segments)


def by_document(
    batches: Iterator[Batch], losses_of: Callable[[Batch], Tensor], config: RunConfig, dataset: Dataset
) -> FinalValidation:
    """The validation of a model by document; `losses_of` gives the loss of each target, [B, T]."""
    split = dataset.split("validation")
    read = final_tokens(config, split.tokens) + 1
    begins = np.zeros(read, np.int64)
    begins[split.document_starts(0, read)] = 1
    document = begins.cumsum() - begins[0]  # of each token
    named = dataset.sources
    names = [] if named is None else named.names
    source_of, bytes_by_source = np.array([] if named is None else named.documents), np.zeros(len(names))
    sums, counts, size, place = np.zeros(document[-1] + 1), np.zeros(document[-1] + 1, np.int64), 0.0, 1
    for batch in batches:
        targets = batch.targets.numpy().ravel()
        owner, known = document[place : place + len(targets)], targets != IGNORED
        sums += np.bincount(owner, losses_of(batch).double().cpu().numpy().ravel() * known, len(sums))
        counts += np.bincount(owner, known, len(sums)).astype(np.int64)
        size += dataset.bytes_of(targets[known], "validation")
        for source in np.unique(source_of[owner]) if names else ():
            bytes_by_source[source] += dataset.bytes_of(targets[known & (source_of[owner] == source)], "validation")
        place += len(targets)
    total, tokens = float(sums.sum()), int(counts.sum())
    by_source = (
        (np.bincount(source_of[: len(sums)], each, len(names)) for each in (sums, counts)) if names else ((), ())
    )
    sources = {
        name or UNNAMED: SourceLoss(tokens=int(read), bits_per_byte=loss / math.log(2) / length)
        for name, loss, read, length in zip(names, *by_source, bytes_by_source, strict=True)
        if length > 0
    }
    group = np.minimum(counts.cumsum() * GROUPS // max(tokens + 1, 1), GROUPS - 1) if len(sums) > GROUPS else None
    if group is not None:
        sums, counts = np.bincount(group, sums), np.bincount(group, counts).astype(np.int64)
    present = counts > 0
    return FinalValidation(
        loss=total / tokens,
        bits_per_byte=total / math.log(2) / size,
        tokens=tokens,
        document_tokens=tuple(counts[present].tolist()),
        document_losses=tuple(round(value, 3) for value in sums[present].tolist()),
        sources=sources,
    )


def without_documents(batches: list[Batch], loss: float, tokens: int, dataset: Dataset) -> FinalValidation:
    """The validation of a model that is divided among processes."""
    scored = (batch.targets[batch.targets != IGNORED].numpy() for batch in batches)
    size = math.fsum(dataset.bytes_of(targets, "validation") for targets in scored)
    return FinalValidation(loss=loss, bits_per_byte=loss * tokens / math.log(2) / size, tokens=tokens)


SEQUENCES = 4


def inspect_model(model: Decoder, batch: Batch) -> dict[str, Any]:
    """Magnitudes, gradients, depth weights and gates on a few sequences of a batch, in fp32: `inspection.json`.

    Runs one forward and backward pass and records the model's taps; sections without taps are left out:

    - by sublayer: the RMS of its output and of its parameters' gradients, and how much of its output each stream takes
      in (`beta`);
    - by read: the mean weight of each source, where row r is the read after sublayer `readers[r]`;
    - by layer: the mean of the attention gate, the share of it that is nearly closed, and each expert's share of the
      choices.
    """
    device = next(model.parameters()).device
    tokens, targets = batch.tokens[:SEQUENCES].to(device), batch.targets[:SEQUENCES].to(device)
    segments = None if batch.segments is None else batch.segments[:SEQUENCES].to(device)
    model.zero_grad(set_to_none=True)
    with taps.record() as tensors:
        model.losses(tokens, targets, segments=segments)[0].backward()
    gradients = [[p.grad for p in sublayer.parameters() if p.grad is not None] for sublayer in model.executions]
    reads = _numbered(tensors, "depth", "weights")
    sections = {
        "tokens": tokens.numel(),
        "sublayers": [
            {"sublayer": k, "output_rms": _rms([output]), "gradient_rms": _rms(gradients[k])}
            for k, output in _numbered(tensors, "sublayer", "output")
        ],
        "depth_weights": reads
        and {"readers": [k for k, _ in reads], "mean": [_mean_over_tokens(weights) for _, weights in reads]},
        "gates": [
            {"layer": k, "mean": float(gate.float().mean()), "closed": float(gauges.closed(gate).float().mean())}
            for k, gate in _numbered(tensors, "attention", "gate")
        ],
        "beta": [{"sublayer": k, "mean": _mean_over_tokens(beta)} for k, beta in _numbered(tensors, "depth", "beta")],
        "experts": [{"layer": k, "load": load.tolist()} for k, load in _numbered(tensors, "moe", "load")],
    }
    model.zero_grad(set_to_none=True)
    return {name: section for name, section in sections.items() if section}


def _numbered(tensors: dict[str, Tensor], part: str, what: str) -> list[tuple[int, Tensor]]:
    """The taps of this kind, such as depth.N.weights, with their numbers N."""
    named = ((taps.parts(name), tensor) for name, tensor in tensors.items())
    matches = [(of[1], x.detach()) for of, x in named if of is not None and (of[0], of[2]) == (part, what)]
    return sorted(matches, key=itemgetter(0))


def _mean_over_tokens(values: Tensor) -> list[float]:
    mean: list[float] = values.float().flatten(end_dim=-2).mean(0).tolist()
    return mean


def _rms(tensors: list[Tensor]) -> float:
    """The root mean square over the elements of all tensors."""
    squares = torch.stack([t.double().square().sum() for t in tensors]).sum()
    return float((squares / sum(t.numel() for t in tensors)).sqrt())
