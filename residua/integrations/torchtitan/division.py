"""Tensor and context parallelism: the division of a layer among ranks.

Tensor parallelism: every rank has some heads and hidden channels of each layer, and some tokens between layers. Its
model is a decoder with fewer heads and narrower feed-forwards (`narrow`). Its fused projections hold its rows of every
part: of Q, K, V and G, of gate and up. Between the layers it has T/N tokens of each sequence, so norms, depth
connections, mixtures of experts, embedding and head stay unchanged (sequence parallelism). A layer gathers the tokens
before its first projection; after its last one, the outputs are summed and scattered over the ranks (`communicate`):

    x [B, T/N, C] → gather → x [B, T, C] → heads of this rank → y [B, T, C] → sum, scatter → y [B, T/N, C]

Anchors are computed and mixed head by head, so they stay on the rank of their heads. Replicated parameters (gains,
junction queries, experts) see different tokens or serve different heads on each rank, so their gradients are summed.

Context parallelism: every rank has some tokens of each sequence, at explicit positions. Everything except attention
works token by token. Softmax attention gathers the keys and values of all ranks, sorts them by position, and attends
from the rank's own queries. So documents, windows and sinks work as on one process, and a rank may have any tokens,
including torchtitan's balanced halves from both ends. PyTorch's ring attention passes keys around instead; it has no
kernels for the CPU, for documents, windows or sinks.

The state of Gated DeltaNet runs along the sequence. Instead of waiting for each other, the ranks divide its heads. Each
gathers all tokens and computes its heads over the whole sequence; the sums over heads are scattered back. Weights stay
whole on every rank; each rank has the gradient of its heads, and FSDP2 adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
    wait_tensor,
)
from torch.func import functional_call

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.model.anchor_source import ExoSource
from residua.model.context import Anchors, Context, map_reads
from residua.model.decoder import Decoder
from residua.model.projection import declared_matrices
from residua.model.rope import GROWING
from residua.model.sdpa import attend
from residua.model.size import shapes_only

TENSOR = "--parallelism.tensor_parallel_degree"
CONTEXT = "--parallelism.context_parallel_degree"


def narrow(model: ModelConfig, ranks: int) -> ModelConfig:
    """The model of one rank, with its share of heads and hidden channels."""
    if ranks == 1:
        return model
    if model.anchors.joins_heads:
        raise ConfigError(
            f"{TENSOR} {ranks} divides heads among ranks, but model.anchors.kind = '{model.anchors.kind}' with "
            "these settings mixes across heads: use data_parallel_shard_degree."
        )
    ffn = model.ffn
    if not ffn.mixture:
        _refuse_bias("model.ffn.bias", getattr(ffn, "bias", False), ranks)
        ffn = ffn.model_copy(update={"hidden": _share("model.ffn.hidden", ffn.hidden, ranks)})
    return model.model_copy(update={"ffn": ffn, "attention": _narrow_mixer(model.attention, model.width, ranks)})


def narrow_heads(mixer: Any, ranks: int, flag: str = TENSOR) -> Any:
    """A mixer with one rank's share of the heads."""
    counts = mixer.head_counts()
    return mixer.model_copy(update={key: _share(f"attention.{key}", n, ranks, flag) for key, n in counts.items()})


def _narrow_mixer(mixer: Any, width: int, ranks: int) -> Any:
    if mixer.parts:
        return mixer.model_copy(update={n: _narrow_mixer(getattr(mixer, n), width, ranks) for n in mixer.parts})
    if not mixer.head_counts():
        raise ConfigError(
            f"{TENSOR} {ranks} divides the heads of softmax attention and Gated DeltaNet, but "
            f"model.attention.kind = '{mixer.kind}' has no independent heads: use data_parallel_shard_degree."
        )
    if getattr(mixer, "full", None) is not None:
        raise ConfigError(
            f"{TENSOR} {ranks} divides the heads of every layer in the same way, but attention.full gives some "
            "layers different heads: use data_parallel_shard_degree."
        )
    if getattr(mixer, "qk_norm", "none") == "rms_all":
        raise ConfigError(
            f"{TENSOR} {ranks} divides heads among ranks, but attention.qk_norm = 'rms_all' normalizes all of "
            "them together: use data_parallel_shard_degree."
        )
    _refuse_bias("attention.bias = 'all'", getattr(mixer, "bias", "none") == "all", ranks)
    head_dim = mixer.turned(width) or mixer.head_dim  # its default depends on the number of heads
    return narrow_heads(mixer, ranks).model_copy(update={"head_dim": head_dim})


