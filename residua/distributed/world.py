"""A run on several processes, as the trainer sees it: `Ranks` has the methods of `train.world.World`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist

from residua.config.plugins import plugin_place
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.distributed.heartbeat import Heartbeat, Terminations, lost_a_peer
from residua.distributed.mesh import Mesh, Processes, job_store
from residua.distributed.nodes import Probe, keep_records, node_count, ranks_here, write_records
from residua.distributed.pipeline.step import PipelinedStep
from residua.distributed.shard import Parts
from residua.distributed.step import RankedStep, ReplicatedStep, ShardedStep
from residua.machine import choose_device
from residua.model.decoder import Decoder
from residua.model.size import shapes
from residua.reading import reason
from residua.report import failure
from residua.storage.checkpoint import checkpoints, model_tensors, what_is_left
from residua.storage.run import FollowedRun, Run, record_end
from residua.storage.shard_files import Saver, load_shards
from residua.train.health import TrainingStopped
from residua.train.start import starting_parts
from residua.train.step import Step
from residua.train.summary import check_memory
from residua.train.world import World, check_processes

T = TypeVar("T")

STALL_SHARE = 0.9
"""Share of a collective's time limit after which an unfinished step is reported."""
SLOW_FACTOR = 1.3
"""A rank that takes at least this multiple of the median time is called slow."""


class Ranks(World):
    """The processes that torchrun started, as one of them sees them. Rank 0 leads: it owns the folder of the run."""

    def __init__(self, processes: Processes, mesh: Mesh, config: RunConfig) -> None:
        super().__init__(processes.device)
        self.processes, self.mesh, self.config = processes, mesh, config
        self.leads, self.rank, self.size = mesh.rank == 0, mesh.rank, mesh.size
        self.batch_rank, self.batch_ranks = mesh.batch_rank, config.parallel.batch_ranks
        self.restarted = processes.started.again
        self.folder: Path | None = None
        self.saver = Saver()
        # a separate connection: that of the process group is busy while a collective waits
        store = job_store(f"heartbeat/{processes.started.name}", timedelta(seconds=30))
        self.hosts = [""] * mesh.size
        self._slow: dict[int, int] = {}
        """Slow ranks, and for how many log lines they have been slow."""
        self.heartbeat = Heartbeat(
            store, mesh.rank, mesh.size, config.parallel.patience, self._advice(), record=self._record,
            node=ranks_here(mesh.rank, mesh.size), stall=STALL_SHARE * processes.timeout.total_seconds(),
        )  # fmt: skip
        self._terminations = Terminations(self.heartbeat)

    @classmethod
    def start(cls, config: RunConfig, device: torch.device) -> Self:
        """Join the other processes. One that dies before this returns cannot be named: it has no heartbeat yet."""
        try:
            processes = Processes.start(device, config.parallel.patience)
            return cls(processes, Mesh(config.parallel, processes.device), config)
        except Exception as error:
            if not lost_a_peer(error):
                raise
            raise TrainingStopped(
                f"the ranks could not connect ({reason(error)}), probably because one of them ended while starting; "
                "nothing was written: run the same command again."
            ) from None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            # torchrun sends SIGTERM to every rank when the first one ends, and this rank must still print why
            self._terminations.ignore()
        try:
            if isinstance(error, TrainingStopped) or (isinstance(error, Exception) and failure.is_expected(error)):
                self.heartbeat.fail(str(error))
            elif isinstance(error, Exception):
                self._explain(error)
            if isinstance(error, TrainingStopped) and not self.heartbeat.speaks:
                self._leave_to_leader(error.exit_code)
        finally:
            self.heartbeat.stop(finished=error is None)
            if error is None:
                self._terminations.restore()
                self.processes.stop()

    def _leave_to_leader(self, code: int) -> NoReturn:
        """Exit silently after rank 0, which prints the reason; if another rank ended first, torchrun would kill it."""
        self.heartbeat.outlast_leader()
        raise SystemExit(code)

    def _explain(self, error: Exception) -> None:
        """Report why this rank fails: for a reason of its own, or because another rank died."""
        place = plugin_place(error)
        if not lost_a_peer(error) or (place is not None and place.raised):
            self.heartbeat.fail(failure.sentence(error))
            return
        sentence = self.heartbeat.who_died()
        if sentence is None:
            sentence = f"a collective failed, although all ranks are alive ({reason(error)}){self._record()}"
        elif self.leads and self.folder is not None:
            record_end(self.folder, "failed", sentence)
        if not self.heartbeat.speaks:  # another rank of this node prints the reason
            self._leave_to_leader(1) if self.heartbeat.explained else sys.exit(1)
        left = what_is_left(self.folder) if self.folder is not None else "nothing was saved"
        raise TrainingStopped(f"{sentence}; {left}; {self.heartbeat.advice}.") from None

    def _record(self) -> str:
        """Save this rank's last collectives; returns a clause that says where those of all ranks are."""
        if self.folder is None or write_records(self.folder, self.mesh.rank) is None:
            return ""
        return f"; the last collectives of each rank are in {self.folder}/collectives-rank-*.json"

    def _advice(self) -> str:
        by_hand = f"{self.command(self.config)} --resume --out {self.folder or 'RUN'}"
        return (
            f"torchrun --max-restarts resumes from the last checkpoint automatically; to resume manually, run "
            f"`{by_hand}`"
        )

    def open_run(self, folder: Path, config: RunConfig, *, resume: bool) -> Run:
        self.folder = folder
        self.heartbeat.advice = self._advice()
        if self.leads:
            run = self._lead(partial(super().open_run, folder, config, resume=resume))
        else:
            self._follow()
            run = FollowedRun(folder, config)
        try:
            self._require_shared(folder)
        except BaseException:
            run.close()
            raise
        return run

    def _require_shared(self, folder: Path) -> None:
        """Refuse a folder that differs between nodes: each would get a part of every checkpoint."""
        probe = Probe(folder, self.mesh.rank, self.processes.started.name)
        self._lead(probe.write) if self.leads else self._follow()
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, probe.answer(), group=self.saver.group)
        self.hosts = [answer["host"] for answer in answers]
        problem = self._broadcast(probe.missing(answers) if self.leads else None)
        probe.remove()
        if problem is None:
            return
        if not self.leads:
            self._leave_to_leader(2)
        raise ConfigError(problem)

    def leader_first(self, work: Callable[[], T]) -> T:
        if self.leads:
            return self._lead(work)
        self._follow()
        return work()

    def _lead(self, work: Callable[[], T]) -> T:
        """On rank 0: do the work, then report whether it failed to the others, which wait in `_follow`."""
        try:
            result = work()
        except Exception as error:
            self._broadcast(failure.sentence(error))
            raise
        self._broadcast(None)
        return result

    def _follow(self) -> None:
        """Wait for the work of rank 0. If it failed, exit and let rank 0 print the reason."""
        if self._broadcast(None) is not None:
            self._leave_to_leader(2)

    def from_leader(self, work: Callable[[], T]) -> T:
        if not self.leads:
            self._follow()
        result: T = self._broadcast(self._lead(work) if self.leads else None)
        return result

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def agree(self, signal_number: int | None, done: int) -> int | None:
        self.heartbeat.done = done
        highest = torch.tensor(signal_number or 0)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        self.heartbeat.common = done
        return int(highest) or None

    def build_step(self, config: RunConfig) -> RankedStep:
        check_memory(config, self.device)
        resumed = self.folder is not None and bool(checkpoints(self.folder))
        return build_ranked_step(starting_parts(config, resumed=resumed), config, self.mesh)

    def save(self, run: Path, number: int, step: Step, state: Mapping[str, Any], keep: int) -> None:
        self.saver.save(run, number, step.model, step.optimizer, state, keep)

    def settle(self) -> None:
        self.saver.settle()

    def restore(self, path: Path, step: Step) -> None:
        load_shards(path, step.model, step.optimizer)

    def nonfinite(self, step: Step) -> list[str]:
        return self.saver.nonfinite(model_tensors(step.model) | step.optimizer.tensors())

    def whole_model(self, step: Step) -> Decoder | None:
        parallel = self.config.parallel
        return step.model if parallel.shard == parallel.pipeline == 1 else None

    def rank_times(self, step: Step, done: int) -> dict[str, Any] | None:
        assert isinstance(step, RankedStep)
        mine = torch.tensor([step.watch.take(), self.mesh.pipeline_rank], dtype=torch.float64)
        by_rank = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(by_rank, mine)
        self.heartbeat.common = done
        seconds, stages = zip(*(pair.tolist() for pair in by_rank), strict=True)
        slow = slow_ranks(seconds, stages, self.hosts)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        messages = [words for rank, words in slow.items() if self._slow[rank] == 2]
        return {"forward_ms": [round(1e3 * second, 3) for second in seconds], "slow": list(slow), "said": messages}

    def command(self, config: RunConfig) -> str:
        return config.parallel.command_on(node_count())

    def describe(self) -> str:
        parallel = self.config.parallel
        sizes = f"data {parallel.data} × shard {parallel.shard} × pipeline {parallel.pipeline}"
        experts = f", experts divided among {parallel.experts}" if parallel.experts > 1 else ""
        stages = f", {parallel.stages} stages, {parallel.schedule}" if parallel.pipeline > 1 else ""
        return f"{sizes}{experts}{stages}"


