import pytest
import torch
from torch import Tensor

from residua.model import decoder


@pytest.fixture
def exact_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64 instead of the product's float32, so that whole models compare to rounding."""

    def table(positions: Tensor, head_dim: int, theta: float, scaling: None = None) -> tuple[Tensor, Tensor]:
        i = torch.arange(head_dim // 2, dtype=torch.float64)
        angles = positions.double()[:, None] * theta ** (-2 * i / head_dim)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(decoder, "rotary_table", table)
