"""Where a per-channel factor can move in a model without changing what it computes.

An edge runs from whatever produces a vector to every linear map that reads it. Dividing channel j of the producer by
s_j and multiplying column j of all readers by s_j leaves the model as it was. Both ends are found by following the
model's own modules, so a new norm or a new sublayer either says here how it divides, or is refused by name.

A norm that gates its own output reads that output too: GatedNorm's `down` is a reader inside the producer, and leaving
it out changes the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import cast

import torch
from torch import Tensor, nn

from residua.model.anchors import DynamicMix, Mix
from residua.model.attention import SoftmaxAttention
from residua.model.decoder import Decoder, Sublayer
from residua.model.ffn import GatedFFN, PlainFFN, relu2
from residua.model.linear_attention import GatedDeltaNet
from residua.model.moe import Experts, MoE
from residua.model.norm import DyT, GatedDyT, GatedNorm, PreAffine, RMSNorm
from residua.model.projection import Projection
from residua.ops._runtime.numeric import no_autocast, wide
from residua.quantize.low import expert_states


def _first(x: Tensor, *rest: object) -> Tensor:
    return x


@dataclass(frozen=True)
class Edge:
    """A producer, by `divide(s)`, and its readers, matrices [R, C] whose columns are its channels.

    channel [C] names, for each input channel of the readers, the producer's channel it comes from: the identity, or
    fewer channels where several inputs share one (grouped key-value heads, a gain that all heads share). The vector
    itself is what `look` finds in the arguments of `probe`.
    """

    name: str
    readers: tuple[Tensor, ...]
    channel: Tensor
    divide: Callable[[Tensor], None]
    probe: nn.Module
    look: Callable[..., Tensor] = _first

    @torch.no_grad()
    def fold(self, factor: Tensor) -> None:
        """Divide the producer by `factor` [channels] and multiply the readers, each in place."""
        self.divide(factor)
        columns = factor[self.channel.to(factor.device)]
        for reader in self.readers:
            reader.mul_(columns.to(reader.dtype))


def edges(model: Decoder, *, inside: bool = True) -> list[Edge]:
    """The edges from a model's norms and, if `inside`, those within sublayers, in the order of the forward pass."""
    found = []
    for k, sublayer in enumerate(cast(Iterable[Sublayer], model.sublayers)):
        norm, body = sublayer.norm, sublayer.body
        width = torch.arange(model.config.width)
        found.append(Edge(f"sublayers.{k}.norm", readers(body), width, partial(divide_norm, norm), body))
        found += inner_edges(body, f"sublayers.{k}.body") if inside else []
    return found


@singledispatch
def divide_norm(norm: nn.Module, by: Tensor) -> None:
    """Divide a norm's output channels, exactly."""
    raise ValueError(
        f"{type(norm).__name__} does not say how its output can be divided by channel: register it with divide_norm."
    )


@divide_norm.register(RMSNorm)
@divide_norm.register(PreAffine)
def _(norm: RMSNorm | PreAffine, by: Tensor) -> None:
    norm.weight.div_(by)


@divide_norm.register(GatedNorm)
def _(norm: GatedNorm, by: Tensor) -> None:
    norm.weight.div_(by)
    norm.gate.down.mul_(by)


@divide_norm.register(DyT)
def _(norm: DyT, by: Tensor) -> None:
    norm.weight.div_(by)
    norm.bias.div_(by)


@divide_norm.register(GatedDyT)
def _(norm: GatedDyT, by: Tensor) -> None:
    norm.weight.div_(by)
    norm.bias.div_(by)
    norm.gate.down.mul_(by)


@singledispatch
def readers(body: nn.Module) -> tuple[Tensor, ...]:
    """Every linear map that reads a sublayer's normed input."""
    raise ValueError(
        f"{type(body).__name__} does not say which maps read its input: register it with quantize.graph.readers."
    )


@readers.register
def _(body: SoftmaxAttention) -> tuple[Tensor, ...]:
    mixing = (body.mix.gamma.down.weight,) if isinstance(body.mix, DynamicMix) else ()
    return (body.project.weight, *mixing)


@readers.register
def _(body: GatedDeltaNet) -> tuple[Tensor, ...]:
    return body.project.weight, body.gates.weight


