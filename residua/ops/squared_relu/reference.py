"""The feed-forward with a squared ReLU in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, relu


def squared_relu_ffn(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """y = W_out relu(W_in x)² (arXiv 2109.08668): x [..., C], w_in [H, C], w_out [C, H] → [..., C]."""
    return linear(relu(linear(x, w_in)).square(), w_out)
