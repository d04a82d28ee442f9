"""What sublayers read and hand over: magnitudes, outliers, similarity, dimensionality. All sums run in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.diagnose.observe import Observation
from residua.diagnose.schema import Activation
from residua.ops._runtime.numeric import wide

FAR = 8.0
"""A value stands far above the rest when it exceeds this many times its token's median |h|. For normal values of equal
scale that happens once in 15 million."""
CORE_VARIANCE = 0.99
COVARIANCE_BYTES = 512 << 20
LARGEST = 3
TOKENS_AT_ONCE = 256


class StateSums:
    """Running sums over one state [B, T, C], the input of one sublayer.

    rms: sqrt(mean h²). median: mean over tokens of the (lower) median of |h|. Mean |h| by dimension, and in how many
    tokens a dimension exceeds FAR medians. The three largest |h|. Token similarity: the mean cosine of two different
    tokens of a sequence, (‖Σ u_i‖² − Σ ‖u_i‖²)/(T(T−1)) with u = h/‖h‖. Input similarity: the cosine of the whole
    sequence [T·C] with the first state's.
    """

    def __init__(self) -> None:
        self.tokens = self.sequences = 0
        self.squares = self.medians = self.token_similarity = self.input_similarity = 0.0
        self.absolute: Tensor | None = None
        self.far: Tensor | None = None
        self.largest: list[Activation] = []

    def add(self, state: Tensor, first: Tensor, tokens: Tensor) -> None:
        h = wide(state)
        size = h.abs()
        median = size.median(-1).values
        absolute, far = size.double().sum((0, 1)), (size > FAR * median[..., None]).double().sum((0, 1))
        self.absolute = absolute if self.absolute is None else self.absolute + absolute
        self.far = far if self.far is None else self.far + far
        self.squares += float(h.double().square().mean(-1).sum())
        self.medians += float(median.double().sum())
        self._note_largest(size, tokens)
        self.token_similarity += float(token_similarity(h).sum())
        self.input_similarity += float(torch.cosine_similarity(h.flatten(1), wide(first).flatten(1), -1).double().sum())
        self.tokens += tokens.numel()
        self.sequences += tokens.shape[0]

    def _note_largest(self, size: Tensor, tokens: Tensor) -> None:
        values, places = size.flatten().topk(min(LARGEST, size.numel()))
        length, width = size.shape[1:]
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            row, rest = divmod(place, length * width)
            position, dimension = divmod(rest, width)
            token = int(tokens[row, position])
            self.largest.append(Activation(
                value=value, dimension=dimension, sequence=self.sequences + row, position=position, token=token
            ))  # fmt: skip
        self.largest = sorted(self.largest, key=lambda a: -a.value)[:LARGEST]


def token_similarity(h: Tensor) -> Tensor:
    """Mean cosine over pairs of different tokens of each sequence, [B]; 1 for a sequence of one."""
    u = (h / h.norm(dim=-1, keepdim=True).clamp(min=1e-30)).double()
    length = h.shape[1]
    if length == 1:
        return torch.ones(h.shape[0], dtype=torch.float64)
    return (u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (length * (length - 1))


class StatePairs:
    """Mean over tokens of cos(x_l, x_m) and of arccos(cos(x_l, x_m))/π for every two states, [S, S]."""

    def __init__(self, count: int) -> None:
        self.cosine = torch.zeros(count, count, dtype=torch.float64)
        self.angle = torch.zeros(count, count, dtype=torch.float64)
        self.tokens = 0

    def add(self, states: Sequence[Tensor]) -> None:
        rows = [state.flatten(0, 1) for state in states]
        count = rows[0].shape[0]
        for start in range(0, count, TOKENS_AT_ONCE):
            x = torch.stack([wide(row[start : start + TOKENS_AT_ONCE]) for row in rows], 1)
            u = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            cosine = (u @ u.transpose(1, 2)).double().clamp(-1, 1)
            # a state's angle to itself is zero, which arccos of a rounded 1 would miss
            cosine.diagonal(dim1=1, dim2=2).fill_(1.0)
            self.cosine += cosine.sum(0).cpu()
            self.angle += (cosine.arccos() / torch.pi).sum(0).cpu()
        self.tokens += count

    def means(self) -> tuple[list[list[float]], list[list[float]]]:
        return (self.cosine / self.tokens).tolist(), (self.angle / self.tokens).tolist()


class CoreFeatures:
    """PCA: the least k for which the k largest eigenvalues of the covariance hold 99 % of its trace.

    Second moments are summed about the first batch's mean, so that a large constant dimension costs no precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self.centre: Tensor | None = None
        self.sum: Tensor | None = None
        self.square: Tensor | None = None

    def add(self, state: Tensor) -> None:
        x = wide(state).flatten(0, 1)
        if self.centre is None:
            self.centre = x.mean(0)
        x = x - self.centre
        total, square = x.double().sum(0), (x.T @ x).double()
        self.sum = total if self.sum is None else self.sum + total
        self.square = square if self.square is None else self.square + square
        self.count += x.shape[0]

    def result(self) -> int:
        assert self.sum is not None and self.square is not None
        mean = self.sum / self.count
        values = torch.linalg.eigvalsh(self.square / self.count - mean[:, None] * mean[None]).clamp(min=0).flip(0)
        share = values.cumsum(0) / values.sum().clamp(min=1e-300)
        return int((share < CORE_VARIANCE - 1e-12).sum()) + 1


