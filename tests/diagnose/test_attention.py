"""Block-by-block sums equal the direct definition on the whole T×T map, in float64."""

import pytest
import torch
from torch import Tensor

from residua.diagnose import attention
from residua.diagnose.attention import Scores, attend_and_sum, attention_sums

BATCH, HEADS, KV, LENGTH, DIM = 2, 4, 2, 13, 6
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
RANDOM_MASK = (torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(7)) < 0.6) | torch.eye(
    LENGTH, dtype=torch.bool
)

CASES = {
    "causal": Scores(scale=0.4),
    "window": Scores(scale=0.4, window=4),
    "sink": Scores(scale=0.4, sink=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "softcap": Scores(scale=2.0, softcap=1.5),
    "mask": Scores(scale=0.4, mask=RANDOM_MASK & CAUSAL),
    "added mask": Scores(scale=0.4, mask=torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~CAUSAL, torch.finfo().min)),
}


def whole_map(q: Tensor, k: Tensor, how: Scores) -> tuple[Tensor, Tensor]:
    """The weights A [B, H, T, T], and which keys each query can see [B, T, T], by the definition."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(HEADS // KV, 1)) * how.scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    visible = CAUSAL[None].expand(BATCH, -1, -1)
    if how.window:
        near = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None] < how.window
        visible = visible & near
    if how.mask is not None and how.mask.dtype == torch.bool:
        visible = how.mask[:, 0].expand(BATCH, -1, -1)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / (total if how.sink is None else total + how.sink.exp()[:, None, None]), visible


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [1 << 24, 3 * BATCH * HEADS * LENGTH], ids=["one block", "blocks of three"])
def test_blockwise_sums_equal_those_of_the_full_map(case: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(attention, "CORNER", 5)
    q, k, v = (torch.randn(BATCH, h, LENGTH, DIM, dtype=torch.float64) for h in (HEADS, KV, KV))
    how = CASES[case]
    output, sums = attend_and_sum(q, k, v, how)
    weights, visible = whole_map(q, k, how)
    count = visible.sum(-1).double()
    close = {
        "received": (sums.received, weights.sum(2)),
        "entropy": (sums.entropy, torch.special.entr(weights).sum((2, 3))),
        "corner": (sums.corner, weights[0, :, :5, :5]),
        "outside": (sums.outside, (1 - weights.sum(-1)).sum(-1)),
        "uniform": (sums.uniform, (visible / count[..., None]).sum(1)),
        "seen by": (sums.seen_by, visible.sum(1).double()),
        "uniform entropy": (sums.uniform_entropy, count.log().sum(1)),
        "output": (output, weights @ v.repeat_interleave(HEADS // KV, 1)),
    }
    for name, (got, expected) in close.items():
        torch.testing.assert_close(got.expand_as(expected), expected, rtol=1e-10, atol=1e-10, msg=name)


def test_no_tensor_of_a_long_sequence_holds_a_full_map(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = attention._softmax
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(attention, "_softmax", lambda s, k: (seen.append(s.numel()), original(s, k))[1])
    q, k = torch.randn(1, 4, 128, 8), torch.randn(1, 2, 128, 8)
    attention_sums(q, k, Scores(scale=0.3))
    assert max(seen) <= 1 << 12 < 4 * 128 * 128 and sum(seen) == 4 * 128 * 128
