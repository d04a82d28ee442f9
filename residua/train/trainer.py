"""The training loop: steps, logs, validations and checkpoints, in an order that lets a run resume bit for bit.

The order of `train`; `World` determines which processes do what:

1. It opens the run's folder and text, and refuses mismatches before anything is written.
2. `Trainer` builds the step and resumes from the newest finite checkpoint, if there is one.
3. `fit` writes config.toml and the environment, then runs step by step (`_train_step`). After each step it does
   whatever is due: telemetry, a log line, a validation, a checkpoint, the start of a shorter run (`Branch`). A log line
   stops a run whose loss is not finite, has diverged or does not fall; a signal stops the run after saving it.
4. `finish` validates on all of the text, and writes validation.json, result.json and inspection.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from rich.console import Console

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.data.loader import IGNORED
from residua.data.source import check_vocabulary
from residua.files import explain, write_atomically
from residua.machine import out_of_memory
from residua.model.size import measure
from residua.report.failure import is_expected
from residua.report.plain import PlainConsole
from residua.storage.checkpoint import Checkpoint, prune, what_is_left
from residua.storage.load import weights_fingerprint
from residua.storage.run import METRICS, Run, read_metrics
from residua.train.environment import START, TEXT, describe_environment
from residua.train.health import Interrupted, StopSignals, TrainingStopped, Watch, had_fair_steps, token_frequencies
from residua.train.result import (
    FINAL,
    FinalValidation,
    Result,
    by_document,
    closing_words,
    collect_result,
    final_batches,
    inspect_model,
    without_documents,
)
from residua.train.sinks import Display, Optional, Sink, check_trackers, open_trackers
from residua.train.start import check_model, check_tokenizer, start_lines
from residua.train.state import RunState, check_text, fitting_state, random_states, read_state, set_random_states
from residua.train.step import arithmetic
from residua.train.summary import check_disk, summarise
from residua.train.telemetry import Telemetry, build_telemetry
from residua.train.timing import Clock, Profiler, mfu, peak_memory_gib
from residua.train.world import World

SMOOTHED_LINES = 10


class Branch(NamedTuple):
    """A shorter run that shares the beginning of a longer one: they differ only in `train.steps`.

    Until its own decay begins, it has the learning rates and batches of the longer run, and thus its weights. The
    longer run saves that point in `folder`; from there the branch resumes like an interrupted run.
    """

    folder: Path
    config: RunConfig

    @property
    def step(self) -> int:
        """The step from which the branch resumes. At least its last step is its own: that one logs and validates."""
        recipe = self.config.train
        return min(recipe.schedule.shared_steps(recipe.steps), recipe.steps - 1)


def train(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    world: World | None = None,
    branches: Sequence[Branch] = (),
) -> Result:
    """Train a run in the folder `out`, or continue the run in it.

    `world` holds the processes that train it: only this one, or those of `residua.distributed.world.open_world`.
    `branches` are shorter runs whose starting points this run saves on its way, so that they need not repeat its steps.
    Raises `UserError` for a mistake in the configuration, the data or the folder, before anything is written;
    `TrainingStopped` when the run cannot go on; `Interrupted` after a signal, once the run is saved.
    """
    with world or World.alone(config) as world:
        console = (console or PlainConsole()) if world.leads else Console(quiet=True)
        check_trackers(config)
        check_model(config)
        run = world.open_run(Path(out), config, resume=resume)
        try:
            with world.stages.measure("data"):
                dataset = world.open_data(config)
                world.leader_first(lambda: _check_data(run, dataset))
            with arithmetic(config.train):
                trainer = Trainer(run, dataset, world, console, branches)
                with trainer.explained():
                    with StopSignals() as signals:
                        trainer.fit(signals)
                    return trainer.finish()
        except Exception as error:
            run.record_failure(error)
            raise
        finally:
            run.close()


def _check_data(run: Run, dataset: Dataset) -> None:
    """Refuse text that the run was not trained on, or that contains tokens outside its model's vocabulary."""
    check_text(run, dataset)
    check_vocabulary(run.config, dataset)
    check_tokenizer(run.config, dataset)


