"""The depth protocol: a model calls only `open` and `step`; everything else informs tools."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from residua.errors import UserError
from residua.model.body import reset
from residua.model.context import Input, Reads
from residua.model.equivalence import InitFidelity
from residua.model.topology.facts import Ablations, Costs, SourceNames, trace_rows

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.model.topology.inference import InferenceTopology

State = tuple[Tensor, ...]
"""Tensors only, since compilation, activation checkpointing and pipeline stages pass the state on."""

Items = dict[str, Tensor]
"""Tensors that cross a stage boundary, by name, in sending order."""

MOVED = {
    "costs": "floor step_rows kept_widths bandwidth_share",
    "source_names": "source_name initial_source one_stream block_of_reader block_of_source",
    "ablations": "sources_seen without_source weighing_readers with_equal_weights stream_count without_stream "
    "without_writes fill_phase",
    "initialization": "begin_as_sum sum_factors begin_as output_gain adds",
    "inference": "fused normed",
}
"""Attribute names that plugins used with Residua 0.1, by the method whose result has them now."""


def refuse_moved(name: str, stated: Mapping[str, Any]) -> None:
    """Refuse attributes of a topology whose names are obsolete."""
    for method, names in MOVED.items():
        if moved := [each for each in names.split() if each in stated]:
            raise UserError(
                f"{name} states {', '.join(moved)}, which has no effect: return it in the object of `{method}` "
                "(docs/extend.md)."
            )


class Topology(nn.Module):
    """How sublayers communicate along depth. A model has one topology, which owns the parameters of its junctions.

    `open` and `step` are pure functions of their tensors and token-local: the result at a position depends only on that
    position, so decoding needs no depth cache. Every other method has a default that is correct for any topology;
    override it where you know more.

    Readers are the consumers of the depth state: reader k is sublayer k, the last reader is the final norm. The
    junction after sublayer k computes the input of reader k+1.
    """

    reads_tokens = False
    """Whether `open` and `step` take the token ids [B, T] as an extra last argument."""

    def __init_subclass__(cls, **keys: Any) -> None:
        super().__init_subclass__(**keys)
        refuse_moved(cls.__name__, vars(cls))
        for name in ("open", "step"):
            if name in vars(cls):
                setattr(cls, name, keeps_gradients(vars(cls)[name]))

    @abstractmethod
    def open(self, x: Tensor) -> tuple[Input, State]:
        """Turn the embedding [B, T, C] into the first sublayer's input and the state.

        An input may be several `Reads`, if the projections of attention read different mixtures.
        """

    @abstractmethod
    def step(self, k: int, y: Tensor, state: State) -> tuple[Input, State]:
        """Turn the output of sublayer k into the input of sublayer k+1, or of the final norm after the last one."""

    def initialization(self) -> Initialization:
        """How a new model starts, and how this topology can start as another."""
        return Initialization()

    def boundary(self) -> Boundary:
        """How the state crosses from one pipeline stage to the next."""
        return Boundary(self)

    def recovery(self) -> Recovery | None:
        """How the backward pass recovers states that the forward pass did not store; None if not supported."""
        return None

    def costs(self, sublayers: int, width: int) -> Costs:
        """The cost of the junctions in training; the default runs them on tensors without memory, when asked."""
        return Costs(cache(lambda: trace_rows(self, sublayers, width)))

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        """Names for diagnoses of the sources that readers weight; `sublayers` are the names of the sublayers."""
        return SourceNames()

    def ablations(self) -> Ablations:
        """The parts that diagnoses can switch off."""
        return Ablations()

    def inference(self, norms: Sequence[RMSNorm]) -> InferenceTopology | None:
        """This topology with norms[k] applied to the input of reader k, for prefill and decoding without gradients.

        All `norms` are plain RMSNorms. Parameters may be prepared once, since they do not change afterwards. The
        default is None: the junctions run unchanged, followed by the norms.
        """
        return None


@dataclass(frozen=True)
class Initialization:
    """How a topology and the model around it start, including a start as another model (`retrofit`).

    output_gain: factor on the initial std of every sublayer's output projection. is_additive: whether every reader gets
    the sum of the embedding and all outputs so far, so that others can start as this one.

    init_as_additive(): start as such a model, by changing parameters in place. EXACTLY: every reader gets the sum.
    UP_TO_EPS: every reader gets a positive multiple of it, `sum_factors`, which the norm in front of it cancels. By
    default, the topology starts as in a new model. sum_factors: the multiples for readers 0, 1, …; None if all get the
    sum itself.

    output_factors(): factors for the outputs that make every reader get a multiple of their sum; None if no factors
    make the topology a sum.

    begin_as(old): start as a topology of the same kind with other settings, by changing parameters in place. If None,
    the other's parameters are copied where they fit, without preserving the function.
    """

    output_gain: float = 1.0
    is_additive: bool = False
    init_as_additive: Callable[[], InitFidelity] = lambda: InitFidelity.NOT
    sum_factors: Sequence[float] | None = None
    output_factors: Callable[[], Tensor] | None = None
    begin_as: Callable[[Any], InitFidelity] | None = None

    @classmethod
    def additive_when_new(cls, topology: nn.Module, **others: Any) -> Initialization:
        """That of a topology whose new parameters make it such a model."""

        def init_as_additive() -> InitFidelity:
            reset(topology)
            return InitFidelity.EXACTLY

        return cls(init_as_additive=init_as_additive, **others)

    def factors(self, sublayers: int) -> Sequence[float]:
        """`sum_factors` as explicit numbers."""
        return [1.0] * (sublayers + 1) if self.sum_factors is None else self.sum_factors


class Recovery:
    """Junctions that recover their inputs from their outputs in the backward pass.

    kept: sublayers after which the junction stores its input instead, because recovery would be inexact.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.kept: tuple[int, ...] = ()

    def amplification(self, k: int, beta: Tensor) -> Tensor | None:
        """How much recovery after sublayer k amplifies rounding; None if it recovers nothing, or recovers exactly.

        `beta` [B, T, n] are its write gates.
        """
        raise NotImplementedError

    def needs_keeping(self, amplification: Mapping[int, float], epsilon: float) -> Sequence[int]:
        """Sublayers to add to `kept`; `epsilon` is the rounding error of the streams."""
        raise NotImplementedError


