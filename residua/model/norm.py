"""Norms: the first operation of a sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from residua import ops
from residua.config import choices
from residua.errors import UserError
from residua.model.equivalence import InitFidelity, take_parameters
from residua.ops._runtime.numeric import rms, wide

GATE_STD = 0.02


class Norm(nn.Module):
    """The first operation of a sublayer.

    A model calls only `forward`. Every other method has a default; override it if yours is more precise.
    """

    def gain(self) -> Tensor | None:
        """The factor [C] on each output channel, by default the parameter `weight`; None if there is none."""
        weight = self._parameters.get("weight")
        return None if weight is None else weight.detach()

    def gain_parts(self) -> dict[str, Tensor]:
        """The factors [C] whose product is the gain, by the paper's name: λ on the output; empty without factors."""
        gain = self.gain()
        return {} if gain is None else {"λ": gain}

    def gate_of(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The output without the gate [..., C], and the gate [..., C or 1]; None if the norm has no gate."""
        return None

    def divide(self, by: Tensor) -> None:
        """Divide the output channels by `by` [C] exactly, by changing parameters in place (SmoothQuant)."""
        raise UserError(
            f"{type(self).__name__} does not define how to divide its output per channel: add a method divide(by)."
        )

    @property
    def plain_rms(self) -> bool:
        """Whether decoding kernels may compute it as weight ⊙ x / sqrt(mean(x²) + eps)."""
        return False

    scale_invariant = False
    """Whether a positive factor on x changes nothing, up to eps."""

    fixed = False
    """Whether it has no parameter that could absorb a factor on its output."""

    eps: float | None = None
    """The number added to the mean square of x; None if there is none."""

    def begin_as(self, old: Norm) -> InitFidelity:
        """Start as a norm with other settings and the same eps, by changing parameters in place.

        By default, copies the parameters of a norm of the same kind and does not preserve the function.
        """
        if type(self) is type(old):
            take_parameters(self, old)
        return InitFidelity.NOT


class NoNorm(Norm):
    """The identity, for sublayers that normalise only their output."""

    fixed = True

    def forward(self, x: Tensor) -> Tensor:
        return x

    def begin_as(self, old: Norm) -> InitFidelity:
        return InitFidelity.EXACTLY


class AffineNorm(Norm):
    """Base of norms that end with weight ⊙ … + bias; either may be missing."""

    @torch.no_grad()
    def divide(self, by: Tensor) -> None:
        for name in ("weight", "bias"):
            if (parameter := self._parameters.get(name)) is not None:
                parameter.div_(by)


class RMSNorm(AffineNorm):
    """y = weight ⊙ x / sqrt(mean(x²) + eps)."""

    scale_invariant = True
    eps: float

    def __init__(self, config: choices.RMSNorm | choices.GatedNorm, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)

    @torch.no_grad()
    def begin_as(self, old: Norm) -> InitFidelity:
        """A norm without a gain equals one with gains of 1."""
        if type(self) is not RMSNorm or not isinstance(old, UnitRMSNorm):
            return super().begin_as(old)
        nn.init.ones_(self.weight)
        return InitFidelity.EXACTLY

    @property
    def plain_rms(self) -> bool:
        return type(self) is RMSNorm


class UnitRMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps)."""

    scale_invariant = fixed = True
    eps: float

    def __init__(self, config: choices.UnitRMSNorm, width: int) -> None:
        super().__init__()
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps)


class LayerNorm(nn.LayerNorm, AffineNorm):
    """y = weight ⊙ (x − mean(x)) / sqrt(var(x) + eps) + bias; `bias`, or both parameters, can be configured away."""

    scale_invariant = True
    eps: float

    def __init__(self, config: choices.LayerNorm, width: int) -> None:
        self.fixed = config.parameters == "none"
        super().__init__(width, config.eps, not self.fixed, config.parameters == "gain_and_bias")

    def forward(self, x: Tensor) -> Tensor:
        h = wide(x)
        gain, bias = (None if part is None else part.to(h.dtype) for part in (self.weight, self.bias))
        return layer_norm(h, h.shape[-1:], gain, bias, self.eps).to(x.dtype)

    @torch.no_grad()
    def begin_as(self, old: Norm) -> InitFidelity:
        """A norm with more parameters can start as one with fewer."""
        if not isinstance(old, LayerNorm):
            return super().begin_as(old)
        self.reset_parameters()
        ours, theirs = dict(self.named_parameters()), dict(old.named_parameters())
        for name in ours.keys() & theirs.keys():
            ours[name].copy_(theirs[name])
        return InitFidelity.EXACTLY if theirs.keys() <= ours.keys() else InitFidelity.NOT


