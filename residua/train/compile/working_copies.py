"""Working copies: matrices rounded once per step, and gradients summed in the kernel that produces them.

Autocast rounds every float32 master again for each micro-batch, and autograd reads and writes every gradient once more
to add it to those of earlier micro-batches. Here the model runs on copies in the products' dtype, refreshed at the
start of a step. A copy's backward pass adds its gradient to a float32 buffer; the compiler fuses this addition with the
conversion to float32. Results are the same with less memory traffic, except for folded weights of anchors, which are
rounded once more (`ops/mix_projection/anchor_gradients.py`). Autograd does not see the masters, so hooks on them do not
run.

They made a step of L 7 ms shorter (docs/lab/kernels.md, "Gains of single parts", `residua bench step mgr-l-prenorm
--micro-batch 16 --accumulate 4`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class WorkingCopies:
    """Copies of the weights that autocast would round: the trained weights that modules list in `rounded`.

    Every copy has a gradient in every step, zero if no pass used it, so each such weight must be used in every step. A
    weight with several names (tied) is copied once, under its first name. `unread` weights only get gradients: their
    copies are NaN and have no memory, because FP8 products read codes.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, unread: Collection[Tensor] = ()) -> None:
        weights = dict(_rounded(model))
        names = {id(weight): name for name, weight in reversed(weights.items()) if weight.requires_grad}
        self._masters = {name: weights[name] for name in reversed(names.values())}
        masters = self._masters.values()
        skipped, nothing = {id(weight) for weight in unread}, torch.full((), torch.nan, dtype=dtype)
        self._copies = [
            nothing.to(m.device).expand(m.shape)
            if id(m) in skipped
            else torch.empty_like(m, dtype=dtype, requires_grad=False)
            for m in masters
        ]
        self._read = [
            (copy, master) for copy, master in zip(self._copies, masters, strict=True) if id(master) not in skipped
        ]
        self._gradients = [torch.empty_like(m, requires_grad=False) for m in masters]
        # The copies depend on this tensor, which requires a gradient, so that autograd runs their backward pass.
        self._origin = next(iter(masters)).new_zeros(()).requires_grad_() if self._masters else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current values of the masters."""
        if self._read:
            copies, masters = zip(*self._read, strict=True)
            torch._foreach_copy_(list(copies), list(masters))

    def begin(self) -> None:
        """Start a step: refresh the copies, and set the masters' gradients to zero."""
        self.refresh()
        if self._masters:
            torch._foreach_zero_(self._gradients)
        for master, gradient in zip(self._masters.values(), self._gradients, strict=True):
            master.grad = gradient

    def run(self, module: nn.Module, prefix: str, *args: Any, **settings: Any) -> Any:
        """Call a module with copies instead of weights; `prefix` is the name of the model inside the module."""
        pairs = zip(self._masters, self._copies, self._gradients, strict=True)
        weights = {prefix + name: self._placed(name, copy, total) for name, copy, total in pairs}
        return functional_call(module, weights, args, settings)

    def _placed(self, name: str, copy: Tensor, total: Tensor) -> Tensor:
        """The tensor that replaces a weight during a call."""
        return adding_up(self._origin, copy, total)


def _rounded(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for name in getattr(module, "rounded", ()):
            yield f"{prefix}.{name}" if prefix else name, module.get_parameter(name)


class _AddingUp(torch.autograd.Function):
    """The identity on a copy; its backward pass adds the gradient to a buffer and returns none."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, copy: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(total)
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        (total,) = ctx.saved_tensors
        total.add_(g.to(total.dtype))
        return None, None, None


def adding_up(origin: Tensor | None, copy: Tensor, total: Tensor) -> Tensor:
    """A copy whose gradient is added to `total`."""
    out: Tensor = _AddingUp.apply(origin, copy, total)
    return out