class Trainer:
    """A run in progress: its step, data, counters and sinks (metrics file, display, trackers)."""

    def __init__(
        self, run: Run, dataset: Dataset, world: World, console: Console, branches: Sequence[Branch] = ()
    ) -> None:
        self.run, self.dataset, self.world, self.console = run, dataset, world, console
        self.device = world.device
        self.config = run.config
        recipe = self.config.train
        self.size = measure(self.config.model.model_copy(update={"context": self.config.sequence}))
        torch.manual_seed(recipe.seed)
        world.reset_peak_memory()
        with world.stages.measure("build"):
            self.step = world.build_step(self.config)
        if world.leads:
            check_disk(self.step, run.folder, recipe.keep)

        with world.stages.measure("data"):
            self.loader, self.validation = world.open_batches(self.config, dataset)
            targets = torch.cat([batch.targets.flatten() for batch in self.validation])
            self.validation_bytes = dataset.bytes_of(targets[targets != IGNORED].numpy(), "validation")
        self.done = 0
        self.clock = Clock()
        self.profiler = Profiler(run.folder, recipe.profile, world.rank, self.device, self._notify)
        self.watch = Watch(recipe.divergence_margin, recipe.divergence_patience)
        self.frequencies = token_frequencies(self.config, dataset)
        self.telemetry = build_telemetry(self.config, self.validation[0], world.whole_model(self.step))
        self.loss, self.smoothed, self.lines = math.inf, 0.0, 0
        self.validation_loss: float | None = None
        self.skipped: dict[Checkpoint, str] = {}
        self.branches = branches
        self._restore()

    def _restore(self) -> None:
        """Resume from the newest checkpoint with finite weights and optimizer state, if there is any checkpoint."""
        saved = self.run.checkpoints()
        for checkpoint in reversed(saved):
            state = read_state(checkpoint)
            self.world.restore(checkpoint.path, self.step)
            broken = self.world.nonfinite(self.step)
            if not broken:
                self._go_on_from(checkpoint, state)
                return
            self.skipped[checkpoint] = f"{broken[0]} is not finite" + f" (first of {len(broken)})" * (len(broken) > 1)
        if saved:
            raise ConfigError(
                f"no checkpoint in {self.run.folder} is finite (in {saved[-1].path}, {self.skipped[saved[-1]]}): "
                "start a new run in another --out."
            )

    def _go_on_from(self, checkpoint: Checkpoint, state: RunState) -> None:
        self.done = state.step
        if self.done > self.config.train.steps:
            raise ConfigError(
                f"{self.run.folder} has done {self.done} steps, more than train.steps = {self.config.train.steps}: "
                "raise train.steps, or start a new run in another --out."
            )
        with fitting_state(checkpoint):
            self.loader.load_state_dict(state.loader.model_dump())
            self.step.set_totals(state.totals)
            if self.step.balancer is not None:
                self.step.balancer.set_state({} if state.balance is None else state.balance.model_dump())
            if self.step.low_precision is not None and state.ranges is not None:
                self.step.low_precision.set_state(state.ranges)
            set_random_states(state.rng.model_dump(exclude_none=True))
        self.clock = Clock(state.clock.total, state.clock.interval)
        self.watch = replace(self.watch, **state.watch.model_dump())
        self.smoothed, self.lines = state.smoothed, state.lines
        self.step.keep_streams(state.kept)

    def fit(self, signals: StopSignals) -> None:
        """Train to the last step, or until a signal arrives or the loss diverges."""
        summarise(self.console, self.config, self.step, self.dataset, self.size, self.done, self.world.describe())
        for line in start_lines(self.config) if self.done == 0 else ():
            self.console.print(f"{'start':<8} {line}", soft_wrap=True, markup=False)
        self.run.begin(self._environment(), self.done, self.world.stages.take())
        for checkpoint, reason in self.skipped.items():
            moved = self.run.set_checkpoint_aside(checkpoint)
            self._notify(f"skipped {checkpoint.path}: {reason}; it is now {moved}")
        self.run.keep_tokenizer(self.dataset.path / "tokenizer.json", fresh=self.done == 0)
        if self.config.train.start is not None:
            self.run.keep_companions(Path(self.config.train.start))
        if self.done == 0 and (notice := self.run.set_metrics_aside()):
            self._notify(notice)
        self.metrics = self.run.metrics(until=self.done)
        self.sinks: list[Sink] = []
        if self.world.leads:
            prune(self.run.folder, self.config.train.keep)
            display = Optional("The display", lambda: Display(self.config, self.done, self.console), self._notify)
            trackers = open_trackers(self.config, self.run.folder, self.done, self._notify)
            self.sinks = [self.metrics, display, *trackers]
        if self.telemetry is not None and self.world.leads:
            self.telemetry.recall(read_metrics(self.run.folder / METRICS))
        elif self.telemetry is None and self.config.train.telemetry == "on":
            self._notify(
                "telemetry is off: it needs the whole model in one process (parallel.shard = 1, parallel.pipeline = 1)"
            )
        try:
            self.clock.start()
            if self.done == 0 and self.config.train.start is not None:
                self._validate()  # shows how much of the initial model was preserved
            while self.done < self.config.train.steps:
                self._train_step()
                signal_number = self.world.agree(signals.received, self.done)
                if signal_number is not None and self.done < self.config.train.steps:
                    self._interrupt(signal_number)
        finally:
            self.loader.close()
            for sink in self.sinks:
                sink.close()

    def _environment(self) -> dict[str, Any]:
        """The environment of the run: software, hardware, its text, and its initial weights."""
        about = {**describe_environment(self.device), TEXT: self.dataset.fingerprint}
        start = self.config.train.start
        if start is None or not self.world.leads:
            return about
        began = self.run.recorded(START) if self.done else weights_fingerprint(start)
        return about if began is None else {**about, START: began}

    def _train_step(self) -> None:
        recipe = self.config.train
        with self.profiler.around(self.done + 1):
            batches = [next(self.loader) for _ in range(recipe.accumulate // self.world.batch_ranks)]
            self.step(batches, recipe.schedule.factor(self.done, recipe.steps))
        self.done += 1
        self.validation_loss = None
        last = self.done == recipe.steps
        if self.telemetry is not None and self.telemetry.due(self.done):
            self._observe(self.telemetry)
        if last or self.done == 1 or self.done % recipe.log_every == 0:
            self._log()
        if last or self.done % recipe.validate_every == 0 or self.done % recipe.save_every == 0:
            self._validate()
        if last and self.watch.strikes:
            self._stop_if("the run ended with a loss above its first value")
        if last and had_fair_steps(recipe) and self.validation_loss is not None:
            # do not finish a run that had time to learn but whose losses show that it has not
            loss = min(self.loss, self.validation_loss)
            self._start_again_if(self.watch.unlearned(recipe.steps, loss, self.frequencies))
        if last or (self.done % recipe.save_every == 0 and self._sound()):
            self._save()
        for branch in self.branches:
            if branch.step == self.done and self._sound():
                self._begin(branch)

    def _observe(self, telemetry: Telemetry) -> None:
        """Write a telemetry record: figures of every layer, measured by the leader."""
        with self._paused():
            record = self.world.from_leader(lambda: telemetry.measure(self.step, self.done))
            self.step.keep_streams(record.get("kept", ()))
            self._tell(**record, seconds=round(self.clock.total, 3))

    def _log(self) -> None:
        totals = self.step.totals()
        self.clock.stop()
        loss, grad_norm = totals.loss / totals.steps, totals.grad_norm / totals.steps
        self._stop_if(self.watch.check(self.done, loss, grad_norm))
        self._start_again_if(self.watch.stuck(self.done, loss, self.frequencies))
        self.loss = loss
        self.lines += 1
        self.smoothed += (loss - self.smoothed) / min(self.lines, SMOOTHED_LINES)
        speed = totals.steps * self.config.tokens_per_step / self.clock.interval
        utilisation = mfu(speed / self.world.size, self.size.flops_per_token, self.device)
        if self.step.balancer is not None:  # the load of the experts over the interval
            self._tell(kind="experts", step=self.done, **self.step.balancer.spread().record())
            self.step.balancer.clear()
        if (times := self.world.rank_times(self.step, self.done)) is not None:
            self._tell(kind="ranks", step=self.done, **times)
        self._tell(
            kind="train",
            step=self.done,
            loss=round(loss, 6),
            smoothed=round(self.smoothed, 6),
            z=round(totals.z / totals.steps, 8),
            lr=self.step.optimizer.param_groups[0]["lr"],
            grad_norm=round(grad_norm, 6),
            tokens=self.done * self.config.tokens_per_step,
            seconds=round(self.clock.total, 3),
            tokens_per_second=round(speed, 1),
            mfu=None if utilisation is None else round(utilisation, 4),
            memory_gib=round(peak_memory_gib(self.device), 3),
        )
        notice = self.step.notice() if self.lines == 1 else None
        if notice is not None:
            self.console.print(notice, soft_wrap=True)
        self.step.set_totals([0.0] * 4)
        self.clock.interval = 0.0

    def _validate(self) -> None:
        with self._paused():
            loss, tokens = self.step.evaluate(self.validation)
            self._stop_if(None if math.isfinite(loss) else f"at step {self.done} the validation loss is {loss}")
            self.validation_loss = loss
            bits, seconds = loss * tokens / math.log(2) / self.validation_bytes, round(self.clock.total, 3)
            rounded = {"loss": round(loss, 6), "bits_per_byte": round(bits, 6)}
            self._tell(kind="validation", step=self.done, **rounded, tokens=tokens, seconds=seconds)

    def _sound(self) -> bool:
        """Whether the run is sound enough to save, by its last logged loss and the mean loss of the steps since."""
        totals = self.step.totals()
        loss = totals.loss / max(totals.steps, 1)
        finite = math.isfinite(loss) and math.isfinite(totals.grad_norm)
        return finite and not self.watch.strikes and not self.watch.too_high(loss)

    def _save(self) -> None:
        with self._paused():
            self.metrics.sync()
            self.world.save(self.run.folder, self.done, self.step, self._state(), self.config.train.keep)

    def _begin(self, branch: Branch) -> None:
        """Save the start of a shorter run."""

        def save(folder: Path) -> None:
            self.world.save(folder, self.done, self.step, self._state(), self.config.train.keep)
            self.world.settle()

        with self._paused():
            self.metrics.sync()
            self.run.branch(branch.folder, branch.config, self.done, save)

    def _state(self) -> dict[str, Any]:
        """The state for a resumed run except tensors, as plain JSON that reads back exactly."""
        return {
            "step": self.done,
            "validation_loss": self.validation_loss,
            "tokenizer_hash": self.dataset.tokenizer_hash,
            "loader": self.loader.state_dict(),
            "totals": list(self.step.totals()),
            "balance": None if self.step.balancer is None else self.step.balancer.state(),
            "ranges": None if self.step.low_precision is None else self.step.low_precision.state(),
            "clock": {"total": self.clock.total, "interval": self.clock.interval},
            "watch": asdict(self.watch),
            "smoothed": self.smoothed,
            "lines": self.lines,
            "kept": list(recovery.kept) if (recovery := self.step.model.topology.recovery()) else [],
            "rng": random_states(self.device),
        }

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Wait for the device; the block does not count as training time."""
        self.step.totals()
        self.clock.stop()
        yield
        self.clock.start()

    def finish(self) -> Result:
        """Validate on all of the text, write validation.json, result.json and inspection.json, print the next steps."""
        self.world.settle()
        final = self._final_validation()
        self.world.trained()
        return self.world.from_leader(lambda: self._report(final))

    def _final_validation(self) -> FinalValidation:
        """The loss on all of the validation text, by document if a process has the whole model."""
        if self.world.whole_model(self.step) is None:
            batches = list(final_batches(self.config, self.dataset))
            return without_documents(batches, *self.step.evaluate(batches), self.dataset)
        text = final_batches(self.config, self.dataset)
        return self.world.from_leader(lambda: by_document(text, self.step.token_losses, self.config, self.dataset))

    def _report(self, final: FinalValidation) -> Result:
        folder = self.run.folder
        write_atomically(folder / FINAL, final.model_dump_json() + "\n")
        unigram = token_frequencies(self.config, self.dataset, final.tokens).unigram
        result = collect_result(folder, self.config, self.size, self.device, unigram, final, self.world.size)
        write_atomically(folder / "result.json", json.dumps(asdict(result), indent=1) + "\n")
        model = self.world.whole_model(self.step)
        if model is not None:
            inspection = inspect_model(model, self.validation[0])
            write_atomically(folder / "inspection.json", json.dumps(inspection) + "\n")
        self.console.print(closing_words(result, self.config, self.world.command(self.config)), soft_wrap=True)
        return result

    def _tell(self, **record: Any) -> None:
        """Write a record to all sinks, and print its sentences for the user."""
        for sink in self.sinks:
            sink.write(record)
        for sentence in record.get("said", ()):
            self._notify(sentence)

    def _notify(self, words: str) -> None:
        self.console.print(words, soft_wrap=True, markup=False)

    def _interrupt(self, signal_number: int) -> None:
        if self._sound():
            self._save()
            self.world.settle()
        self.run.record_stop(f"stopped by a signal at step {self.done}")
        raise Interrupted(f"stopped by a signal at step {self.done}; {self._how_to_resume()}.", signal_number)

    def _stop_if(self, reason: str | None) -> None:
        if reason is not None:
            lower = "Lower the learning rate (train.optimizer.lr) or raise train.schedule.warmup, then start again or"
            self._stop(reason, f"{lower} {self._how_to_resume()}.")

    def _start_again_if(self, reason: str | None) -> None:
        if reason is not None:
            rate = f"train.optimizer.lr = {self.config.train.optimizer.lr:g}"
            self._stop(reason, f"Try a learning rate other than {rate}, usually a lower one, in a new run.")

    def _stop(self, reason: str, advice: str) -> NoReturn:
        """End the run because of its losses, and record the reason in its folder."""
        self.run.record_stop(reason)
        raise TrainingStopped(f"{reason}; {what_is_left(self.run.folder)}. {advice}")

    def _how_to_resume(self) -> str:
        return f"continue with `{self.world.command(self.config)} --resume --out {self.run.folder}`"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """If the disk or memory is full, or access is denied, stop with a sentence that names the last checkpoint."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if not is_expected(error):
                raise
            what, advice = explain(error)
            raise TrainingStopped(
                f"{what}; {what_is_left(self.run.folder)}: {advice}, then {self._how_to_resume()}."
            ) from None
        except (MemoryError, RuntimeError) as error:
            device = out_of_memory(error)
            if device is None:
                raise
            raise TrainingStopped(
                f"{device} ran out of memory after step {self.done}; {what_is_left(self.run.folder)}. Lower "
                f"train.micro_batch = {self.config.train.micro_batch} and raise train.accumulate, or set "
                "train.recompute=sublayers."
            ) from None