class PreAffine(AffineNorm):
    """y = RMSNorm(affine ⊙ x) (arXiv 2601.22966): `affine` can hold the outliers instead of x."""

    scale_invariant = True
    eps: float

    def __init__(self, config: choices.PreAffine, width: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.affine = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.affine)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, affine=self.affine, eps=self.eps)

    def gain(self) -> Tensor:
        return self.weight.detach() * self.affine.detach()

    def gain_parts(self) -> dict[str, Tensor]:
        """λ1 multiplies the input."""
        return {"λ": self.weight.detach(), "λ1": self.affine.detach()}

    @torch.no_grad()
    def begin_as(self, old: Norm) -> InitFidelity:
        """With `affine` = 1 it equals an RMSNorm, with or without a gain."""
        if type(old) not in (RMSNorm, UnitRMSNorm):
            return super().begin_as(old)
        self.reset_parameters()
        if isinstance(old, RMSNorm):
            self.weight.copy_(old.weight)
        return InitFidelity.EXACTLY


class LowRankGate(nn.Module):
    """The parameters of y ⊙ act(up · silu(down · y)): `down` [R, C], `up` [C, R], or [1, R] when tensorwise.

    The paper gives no initialisation. With a sigmoid, our `up` starts at 0, so every gate starts at ½ and `down` learns
    from the second step on. The other activations are 0 at 0 and would silence the model, so their `up` starts normal.
    """

    def __init__(self, config: choices.LowRankGate, width: int) -> None:
        super().__init__()
        self.activation = config.activation
        outputs = {"elementwise": width, "tensorwise": 1}[config.granularity]
        self.down = nn.Parameter(torch.empty(config.rank, width))
        self.up = nn.Parameter(torch.empty(outputs, config.rank))
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"down": (config.rank,), "up": (outputs,)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=GATE_STD)
        nn.init.zeros_(self.up) if self.activation == "sigmoid" else nn.init.normal_(self.up, std=GATE_STD)

    def scores(self, y: Tensor) -> Tensor:
        """The gate itself, [..., C or 1]."""
        return ops.gate_scores(y, self.down, self.up, activation=self.activation)

    @torch.no_grad()
    def begin_as(self, old: LowRankGate) -> InitFidelity:
        """Start as a gate of the same or a lower rank, or as one number for all channels: the rest of `up` is zero."""
        rank = len(old.down)
        if len(self.down) < rank:
            raise UserError(
                f"model.norm.rank = {len(self.down)} is less than the {rank} of the initial model, whose gate does "
                f"not fit: use at least {rank}."
            )
        if len(self.up) < len(old.up):
            raise UserError(
                "model.norm.granularity = 'tensorwise' has one gate for all channels, but the initial model has one "
                "per channel: keep 'elementwise'."
            )
        self.down[:rank] = old.down
        nn.init.zeros_(self.up)
        self.up[:, :rank] = old.up
        return InitFidelity.EXACTLY if self.activation == old.activation else InitFidelity.NOT

    def forward(self, y: Tensor) -> Tensor:
        return ops.low_rank_gate(y, self.down, self.up, activation=self.activation)


