"""The one comparison of the golden tests: values, and the gradient of a random functional of them in every leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

TOLERANCE = 1e-10
FLOOR = 1e-3
"""Below this size a tensor is compared absolutely: a gradient that is zero by cancellation has no relative error."""


def agree(
    ours: Sequence[Tensor],
    golden: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    *,
    tolerance: float = TOLERANCE,
    silent: Sequence[str] = (),
) -> None:
    """Assert equal values and equal gradients; a gradient that is zero hides mistakes, so only `silent` ones may be."""
    assert len(ours) == len(golden)
    for i, (a, b) in enumerate(zip(ours, golden, strict=True)):
        close(f"value {i}", a, b, tolerance)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for b in golden]
    ours_grads, golden_grads = (gradients(values, probes, leaves) for values in (ours, golden))
    for name in leaves:
        close(f"gradient of {name}", ours_grads[name], golden_grads[name], tolerance)
        assert name in silent or golden_grads[name].abs().max() > 1e-9, f"gradient of {name} vanishes: a blind test"


def close(what: str, a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> None:
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, golden {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, golden {b.dtype}"
    if a.numel() == 0:
        return
    error = ((a - b).abs().max() / b.abs().max().clamp(min=FLOOR)).item()
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def gradients(values: Sequence[Tensor], probes: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = sum((probe * value).sum() for probe, value in zip(probes, values, strict=True))
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def each_token(
    equation: Callable[[Tensor, list[Tensor]], list[Tensor]], x: Tensor, y: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Apply a one-token equation to every position of x [B, T, C] and its companions."""
    batch, length = x.shape[:2]
    rows = [[equation(x[b, t], [o[b, t] for o in y]) for t in range(length)] for b in range(batch)]
    count = len(rows[0][0])
    return [torch.stack([torch.stack([token[i] for token in row]) for row in rows]) for i in range(count)]


def random(*shape: int, seed: int = 0, grad: bool = True, scale: float = 1.0) -> Tensor:
    """A float64 leaf."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_(grad)


def randomise(module: nn.Module, scale: float = 0.5, seed: int = 2) -> nn.Module:
    """Move every parameter away from its start, so that no zero or one hides a fault; to float64."""
    module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def leaves_of(module: nn.Module, **others: Tensor) -> dict[str, Tensor]:
    """Every parameter of a module, and the inputs."""
    return {**others, **dict(module.named_parameters())}
