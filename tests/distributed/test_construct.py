"""The parts that ranks build their share from."""

from __future__ import annotations

import torch

import residua
from residua.train.start import starting_parts
from tests.distributed.cases import run_config


def test_the_parts_of_a_new_run_are_those_of_one_process() -> None:
    config = run_config("exoformer")
    torch.manual_seed(0)
    whole = residua.build(config.model).state_dict()
    torch.manual_seed(0)
    parts = {
        f"{name}.{key}": value for name, part in starting_parts(config) for key, value in part.state_dict().items()
    }
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_parts_of_a_resumed_run_draw_nothing() -> None:
    config = run_config("mhc").override(["model.topology.kind=mhc_lite"])
    before = torch.get_rng_state()
    parts = dict(starting_parts(config, resumed=True))
    assert torch.equal(torch.get_rng_state(), before)
    # checkpoints hold all that a part needs (tests/model/test_initial.py)
    assert not dict(parts["topology"].named_buffers())
