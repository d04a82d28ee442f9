"""Runs that are killed, stopped and starved at random moments end with the bits of an undisturbed run.

`python -m tests.soak` injects 200 signals into all kinds and prints the table in docs/lab/soak.md.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.faults import FULL, GONE, SIGNALS, Deck, deal, open_disk
from tests.soak.runs import KINDS, Kind
from tests.soak.soak import Soak

pytestmark = pytest.mark.slow

KILL, TERMINATE, PAUSE, _ = SIGNALS
ONE, DDP, FSDP2, PIPELINE, EXPERTS = KINDS


@pytest.fixture
def lost(tmp_path: Path) -> Callable[..., list[str]]:
    """Injects faults and returns the problems after them."""

    def conduct(decks: dict[Kind, Deck], seed: int = 0, commands: float = 0.0) -> list[str]:
        with open_disk(tmp_path / "disk") as disk:
            soak = Soak(tmp_path, disk, decks, chance=random.Random(seed), commands=commands)
            soak.conduct()
        assert len(soak.injected) == sum(map(len, decks.values()))
        return [f"{f.kind.name}, {f.fault.name} at {f.moment}: {'; '.join(f.wrong)}" for f in soak.injected if f.wrong]

    return conduct


def test_run_survives_faults_and_ends_bit_identical(lost: Callable[..., list[str]]) -> None:
    assert lost({ONE: [(KILL, "save"), (TERMINATE, "steps"), (FULL, "steps")]}) == []


@pytest.mark.nightly
def test_sharded_run_survives_a_kill_and_a_lost_node(lost: Callable[..., list[str]]) -> None:
    assert lost({ONE: [(GONE, "steps"), (PAUSE, "steps")], FSDP2: [(KILL, "save")]}) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_fifty_signals_at_random_moments_lose_nothing(kind: Kind, lost: Callable[..., list[str]]) -> None:
    chance = random.Random(kind.name)
    assert lost({kind: deal(50, chance)}, commands=0.04) == []
