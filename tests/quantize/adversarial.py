"""Tensors that break sloppy quantizers."""

import torch
from torch import Tensor

TINY = 2.0**-149


def tensors(rows: int = 48, columns: int = 64) -> dict[str, Tensor]:
    """Name to [rows, columns] in fp32: outliers up to ×6000, zeros, subnormals, ties, one sign, huge and small."""
    generator = torch.Generator().manual_seed(5)

    def random() -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    found = {f"outlier ×{size}": random() for size in (1, 10, 100, 1000, 6000)}
    for size, x in zip((1, 10, 100, 1000, 6000), found.values(), strict=True):
        x[:, 7] *= size
        x[3, 40] *= -size
    sparse = random()
    sparse[5] = 0.0
    sparse[:, 16:32] = 0.0
    found["rows and blocks of zeros"] = sparse
    subnormal = random()
    subnormal[2, :16] = TINY * 9
    subnormal[9, 3] = -TINY
    subnormal[11] *= 1e-39
    found["subnormals among others"] = subnormal
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    found["ties"] = (torch.cat([grid, -grid]).repeat(rows, columns // 16)) * 2.0 ** torch.arange(rows)[:, None].sub(24)
    found["one sign"] = -random().abs()
    found["large"] = random() * 1e30
    found["small"] = random() * 1e-20
    found["one value"] = torch.full((rows, columns), 0.1)
    return found


NAMES = list(tensors())
