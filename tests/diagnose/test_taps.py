"""`residua.diagnose.taps` records the published tensors of a model, by name."""

import pytest
import torch
from torch import nn

import residua.diagnose
from tests.diagnose import planted

TOKENS = planted.sample().tokens


def test_patterns_record_only_matching_taps() -> None:
    model = planted.control()
    with residua.diagnose.taps(model, "attention.*.key", "final.input") as seen:
        model(TOKENS)
    assert set(seen) == {"final.input", *(f"attention.{layer}.key" for layer in range(4))}


def test_tapped_tensors_keep_their_graph() -> None:
    model = planted.control()
    with residua.diagnose.taps(model, "sublayer.2.output") as seen:
        loss = planted.losses(model, planted.sample())
    (gradient,) = torch.autograd.grad(loss, seen["sublayer.2.output"])
    assert gradient.abs().sum() > 0


def test_a_model_without_taps_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no taps"), residua.diagnose.taps(nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass
