"""Residua's prepared text as torchtitan's data loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from residua.data.loader import Loader
from residua.data.source import open_data
from residua.integrations.torchtitan.packed import pack, unpack
from residua.integrations.torchtitan.run import parse_run


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
            open_data(run)  # which prepares the embedded text if it must
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
        """The place in the global order, which is the same on all ranks, so that any number of them can go on."""
        return {"place": pack(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(unpack(state_dict["place"]))


class NoTokenizer(BaseTokenizer):
    """Prepared text needs no tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError("the text of a run is prepared: it is read as tokens")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("the text of a run is prepared: it is read as tokens")

    def get_vocab_size(self) -> int:
        raise NotImplementedError("the model knows its vocabulary")
