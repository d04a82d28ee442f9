"""A model as seen by a diagnosis, and how to switch off parts of it inside a `with` block.

Adapters (native.py, huggingface.py) record observations; metrics read nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from residua.config.settings import Frozen
from residua.diagnose.attention import AttentionSums
from residua.model.topology import SourceNames
from residua.ops._runtime.numeric import wide

SiteKind = Literal["attention", "linear attention", "feed-forward", "mixture of experts", "layer"]
AblationKind = Literal["layer", "layers", "sublayer", "head", "source", "stream", "uniform"]


@dataclass(frozen=True)
class Site:
    """One sublayer, which reads and writes the depth state. `layer` counts transformer layers from 0."""

    index: int
    layer: int
    kind: SiteKind

    @property
    def name(self) -> str:
        """The name to display: `layer 3 attention`."""
        return f"layer {self.layer}" if self.kind == "layer" else f"layer {self.layer} {self.kind}"


@dataclass
class Observation:
    """One forward pass over a few sequences. Fields that do not apply to a model stay empty.

    tokens [B, T]; loss: mean nats per target. By site, and at `len(sites)` for the final norm: states [B, T, C], the
    input before the norm; weights [B, T, sources] and streams [B, T, n, C], from which that input is mixed. By site:
    outputs [B, T, C]; betas [B, T, n], the gates of its write. By layer: attention, already summed; gates [B, T, heads,
    ·], after the sigmoid; loads [E], the share of the choices that each expert received; value_gates [B, T, kv_heads],
    how much of another value is added to the layer's own. By layer and pathway: gammas [B, T, 2], the factors on λ1 and
    λ2 of dynamic mixing.
    """

    tokens: Tensor
    loss: float = float("nan")
    states: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, AttentionSums] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    value_gates: dict[int, Tensor] = field(default_factory=dict)
    gammas: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    betas: dict[int, Tensor] = field(default_factory=dict)
    streams: dict[int, Tensor] = field(default_factory=dict)
    _medians: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _mean_squares: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def median(self, state: int) -> Tensor:
        """The (lower) median of |h| by token, [B, T]; computed once for all metrics."""
        if state not in self._medians:
            self._medians[state] = wide(self.states[state]).abs().median(-1).values
        return self._medians[state]

    def mean_square(self, state: int) -> Tensor:
        """The mean of h² by token in float64, [B, T]; computed once for all metrics."""
        if state not in self._mean_squares:
            self._mean_squares[state] = wide(self.states[state]).double().square().mean(-1)
        return self._mean_squares[state]


@dataclass(frozen=True)
class Ablation:
    """A part of the model that is switched off inside `with ablation.applied():`.

    `index` counts within its kind, or is the first of `count` layers; `head` counts within its layer; `label` is for
    display, and `note` says where the part could not be removed entirely.
    """

    kind: AblationKind
    index: int
    label: str
    applied: Callable[[], AbstractContextManager[None]]
    head: int | None = None
    count: int = 1
    note: str = ""


NEAR_ZERO = 1e-3
"""Below this λ1, a projection takes nothing from its anchor."""


class AnchorFacts(Frozen):
    """λ of projection mixing: means by head of the parameters λ1 (anchor) and λ2 (current), and the share of |λ1| below
    1e-3. The factor applied is λγ. `gamma` holds the means of γ1 and γ2 over tokens (null for static mixing, γ = 1),
    and the channels hold λ1·γ1 and λ2·γ2. `ratio` is the median over channels of λ1·γ1/(λ2·γ2). Older files lack these.
    For gated values, λ1 is the mean of the gate over tokens, and `near_zero` is the share of tokens and heads in which
    the gate is near zero."""

    layer: int
    pathway: str
    anchor: list[float]
    current: list[float]
    near_zero: float
    gamma: list[float] | None = None
    ratio: float | None = None
    anchor_channels: list[float] = Field(default_factory=list)
    current_channels: list[float] = Field(default_factory=list)


class Subject(ABC):
    """A model under diagnosis.

    description: the model in words; state_name: the meaning of `states`, "residual stream" or, if sublayers read a
    mixture of sources, "sublayer input"; names: those of the sources that readers weight; gains: by site, the gain of
    its norm [C], the final norm's at `len(sites)`; skipped: which measurements were impossible, and why.
    """

    name: str
    description: str
    model: nn.Module
    width: int
    vocabulary: int
    context: int | None
    sites: Sequence[Site]
    layers: int
    state_name: str
    names: SourceNames = SourceNames()
    gains: dict[int, Tensor]
    skipped: list[str]

    def reader_name(self, state: int) -> str:
        """The name of a state's reader for display: a sublayer, or the final norm."""
        return self.sites[state].name if state < len(self.sites) else "the final norm"

    def norm_parts(self) -> dict[int, dict[str, Tensor]]:
        """By state, the named factors [C] of the norm that reads it; by default its whole gain, λ."""
        return {k: {"λ": gain} for k, gain in sorted(self.gains.items())}

    def norm_gate(self, state: int, h: Tensor) -> tuple[Tensor, Tensor] | None:
        """For the norm that reads state h [B, T, C]: its output y before the gate, and the gate; None if ungated."""
        return None

    @abstractmethod
    def observe(self, tokens: Tensor, targets: Tensor) -> Observation:
        """Run the model without gradients and record an observation."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per target; differentiable where gradients are enabled."""

    @abstractmethod
    def parameters_of(self, site: Site) -> Iterator[nn.Parameter]:
        """The parameters of one sublayer, including its norm."""

    def anchor_scales(self) -> list[AnchorFacts]:
        """λ of projection mixing, without γ."""
        return []

    @abstractmethod
    def ablations(self, kinds: Sequence[AblationKind]) -> list[Ablation]:
        """The parts of these kinds that can be removed."""

    def without_layers(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        """A context in which several layers are removed at once."""
        single = {ablation.index: ablation for ablation in self.ablations(("layer",))}
        return _all_of([single[layer] for layer in layers])


@contextmanager
def _all_of(ablations: Sequence[Ablation]) -> Iterator[None]:
    with ExitStack() as stack:
        for ablation in ablations:
            stack.enter_context(ablation.applied())
        yield


def on_each(
    modules: Sequence[nn.Module], hook: Callable[..., Any], with_kwargs: bool = False
) -> Callable[[], list[RemovableHandle]]:
    """For `hooked`: attach a forward hook to each of these modules."""
    return lambda: [module.register_forward_hook(hook, with_kwargs=with_kwargs) for module in modules]


def before_each(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Callable[[], list[RemovableHandle]]:
    """For `hooked`: attach a forward pre-hook to each of these modules."""
    return lambda: [module.register_forward_pre_hook(hook) for module in modules]


def silenced(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that sets the module's main output to zero."""
    return replaced_first(output, torch.zeros_like)


def first(output: Any) -> Any:
    """A module's main output: the output itself, or the first item of a tuple or list."""
    return output[0] if isinstance(output, tuple | list) and output else output


def replaced_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the main tensor of an output."""
    if isinstance(output, list):
        return [change(output[0]), *output[1:]]
    if isinstance(output, tuple):
        items = (change(output[0]), *output[1:])
        return type(output)(*items) if hasattr(output, "_fields") else items
    return change(output)
