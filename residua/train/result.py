"""The result of a finished run, computed from its metrics."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from residua.config.run import RunConfig
from residua.reading import counted, refuse
from residua.storage.run import METRICS, read_metrics
from residua.train.throughput import mfu

if TYPE_CHECKING:
    from residua.model.size import Size
    from residua.train.final_validation import FinalValidation


@dataclass(frozen=True)
class Result:
    """The content of `result.json`. Losses: nats per token of validation text. Speed: median over log lines.

    `validation_loss` is on `validation_tokens`, all of the text (`final_validation.py`); `best_validation_loss` is the
    lowest while it trained, on the part of the text that it was validated on then. `unigram_entropy` is the loss of a
    model that knows only how often tokens occur.
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
            f"{folder / METRICS} holds no training or no validation, so the run has no result",
            f"restore the file, or train longer with train.steps={2 * config.train.steps}",
        )
    # The first line covers the first step only, which includes compilation and warm-up.
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


def closing_words(result: Result, command: str) -> str:
    """What to print when a run has finished: its result and what to do next; `command` starts a run."""
    frequencies = f"the frequencies of tokens alone, {result.unigram_entropy:.4f}"
    folder = shlex.quote(result.folder)
    early = f"It is no better than {frequencies}: a model that has learned is below.\n"
    return (
        f"Finished: validation loss {result.validation_loss:.4f} ({result.bits_per_byte:.4f} bits/byte, on "
        f"{counted(result.validation_tokens, 'token')}) after {counted(result.steps, 'step')}; "
        f"weights, curves and config are in {result.folder}.\n"
        f"{early * (result.validation_loss >= result.unigram_entropy)}"
        "Next: try it, look inside it, or set it against another architecture with\n"
        f"  residua generate {folder} --prompt TEXT\n"
        f"  residua diagnose {folder}\n"
        f"  residua compare prenorm mgr --base {folder}/config.toml\n"
        "or train it longer (the schedule then ends later, so the learning rate rises again) with\n"
        f"  {command} --resume --out {folder} train.steps={2 * result.steps}"
    )
