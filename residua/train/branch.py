"""A shorter run that begins as a longer one: the two part where the shorter one's learning rate begins to fall."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from residua.config.run import RunConfig


class Branch(NamedTuple):
    """A run that differs from a longer one only in `train.steps`.

    Until its own decay begins, it has the rates, the batches and so the weights of the longer one, which saves that
    moment in `folder`. From there the branch resumes like an interrupted run.
    """

    folder: Path
    config: RunConfig

    @property
    def step(self) -> int:
        """The last step that both have in common."""
        recipe = self.config.train
        return recipe.schedule.shared_steps(recipe.steps)
