"""torchtitan's trainer for a Residua run: its text, loss, gradients, and the files for converting its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as engine
from torchtitan.trainer import Trainer

from residua.config.run import RunConfig
from residua.data.loader import Loader
from residua.data.source import open_data
from residua.data.tokenizer import SETTINGS
from residua.distributed.experts import expert_matrices
from residua.distributed.step import clip_together
from residua.files import write_atomically
from residua.integrations.torchtitan.checkpoint import pack, unpack
from residua.integrations.torchtitan.compat import parse_run
from residua.integrations.torchtitan.model import ResiduaModel
from residua.integrations.torchtitan.optimizer import schedule_of
from residua.integrations.torchtitan.refusals import plainly, refuse_engine
from residua.model.moe import mixtures
from residua.storage.hugging_face import keep_companions
from residua.storage.shard_files import local
from residua.train.balance import Balancer


class ResiduaLoss(BaseLoss):
    """The loss of `residua train`: cross-entropy, z-term, balance of experts. It reports only the cross-entropy.

    Incoming losses are means over this rank's targets; outgoing ones are its parts of the means over the step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """No settings: the run holds the weights of the terms."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.tokens: dist.ProcessGroup | None = None
        """Ranks with different tokens that torchtitan does not know: it sums losses only over its own axes."""

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        count = (labels != IGNORE_INDEX).sum()
        share = count / (count if global_valid_tokens is None else global_valid_tokens)
        cross_entropy, z, *balance = pred.unbind()
        trained = sum(balance, (cross_entropy + z) * share)
        reported = cross_entropy.detach() * share
        if self.tokens is not None:
            dist.all_reduce(reported, group=self.tokens)
        return _report(reported, trained), {}


def _report(value: Tensor, trained: Tensor) -> Tensor:
    """A loss with the given value, and the gradient of `trained`."""
    return trained + (value - trained).detach()


