"""Training in low precision: which matrices multiply in FP8 or NVFP4, their ranges, and their telemetry.

`ops/low_precision/product.py` has the mathematics. Masters, optimizer, norms, attention, depth operators and embedding
stay unchanged. A projection is changed by replacing its `forward`; kernels that would read its weight directly are then
not used. The head is changed on request, and only in training losses: `Decoder.logits` stays unchanged.

The range of a tensor in FP8 is the largest magnitude of the last `history` steps, over all ranks. So the range is known
before the tensor, and needs no extra pass over memory. A value beyond it is clamped and counted, and enters the next
range. Before the first step, passes over its first sequences measure the ranges; in these passes, each tensor is scaled
by its own magnitude (`Step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn

from residua.config.run import TrainConfig
from residua.errors import UserError
from residua.model.body import Body
from residua.model.context import Anchors, Context
from residua.model.decoder import Decoder
from residua.model.projection import STEERING, Projection
from residua.model.taps import tap
from residua.ops._runtime.launch import dense_like
from residua.ops.fp8_codes import encode_weights
from residua.ops.linear_cross_entropy.fp8 import fp8_cross_entropy
from residua.ops.low_precision.fp8 import E4M3, E4M3_MAX, E5M2_MAX, EncodedWeight, Scales, encode, largest_of, scale_of
from residua.ops.low_precision.nvfp4 import GROUP
from residua.ops.low_precision.product import (
    Multiply,
    Operand,
    fp8_linear,
    fp8_squared_relu,
    nvfp4_linear,
    on_hardware,
    round_nvfp4_blocks,
    simulated,
)
from residua.reading import counted
from residua.train.telemetry_curves import HEAD

FIGURES = ("kurtosis", "block_share", "saturated", "underflow", "reach")
"""Telemetry figures for the input of every product."""
AGREES = 1e-2
"""Maximum relative error of a hardware product against its simulation."""


@dataclass(frozen=True)
class Recipe:
    """A low precision: its name, the `smallest` matrices to convert and the share of last layers `spared` by default.

    FP8 multiplies codes with `multiply`; NVFP4 has its own product.
    """

    words: str
    smallest: int
    spared: float
    multiply: Multiply | None


RECIPES = {
    "fp8": Recipe("FP8", 1024, 0.0, on_hardware),
    "fp8_emulated": Recipe("emulated FP8", 16, 0.0, simulated),
    "nvfp4_emulated": Recipe("emulated NVFP4", 16, 0.15, None),
}
"""Recipes by `train.precision`. Emulations only measure quality, so they also take small matrices."""


class LowLinear:
    """Replaces the `forward` of a projection; `place` is its sublayer's number and its name in the sublayer."""

    def __init__(self, projection: Projection, place: tuple[int, str]) -> None:
        self.projection = projection
        self.tap = "product.{}.{}".format(*place)

    def __call__(self, x: Tensor) -> Tensor:
        tap(self.tap, lambda: self.figures(x.detach()))
        y, bias = self.multiply(x, self.projection.weight), self.projection.bias
        return y if bias is None else y + bias.to(y.dtype)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """y = x Wᵀ."""
        raise NotImplementedError

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, K] after rounding, and the magnitude above which values are clamped."""
        raise NotImplementedError

    def figures(self, x: Tensor) -> Tensor:
        """`FIGURES` of an input: E x⁴ / (E x²)², the mean over blocks of 16 of max|x| / Σ|x|, shares, max|x| / limit.

        A value is saturated if it was clamped, and underflows if it is nonzero and was rounded to zero.
        """
        rows = x.flatten(end_dim=-2).float()
        low, limit = self.rounded(rows)
        size = rows.abs()
        square = rows.square()
        whole = rows[:, : rows.shape[1] // GROUP * GROUP].abs().unflatten(1, (-1, GROUP))
        share = whole.amax(-1) / whole.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        kurtosis = square.square().mean() / square.mean().square()
        lost = (low == 0) & (rows != 0)
        shares = [(size > limit).float().mean(), lost.float().mean()]
        return torch.stack([kurtosis, share.mean(), *shares, size.amax() / limit])


@dataclass
class Known:
    """Flags that all FP8 products of a model share: whether ranges, and codes of the current weights, are known."""

    ranges: bool = False
    weights: bool = False


class Fp8Linear(LowLinear):
    """A projection in FP8, with ranges from earlier steps."""

    def __init__(
        self, projection: Projection, place: tuple[int, str], scales: Scales, multiply: Multiply, known: Known
    ) -> None:
        super().__init__(projection, place)
        self.scales, self.product, self.known = scales, multiply, known
        self.encoded: EncodedWeight | None = None

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        encoded = self.encoded if self.known.weights else None
        return fp8_linear(x, weight, self.scales, self.product, delayed=self.known.ranges, encoded=encoded)

    def operand(self) -> Operand | None:
        """The weight with its codes and scales, if they are known."""
        if self.encoded is None or not (self.known.weights and self.known.ranges):
            return None
        return Operand(self.projection.weight, self.encoded, self.scales)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = encode(x, self.scales.x if self.known.ranges else scale_of(largest_of(x)))
        return low.values.float() * low.scale, low.scale * E4M3_MAX


class Fp8Head(Fp8Linear):
    """Replaces `Decoder.training_losses`: the head's products in FP8, with the range of its input from earlier steps.

    Its gradient has a fixed range, so its history is zero.
    """

    def __init__(self, model: Decoder, scales: Scales, multiply: Multiply, known: Known) -> None:
        matrix = model.embed if model.unembed is None else model.unembed
        # only the projection's weight is read
        super().__init__(cast("Projection", matrix), (len(model.sublayers), HEAD), scales, multiply, known)

    def training_losses(self, h: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        """As `Decoder.training_losses`."""
        return fp8_cross_entropy(
            h, self.projection.weight, targets, self.scales, self.product, z_loss=z_loss, delayed=self.known.ranges,
            encoded=self.encoded if self.known.weights else None,
        )  # fmt: skip


class Fp8SquaredRelu:
    """Replaces the `forward` of a feed-forward with relu(·)² whose maps are both in FP8: see `fp8_squared_relu`.

    If ranges or weight codes are not known, the maps run separately.
    """

    def __init__(self, up: Fp8Linear, out: Fp8Linear, by_maps: Callable[..., tuple[Tensor, Anchors]]) -> None:
        self.up, self.out, self.by_maps = up, out, by_maps

    def __call__(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        up, out = self.up.operand(), self.out.operand()
        if up is None or out is None:
            return self.by_maps(x, anchors, context)
        return fp8_squared_relu(x, up, out, self.up.product), anchors


class Nvfp4Linear(LowLinear):
    """A projection in NVFP4, whose scales are computed from the tensor itself, so that nothing is clamped."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return nvfp4_linear(x, weight)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return round_nvfp4_blocks(x), largest_of(x)


