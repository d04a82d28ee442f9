"""Trains cases on several ranks, all in one start, and compares them with the training of one process."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.cases import ACCUMULATE, LENGTH, MICRO_BATCH, MIXTURES
from tests.distributed.launch import launch

Trace = dict[str, Tensor]
Cases = dict[str, tuple[str, dict[str, Any]]]
"""A model and the keys of `[parallel]`, with a few others that `worker.ranked` takes; by name."""
ALONE = ("layers", "recompute", "balance", "crowded")
"""Keys of a case that one process is given too."""
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
BLOCK = MICRO_BATCH * LENGTH * 16 * 4 * ACCUMULATE
"""Bytes of a hidden state in a step."""
TOLERANCE = 1e-5
# Muon enlarges small singular values of a gradient, so weights show rounding that gradients do not.
WEIGHT_TOLERANCE = 1e-3


def assert_same_training(ranks: dict[str, Tensor], alone: dict[str, Tensor], weights: float = WEIGHT_TOLERANCE) -> None:
    """Losses and clipped gradients of each step, the validation loss, and the final weights."""
    missing = alone.keys() - ranks.keys()
    assert not missing, f"no rank has {sorted(missing)[:3]}"
    for name, expected in alone.items():
        # Muon also moves the rounding of a whole matrix into few entries: weights are compared by their norm
        bound, order = (weights, 2) if name.startswith("weight/") else (TOLERANCE, float("inf"))
        size = float(torch.linalg.vector_norm(expected.double(), order))
        error = float(torch.linalg.vector_norm(ranks[name].double() - expected.double(), order))
        assert error <= bound * max(size, 1e-3), f"{name}: {error:.2e} of {size:.2e}"


class Traces(dict[str, Trace]):
    """The records of the ranks in each case; requesting one case trains all cases of its group."""

    def __init__(self, ranks: int, folder: Path, *groups: Cases) -> None:
        super().__init__()
        self.ranks, self.folder, self.groups = ranks, folder, groups

    def __missing__(self, name: str) -> Trace:
        cases = next(group for group in self.groups if name in group)
        listed = [(name, *case) for name, case in cases.items()]
        launch(self.ranks, "tests.distributed.worker", self.folder, listed, again=self.ranks == 2)
        self.update({name: load_file(self.folder / f"{name}.safetensors") for name in cases})
        return self[name]

    def assert_as_one(self, name: str) -> None:
        """The ranks trained like one process, and no longer hold received tensors."""
        model, asked = next(group[name] for group in self.groups if name in group)
        recipe = {key: asked[key] for key in ALONE if key in asked}
        # crowded routers start at zero, so their weights are updates of Muon and nothing else
        weights = TOLERANCE if model in MIXTURES and "crowded" not in asked else WEIGHT_TOLERANCE
        assert_same_training(self[name], alone(model, json.dumps(recipe)), weights)
        assert self[name].get("kept", 0) == 0

    def assert_orthogonalised_once(self, name: str, turns: int) -> None:
        """Each matrix by one of the ranks, in so many turns per step."""
        from tests.distributed.cases import STEPS
        from tests.distributed.worker import orthogonalised, single

        model, _ = next(group[name] for group in self.groups if name in group)
        with orthogonalised() as matrices:
            single(model)
        assert (self[name]["matrices"], self[name]["turns"]) == (sum(matrices), turns * STEPS)


@cache
def alone(model: str, recipe: str = "{}") -> Trace:
    """The same on one process."""
    from tests.distributed.worker import single

    return single(model, **json.loads(recipe))


def regular_and_nightly(regular: Iterable[str], nightly: Iterable[str]) -> list[Any]:
    """Names of cases; `make test` runs only the regular ones."""
    return [*regular, *(pytest.param(name, marks=pytest.mark.nightly) for name in nightly)]
