"""Compares the training of several ranks with that of one process."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-5
# Muon enlarges small singular values of a gradient, so weights show rounding that gradients do not.
WEIGHT_TOLERANCE = 1e-3


def assert_same_training(ranks: dict[str, Tensor], alone: dict[str, Tensor], weights: float = WEIGHT_TOLERANCE) -> None:
    """Losses and clipped gradients of each step, the validation loss, and the final weights."""
    missing = alone.keys() - ranks.keys()
    assert not missing, f"no rank has {sorted(missing)[:3]}"
    for name, expected in alone.items():
        size = float(expected.abs().max())
        error = float((ranks[name].double() - expected.double()).abs().max())
        bound = weights if name.startswith("weight/") else TOLERANCE
        assert error <= bound * max(size, 1e-3), f"{name}: {error:.2e} of {size:.2e}"