@dataclass
class Beyond:
    """A tensor that was clamped in the last step, and the ratio of its largest magnitude to its limit."""

    place: tuple[int, str]
    tensor: str
    factor: float


class LowPrecision:
    """The low-precision products of a model, and their FP8 ranges over steps. `Step` owns it.

    `whole`: whether this process has all of every weight and can therefore round each once per step.
    """

    def __init__(self, model: Decoder, config: TrainConfig, device: torch.device, whole: bool = True) -> None:
        self.recipe, self.config = RECIPES[config.precision], config.low_precision
        if self.recipe.multiply is on_hardware and not multiplies(device):
            raise UserError(
                f"train.precision = 'fp8' needs a device with FP8 products, which {device} with PyTorch "
                f"{torch.__version__} lacks: use train.precision = 'fp8_emulated', or 'bfloat16'."
            )
        chosen = chosen_products(model, config)
        head = [(len(model.sublayers), HEAD)] if self.config.head else []
        self.places = [*(place for place, _ in chosen), *head]
        # separate tensors: compiled graphs write to some, and would treat parts of one tensor as one
        self._scales = [Scales(*(torch.zeros((), device=device) for _ in Scales._fields)) for _ in self.places]
        self._seen = [value for scales in self._scales for value in (scales.seen_x, scales.seen_g)]
        self._history = torch.zeros(self.config.history, 2 * len(self.places), device=device)
        self._beyond = torch.zeros(2 * len(self.places), device=device)
        self._limits = torch.full_like(self._beyond, torch.inf)
        self._known, self._whole = Known(), whole
        products = [self._product(p, place, scales) for (place, p), scales in zip(chosen, self._scales, strict=False)]
        self._products = [product for product in products if isinstance(product, Fp8Linear)]
        for (_, projection), product in zip(chosen, products, strict=True):
            projection.forward = product  # type: ignore[method-assign]
        self._head: Fp8Head | None = None
        if head and self.recipe.multiply is not None:
            self._head = Fp8Head(model, self._scales[-1], self.recipe.multiply, self._known)
            self._products.append(self._head)
            model.training_losses = self._head.training_losses  # type: ignore[method-assign]
        for sublayer in model.sublayers:
            body = cast("Body", sublayer.body)
            if maps := body.squared_relu_maps():
                up, out = (projection.forward for projection in maps)
                if isinstance(up, Fp8Linear) and isinstance(out, Fp8Linear) and not up.projection.has_bias:
                    model.anchors.shares_gradient = False
                    body.forward = Fp8SquaredRelu(up, out, body.forward)  # type: ignore[method-assign]

    @property
    def knows_ranges(self) -> bool:
        """Whether no range must be measured before a step."""
        return self._known.ranges or not self._products

    @property
    def encoded(self) -> list[Tensor]:
        """The weights that products read only as codes inside `encoded_weights`."""
        only = [product for product in self._products if product is not self._head]  # the embedding may read the head's
        return [product.projection.weight for product in only] if self._whole else []

    @contextmanager
    def encoded_weights(self) -> Iterator[None]:
        """Inside the block, products use FP8 codes of the current weights instead of encoding them at every use."""
        if not self._whole or not self._products:
            yield
            return
        self._encode_weights()
        self._known.weights = True
        try:
            yield
        finally:
            self._known.weights = False

    @torch.no_grad()
    def _encode_weights(self) -> None:
        masters = [product.projection.weight.detach() for product in self._products]
        for product, master in zip(self._products, masters, strict=True):
            if product.encoded is None:
                codes = dense_like(master, E4M3)
                product.encoded = EncodedWeight(codes, dense_like(codes.t()), master.new_empty(()))
        encode_weights(masters, [product.encoded for product in self._products if product.encoded is not None])

    def _product(self, projection: Projection, place: tuple[int, str], scales: Scales) -> LowLinear:
        multiply = self.recipe.multiply
        if multiply is None:
            return Nvfp4Linear(projection, place)
        return Fp8Linear(projection, place, scales, multiply, self._known)

    @torch.no_grad()
    def end_step(self, largest_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Update the ranges for the next step with the magnitudes of this one."""
        if not self._products:
            return
        now = largest_over_ranks(torch.stack(self._seen))
        now = torch.where(now.isfinite(), now, torch.zeros_like(now))  # a NaN range would stay NaN
        self._beyond = now / self._limits
        self._set(torch.cat([self._history[1:], now[None]]))
        self._known.ranges = True
        torch._foreach_zero_(self._seen)

    def _set(self, history: Tensor) -> None:
        """Set the history and compute scales from it; a tensor that was always zero gets an arbitrary scale."""
        self._history = history
        if not self._scales:
            return
        x, g = history.amax(0).unflatten(0, (-1, 2)).unbind(1)
        x, g = scale_of(torch.where(x > 0, x, E4M3_MAX)), scale_of(g, E5M2_MAX)
        torch._foreach_copy_([scales.x for scales in self._scales], list(x.unbind()))
        torch._foreach_copy_([scales.g for scales in self._scales], list(g.unbind()))
        self._limits = torch.stack([x * E4M3_MAX, g * E5M2_MAX], 1).flatten()

    def beyond(self) -> list[Beyond]:
        """The tensors that exceeded their range in the last step. Waits for the device."""
        names = [(place, tensor) for place in self.places for tensor in ("input", "gradient")]
        factors = self._beyond.tolist()
        return [Beyond(*name, factor) for name, factor in zip(names, factors, strict=True) if factor > 1]

    def tap_head(self, x: Tensor) -> None:
        """Publish `FIGURES` of the head's input, if it multiplies in FP8."""
        if self._head is not None:
            tap(self._head.tap, self._head.figures(x))

    def state(self) -> list[list[float]]:
        """The largest magnitudes of the last steps, for a resumed run."""
        values: list[list[float]] = self._history.tolist()
        return values

    def set_state(self, history: list[list[float]]) -> None:
        """Continue from a state that `state` returned, of any number of steps.

        If it has the ranges of other products, which a resumed run may choose, they are found again.
        """
        values = torch.tensor(history, device=self._history.device).reshape(len(history), -1)
        if values.shape[1] != self._history.shape[1]:
            return
        steps, restored = self.config.history, torch.zeros_like(self._history)
        restored[-len(values) :] = values[-steps:]
        self._set(restored)
        self._known.ranges = bool(restored.any())

    def restart(self) -> None:
        """Reset the ranges for another run."""
        self._set(torch.zeros_like(self._history))
        self._limits.fill_(torch.inf)
        self._known.ranges = False
        torch._foreach_zero_(self._seen)

    def describe(self) -> str:
        """A line for the summary of the run."""
        smallest = self.config.smallest or self.recipe.smallest
        if not self.places:
            return f"no product in {self.recipe.words}: no matrix has at least {smallest:,} rows and columns"
        head = ", including the head" if self._head is not None else ""
        return f"{counted(len(self.places), 'product')} in {self.recipe.words}{head}"


def chosen_products(model: Decoder, config: TrainConfig) -> list[tuple[tuple[int, str], Projection]]:
    """The projections that use low precision, each with its place."""
    recipe, chosen = RECIPES[config.precision], config.low_precision
    smallest = chosen.smallest or recipe.smallest
    share = recipe.spared if chosen.spared is None else chosen.spared
    until = len(model.sublayers) - 2 * math.ceil(share * len(model.sublayers) / 2)
    wanted = ("attention", "feed-forward") if chosen.sublayers == "all" else (chosen.sublayers,)
    return [
        ((k, name.replace(".", "_")), projection)
        for k, sublayer in enumerate(model.sublayers[:until])
        if cast("Body", sublayer.body).role in wanted
        for name, projection in _projections(sublayer)
        if min(projection.weight.shape) >= smallest and all(n % GROUP == 0 for n in projection.weight.shape)
    ]


def build_low_precision(
    model: Decoder, config: TrainConfig, device: torch.device, whole: bool = True
) -> LowPrecision | None:
    """Install the low precision that `train.precision` sets in the model; None for bf16 and float32."""
    return LowPrecision(model, config, device, whole) if config.precision in RECIPES else None


def multiplies(device: torch.device) -> bool:
    """Whether a device's FP8 products match the simulation."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(32, 64, generator=generator).to(device) for _ in range(2)]
    a, b = (encode(matrix, matrix.new_tensor(2**-6)) for matrix in matrices)
    expected = simulated(a, b, torch.float32)
    try:
        result = on_hardware(a, b, torch.bfloat16).float()
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return bool((result - expected).norm() <= AGREES * expected.norm())


def _projections(sublayer: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The large projections of a sublayer, by name."""
    body = cast("Body", sublayer.body)
    for name, module in body.named_modules():
        if isinstance(module, Projection) and not any(fnmatchcase(f".{name}", pattern) for pattern in STEERING):
            yield name, module