def _share(key: str, count: int, ranks: int, flag: str = TENSOR) -> int:
    if count % ranks:
        raise ConfigError(f"{flag} {ranks} does not divide {key} = {count}: use a divisor of it.")
    return count // ranks


def _refuse_bias(key: str, biased: bool, ranks: int) -> None:
    if biased:
        raise ConfigError(
            f"{TENSOR} {ranks} sums outputs over ranks, which would add the bias of {key} once per rank: use "
            "data_parallel_shard_degree."
        )


class Split(NamedTuple):
    """How ranks divide a parameter: along `dim`; `parts` are the sizes of its parts on every rank."""

    dim: int
    parts: tuple[int, ...]

    def intervals(self, rank: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """For every part: its start and end on this rank, and its start in the whole parameter."""
        for stop, size in zip(accumulate(self.parts), self.parts, strict=True):
            begin = stop - size
            yield begin, stop, begin * ranks + rank * size


def find_splits(mine: nn.Module, whole: nn.Module) -> dict[str, Split]:
    """The divided parameters, by name: those whose shapes differ between a rank's model or layer and the whole one."""
    parts = dict(_declared_parts(mine))
    splits = {}
    for name, parameter in mine.named_parameters():
        pairs = enumerate(zip(parameter.shape, whole.get_parameter(name).shape, strict=True))
        differing = [dim for dim, (here, all_of_it) in pairs if here != all_of_it]
        if differing:
            (dim,) = differing
            splits[name] = Split(dim, parts.get((name, dim), (parameter.shape[dim],)))
    return splits


def _declared_parts(model: nn.Module) -> Iterator[tuple[tuple[str, int], tuple[int, ...]]]:
    """The sizes of the maps that are fused in a parameter, along an axis."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, rows in declared_matrices(module).items():
            yield (f"{prefix}{name}", 0), rows
            if getattr(module, "bias", None) is not None:
                yield (f"{prefix}bias", 0), rows
        for (name, dim), sizes in getattr(module, "other_parts", {}).items():
            yield (f"{prefix}{name}", dim), sizes


def pieces(split: Split, rank: int, ranks: int, first: int, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The parts of a whole parameter that a rank has: their offsets in it, and views of them.

    `tensor` holds the rank's rows from `first` on; FSDP2 divides the rank's rows further.
    """
    others = (0,) * (tensor.dim() - 2)
    for begin, stop, place in split.intervals(rank, ranks):
        if split.dim == 1:
            yield (first, place, *others), tensor[:, begin:stop]
            continue
        low, high = max(begin, first), min(stop, first + len(tensor))
        if low < high:
            yield (place + low - begin, 0, *others)[: tensor.dim()], tensor[low - first : high - first]


def communicate(model: Decoder, group: dist.ProcessGroup) -> None:
    """Make layers gather tokens before their first projection, and sum and scatter the outputs of their last."""

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return map_reads(lambda x: gathered(x, group), inputs[0]), *inputs[1:]

    def scatter(module: nn.Module, inputs: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return scattered(outputs[0], group), *outputs[1:]

    for k, sublayer in enumerate(model.sublayers):
        body = sublayer.get_submodule("body")
        if k % 2 == 0 or not model.config.ffn.at(k // 2).mixture:  # a mixture works token by token, with whole experts
            body.register_forward_pre_hook(gather)
            body.register_forward_hook(scatter)
    if isinstance(model.anchors, ExoSource):
        model.anchors.project.register_forward_pre_hook(gather)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens [B, T, …] of all ranks; the gradients of all ranks are summed."""
    whole: Tensor = wait_tensor(all_gather_tensor_autograd(x.contiguous(), 1, group))
    return whole


def scattered(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sums over all ranks for this rank's tokens [B, T/N, …]; gradients are gathered."""
    shard: Tensor = wait_tensor(reduce_scatter_tensor_autograd(y.contiguous(), "sum", 1, group))
    return shard


class Across:
    """Attention from the tokens of this rank, at `positions` [T], to those of all ranks of a group."""

    def __init__(self, positions: Tensor, group: dist.ProcessGroup) -> None:
        self.positions, self.group = positions, group
        self.places = wait_tensor(all_gather_tensor(positions, 0, group))
        self.order = torch.argsort(self.places)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        k, v = self.in_order(k), self.in_order(v)
        return attend(q, k, v, positions=self.positions, **options)

    def in_order(self, x: Tensor) -> Tensor:
        """The tokens [B, T, …] of all ranks, sorted by position."""
        return gathered(x, self.group).index_select(1, self.order)

    def back(self, y: Tensor) -> Tensor:
        """The sums over all ranks of y [B, T, …], which is sorted by position, for this rank's tokens."""
        return scattered(y.index_select(1, self.places), self.group)


class HeadsOfSequences:
    """Replaces `forward` of a Gated DeltaNet: computes this rank's share of the heads for all tokens."""

    def __init__(self, body: Any, mixer: Any, rank: int, ranks: int) -> None:
        with torch.device("meta"), shapes_only():
            self.local_body = type(body)(narrow_heads(mixer, ranks), body.out.weight.shape[0], std=0.0, output_std=0.0)
        self.body, self.rank, self.ranks = body, rank, ranks
        self.splits = find_splits(self.local_body, body)

    def __call__(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        across = context.across
        assert isinstance(across, Across)
        weights = {name: self._share(name, weight) for name, weight in self.body.named_parameters()}
        y, anchors = functional_call(self.local_body, weights, (across.in_order(x), anchors, context))
        return across.back(y), anchors

    def _share(self, name: str, weight: Tensor) -> Tensor:
        """The rows or columns of this rank's heads."""
        split = self.splits.get(name)
        if split is None:
            return weight
        intervals = split.intervals(self.rank, self.ranks)
        return torch.cat([weight.narrow(split.dim, place, stop - begin) for begin, stop, place in intervals], split.dim)


def divide_states(model: Decoder, rank: int, ranks: int) -> None:
    """Let ranks that have different tokens divide the heads of linear attention."""
    for layer, sublayer in enumerate(list(model.sublayers)[::2]):
        body, mixer = sublayer.get_submodule("body"), model.config.attention.at(layer)
        if not mixer.attends:
            model.anchors.shares_gradient = False
            body.forward = HeadsOfSequences(body, mixer, rank, ranks)  # type: ignore[method-assign]


def refuse_mixers(model: ModelConfig, ranks: int) -> None:
    """Refuse models in which tokens depend on more of other tokens than keys and values."""
    for mixer in {mixer.kind: mixer for mixer in map(model.attention.at, range(model.layers))}.values():
        if not mixer.attends and mixer.head_counts():
            narrow_heads(mixer, ranks, CONTEXT)
        elif not mixer.attends:
            raise ConfigError(
                f"{CONTEXT} {ranks} divides sequences, along which the state of model.attention.kind = '{mixer.kind}' "
                "is passed on: use tensor_parallel_degree or data_parallel_shard_degree."
            )
        scaling = getattr(mixer, "rope_scaling", None)
        if scaling is not None and scaling.kind in GROWING:
            raise ConfigError(
                f"{CONTEXT} {ranks} divides sequences, whose length decides the angles of attention.rope_scaling = "
                f"'{scaling.kind}': use another scaling, or data_parallel_shard_degree."
            )