def slow_ranks(seconds: Sequence[float], stages: Sequence[float], hosts: Sequence[str]) -> dict[int, str]:
    """A sentence for each rank that takes `SLOW_FACTOR` times the median of ranks with the same `stages`.

    Ranks with other pipeline stages do different work, whose time a FLOP count does not predict well enough.
    """
    usual = {
        stages_here: median_low(s for s, stage in zip(seconds, stages, strict=True) if stage == stages_here)
        for stages_here in set(stages)
    }
    return {
        rank: f"rank {rank} on {hosts[rank]} is slow: {second / usual[stage]:.2f} × the median rank's time for the "
        "same work; check the clock, the temperature and other processes of its device"
        for rank, (second, stage) in enumerate(zip(seconds, stages, strict=True))
        if second > SLOW_FACTOR * usual[stage] > 0
    }


Way = Literal["replicate", "shard", "pipeline"]
STEPS: dict[Way, Callable[[Decoder, Parts, RunConfig, Mesh], RankedStep]] = {
    "replicate": ReplicatedStep,
    "shard": ShardedStep,
    "pipeline": PipelinedStep,
}


def build_ranked_step(parts: Parts, config: RunConfig, mesh: Mesh, way: Way | None = None) -> RankedStep:
    """The step for a mesh, with the weights of `parts`.

    `way` selects a kind of step even if its axis has a single rank, as benchmarks and tests do.
    """
    parallel = config.parallel
    default: Way = "pipeline" if parallel.pipeline > 1 else "shard" if parallel.shard > 1 else "replicate"
    return STEPS[way or default](shapes(config.model), parts, config, mesh)


def open_world(config: RunConfig, folder: Path | None = None) -> World:
    """The world that the configuration asks for: one process, or those that torchrun started.

    `folder` is the run's; PyTorch writes records of collectives that hang there.
    """
    if config.parallel.ranks == 1:
        return World.alone(config)
    check_processes(config)
    keep_records(folder)
    return Ranks.start(config, choose_device(config.train.device, "train.device"))
