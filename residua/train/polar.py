"""Polar Express: the nearest semi-orthogonal matrix by five matrix polynomials (Amsel et al., arXiv 2505.16932).

For G = UΣVᵀ it returns about UVᵀ: X = G / (1.02‖G‖_F + 1e-6), then five times A = XXᵀ, X ← (aI + bA + cA²)X. Each
step maps every singular value s to as + bs³ + cs⁵; the coefficients are the minimax-optimal sequence for singular
values between 1e-3 and 1 of the norm, which all end within 1 ± 0.1412. The 1.02 is a margin for rounding in bf16.
A and aI + bA + cA² = aI + bA + cAAᵀ are symmetric: on a GPU only half of each is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.symmetric_product import symmetric_product

COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02
EPS = 1e-6


def working_dtype(parameter: Tensor) -> torch.dtype:
    """bf16 on a GPU, where it is the fast matrix type and enough for a direction; elsewhere the parameter's own."""
    return torch.bfloat16 if parameter.is_cuda and parameter.dtype != torch.float64 else parameter.dtype


def polar_express(gradients: Tensor) -> Tensor:
    """Orthogonalise a stack of matrices [..., rows, columns], each on its own, in the stack's own dtype.

    A tall matrix is multiplied from the right, X ← X(aI + bA + cA²) with A = XᵀX, which is the same as transposing it
    and back without the two copies.
    """
    tall = gradients.size(-2) > gradients.size(-1)
    x = gradients.reshape(-1, *gradients.shape[-2:])
    norm = torch.linalg.matrix_norm(x, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x * (1 / (MARGIN * norm + EPS)).to(x.dtype)
    for a, b, c in COEFFICIENTS:
        gram = symmetric_product(x.mT if tall else x)
        polynomial = symmetric_product(gram, gram, alpha=c, beta=b, gamma=a)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x.reshape(gradients.shape)