@readers.register
def _(body: GatedFFN) -> tuple[Tensor, ...]:
    return (body.gate_up.weight,)


@readers.register
def _(body: PlainFFN) -> tuple[Tensor, ...]:
    return (body.up.weight,)


@singledispatch
def inner_edges(body: nn.Module, name: str) -> list[Edge]:
    """Edges inside a sublayer, up to its last projection; none where what lies between is not linear."""
    return []


@inner_edges.register
def _(body: SoftmaxAttention, name: str) -> list[Edge]:
    """Values to output: attention averages them and the gate multiplies them, both channel by channel."""
    divide = _divide_values(body)
    if divide is None:
        return []
    head_dim, kv = body.head_width["v"], body.rows[2]
    heads = body.rows[0] // head_dim
    served = torch.arange(heads) // (heads * head_dim // kv)
    channel = served[:, None] * head_dim + torch.arange(head_dim)
    return [Edge(f"{name}.values", (body.out.weight,), channel.flatten(), divide, body.out)]


def _divide_values(body: SoftmaxAttention) -> Callable[[Tensor], None] | None:
    """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V. The anchors serve all layers: only λ of this layer can divide them, if per element."""
    mix = body.mix
    if "v" not in getattr(mix, "pathways", ()):
        return partial(_divide_rows, body.project, sum(body.rows[:2]), body.rows[2])
    if not isinstance(mix, Mix) or mix.current_scale["v"].dim() != 2:
        return None
    return partial(_divide_mixed, mix)


def _divide_rows(project: Projection, first: int, count: int, by: Tensor) -> None:
    project.weight[first : first + count].div_(by[:, None])


def _divide_mixed(mix: Mix, by: Tensor) -> None:
    for scale in (mix.anchor_scale["v"], mix.current_scale["v"]):
        scale.div_(by.view_as(scale))


@inner_edges.register
def _(body: GatedDeltaNet, name: str) -> list[Edge]:
    """The norm's gain, which all heads share, to the output; the gate on it multiplies channel by channel."""
    channel = torch.arange(body.rows[2]) % body.head_dim
    return [Edge(f"{name}.norm", (body.out.weight,), channel, partial(divide_norm, body.norm), body.out)]


@inner_edges.register
def _(body: GatedFFN, name: str) -> list[Edge]:
    """The linear branch to the output."""
    hidden = body.out.weight.shape[1]
    divide = partial(_divide_rows, body.gate_up, hidden, hidden)
    return [Edge(f"{name}.up", (body.out.weight,), torch.arange(hidden), divide, body.out)]


@inner_edges.register
def _(body: PlainFFN, name: str) -> list[Edge]:
    """relu(x/√s)² = relu(x)²/s; no other activation passes a factor on."""
    if body.act is not relu2:
        return []
    hidden = body.out.weight.shape[1]
    divide = partial(_divide_square, body.up.weight)
    return [Edge(f"{name}.up", (body.out.weight,), torch.arange(hidden), divide, body.out)]


def _divide_square(up: Tensor, by: Tensor) -> None:
    up.div_(by.sqrt()[:, None])


@readers.register
def _(body: MoE) -> tuple[Tensor, ...]:
    """The router and every expert; a factor that missed the router would send tokens elsewhere."""
    shared = () if body.shared is None else readers(body.shared)
    gate = () if body.shared_gate is None else (body.shared_gate.weight,)
    return (body.router.weight, body.experts.up, *shared, *gate)


@inner_edges.register
def _(body: MoE, name: str) -> list[Edge]:
    """Inside the shared expert as in any other feed-forward; inside the others a channel's factor is common to all."""
    found = [] if body.shared is None else inner_edges(body.shared, f"{name}.shared")
    experts = body.experts
    if not experts.gated and experts.act is not relu2:
        return found
    channel = torch.arange(experts.out.shape[1])
    look = partial(_expert_states, experts)
    return [*found, Edge(f"{name}.experts", (experts.out,), channel, partial(_divide_experts, experts), experts, look)]


def _divide_experts(experts: Experts, by: Tensor) -> None:
    rows = experts.up.unflatten(0, (experts.count, -1))
    if experts.gated:
        rows[:, len(by) :].div_(by[:, None])
    else:
        _divide_square(rows, by)


def _expert_states(experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
    with no_autocast(x):
        return expert_states(experts, wide(x), ends)