class HiddenMetrics:
    """Every state and output of a model; states are numbered 0 … sites, the last being the final norm's input."""

    def __init__(self, sites: int, width: int) -> None:
        self.sites = sites
        self.states = {k: StateSums() for k in range(sites + 1)}
        self.outputs: dict[int, float] = {}
        self.medians: dict[int, float] = {}
        self.tokens = 0
        self.pairs: StatePairs | None = None
        self.core = {k: CoreFeatures() for k in _affordable(sites + 1, width)}
        self.present: list[int] = []

    def add(self, seen: Observation) -> None:
        self.present = sorted(seen.states)
        first = seen.states[self.present[0]]
        for k in self.present:
            self.states[k].add(seen.states[k], first, seen.tokens)
            if k in self.core:
                self.core[k].add(seen.states[k])
        for k, output in seen.outputs.items():
            y = wide(output)
            self.outputs[k] = self.outputs.get(k, 0.0) + float(y.double().square().mean(-1).sum())
            self.medians[k] = self.medians.get(k, 0.0) + float(y.abs().median(-1).values.double().sum())
        self.tokens += seen.tokens.numel()
        if self.pairs is None:
            self.pairs = StatePairs(len(self.present))
        self.pairs.add([seen.states[k] for k in self.present])

    def output_rms(self, site: int) -> float | None:
        return None if site not in self.outputs else (self.outputs[site] / self.tokens) ** 0.5

    def relative_median(self, site: int) -> float | None:
        """Median |y| over median |h|, each a mean over tokens: unlike the RMS, no outlier dimension decides it."""
        if site not in self.medians or site not in self.present:
            return None
        return self.medians[site] / max(self.states[site].medians, 1e-30)

    def state_rms(self, state: int) -> float:
        sums = self.states[state]
        return (sums.squares / max(1, sums.tokens)) ** 0.5

    def dimensions(self) -> tuple[Tensor, Tensor]:
        """Over all states: the mean |h| of each dimension, and the share of tokens in which it stands far above."""
        sums = [self.states[k] for k in self.present]
        tokens = sum(s.tokens for s in sums)
        absolute = torch.stack([s.absolute for s in sums if s.absolute is not None]).sum(0)
        far = torch.stack([s.far for s in sums if s.far is not None]).sum(0)
        return (absolute / tokens).cpu(), (far / tokens).cpu()


def _affordable(states: int, width: int) -> list[int]:
    """States, evenly spread, whose covariance matrices fit the budget; always the first and the last."""
    count = max(2, min(states, COVARIANCE_BYTES // (8 * width * width)))
    return sorted({round(i * (states - 1) / (count - 1)) for i in range(count)})