class ResiduaTrainer(Trainer):
    """torchtitan's trainer with three changes.

    Targets go into the model, which computes the loss with its head, so that logits are never stored. `Gradients` clips
    gradients, because torchtitan's function does not mix sharded with whole parameters, and counts parameters that
    stages share repeatedly. The run's configuration and tokenizer are written to the dump folder.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's settings, and the run as TOML."""

        run: Annotated[str, tyro.conf.Suppress] = ""

    def __init__(self, config: Config) -> None:
        run = parse_run(config.run)
        with plainly():
            refuse_engine(config, run)
        _fill_pipeline(config, run)
        super().__init__(config)
        (model,) = self.model_parts
        assert isinstance(model, ResiduaModel)
        self.gradients = Gradients(model)
        if model.grid.tensor_ranks > 1:
            self.loss_fn.tokens = model.grid.tensor
        self._balance(model, run)
        with plainly():
            self._describe(run, model)

    def _balance(self, model: ResiduaModel, run: RunConfig) -> None:
        """Balance experts over all tokens of a step, on all ranks."""
        batches = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        model.part = 1 / (batches * model.grid.ranks)
        add = model.grid.over_all if model.mixtures else model.grid.over_batch
        layers = model.mixtures or mixtures(model)
        if layers:
            model.balancer = Balancer(run.train.balance, layers, self.device, lambda tensor: add(tensor.clone()))
        self.balancer = model.balancer

    def _describe(self, run: RunConfig, model: ResiduaModel) -> None:
        """Put the files for `convert` and `residua` next to the checkpoints."""
        if dist.get_rank() == 0:
            folder = Path(self.config.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "config.toml", self._trained(run, model).to_toml())
            if run.train.start is not None:
                keep_companions(Path(run.train.start), folder)
            for name in ("tokenizer.json", SETTINGS):
                source = self.dataloader.dataset.path / name
                if source.exists():
                    write_atomically(folder / name, source.read_text(encoding="utf-8"))

    def _trained(self, run: RunConfig, model: ResiduaModel) -> RunConfig:
        """The run with the changes from torchtitan's flags."""
        training, grid = self.config.training, model.grid
        flowing = self.num_pipeline_parallel_microbatches
        batches = self.gradient_accumulation_steps * flowing * grid.config.data * grid.config.shard
        schedule = schedule_of(self.config.lr_scheduler).model_dump()
        return run.override(
            [
                # the length of the schedule; a job may train only a part of it
                f"train.steps={self.config.lr_scheduler.total_steps or training.steps}",
                f"train.micro_batch={training.local_batch_size // flowing}",
                f"train.accumulate={batches // grid.context_ranks}",
                f"train.clip_norm={float(training.max_norm)}",
                f"train.seed={model.seed}",
                *([f"data.sequence={training.seq_len}"] if training.seq_len != run.sequence else []),
                *(f"train.schedule.{key}={json.dumps(value)}" for key, value in schedule.items()),
            ]
        )

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        grid = self.gradients.grid
        batch = dict(input_dict)
        if grid.tensor_ranks * grid.context_ranks > 1:  # torchtitan gives each context-parallel rank its positions
            tokens = batch["input"]
            batch["positions"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        inputs, labels, batch = super().post_dataloading_process(batch, labels)
        if grid.tensor_ranks * grid.context_ranks > 1:
            if not self.parallel_dims.pp_enabled:  # a schedule divides its inputs by rows
                batch["positions"] = batch["positions"][0].contiguous()
            inputs, labels = (x.chunk(grid.tensor_ranks, 1)[grid.tensor_rank].contiguous() for x in (inputs, labels))
        if self.parallel_dims.pp_enabled and self.model_parts[0].token_readers:
            batch["tokens"] = inputs
        return inputs, labels, {**batch, "targets": labels}

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        with self._clipping():
            super().train_step(data_iterator)
        if self.balancer is not None:
            self.balancer.end()

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        """Replace torchtitan's clipping function, which it looks up in its module, with ours during a step."""
        theirs = engine.clip_grad_norm_
        engine.clip_grad_norm_ = lambda _, max_norm, **__: self.gradients.clip(max_norm)
        try:
            yield
        finally:
            engine.clip_grad_norm_ = theirs

    def state_dict(self) -> dict[str, Any]:
        state = dict(super().state_dict())
        if self.balancer is not None:
            state["expert_load"] = torch.tensor(self.balancer.state()["load"], dtype=torch.float64)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.balancer is not None:
            self.balancer.set_state({**self.balancer.state(), "load": state_dict["expert_load"].tolist()})


def _fill_pipeline(config: Any, run: RunConfig) -> None:
    """Send all micro-batches of a step through the pipeline at once, unless a flag sets another local batch size."""
    mesh, training = config.parallelism, config.training
    if mesh.pipeline_parallel_degree == 1 or training.local_batch_size != run.train.micro_batch:
        return
    world = int(os.environ.get("WORLD_SIZE", 1))
    ranks = world // (mesh.pipeline_parallel_degree * mesh.tensor_parallel_degree * mesh.context_parallel_degree)
    if training.global_batch_size > 0 and training.global_batch_size % ranks == 0:
        training.local_batch_size = training.global_batch_size // ranks


class Gradients:
    """The gradients of this rank's model part. Create it when the parameters have their final form.

    FSDP2 has summed the gradients of its parameters. Others are whole on every rank: scalars and, in a pipeline,
    parameters that several stages use.
    """

    def __init__(self, model: ResiduaModel) -> None:
        self.grid, self.shared = model.grid, model.shared
        self.parameters = list(model.parameters())
        self.split = {parameter for name, parameter in model.named_parameters() if name in model.splits}
        self.experts: list[Any] = expert_matrices(model, model.grid)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Sum gradients not yet summed over the ranks, and scale all to a common norm of at most `max_norm`."""
        self.complete()
        groups = (self.grid.shard, self.grid.tensor, self.grid.pipeline)
        return clip_together(self.parameters, self._counts, groups, max_norm, self.grid.device)

    def complete(self) -> None:
        """Sum the gradients of shared parameters over stages, and of whole ones over ranks with different tokens."""
        if self.shared is not None:
            self.shared.complete([], ranks=1)
        if self.grid.ranks == 1:
            return
        for parameter in self.experts if self.grid.config.data > 1 else ():
            dist.all_reduce(local(parameter.grad), group=self.grid.data)
        for parameter in self.parameters:
            if not isinstance(parameter, DTensor):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                split = parameter in self.split
                self.grid.over_copies(parameter.grad) if split else self.grid.over_batch(parameter.grad)

    def _counts(self, parameter: Any) -> bool:
        """Whether this rank adds its part of a parameter to the norm; of equal copies, only one counts."""
        if not isinstance(parameter, DTensor):
            first = self.grid.shard_rank == 0 and (self.grid.tensor_rank == 0 or parameter in self.split)
            if not first:
                return False
        return self.shared is None or self.shared.counts(parameter)


class PreparedText(BaseDataLoader):
    """The run's windows in their one global order: a step has the same ones on any mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The run, as TOML."""

        run: Annotated[str, tyro.conf.Suppress] = ""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        run = parse_run(config.run)
        if dist.get_rank() == 0:
            open_data(run)  # prepares the embedded text if necessary
        dist.barrier()
        self.dataset = open_data(run)
        self.loader = Loader(
            self.dataset.split("train"),
            seq_len,
            local_batch_size,
            run.data.seed,
            dp_rank,
            dp_world_size,
            segments=run.data.masking == "documents",
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in self.loader:
            documents = {} if batch.segments is None else {"segments": batch.segments}
            yield {"input": batch.tokens, **documents}, batch.targets

    def state_dict(self) -> dict[str, Any]:
        """The position in the global order. It is the same on all ranks, so any number of ranks can continue."""
        return {"place": pack(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(unpack(state_dict["place"]))


class NoTokenizer(BaseTokenizer):
    """Stands in for a tokenizer, which prepared text does not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a run reads prepared tokens, and the model has its own vocabulary")

    encode = decode = get_vocab_size = _refuse