class Boundary:
    """How a model is split along depth: the names and tensors that cross from one slice of sublayers to the next.

    Every tensor that crosses has a unique name. A tensor that no longer changes, such as a finished block of Attention
    Residuals or the embedding, keeps its name at all later boundaries: a rank then knows that it already has it.

    This default sends the whole state, and also the next sublayer's input unless that is the state.
    """

    plain = True
    """Whether the state inside a slice consists of ordinary tensors, which receive only gradients."""

    blocks: float | None = None
    """Blocks in the traffic formulas of Attention Residuals; None if they do not apply."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def begin(self, x: Tensor, *ids: Tensor) -> tuple[Input, State]:
        """Turn the embedding into the first sublayer's input and a state that can be split.

        `ids` are the tokens, for a topology that reads them; every stage receives them.
        """
        return self.topology.open(x, *ids)

    def after(self, k: int, y: Tensor, state: State, *ids: Tensor) -> State:
        """The state after sublayer k, without tensors needed only for the next input."""
        return self.topology.step(k, y, state, *ids)[1]

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        """End a slice: turn the output y of its last sublayer k into the tensors that cross."""
        h, state = self.topology.step(k, y, state, *ids)
        items = {f"state.{k}.{i}": tensor for i, tensor in enumerate(state)}
        if isinstance(h, Reads):  # views, because each tensor that crosses has one name
            return {f"input.{k}.{way}": read.view_as(read) for way, read in h._asdict().items()} | items
        return items if h is state[0] else {f"input.{k}": h, **items}

    def enter(self, k: int, items: Items) -> tuple[Input, State]:
        """Begin the next slice: the input of sublayer k+1, and the state."""
        state = tuple(tensor for name, tensor in items.items() if name.startswith("state."))
        if f"input.{k}.q" in items:
            return Reads(*(items[f"input.{k}.{way}"] for way in Reads._fields)), state
        return items.get(f"input.{k}", state[0]), state

    def embedding(self) -> str | None:
        """The name under which the embedding crosses, if it does."""
        return None


class KeptBoundary(Boundary):
    """state[0], the next sublayer's input, changes at every junction; the other tensors are final and keep their names.

    `embedding` is the embedding's index among the final tensors; None if it is not one of them.
    """

    def __init__(self, topology: Topology, embedding: int | None) -> None:
        super().__init__(topology)
        self.place = embedding

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        _, (h, *kept) = self.topology.step(k, y, state, *ids)
        return {f"input.{k}": h, **{f"kept.{i}": tensor for i, tensor in enumerate(kept)}}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        h, count = items[f"input.{k}"], sum(name.startswith("kept.") for name in items)
        return h, (h, *(items[f"kept.{i}"] for i in range(count)))  # tensors that the rank already has come last

    def embedding(self) -> str | None:
        return None if self.place is None else f"kept.{self.place}"


# `torch.utils.checkpoint` with `use_reentrant=True` tracks tensors among its arguments and results, but not inside
# tuples: autograd treats those as constants. A state returned in a tuple would silently train wrongly.

_FORWARD = CheckpointFunction.forward.__code__
_MADE_IN = "_residua_made_in"


def keeps_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `open` or `step` to raise an error if a reentrant checkpoint detaches its tensors."""

    @wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *given, **options)
        tensors = [t for item in given for t in (item if isinstance(item, tuple) else (item,)) if isinstance(t, Tensor)]
        frame = reentrant_checkpoint(tensors)
        made_in = None if frame is None else id(frame.f_locals["ctx"])
        followed = () if frame is None else frame.f_locals["args"]
        if any(_is_cut_off(tensor, made_in, followed) for tensor in tensors):
            raise UserError(
                "a reentrant checkpoint drops the gradients of a topology's state, because the state is a tuple: "
                "pass and return its tensors one by one, or set use_reentrant=False (docs/use-in-your-model.md)."
            )
        returned = method(self, *given, **options)
        if made_in is not None:
            for tensor in returned[1]:
                if all(tensor is not old for old in tensors):
                    setattr(tensor, _MADE_IN, made_in)
        return returned

    return call


def reentrant_checkpoint(tensors: Sequence[Tensor]) -> FrameType | None:
    """The frame of the reentrant checkpoint whose forward pass, with gradients off, is running; None without one."""
    if torch.is_grad_enabled() or not any(tensor.requires_grad or hasattr(tensor, _MADE_IN) for tensor in tensors):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FORWARD:
        frame = frame.f_back
    return frame


def _is_cut_off(tensor: Tensor, made_in: int | None, followed: Sequence[Any]) -> bool:
    """Whether the tensor entered this checkpoint, or left another, without being tracked."""
    if tensor.requires_grad:
        return made_in is not None and not tensor.is_leaf and all(tensor is not other for other in followed)
    return tensor.is_floating_point() and vars(tensor).get(_MADE_IN, made_in) != made_in


class FromEmbedding(Topology):
    """A topology whose first input and whole state are the embedding."""

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)