class GatedNorm(RMSNorm):
    """y = RMSNorm(x), y' = y ⊙ σ(up · silu(down · y)) (arXiv 2601.22966)."""

    def __init__(self, config: choices.GatedNorm, width: int) -> None:
        super().__init__(config, width)
        self.gate = LowRankGate(config, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate
        return ops.gated_norm(x, self.weight, gate.down, gate.up, eps=self.eps, activation=gate.activation)

    def gate_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, self.gate.scores(y)

    @torch.no_grad()
    def begin_as(self, old: Norm) -> InitFidelity:
        """With `up` = 0 every σ gate is ½, and a doubled gain gives the RMSNorm; other activations are 0 there."""
        if isinstance(old, GatedNorm):
            self.weight.copy_(old.weight)
            return self.gate.begin_as(old.gate)
        if type(old) not in (RMSNorm, UnitRMSNorm) or self.gate.activation != "sigmoid":
            return super().begin_as(old)
        self.weight.copy_(2 * (old.weight if isinstance(old, RMSNorm) else torch.ones_like(self.weight)))
        nn.init.zeros_(self.gate.up)
        return InitFidelity.EXACTLY

    @torch.no_grad()
    def divide(self, by: Tensor) -> None:
        """The gate reads the divided vector too."""
        super().divide(by)
        self.gate.down.mul_(by)


class DyT(AffineNorm):
    """y = weight ⊙ tanh(alpha · x) + bias (arXiv 2503.10622): a norm without statistics."""

    def __init__(self, config: choices.DyT | choices.GatedDyT, width: int) -> None:
        super().__init__()
        self.start = config.alpha
        self.alpha = nn.Parameter(torch.empty(()))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * torch.tanh(self.alpha * x) + self.bias).to(x.dtype)


class Derf(AffineNorm):
    """y = weight ⊙ erf(alpha · x + shift) + bias (arXiv 2512.10938); `alpha` and `shift` are single numbers."""

    def __init__(self, config: choices.Derf, width: int) -> None:
        super().__init__()
        self.start = config.alpha
        self.alpha, self.shift = (nn.Parameter(torch.empty(())) for _ in range(2))
        self.weight, self.bias = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.start)
        nn.init.zeros_(self.shift)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * torch.erf(self.alpha * x + self.shift) + self.bias).to(x.dtype)


class GatedDyT(DyT):
    """DyT followed by GatedNorm's low-rank gate."""

    def __init__(self, config: choices.GatedDyT, width: int) -> None:
        super().__init__(config, width)
        self.gate = LowRankGate(config, width)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.gate(super().forward(x))
        return gated

    def gate_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, self.gate.scores(y)

    @torch.no_grad()
    def begin_as(self, old: Norm) -> InitFidelity:
        """With `up` = 0 every gate is ½, and a doubled gain and bias make it the DyT."""
        if not isinstance(old, DyT) or (type(old) is DyT and self.gate.activation != "sigmoid"):
            return super().begin_as(old)
        factor = 1 if isinstance(old, GatedDyT) else 2
        self.alpha.copy_(old.alpha)
        self.weight.copy_(factor * old.weight)
        self.bias.copy_(factor * old.bias)
        if isinstance(old, GatedDyT):
            return self.gate.begin_as(old.gate)
        nn.init.zeros_(self.gate.up)
        return InitFidelity.EXACTLY

    @torch.no_grad()
    def divide(self, by: Tensor) -> None:
        super().divide(by)
        self.gate.down.mul_(by)


NORMS: dict[type[choices.NormChoice], Callable[..., Norm]] = {
    choices.RMSNorm: RMSNorm,
    choices.UnitRMSNorm: UnitRMSNorm,
    choices.LayerNorm: LayerNorm,
    choices.PreAffine: PreAffine,
    choices.GatedNorm: GatedNorm,
    choices.DyT: DyT,
    choices.Derf: Derf,
    choices.GatedDyT: GatedDyT,
}


def register_norm(choice: type[choices.NormChoice], norm: Callable[..., Norm]) -> None:
    """Make `norm.kind = …` of a configuration build `norm(config, width)`; see docs/extend.md."""
    choices.NormChoice.join(choice)
    NORMS[choice] = norm


def build_norm(config: choices.NormChoice, width: int) -> Norm:
    """Build the norm that a configuration describes."""
    return NORMS[type(config)](config, width)
