"""Gated DeltaNet between its projections, in plain PyTorch: convolution, delta rule, output norm and gate.

In a separate file because it calls operators such as `gated_delta`, not their references.
"""

from __future__ import annotations

from torch import Tensor

from residua.ops.delta_rule.rules import gated_delta
from residua.ops.gated_output import gated_output
from residua.ops.short_convolution import convolve_heads


def delta_mixer(
    projected: Tensor,
    g: Tensor,
    beta: Tensor,
    convolution: Tensor,
    gain: Tensor,
    key_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """y = RMSNorm(o) ⊙ silu(z) with o from the gated delta rule over q, k, v = conv(·); see the three operators.

    projected [B, T, (2 key_heads + 2 H) D] holds q, k, v and z; g, beta [B, T, H]; convolution [kernel, channels] is
    for q, k and v; gain [D]. The norms of q and k have eps 1e-6, the output's has `eps`. Returns y [B, T, H, D] and the
    last state [B, H, D, D].
    """
    q, k, v, z = convolve_heads(projected, convolution, key_heads, g.shape[-1], segments=segments)
    o, last = gated_delta(q, k, v, g, beta, segments=segments)
    return gated_output(o, z, gain, eps=eps), last
