"""Compares the training of several ranks with that of one process."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-5
# Muon enlarges small singular values of a gradient, so weights show rounding that gradients do not.
WEIGHT_TOLERANCE = 1e-3


def assert_same_training(ranks: dict[str, Tensor], alone: dict[str, Tensor], weights: float = WEIGHT_TOLERANCE) -> None:
    """Losses and clipped gradients of each step, the validation loss, and the final weights."""
    missing = alone.keys() - ranks.keys()
    assert not missing, f"no rank has {sorted(missing)[:3]}"
    for name, expected in alone.items():
        # Muon also moves the rounding of a whole matrix into few entries: weights are compared by their norm
        bound, order = (weights, 2) if name.startswith("weight/") else (TOLERANCE, float("inf"))
        size = float(torch.linalg.vector_norm(expected.double(), order))
        error = float(torch.linalg.vector_norm(ranks[name].double() - expected.double(), order))
        assert error <= bound * max(size, 1e-3), f"{name}: {error:.2e} of {size:.2e}"
