"""Checks before a run resumes: the keys of its checkpoint's state.json, and that the text is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.corpus import TRAIN
from residua.errors import UserError
from residua.reading import Count, Shape, reason, refuse
from residua.storage.checkpoint import STATE, Checkpoint, elsewhere
from residua.storage.run import Run, saved_config
from residua.train.environment import TEXT


class _Loader(Shape):
    seed: Count
    sequence: Count
    tokens: Count
    tokenizer_hash: str
    epoch: Count
    position: Count


class _Balance(Shape):
    load: list[list[float]] | None
    sums: Annotated[list[Any], Field(min_length=3, max_length=3)]
    steps: Count


class _Clock(Shape):
    total: float
    interval: float


class _Watch(Shape):
    first_loss: float | None
    strikes: Count
    lowest: float | None = None
    lowest_step: Count = 0
    stale: Count = 0


class _Random(Shape):
    cpu: str
    cuda: str | None = None


class RunState(Shape):
    """Step, data position, counters and random states; `Trainer._state` writes it."""

    step: Count
    validation_loss: float | None
    tokenizer_hash: str
    loader: _Loader
    totals: Annotated[list[Annotated[float, Field(allow_inf_nan=True)]], Field(min_length=4, max_length=4)]
    balance: _Balance | None
    ranges: list[list[float]] | None = None
    clock: _Clock
    watch: _Watch
    smoothed: float
    lines: Count
    kept: list[Count] = Field(default_factory=list)
    rng: _Random


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state in a checkpoint."""
    state = checkpoint.read(RunState)
    if state.step != checkpoint.step:
        with fitting_state(checkpoint):
            raise UserError(f"it is from step {state.step}")
    return state


@contextmanager
def fitting_state(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the checkpoint in errors that restoring its state raises."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f"{checkpoint.path / STATE} does not fit this run ({reason(error)})"
        refuse(problem, lambda: elsewhere(checkpoint.path))


def check_text(run: Run, dataset: Dataset) -> None:
    """Refuse to resume with a text other than the run's; the text may have moved.

    Runs from before texts had fingerprints, and runs of other trainers, record only the number of tokens.
    """
    if not (candidates := run.checkpoints()):
        return
    state = read_state(candidates[-1])
    dataset.require_tokenizer(state.tokenizer_hash, str(candidates[-1].path))
    tokens = dataset.split(TRAIN).tokens
    trained, tokens = run.recorded(TEXT), min(tokens, run.config.data.limit or tokens)
    same = state.loader.tokens == tokens if trained is None else trained == dataset.fingerprint
    if not same:
        before = saved_config(run.folder).data.path
        where = "" if before == run.config.data.path else f" ({before or 'the embedded corpus'})"
        raise ConfigError(
            f"{dataset.path} is not the text that {run.folder} was trained on{where}: resume with that text, or "
            f"start a new run from its weights with --from {run.folder}."
        )


def random_states(device: torch.device) -> dict[str, str]:
    """PyTorch's random states as text."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def set_random_states(states: dict[str, str]) -> None:
    """Restore states that `random_states` returned; skips the GPU's if this machine has none."""
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for name, text in states.items():
        if name == "cpu" or (name == "cuda" and torch.cuda.is_available()):
            setters[name](torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
