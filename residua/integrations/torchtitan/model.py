"""A Residua decoder that torchtitan can build, initialize and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from residua.distributed.pipeline.part import SharedParameters
from residua.distributed.shard import fill, materialise
from residua.integrations.torchtitan.checkpoint import Pieces, copy_share
from residua.integrations.torchtitan.compat import parse_run
from residua.integrations.torchtitan.division import Across, find_splits, narrow, pieces
from residua.model.cache import Now
from residua.model.context import Context
from residua.model.decoder import Decoder
from residua.model.moe import MoE
from residua.model.size import measure, shapes
from residua.storage.shard_files import local
from residua.train.balance import Balancer
from residua.train.compile.rewrites import compile_rewritten
from residua.train.compile.working_copies import WorkingCopies
from residua.train.losses import LossFunction, eager_losses
from residua.train.start import starting_parts
from residua.train.step import autocast

if TYPE_CHECKING:
    from residua.integrations.torchtitan.parallelize import Grid


class ResiduaModel(Decoder, BaseModel):
    """Tokens and targets [B, T] in, losses out: cross-entropy, z-term and, with experts, their balance.

    Parameters have the same names as in a run's checkpoints. In a pipeline, the model holds this rank's share of them,
    and the stages compute with it.
    """

    grid: Grid

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The run, as TOML, the number of tensor-parallel ranks, and torchtitan's seed."""

        run: Annotated[str, tyro.conf.Suppress] = ""
        tensor: Annotated[int, tyro.conf.Suppress] = 1
        seed: Annotated[int | None, tyro.conf.Suppress] = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            self.tensor, self.seed = config.parallelism.tensor_parallel_degree, config.debug.seed

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            size = measure(parse_run(self.run).model.model_copy(update={"context": seq_len}))
            return size.parameters, size.flops_per_token

    def __init__(self, config: Config) -> None:
        self.run = parse_run(config.run)
        self.seed = self.run.train.seed if config.seed is None else config.seed
        Decoder.__init__(self, narrow(self.run.model, config.tensor))
        self.splits = {} if config.tensor == 1 else find_splits(self, shapes(self.run.model))
        self.balancer: Balancer | None = None
        self.shared: SharedParameters | None = None  # in a pipeline
        self.mixtures: list[MoE] = []  # of all stages, in a pipeline
        self.part = 1.0  # share of a step's tokens in one micro-batch
        self.precision, self.device_type, self.compiled = torch.float32, "cpu", False
        self.recomputes = False
        self.copies: WorkingCopies | None = None
        self._losses: tuple[LossFunction, ...] = ()

    def compute_with(self, losses: LossFunction) -> None:
        """Let `forward` call this function, which may be a module that contains this one."""
        self._losses = (losses,)  # in a tuple, so that it does not become a child of this module

    def compute_alone(self) -> None:
        """Compute the losses as `residua train` does on one process: compiled as a whole, on working copies."""
        recipe = self.run.train
        if self.precision is not torch.float32 and not self.recomputes:
            self.copies = WorkingCopies(self, self.precision)
        losses = eager_losses(self, recipe.z_loss, self.copies)
        self.compute_with(compile_rewritten(losses) if self.compiled else losses)

    def forward(self, tokens: Tensor, *, targets: Tensor, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        with autocast(self.device_type, self.precision):
            cross_entropy, z, routing = self._losses[0](tokens, targets, **inputs)
        if self.balancer is None:
            return torch.stack([cross_entropy, z])
        balance = self.balancer.loss(routing, self.part)
        return torch.stack([cross_entropy, z, balance])

    def to_empty(self, *, device: Any, recurse: bool = True) -> ResiduaModel:
        """Allocate tensors that have no memory; those shared by stages already have it."""
        materialise(self, torch.device(device))
        return self

    def init_states(self, *, buffer_device: Any = None) -> None:
        """Fill this rank's tensors, one layer at a time, with the initial weights of `residua train`."""
        torch.manual_seed(self.seed)
        with torch.device("cpu"):
            fill(self.state_dict(), starting_parts(self.run), copy_share)
        if self.grid.ranks == 1 and self.shared is None:
            self.compute_alone()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {name: self.placed(name, tensor) for name, tensor in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load tensors that were not written in place; torch.distributed.checkpoint writes to those of `state_dict`."""
        if not self.splits:
            return super().load_state_dict(state_dict, *args, **kwargs)

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or optimizer state of its shape, as checkpoints hold it: with its place in the whole model."""
        split = self.splits.get(name)
        if split is None:
            return tensor
        shape = list(tensor.shape)
        shape[split.dim] *= self.grid.tensor_ranks
        first = tensor.__create_chunk_list__()[0].offsets[0] if isinstance(tensor, DTensor) else 0
        here = local(tensor.detach())
        local_pieces = pieces(split, self.grid.tensor_rank, self.grid.tensor_ranks, first, here)
        return Pieces(torch.Size(shape), here, local_pieces)

    def _context(
        self,
        rotary: tuple[Tensor, ...] | None,
        segments: Tensor | None,
        now: Now | None = None,
        positions: Tensor | None = None,
    ) -> Context:
        if self.grid.context_ranks == 1:
            return super()._context(rotary, segments, now, positions)
        assert positions is not None, "the tokens of context-parallel ranks have positions"
        return Context(rotary, segments, now, across=Across(positions, self.grid.context))

    def verify_module_protocol(self) -> None:
        """Accept any module: torchtitan's own models use its modules, Residua's use PyTorch's."""


class OwnNames(StateDictAdapter):
    """Uses Residua's names in the safetensors that `--checkpoint.last_save_in_hf` writes."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(state_dict)

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(hf_state_dict)
