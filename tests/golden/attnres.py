"""Attention Residuals (arXiv 2603.15031): EQUATIONS of Full, Block and the two phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.golden.arithmetic import EPS, rms, sigmoid, softmax, weighted_sum


@dataclass
class Reader:
    """One read's parameters: query w, key gain g (None: 1), and the ablations."""

    w: Tensor
    g: Tensor | None = None
    scale: float = 1.0
    key_norm: str = "rms"
    activation: str = "softmax"
    eps: float = EPS

    def logit(self, v: Tensor) -> Tensor:
        """w · (g ⊙ RMS(v)), or w · v without key norm."""
        key = rms(v, self.eps) if self.key_norm == "rms" else v
        if self.g is not None:
            key = self.g * key
        return self.scale * (self.w * key).sum()

    def weights(self, sources: list[Tensor]) -> list[Tensor]:
        logits = [self.logit(v) for v in sources]
        return softmax(logits) if self.activation == "softmax" else [sigmoid(z) for z in logits]

    def __call__(self, sources: list[Tensor]) -> Tensor:
        """h = Σ a_i v_i: the values are raw."""
        return weighted_sum(self.weights(sources), sources)


def full(x: Tensor, y: list[Tensor], readers: list[Reader], window: int | None = None) -> list[Tensor]:
    """Sources v_0 = embedding, v_i = raw output of sublayer i. `readers[k]` reads after sublayer k's output."""
    v = [x]
    h = [x]
    for k, output in enumerate(y):
        v.append(output)
        outputs = v[1:] if window is None else v[1:][-window:]
        h.append(readers[k]([v[0], *outputs]))
    return h


def block(x: Tensor, y: list[Tensor], readers: list[Reader], sublayers_per_block: int) -> list[Tensor]:
    """Blocks of S: the first sublayer reads [b_0 … b_{n−1}], each later one also p; the last read sees every block."""
    b = [x]
    h = []
    for first in range(0, len(y), sublayers_per_block):
        p = torch.zeros_like(x)
        for k in range(first, min(first + sublayers_per_block, len(y))):
            sources = b if k == first else [*b, p]
            h.append(x if k == 0 else readers[k - 1](sources))
            p = p + y[k]
        b.append(p)
    h.append(readers[len(y) - 1](b))
    return h


def delta(x: Tensor, y: list[Tensor], readers: list[Reader], sublayers_per_block: int) -> list[Tensor]:
    """Delta Attention Residuals (arXiv 2605.18855): h += y, and sublayers read h + Σ a_i v_i; the head reads h."""
    h, inputs = x, [x]
    for k in range(1, len(y)):
        h = h + y[k - 1]
        blocks = [y[first:k][:sublayers_per_block] for first in range(0, k, sublayers_per_block)]
        inputs.append(h + readers[k - 1]([x, *(sum(outputs[1:], outputs[0]) for outputs in blocks)]))
    return [*inputs, h + y[-1]]


def two_phase(finished: list[Tensor], partial: Tensor | None, reader: Reader) -> Tensor:
    """Algorithm 1 with running maximum m, denominator ell and unnormalised numerator o."""
    logits = [reader.logit(v) for v in finished]
    m1 = torch.stack(logits).amax()
    ell1 = sum(torch.exp(z - m1) for z in logits)
    o1 = weighted_sum([torch.exp(z - m1) for z in logits], finished)
    if partial is None:
        return o1 / ell1
    m2 = reader.logit(partial)
    m = torch.maximum(m1, m2)
    numerator = torch.exp(m1 - m) * o1 + torch.exp(m2 - m) * partial
    return numerator / (torch.exp(m1 - m) * ell1 + torch.exp(m2 - m))
