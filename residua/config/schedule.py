"""Learning-rate schedules: the fraction of the peak rate at each step."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from residua.config.settings import Count, Frozen

Share = Annotated[float, Field(ge=0, le=1)]


class WarmUp(Frozen):
    """Shared by all schedules: a linear rise over `warmup` steps, and `floor`, the final fraction of the rate."""

    warmup: Count = 100
    floor: Share = 0.1

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak rate for `step` (0-based) of `steps`: 1 at the end of warm-up, `floor` at the last."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.floor + (1 - self.floor) * self._remaining(step, steps)

    def shared_steps(self, steps: int) -> int:
        """How many of the first of `steps` steps have the same rates as in every longer run."""
        return min(self.warmup, steps)

    def _remaining(self, step: int, steps: int) -> float:
        """The remaining part of the decay: from 1 down to 0 at the last step."""
        raise NotImplementedError


class LinearDecay(WarmUp):
    """Constant, then linear decay to `floor` over the last `decay_share` of the run (ExoFormer, arXiv 2601.08131).

    If the warm-up ends later than that, the decay starts after it and takes the remaining steps.
    """

    kind: Literal["linear_decay"] = "linear_decay"
    decay_share: Share = 0.2

    def shared_steps(self, steps: int) -> int:
        return steps - self._decay(steps)

    def _remaining(self, step: int, steps: int) -> float:
        decay = self._decay(steps)
        return min(1.0, (steps - 1 - step) / decay) if decay else 1.0

    def _decay(self, steps: int) -> int:
        """The number of steps that decay takes."""
        return min(int(self.decay_share * steps), steps - self.warmup)


class Cosine(WarmUp):
    """Half a cosine from the peak to `floor` (the MGR recipe)."""

    kind: Literal["cosine"] = "cosine"

    def _remaining(self, step: int, steps: int) -> float:
        progress = (step + 1 - self.warmup) / max(1, steps - self.warmup)
        return (1 + math.cos(math.pi * progress)) / 2


Schedule = Annotated[LinearDecay | Cosine, Field(discriminator="kind")]
